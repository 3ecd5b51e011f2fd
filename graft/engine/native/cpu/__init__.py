"""A step in plain PyTorch; read `runner` first."""
