"""Triton kernels of the engine, each with a plain PyTorch counterpart that tests compare it with.

`graft.models.kernels.rope` writes new keys and values into their pages, since it computes them.

copy         pages of forks                                       pages.Pages.flush_copies
decode       one query per sequence, shared pages read once       attention.Extend
segments     the same, with the learner's bits (`model.exact`)    attention.Extend
code_pairs   a page of `segments` in eight bits                   kv_slots.dequantise
extend       many queries per sequence over their pages           attention.Extend
learner_scores   log-probs of draws by the learner's head         logprobs.score_actions
draw         logits to token, log-prob and entropy in one pass    sampler.sample
truncation   the thresholds of top-k, top-p and min-p             sampler.lowest_kept
"""
