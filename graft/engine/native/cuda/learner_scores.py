"""Log-probs and entropies of draws, computed as the learner will compute them.

The kernel that draws sums exponentials in an order of its own. Where bits count, the kernel of the learner's
head runs on the same logits, in rows of the same layout, with the drawn actions, and its numbers replace
those of the draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.engine.native.cuda.burst import DecodeState
from graft.engine.native.cuda.kernels.draw import DrawField
from graft.models.kernels.head import score_logit_rows, widen


class LearnerScores:
    """One step's draws; `allowed` [modes, V] is the engine's table of masks."""

    def __init__(self, allowed: Tensor | None) -> None:
        self.allowed = widen(allowed)

    @staticmethod
    def before(decode_state: DecodeState) -> Tensor:
        """[2, B] what a draw overwrites: the mode of each row, and how many tokens it has drawn."""
        state = decode_state.state
        return torch.stack([state[DrawField.MODE], state[DrawField.DRAWN]])

    def replace(
        self, decode_state: DecodeState, before: Tensor, logits: Tensor, width: int
    ) -> None:
        """Overwrite the results of the draw that was made from logits [B, W], of `width` actions."""
        mode, drawn = before
        results, after = decode_state.results, decode_state.state[DrawField.DRAWN]
        at = (after - 1).clamp_(min=0).expand(3, 1, -1)
        last = results.gather(1, at)[:, 0]
        action = last[0].long()
        modes = None if self.allowed is None else mode
        scores = score_logit_rows(
            logits, action.clamp(min=0), modes, self.allowed, decode_state.exponents, width
        )
        # -1: the middle of a description; NaN: nothing was allowed
        is_new = (after > drawn) & (action >= 0) & ~last[1].isnan()
        # a row with a penalty or a truncation keeps its own: they are not in these logits
        top_k, top_p, min_p = decode_state.truncations
        is_new &= (decode_state.penalty == 1) & (top_k >= width) & (top_p >= 1) & (min_p <= 0)
        results[1:].scatter_(1, at[1:], torch.where(is_new, torch.stack(scores), last[1:])[:, None])
