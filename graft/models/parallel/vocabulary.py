"""Embedding and head with their rows sharded over a group of processes; logits are not gathered.

    U positions, D width, V actions of which v rows are local, from row `first` on

Each process computes its own rows in chunks and keeps four numbers per position; one maximum and one sum
over the group combine them. Logits ln 6, ln 2 in process 0 and ln 1, ln 3 in process 1, action 3:

                  largest m    sum s of e^(z-m)    sum of (z-m) e^(z-m)    z of the action
    process 0     ln 6         1 + 2/6             -0.366                  0
    process 1     ln 3         1 + 1/3             -0.366                  ln 3
    both          ln 6         12/6                log-prob ln(3/12)       entropy 1.199

A sum relative to m is scaled by e^(m-M) once M, the largest of all, is known. The backward pass
recomputes each chunk and communicates nothing: each process computes the gradient of its own logits, and
`regions.enter` sums that of the hidden states. Only to truncate the distribution each process needs the
logits of all, one chunk at a time: the lowest kept one is a matter of all columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from graft.models.logprobs import chunk_of, logits_of
from graft.models.ops import embed
from graft.models.parallel.regions import leave
from graft.models.truncation import Truncation

NEG_INF = float("-inf")


def embed_rows(tokens: Tensor, weight: Tensor, first: int, group: ProcessGroup) -> Tensor:
    """[T, D]: each token's row, from the process that holds it."""
    at = tokens - first
    is_local = (at >= 0) & (at < len(weight))
    found = embed(at.clamp(0, len(weight) - 1), weight)
    return leave(found.masked_fill(~is_local[:, None], 0.0), group)


class _HeadShard:
    """This process's rows of the head, and which of them may be drawn."""

    def __init__(
        self,
        weight: Tensor,
        first: int,
        modes: Tensor,
        allowed: Tensor | None,
        temperature: float,
        vocab_size: int | None,
    ) -> None:
        self.weight, self.first, self.modes, self.temperature = weight, first, modes, temperature
        count = len(weight)
        self.allowed = None if allowed is None else allowed[:, first : first + count]
        self.vocab_size = 0 if vocab_size is None else min(max(vocab_size - first, 0), count)

    def logits(self, hidden: Tensor, part: slice) -> Tensor:
        """[u, v] in fp32."""
        rows = None if self.allowed is None else self.allowed[self.modes[part]]
        return logits_of(hidden[part], self.weight, self.temperature, rows)

    def find(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The local column of each action (any column if it is not local), and whether it is local."""
        at = actions - self.first
        return at.clamp(0, len(self.weight) - 1), (at >= 0) & (at < len(self.weight))

    def cut_(self, logits: Tensor, floors: Tensor, actions: Tensor) -> Tensor:
        """`Truncation.mask_` of the local columns."""
        at, is_local = self.find(actions)
        is_cut = logits < floors[:, None]
        chosen = is_cut.gather(1, at[:, None]) & ~is_local[:, None]
        return logits.masked_fill_(is_cut.scatter_(1, at[:, None], chosen), NEG_INF)


class _ShardedHead(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,  # [U, D]
        weight: Tensor,  # [v, D]
        actions: Tensor,  # [U]
        modes: Tensor,  # [U]
        allowed: Tensor | None,  # [modes, V]
        first: int,
        temperature: float,
        vocab_size: int | None,
        truncation: Truncation | None,
        chunk: int,
        group: ProcessGroup,
    ) -> tuple[Tensor, ...]:
        rows = _HeadShard(weight, first, modes, allowed, temperature, vocab_size)
        count = len(actions)
        most = hidden.new_full((2, count), NEG_INF, dtype=torch.float32)  # of all, of tokens
        sums = hidden.new_zeros((4, count), dtype=torch.float32)
        floors = None if truncation is None else torch.empty_like(sums[0])
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = rows.logits(hidden, part)
            if truncation is not None and floors is not None:
                floors[part] = truncation.floors(_all_columns(logits, group))
                rows.cut_(logits, floors[part], actions[part])
            at, is_local = rows.find(actions[part])
            sums[2, part] = logits.gather(1, at[:, None])[:, 0].masked_fill_(~is_local, 0.0)
            if rows.vocab_size:
                most[1, part], sums[3, part] = _sum_exp(logits[:, : rows.vocab_size])[:2]
            most[0, part], sums[0, part], sums[1, part] = _sum_exp(logits)
        own = most.clone()
        dist.all_reduce(most, ReduceOp.MAX, group)
        # m-M and e^(m-M); 0 for a process none of whose rows may be drawn
        log_share = torch.where(own == NEG_INF, NEG_INF, own - most)
        share = log_share.exp()
        sums[1] = share[0] * (sums[1] + log_share[0].masked_fill(own[0] == NEG_INF, 0.0) * sums[0])
        sums[0] *= share[0]
        sums[3] *= share[1]
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        log_sum = most[0] + log_total
        logp = sums[2] - log_sum
        entropy = log_total - sums[1] / sums[0]
        vocab_logp = None
        if vocab_size is not None:
            vocab_logp = most[1] + sums[3].log() - log_sum
            vocab_logp.masked_fill_(actions >= vocab_size, 0.0)
        saved = hidden, weight, actions, modes, allowed, log_sum, entropy, vocab_logp, floors
        ctx.save_for_backward(*saved)
        ctx.options = first, temperature, vocab_size, chunk
        return (logp, entropy) if vocab_logp is None else (logp, entropy, vocab_logp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_logp, grad_entropy, *others = grads
        *saved, log_sum, entropy, vocab_logp, floors = ctx.saved_tensors
        hidden, weight, actions, modes, allowed = saved
        first, temperature, vocab_size, chunk = ctx.options
        rows = _HeadShard(weight, first, modes, allowed, temperature, vocab_size)
        grad_vocab = others[0].masked_fill(actions >= vocab_size, 0.0) if others else None
        grad_hidden = torch.empty_like(hidden)
        is_frozen = not ctx.needs_input_grad[1]
        grad_weight = None if is_frozen else torch.zeros_like(weight, dtype=torch.float32)
        with_entropy = bool(grad_entropy.any())
        for start in range(0, len(actions), chunk):
            part = slice(start, start + chunk)
            logits = rows.logits(hidden, part)
            if floors is not None:
                rows.cut_(logits, floors[part], actions[part])
            log_p = logits.sub_(log_sum[part, None])
            p = log_p.exp()
            # the same derivatives as in `logprobs`, for the local columns
            d_logits = p * -grad_logp[part, None]
            at, is_local = rows.find(actions[part])
            chosen = grad_logp[part].masked_fill(~is_local, 0.0)
            d_logits.scatter_add_(1, at[:, None], chosen[:, None])
            if with_entropy:
                surprise = torch.where(p > 0, log_p, 0.0) + entropy[part, None]
                d_logits -= grad_entropy[part, None] * p * surprise
            if grad_vocab is not None:
                d_logits -= grad_vocab[part, None] * p
                vocab_share = (log_p[:, : rows.vocab_size] - vocab_logp[part, None]).exp_()
                d_logits[:, : rows.vocab_size] += vocab_share.mul_(grad_vocab[part, None])
            d_logits /= temperature
            d_logits = d_logits.to(hidden.dtype)
            grad_hidden[part] = d_logits @ weight
            if grad_weight is not None:
                grad_weight += (d_logits.T @ hidden[part]).float()
        own = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, own, *[None] * 9


def _all_columns(logits: Tensor, group: ProcessGroup) -> Tensor:
    """[u, V] in some order: the columns of all processes, and -inf where one has fewer than others."""
    most = torch.tensor(logits.shape[1], device=logits.device)
    dist.all_reduce(most, ReduceOp.MAX, group)
    own = F.pad(logits, (0, int(most) - logits.shape[1]), value=NEG_INF)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group)
    return torch.cat(parts, 1)


def _sum_exp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest, m, the sum of e^(z-m), and that of (z-m) e^(z-m); -inf, 0, 0 if all are -inf."""
    most = logits.amax(-1)
    is_empty = most == NEG_INF
    less = logits - most.masked_fill(is_empty, 0.0)[:, None]
    weight = less.exp()
    spread = weight * less.masked_fill_(less == NEG_INF, 0.0)
    return most, weight.sum(-1), spread.sum(-1)


def score_sharded(
    hidden: Tensor,
    weight: Tensor,
    first: int,
    group: ProcessGroup,
    actions: Tensor,
    modes: Tensor,
    allowed: Tensor | None,
    temperature: float,
    vocab_size: int | None,
    truncation: Truncation | None = None,
) -> tuple[Tensor, ...]:
    """`logprobs.score_actions` for a head of which this process holds the rows from `first` on.

    Every process of the group passes the same hidden states, after `regions.enter`, and gets the
    same results. `allowed` has the columns of the whole head.
    """
    copies = 1 if truncation is None else 4 * dist.get_world_size(group)
    chunk = chunk_of(hidden.device, len(weight) * copies)
    how = first, temperature, vocab_size, truncation, chunk, group
    return _ShardedHead.apply(hidden, weight, actions, modes, allowed, *how)


@torch.no_grad()
def likeliest_sharded(
    hidden: Tensor,
    weight: Tensor,
    first: int,
    actions: Tensor,
    modes: Tensor,
    allowed: Tensor | None,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-prob [U] of each action, and whether it is the likeliest; of equals the first one is."""
    rows = _HeadShard(weight, first, modes, allowed, 1.0, None)
    count = len(actions)
    most = hidden.new_full((count,), NEG_INF, dtype=torch.float32)
    sums = hidden.new_zeros((2, count), dtype=torch.float32)
    best = torch.zeros_like(actions)
    chunk = chunk_of(hidden.device, len(weight))
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        logits = rows.logits(hidden, part)
        at, is_local = rows.find(actions[part])
        sums[1, part] = logits.gather(1, at[:, None])[:, 0].masked_fill_(~is_local, 0.0)
        best[part] = logits.argmax(-1) + first
        most[part], sums[0, part], _ = _sum_exp(logits)
    own = most.clone()
    dist.all_reduce(most, ReduceOp.MAX, group)
    best.masked_fill_(own < most, torch.iinfo(best.dtype).max)
    dist.all_reduce(best, ReduceOp.MIN, group)
    sums[0] *= torch.where(own == NEG_INF, NEG_INF, own - most).exp()
    dist.all_reduce(sums, group=group)
    return sums[1] - most - sums[0].log(), best == actions
