"""Commands with verbs of their own; `graft.cli` puts them together."""
