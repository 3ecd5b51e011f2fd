"""EARL against its baselines: the same model, the same tasks, the same number of sampled tokens."""
