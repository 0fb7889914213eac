"""The methods as the trainer knows them: names, flags, and the replica that runs each."""
