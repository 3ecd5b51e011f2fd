"""Rollouts, training and what surrounds them on one GPU, beside the roofs of that GPU and peers."""
