"""Local updates: rounds of inner steps, averaged at their ends or while the next ones run."""
