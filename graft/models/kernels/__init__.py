"""Triton kernels of the decoder, each the fast twin of a plain PyTorch function beside it.

    norm      add and root-mean-square norm             functions.add_norm
    rope      head norms and rotation of q|k|v          functions.qk_rotate
    gate      silu(gate) * up                           functions.silu_gate
    skinny    matrix products of a few rows             torch's own, behind norm or gate
    interval  attention over a packed forest            tree_attention.TreeAttention
    head      log-probs and entropies from logits       logprobs

A twin defines what the kernel computes; tests compare the two on random ragged shapes, on a GPU or,
without one, through Triton's interpreter. `graft.models.device.has_kernels` says where they run.
"""
