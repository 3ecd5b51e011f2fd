"""Log-probs and entropies of chosen actions, without ever holding all the logits.

    U positions, D width, V actions

The head runs over chunks of positions; the backward pass computes each chunk again. What stays in
memory is [U] numbers, not [U, V]. A GPU with Triton takes `kernels.head`, its twin is here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.device import has_kernels

CHUNK_ELEMENTS = 1 << 22
"""Logits per chunk on a CPU (16 MB in fp32): large enough for the matrix product, small enough to
stay near the cache. A GPU takes far larger ones."""


def _logits(hidden: Tensor, weight: Tensor, temperature: float, allowed: Tensor | None) -> Tensor:
    """[u, V] in fp32, as the sampler sees them: scaled, forbidden actions at -inf."""
    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits /= temperature
    if allowed is not None:
        logits.masked_fill_(~allowed, float("-inf"))
    return logits


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,  # [U, D]
        weight: Tensor,  # [V, D]
        actions: Tensor,  # [U]
        modes: Tensor,  # [U]
        allowed: Tensor | None,  # [modes, V] or None
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(len(actions), device=hidden.device)
        entropy = torch.empty_like(logp)
        for start in range(0, len(actions), chunk):
            part = slice(start, start + chunk)
            rows = None if allowed is None else allowed[modes[part]]
            log_p = _logits(hidden[part], weight, temperature, rows).log_softmax(-1)
            logp[part] = log_p.gather(1, actions[part, None])[:, 0]
            entropy[part] = _entropy(log_p)
        ctx.save_for_backward(hidden, weight, actions, modes, allowed, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, actions, modes, allowed, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with_entropy = bool(grad_entropy.any())
        for start in range(0, len(actions), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            rows = None if allowed is None else allowed[modes[part]]
            log_p = _logits(hidden[part], weight, ctx.temperature, rows).log_softmax(-1)
            p = log_p.exp()
            # d logp / dz = onehot - p;   d H / dz = -p (log p + H)
            d_logits = p * -grad_logp[part, None]
            d_logits.scatter_add_(1, actions[part, None], grad_logp[part, None])
            if with_entropy:
                surprise = torch.where(p > 0, log_p, 0.0) + entropy[part, None]
                d_logits -= grad_entropy[part, None] * p * surprise
            d_logits /= ctx.temperature
            d_logits = d_logits.to(hidden.dtype)
            grad_hidden[part] = d_logits @ weight
            grad_weight += (d_logits.T @ hidden[part]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _entropy(log_p: Tensor) -> Tensor:
    """-sum p log p over the last axis, with 0 log 0 = 0."""
    return -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)


def action_logprobs(
    hidden: Tensor,
    weight: Tensor,
    actions: Tensor,
    *,
    modes: Tensor | None = None,
    allowed: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob [U] of each action and entropy [U] of the distribution it was drawn from.

    `allowed[modes]` are the actions that could be drawn: the very rows the sampler used.
    """
    if not len(actions):  # keep the graph connected: a micro-batch may have nothing to train
        nothing = hidden.sum() * 0.0 + weight.sum() * 0.0
        return nothing.expand(0), nothing.expand(0)
    if modes is None:
        modes = torch.zeros_like(actions)
    if has_kernels(hidden.device):
        from graft.models.kernels.head import head_logprobs

        return head_logprobs(hidden, weight, actions, modes, allowed, temperature)
    budget = CHUNK_ELEMENTS if hidden.device.type == "cpu" else CHUNK_ELEMENTS * 64
    chunk = max(1, budget // len(weight))
    return _ChunkedHead.apply(hidden, weight, actions, modes, allowed, temperature, chunk)
