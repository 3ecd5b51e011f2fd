"""From logits to actions: masks of modes, the sampler, its random numbers, grammars."""
