"""One-bit methods: a dense warm-up, then the momentum in one bit a value."""
