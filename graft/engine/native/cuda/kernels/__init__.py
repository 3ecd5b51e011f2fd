"""Triton kernels of the engine, each with a plain PyTorch twin that tests compare it with.

New keys and values reach their pages by `graft.models.kernels.rope`, which has them in hand.

write    new keys and values into their pages                 pages.Pages.write
decode   one query per sequence, shared pages read once       attention.Extend
extend   many queries per sequence against their pages        attention.Extend
draw     logits to token, log-prob and entropy in one pass    sampler.sample
cut      the thresholds of top-k, top-p and min-p             sampler.survivors
"""
