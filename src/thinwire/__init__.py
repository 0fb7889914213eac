"""thinwire: train PyTorch models across machines joined by slow networks."""
