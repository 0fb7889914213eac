"""Where batches come from: files, tokens, images, and the order they are read in."""
