"""Turn logits into actions: masks of modes, the sampler, its random numbers, grammars."""
