"""The running softmax of attention over pages."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(top, total, acc, score, values):
    """Add one more page to a row's maximum, sum and weighted values.

    score [rows, keys] as exponents of 2, -inf where masked; values [keys, d].
    """
    # an integer: weights then round alike however the keys are split, here and in the learner
    new_top = tl.maximum(top, tl.ceil(tl.max(score, 1)))
    # rounded before they are summed, so that the result is an exact weighted average
    weight = tl.exp2(score - new_top[:, None]).to(values.dtype)
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weight.to(tl.float32), 1)
    acc = tl.dot(weight, values, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc
