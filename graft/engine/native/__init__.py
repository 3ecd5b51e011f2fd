"""The engine that samples from the trainer's own decoder, in the same process.

Read `loop` first: plan, run, hand over. `scheduler` plans (`request`: one sample in progress), `kv/`
holds the pages and which sequences share them, `sampling/` masks, grammars and draws. A step runs in
plain PyTorch (`cpu/`) or in kernels and CUDA graphs (`cuda/`). `engine` and `context` are what rollouts
use; `scoring` computes log-probs of given continuations without sampling.
"""
