"""Models sharded over processes: tensor parallelism and FSDP2. Start with `decoder.py`."""
