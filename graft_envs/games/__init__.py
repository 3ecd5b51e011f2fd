"""GEM's games, `game:STEM-v0[-VARIANT]`: all offline, one file each; read `base.py` first."""
