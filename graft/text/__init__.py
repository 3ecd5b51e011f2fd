"""Tokenizers, chat templates, conversations as tokens, and parsers of a model's text: see `chat.py`."""
