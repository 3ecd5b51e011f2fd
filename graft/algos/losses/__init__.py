"""Losses per token. `loss.py` says what one is, `table.py` lists them, `terms.py` has what is added."""
