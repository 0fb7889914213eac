"""What the methods share: checks of arguments, flat views of tensors, means of replicas."""
