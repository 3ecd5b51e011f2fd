"""A small package for graft: `pip install ./examples/plugin`, then `graft envs maze`."""
