"""Compute a recorded step again and compare it with its record: `graft replay`."""
