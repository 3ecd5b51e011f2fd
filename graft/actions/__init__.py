"""Actions beyond the vocabulary and calls with an enforced syntax: see `actions.py`."""
