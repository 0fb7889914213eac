"""The methods, by family; each is a torch.optim.Optimizer. `thinwire` has all of their names."""
