"""`thinwire compare`: the same training under several methods, on emulated links, side by side."""
