"""How well: loss or accuracy at equal work. Nothing here is timed."""
