"""How soon: seconds until a loss is reached."""
