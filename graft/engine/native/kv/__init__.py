"""KV pages: the pool, sequences as a tree of shared prefixes, and which pages a batch reads once."""
