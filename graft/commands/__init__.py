"""One file per command; `graft.cli` registers them."""
