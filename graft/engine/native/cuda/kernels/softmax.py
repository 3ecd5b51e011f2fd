"""The running softmax that attention over pages is made of."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(top, total, acc, score, values):
    """Add one more page to a row's maximum, sum and weighted values.

    score [rows, keys] in powers of two, -inf where nothing may be seen; values [keys, d].
    """
    # a whole number: weights then round alike however the past is cut, here and in the learner
    new_top = tl.maximum(top, tl.ceil(tl.max(score, 1)))
    # rounded before they are added up: what a row sees is then a true average
    weight = tl.exp2(score - new_top[:, None]).to(values.dtype)
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weight.to(tl.float32), 1)
    acc = tl.dot(weight, values, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc
