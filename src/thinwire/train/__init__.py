"""The trainer behind `thinwire train`."""
