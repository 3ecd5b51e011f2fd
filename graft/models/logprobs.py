"""Log-probs and entropies of chosen actions, without holding all logits at once.

    U positions, D width, V actions, of which the first `vocab_size` are tokens

The head runs on chunks of positions, and the backward pass recomputes each chunk: [U] numbers stay in
memory, not [U, V]. A GPU with Triton uses `kernels.head` instead. With a `Truncation` each chunk is also
sorted, to find the lowest logit that is kept; the chosen action always is.

To compare with a model that has no extra actions, subtract the log-prob of drawing any token: the
difference is the log-prob under the logits of the tokens alone. Tokens a, b and the action "call",
probabilities 0.6, 0.2 and 0.2, a was drawn:

    log-prob ln 0.6    of any token ln 0.8    difference ln 0.75, as of a against b alone
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.device import has_kernels
from graft.models.row_order import RowOrder
from graft.models.truncation import Truncation

CHUNK_ELEMENTS = 1 << 22
"""Logits per chunk on a CPU (16 MB in fp32): large enough for an efficient matrix product, small
enough for the cache. A GPU uses far larger chunks."""


def logits_of(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    allowed: Tensor | None,
    order: RowOrder | None = None,
) -> Tensor:
    """[u, V] in fp32, as in the sampler: divided by the temperature, forbidden actions at -inf."""
    product = F.linear if order is None else order.product
    logits = product(hidden, weight).float()
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
        vocab_size: int | None,
        truncation: Truncation | None,
        order: RowOrder | None,
    ) -> tuple[Tensor, ...]:
        logp = torch.empty(len(actions), device=hidden.device)
        floors = None if truncation is None else torch.empty_like(logp)
        entropy = torch.empty_like(logp)
        vocab_logp = None if vocab_size is None else torch.empty_like(logp)
        for start in range(0, len(actions), chunk):
            part = slice(start, start + chunk)
            rows = None if allowed is None else allowed[modes[part]]
            logits = logits_of(hidden[part], weight, temperature, rows, order)
            if truncation is not None and floors is not None:
                floors[part] = truncation.floors(logits)
                truncation.mask_(logits, floors[part], actions[part])
            log_p = logits.log_softmax(-1)
            logp[part] = log_p.gather(1, actions[part, None])[:, 0]
            entropy[part] = entropy_of(log_p)
            if vocab_logp is not None and vocab_size is not None:
                # not log(1 - rest): where actions have nearly all mass, that is rounding error
                drawn = log_p[:, :vocab_size].logsumexp(-1)
                vocab_logp[part] = drawn.masked_fill_(actions[part] >= vocab_size, 0.0)
        saved = hidden, weight, actions, modes, allowed, entropy, vocab_logp, floors
        ctx.save_for_backward(*saved)
        ctx.temperature, ctx.chunk, ctx.vocab_size = temperature, chunk, vocab_size
        ctx.truncation = truncation
        return (logp, entropy) if vocab_logp is None else (logp, entropy, vocab_logp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_logp, grad_entropy, *others = grads
        hidden, weight, actions, modes, allowed, entropy, vocab_logp, floors = ctx.saved_tensors
        grad_vocab = others[0].masked_fill(actions >= ctx.vocab_size, 0.0) if others else None
        grad_hidden = torch.empty_like(hidden)
        is_frozen = not ctx.needs_input_grad[1]  # as under adapters
        grad_weight = None if is_frozen else torch.zeros_like(weight, dtype=torch.float32)
        with_entropy = bool(grad_entropy.any())
        for start in range(0, len(actions), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            rows = None if allowed is None else allowed[modes[part]]
            logits = logits_of(hidden[part], weight, ctx.temperature, rows)
            if floors is not None:
                ctx.truncation.mask_(logits, floors[part], actions[part])
            log_p = logits.log_softmax(-1)
            p = log_p.exp()
            # d logp / dz = onehot - p;   d H / dz = -p (log p + H)
            d_logits = p * -grad_logp[part, None]
            d_logits.scatter_add_(1, actions[part, None], grad_logp[part, None])
            if with_entropy:
                surprise = torch.where(p > 0, log_p, 0.0) + entropy[part, None]
                d_logits -= grad_entropy[part, None] * p * surprise
            if grad_vocab is not None:
                # d log(any) / dz = p / any - p of tokens, -p of actions beyond them
                d_logits -= grad_vocab[part, None] * p
                vocab_share = (log_p[:, : ctx.vocab_size] - vocab_logp[part, None]).exp_()
                d_logits[:, : ctx.vocab_size] += vocab_share.mul_(grad_vocab[part, None])
            d_logits /= ctx.temperature
            d_logits = d_logits.to(hidden.dtype)
            grad_hidden[part] = d_logits @ weight
            if grad_weight is not None:
                grad_weight += (d_logits.T @ hidden[part]).float()
        own = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, own, *[None] * 8


def entropy_of(log_p: Tensor) -> Tensor:
    """-sum p log p over the last axis, with 0 log 0 = 0 and no gradient through -inf."""
    return -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)


def score_actions(
    hidden: Tensor,
    weight: Tensor,
    actions: Tensor,
    modes: Tensor | None = None,
    allowed: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    truncation: Truncation | None = None,
    order: RowOrder | None = None,
) -> tuple[Tensor, ...]:
    """Log-prob [U] of each action and entropy [U] of the distribution it was drawn from.

    `allowed[modes]`, or what `truncation` keeps of them, could be drawn, as in the sampler. With
    `vocab_size` also, where a token was chosen, the log-prob [U] of choosing any; 0 elsewhere.
    """
    if not len(actions):  # keep the graph connected: a micro-batch may have nothing to train
        # not a view: FSDP warns of results that are
        nothing = hidden.new_zeros(0, dtype=torch.float32)
        nothing = nothing + (hidden.sum() + weight.sum()).float() * 0.0
        return (nothing,) * (2 if vocab_size is None else 3)
    if modes is None:
        modes = torch.zeros_like(actions)
    if has_kernels(hidden.device):
        from graft.models.kernels.head import head_logprobs

        how = {"vocab_size": vocab_size, "truncation": truncation, "order": order}
        return head_logprobs(hidden, weight, actions, modes, allowed, temperature, **how)
    # a sorted chunk takes four times its memory
    chunk = chunk_of(hidden.device, len(weight) * (1 if truncation is None else 4))
    return _ChunkedHead.apply(
        hidden, weight, actions, modes, allowed, temperature, chunk, vocab_size, truncation, order
    )


def chunk_of(device: torch.device, num_actions: int) -> int:
    """Number of positions whose logits are held at a time."""
    budget = CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS * 64
    return max(1, budget // num_actions)


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    weight: Tensor,
    actions: Tensor,
    modes: Tensor,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Log-prob [U] of each action, and whether greedy decoding would choose it."""
    logp = torch.empty(len(actions), device=hidden.device)
    is_best = torch.empty(len(actions), device=hidden.device, dtype=torch.bool)
    chunk = chunk_of(hidden.device, len(weight))
    for start in range(0, len(actions), chunk):
        part = slice(start, start + chunk)
        rows = None if allowed is None else allowed[modes[part]]
        logits = logits_of(hidden[part], weight, 1.0, rows)
        chosen = logits.gather(1, actions[part, None])[:, 0]
        logp[part] = chosen - logits.logsumexp(-1)
        is_best[part] = logits.argmax(-1) == actions[part]
    return logp, is_best
