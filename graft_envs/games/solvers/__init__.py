"""Searches that the teachers of three games use."""
