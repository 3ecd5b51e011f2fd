"""The learner's head on rows of the engine: the same logits, and the same log-probs of them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graft.models.kernels import head_kernels
from graft.models.kernels.head import empty_logits, write_logits
from graft.models.kernels.head_kernels import BLOCK, FORWARD_STAGES, FORWARD_WARPS
from graft.models.row_order import RowOrder


def logits_in_rows(hidden: Tensor, weight: Tensor, order: RowOrder | None) -> tuple[Tensor, Tensor]:
    """Logits as the learner's head holds them: rows [u, W], and the first V columns of them."""
    rows = empty_logits(len(hidden), len(weight), hidden)
    logits = rows[:, : len(weight)]
    write_logits(hidden, weight, logits, order)
    return rows, logits


def score_logit_rows(
    rows: Tensor,
    actions: Tensor,
    modes: Tensor | None,
    allowed: Tensor | None,
    scales: Tensor,
    num_actions: int,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [u] as the learner computes them; scales [u] are log2 e / temperature.

    rows [u, W] and `allowed` [modes, W] have the layout of `empty_logits` and `widen`: how a kernel
    reads, and in which order it adds, depends on it.
    """
    logp, entropy, norm = (torch.empty_like(scales) for _ in range(3))
    head_kernels.forward[(len(rows),)](
        rows, actions, modes, allowed, logp, entropy, norm, None, None,
        num_actions, num_actions, rows.shape[1], 1.0, scales,
        STEPS=triton.cdiv(num_actions, BLOCK), BLOCK=BLOCK, STAGES=FORWARD_STAGES,
        num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return logp, entropy
