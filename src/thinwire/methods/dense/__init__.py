"""Data parallelism: gradients averaged at every step, in any codec."""
