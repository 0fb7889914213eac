"""The training loop of one worker, and what it measures."""
