"""Batches, credits, losses, reductions and the presets that combine them: see `presets.py`."""
