"""Model files: Hugging Face folders, GGUF, verl checkpoints, the hub, exports and model cards."""
