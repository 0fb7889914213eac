"""How fast: what a method keeps of the speed of the compute alone."""
