"""Bytes of weights, optimizer state, activations, logits and KV cache, from the model's shape.

N parameters, b bytes of a weight, T tokens of a micro-batch, L layers, D width, F of the MLP,
q and kv sizes of all query heads and of all key/value heads, V rows of the head
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graft.models.io.tensor_names import own_name
from graft.models.logprobs import CHUNK_ELEMENTS
from graft.models.lora.training import num_trained, target_names, target_sizes
from graft.models.recurrence import CHUNK
from graft.models.shape import ModelShape
from graft.train.memory.device_memory import DeviceMemory
from graft.train.memory.workload import Workload

PREFILL_CHUNK = {False: 2048, True: 8192}
"""Tokens of prompts that the engine computes in one step, without kernels and with them."""
FUSED_CHUNK_BYTES, FUSED_KEPT_SHARE = 650_000_000, 0.08
"""Logits that `kernels.head` holds at a time, and the share of memory in which it keeps all of them
(its CHUNK_BYTES and KEPT_SHARE, which only Triton can import)."""


def sums_in_place(dtype: torch.dtype, fused: bool) -> bool:
    """Whether products add weight gradients in fp32 in place: sums that stay allocated."""
    return fused and dtype.itemsize < 4


def gradient_bytes(params: int, dtype: torch.dtype, fused: bool) -> int:
    """Gradients in the weights' dtype and, of a bf16 model, their fp32 sums; or sums alone."""
    if sums_in_place(dtype, fused):
        return 4 * params
    return params * (dtype.itemsize + (4 if dtype.itemsize < 4 else 0))


def optimizer_state_bytes(params: int, dtype: torch.dtype) -> int:
    """AdamW's two moments and, of a bf16 model, the fp32 masters."""
    return params * (8 + (4 if dtype.itemsize < 4 else 0))


def adapter_gradient_bytes(
    shape: ModelShape, dtype: torch.dtype, rank: int, targets: Sequence[str]
) -> int:
    """Sums of the adapters' gradients, and the gradient of one whole weight."""
    out, gate, up, down = (
        own_name(shape.family, name) for name in ("o_proj", "gate_proj", "up_proj", "down_proj")
    )
    fused = {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "gate_up": (gate, up, "input_linear"),
        down: ("output_linear",),
    }
    kinds = [shape.experts_of(layer) for layer in shape.kinds]
    stored = max(shape.ff if kind is None else kind.count * kind.ff for kind in kinds)
    whole = {
        "qkv": ((1 + shape.attention_gate) * shape.q_size + 2 * shape.kv_size) * shape.width,
        "gate_up": (1 + shape.is_gated) * stored * shape.width,
        out: shape.q_size * shape.width,
        down: stored * shape.width,
        "lm_head": shape.head_rows * shape.width,
    }
    if shape.recurrence is not None:
        products = shape.recurrence.products(shape.width)
        first = tuple(name for name in products if name != "out_proj")
        fused["inputs"] = first
        whole["inputs"] = sum(rows * into for rows, into in (products[name] for name in first))
        last = shape.recurrence.value_size * shape.width
        whole["out_proj"] = max(last, whole.get("out_proj", 0))
    names = target_names(shape, targets)
    trained = {next((w for w, parts in fused.items() if name in parts), name) for name in names}
    if shape.extra:
        trained.add("lm_head")  # rows beyond the vocabulary are trained
    largest = max(whole[name] for name in trained)
    rows = max(count * into for count, into in target_sizes(shape, targets))
    # the rows of one target are widened to fp32
    wide = rows * 4 if dtype.itemsize < 4 else 0
    return 4 * num_trained(shape, rank, targets) + largest * dtype.itemsize + wide


def num_parameters(shape: ModelShape) -> int:
    """All weights, norms and biases included."""
    width, q, kv = shape.width, shape.q_size, shape.kv_size
    blocks = shape.feed_forward_layers
    biases = ((1 + shape.is_gated) * shape.ff + width) * shape.mlp_bias
    norms = shape.attention_layers + len(shape.recurrent_layers) + blocks
    small = norms * (1 + shape.sandwich) * width + blocks * biases
    mixer = (q + kv if shape.joint_norm else 2 * shape.head_dim) * shape.qk_norm
    mixer += ((1 + shape.attention_gate) * q + 2 * kv) * shape.qkv_bias + width * shape.out_bias
    mixer += shape.heads * shape.sinks
    mixers = shape.attention_layers * mixer
    if shape.recurrence is not None:
        mixers += len(shape.recurrent_layers) * shape.recurrence.num_others(width)
    experts, routed = shape.experts, len(shape.expert_layers)
    of_experts = 0
    if experts is not None:
        of_experts = experts.count * experts.has_correction
        inner = (1 + shape.is_gated) * experts.ff
        of_experts += experts.count * (1 + inner + width) * experts.biased
        of_experts += width * experts.shared_gate
    return shape.num_params + small + mixers + routed * of_experts + width


def activation_bytes(
    shape: ModelShape,
    dtype: torch.dtype,
    tokens: int,
    work: Workload,
    fused: bool,
    recompute: bool = False,
) -> int:
    """Bytes that `tokens` tokens keep for the backward pass, and the working memory of one block.

    A block keeps, per token: the inputs of its two norms (2D; with kernels as rows of length 1), q|k|v,
    gate|up (2F) and the output of attention. Plain PyTorch also keeps norms (2D) and the gated product
    (F), q, k and v after their rotation, gathers the keys and values of each run (a prompt once per
    sample), adds their mask, and copies its output.
    """
    size, q, kv, ff = dtype.itemsize, shape.q_size, shape.kv_size, shape.active_ff
    # rows of a token's experts: what they read, what they return, and that product with its weight
    routed = 0 if shape.experts is None else 4 * shape.experts.top_k * shape.width
    if fused:
        block = 2 * shape.width + 2 * ff + 2 * q + 2 * kv
        # gradients of the gated product and of gate|up beside that product, or those of attention
        # beside q, k and v, which are made again
        again = (q + 2 * kv) * shape.qk_norm
        space = max(4 * ff, 3 * q + 4 * kv + again) + 2 * shape.width
    else:
        block = 4 * shape.width + 3 * ff
        block += (q + 2 * kv) * shape.qk_norm  # before their norms and rotation
        group = work.prompt + work.samples * work.written
        gathered = (work.prompt + work.samples * work.context) / group
        seen = (work.prompt**2 + work.samples * work.written * work.context) / group
        block += 3 * q + math.ceil(2 * kv * gathered + shape.heads // shape.kv_heads * seen)
        space = max(5 * ff * size, 16 * (q + kv), 16 * shape.width) // size
    # root-mean-squares (4 bytes per norm), log-sum-exps of attention (per head)
    small = 4 * (2 + (shape.heads + shape.kv_heads) * shape.qk_norm + shape.heads)
    per_block = (block + routed) * size + small
    # a few layers keep more than others: all of them are counted as the largest
    if (sizes := shape.recurrence) is not None:
        inputs = sum(rows for rows, _ in sizes.products(shape.width).values()) - shape.width
        # the tokens that a convolution sees, its result before and after its gate, q, k and v in chunks
        mixed = inputs + (sizes.taps + 4) * sizes.channels
        in_chunks = (
            4 * sizes.value_size + 2 * sizes.value_heads * CHUNK + 2 * sizes.state_size // CHUNK
        )
        in_chunks *= sizes.has_state
        per_block = max(per_block, (4 * shape.width + 3 * ff + mixed + in_chunks) * 4 + small)
    ends = (3 * shape.width + shape.head_dim) * size  # the last norm, the head's rows, angles
    if recompute:
        stream = shape.width * (4 if fused else size)  # kernels keep it in fp32
        per_token = shape.layers * stream + per_block
    else:
        per_token = shape.layers * per_block
    return tokens * (per_token + ends + space * size)


def head_bytes(
    shape: ModelShape, dtype: torch.dtype, tokens: int, device_memory: DeviceMemory
) -> int:
    """Logits of `tokens` trained tokens in the backward pass, and the fp32 gradient of the head."""
    size, weight = dtype.itemsize, shape.head_rows * shape.width
    if device_memory.fused:  # gradients overwrite the logits, which are kept where memory allows
        logits = tokens * shape.head_rows * size
        if tokens > _kept_logits(shape, dtype, device_memory):
            logits = min(logits, FUSED_CHUNK_BYTES)
        return logits + (0 if sums_in_place(dtype, device_memory.fused) else weight * (4 + size))
    budget = CHUNK_ELEMENTS * (1 if device_memory.device.type == "cpu" else 64)
    elements = min(tokens, max(budget // shape.head_rows, 1)) * shape.head_rows
    half = size if size < 4 else 0
    # log-probs, probabilities and two products of them; the weight's gradient and its increment
    return elements * (16 + half) + weight * (8 + half)


def most_head_bytes(
    shape: ModelShape, dtype: torch.dtype, tokens: int, device_memory: DeviceMemory
) -> int:
    """The worst case: how many tokens of a micro-batch are trained is unknown."""
    kept = min(tokens, _kept_logits(shape, dtype, device_memory)) if device_memory.fused else tokens
    return max(
        head_bytes(shape, dtype, tokens, device_memory),
        head_bytes(shape, dtype, kept, device_memory),
    )


def _kept_logits(shape: ModelShape, dtype: torch.dtype, device_memory: DeviceMemory) -> int:
    """Tokens whose logits the kernel keeps until the backward pass; with more it keeps none."""
    share = FUSED_KEPT_SHARE * (device_memory.total or device_memory.available)
    return int(share / (shape.head_rows * dtype.itemsize))


def decode_bytes(
    shape: ModelShape, dtype: torch.dtype, batch: int, kv_tokens: int, device_memory: DeviceMemory
) -> int:
    """Logits of a decoding step, a chunk of prompts in one block, and gathered keys and values."""
    size = dtype.itemsize
    chunk = PREFILL_CHUNK[device_memory.fused] * (
        shape.q_size + 2 * shape.kv_size + 3 * shape.active_ff + 2 * shape.width
    )
    if device_memory.fused:
        return batch * shape.head_rows * (size + 4) + chunk * size
    limit = 1 << 24 if device_memory.device.type == "cpu" else 1 << 28
    gathered = 2 * min(limit, kv_tokens * shape.kv_size)
    lanes = min(1 << 26, kv_tokens * shape.layers * 2 * shape.kv_size) if size == 4 else 0
    return batch * shape.head_rows * (16 + size) + (chunk + gathered + lanes) * size


def gigabytes(number: float) -> str:
    """
    >>> gigabytes(1_192_099_840), gigabytes(3_000_000)
    ('1.19 GB', '3 MB')
    """
    return f"{number / 1e9:,.2f} GB" if number >= 1e8 else f"{number / 1e6:,.0f} MB"
