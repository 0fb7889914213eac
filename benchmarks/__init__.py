"""Measurements. README.md says which command answers which question."""
