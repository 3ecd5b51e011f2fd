"""Triton kernels of the decoder, each with a plain PyTorch function that defines what it computes.

    norm      add and root-mean-square norm             ops.add_norm
    rope      head norms and rotation of q|k|v          ops.qk_rotate
    gate      silu(gate) * up, gelu, the clamped one    ops.gate_product, ops.clamped_gate
    products  matrix products and their gradients       ops.norm_linear, ops.linear
    skinny    matrix products of a few rows             torch's own, after a norm or a gate
    routing   which experts, and whose rows             layers.experts.route
    experts   the MLPs of all experts                   layers.experts.ExpertMLP
    expert_gradients     of their gates, weights and biases    the same
    chunks    rows of a recurrence, and its states      layers.chunks
    interval  attention over a packed forest            tree.attention.TreeAttention
    rotated_attention    rope and interval together     both
    head      log-probs and entropies from logits       logprobs

    chained   launches that overlap
    start     whether Triton starts

    kv_rounding    keys and values in eight bits        kv_slots.quantise, kv_slots.dequantise
    path_attention, fixed_product    attention and products in one order of adding (`model.exact`)

Tests compare the two on random ragged shapes, on a GPU or, without one, in Triton's interpreter. The
kernels are used on devices for which `graft.models.device.has_kernels` is true.
"""
