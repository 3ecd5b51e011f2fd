"""Top-k, top-p and min-p: which actions of a distribution can be drawn.

    probabilities .4 .3 .2 .06 .04
        top_k 3      .4 .3 .2
        top_p .65    .4 .3              the fewest, most likely first, whose sum reaches .65
        min_p .4     .4 .3 .2           at least .4 times the largest
        top_k 3, top_p .75              .4 .3: top-p counts within what top-k left, .7 / .9

What is left is one interval of scores, so one number describes it: the lowest kept score. Actions of
equal scores are kept or removed together. A log-prob is that of what is left, normalised again; its
gradient flows through the normalisation, with the kept actions as constants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.tile_attention import padded_length


class Truncation(NamedTuple):
    """What training keeps of a distribution; the defaults keep everything."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @torch.no_grad()
    def floors(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """[u]: the lowest kept logit of each row of logits [u, V], forbidden ones at -inf."""
        width = logits.shape[-1]
        if 0 < self.top_k < width:
            ranked = logits.topk(self.top_k).values
        else:
            ranked = logits.sort(dim=-1, descending=True).values
        ranked = ranked.float()
        scores = ranked if temperature == 1.0 else ranked / temperature
        count = count_kept(scores, torch.tensor(self.top_p), torch.tensor(self.min_p))
        return ranked.gather(-1, count[:, None] - 1)[:, 0]

    def mask_(self, logits: Tensor, floors: Tensor, actions: Tensor) -> Tensor:
        """Write -inf over the logits [u, V] below the floors [u]; the chosen actions [u] stay."""
        is_cut = logits < floors[:, None]
        return logits.masked_fill_(is_cut.scatter_(1, actions[:, None], False), float("-inf"))


def count_kept(ranked: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[B]: how many of ranked [B, K], the largest scores first, top-p and min-p keep; at least one.

    top_p and min_p are numbers or [B, 1]; scores that top-k removed are -inf.
    """
    # padded: the same bits for the k largest of V scores, and for V of which V - k are removed
    width = ranked.shape[-1]
    lanes = F.pad(ranked, (0, padded_length(width) - width), value=-torch.inf)
    probs = lanes.softmax(-1)[:, :width]
    before = probs.cumsum(-1) - probs  # sum of the likelier ones
    # top_p = 1 must keep everything, though the sum may round to 1 before its end
    keep = (before < top_p) | (top_p >= 1)
    keep &= (probs >= min_p * probs[:, :1]) & (ranked > float("-inf"))
    return keep.sum(-1).clamp_min(1)
