"""Model families without a native decoder, computed by transformers. Start with `load.py`."""
