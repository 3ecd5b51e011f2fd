"""The commands; `graft.cli` registers them."""
