"""Log-probs and entropies of draws, computed as the learner will compute them.

The kernel that draws sums exponentials in an order of its own. Where bits count, the kernel of the learner's
head runs on the same logits, in rows of the same layout, with the drawn actions, and its numbers replace
those of the draw.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.engine.native.cuda.burst import DecodeState
from graft.models.kernels.head import widen
from graft.models.kernels.head_rows import score_logit_rows

ROWS = 256


@triton.jit(do_not_specialize=["batch"])
def _put(
    results,  # [3, STEPS, B] action, log-prob, entropy
    picked,  # [3, B] action, mode, step; action -1: the row drew nothing
    is_plain,  # [B]
    logp,  # [B]
    entropy,
    batch,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < batch
    is_new = tl.load(picked + row, mask=inside, other=-1) >= 0
    is_new &= tl.load(is_plain + row, mask=inside, other=0) != 0
    step = tl.load(picked + 2 * batch + row, mask=is_new, other=0)
    at = results + (STEPS + step) * batch + row
    before = tl.load(at, mask=is_new, other=0.0)
    is_new &= before == before  # NaN: nothing was allowed
    tl.store(at, tl.load(logp + row, mask=is_new, other=0.0), mask=is_new)
    tl.store(at + STEPS * batch, tl.load(entropy + row, mask=is_new, other=0.0), mask=is_new)


class LearnerScores:
    """One step's draws; `allowed` [modes, V] is the engine's table of masks."""

    def __init__(self, allowed: Tensor | None) -> None:
        self.allowed = widen(allowed)

    def write(self, rows: Tensor, allowed: Tensor) -> None:
        """Take over rows of the table that have changed."""
        assert self.allowed is not None
        self.allowed[rows, : allowed.shape[1]] = allowed.to(self.allowed.dtype)

    def replace(self, decode_state: DecodeState, logits: Tensor, width: int) -> None:
        """Overwrite the results of the draws that were made from logits [B, W], of `width` actions."""
        picked, results = decode_state.picked, decode_state.results
        modes = None if self.allowed is None else picked[1]
        scores = score_logit_rows(
            logits, picked[0], modes, self.allowed, decode_state.exponents, width
        )
        batch = picked.shape[1]
        _put[(triton.cdiv(batch, ROWS),)](
            results,
            picked,
            decode_state.is_plain,
            *scores,
            batch,
            STEPS=results.shape[1],
            ROWS=ROWS,
        )
