"""The phases of a run: warm-up, evaluation, RL, summary. `train/session.py` calls them in order."""
