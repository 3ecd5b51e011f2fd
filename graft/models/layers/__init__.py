"""The layers of a decoder, one kind a file, in plain PyTorch."""
