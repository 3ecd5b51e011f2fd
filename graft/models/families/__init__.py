"""Families of models: what their `config.json` says, a family a file. `table` lists them."""
