"""Environments: games, EARL's tasks, shops, shells, reasoning-gym, programs. README.md lists them."""
