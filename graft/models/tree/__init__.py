"""Trajectories as a packed forest: `packing` lays it out, `forest` computes log-probs over it."""
