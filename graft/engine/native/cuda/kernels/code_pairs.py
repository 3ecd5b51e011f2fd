"""`fold_block` for pages of codes (`models.kv_slots`), whose values are read in pairs of bytes.

On their way from shared memory to a product numbers of 16 bits can be transposed, but no bytes. So two
neighbouring numbers of a value are a pair, and a product of the lower codes gives the output at even places,
one of the higher codes that at odd places.

On an H200 decoding over codes has other bits than over the rows they stand for, and takes 1.5 times as long:
operands that were bytes are arranged differently for a product. So recipes refuse `engine.kv: fp8` on a GPU
(`train.rollouts.rollout_engine`), and `benchmarks.exact --kv fp8` measures what is missing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.models.kernels.kv_rounding import COMPILED, widen
from graft.models.kernels.path_attention import add_weights, weigh_block

LOW_TO_BF16 = tl.constexpr("""
{   .reg .b32 pair, sign, power;    mov.b32 power, 0x7B807B80;
    shl.b32 sign, $1, 8;            and.b32 sign, sign, 0x80008000;     shl.b32 pair, $1, 4;
    lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;    mul.rn.bf16x2 $0, pair, power;   }
""")
"""The lower codes of two pairs to bfloat16, as in `kv_rounding`."""

HIGH_TO_BF16 = tl.constexpr("""
{   .reg .b32 pair, sign, power;    mov.b32 power, 0x7B807B80;
    and.b32 sign, $1, 0x80008000;   shr.b32 pair, $1, 4;
    lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;    mul.rn.bf16x2 $0, pair, power;   }
""")


@triton.jit
def widen_pairs(pairs, dtype: tl.constexpr):
    """The numbers of the lower codes of pairs [...], int16, and of the higher ones."""
    if dtype == tl.bfloat16 and COMPILED:
        low = tl.inline_asm_elementwise(
            LOW_TO_BF16, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        high = tl.inline_asm_elementwise(
            HIGH_TO_BF16, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        codes = pairs.to(tl.int32)
        low, high = widen(codes & 0xFF, dtype), widen((codes >> 8) & 0xFF, dtype)
    return low, high


@triton.jit
def fold_pairs(
    top, sums, acc, odd, query, keys, pairs, is_seen, SCALE: tl.constexpr, k_scale, v_scale
):
    """Add a block: keys are codes [BLOCK, W], pairs int16 [BLOCK, W / 2], `acc` and `odd` [rows, W / 2] the
    outputs at even and odd places."""
    score = tl.dot(query, tl.trans(widen(keys, query.dtype)), input_precision="ieee")
    score *= k_scale.to(tl.float32)[None, :]
    new_top, weight, fade = weigh_block(top, score, is_seen, SCALE, query.dtype)
    sums = add_weights(sums, weight, fade)
    weight = (weight.to(tl.float32) * v_scale.to(tl.float32)[None, :]).to(query.dtype)
    low, high = widen_pairs(pairs, query.dtype)
    acc = tl.dot(weight, low, acc * fade, input_precision="ieee")
    odd = tl.dot(weight, high, odd * fade, input_precision="ieee")
    return new_top, sums, acc, odd
