"""Sparse averaging: a few of the weights at a time, and nobody waits for them."""
