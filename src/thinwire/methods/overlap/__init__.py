"""Sending during the backward pass: buckets, the gradient reducer, two levels of links."""
