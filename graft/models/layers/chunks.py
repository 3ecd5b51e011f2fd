"""A recurrence over chunks of positions: rows one after the other, or a chunk at a time.

    n chunks of C positions, K key heads of size dk, H value heads of size dv; heads H/K to each key head

With g the logarithm of the decay since the beginning of the chunk, S the state there and i a position in it:

    u_i = b_i (v_i - exp(g_i) S k_i - sum over j < i of exp(g_i - g_j) (k_i . k_j) u_j)
    o_i = exp(g_i) S q_i + sum over j <= i of exp(g_i - g_j) (q_i . k_j) u_j
    next S = exp(g_C) S + sum over j of exp(g_C - g_j) u_j k_j'

Without b values are added as they are: u_i = v_i (Mamba-2). `write_rows` computes one row of each chunk from
the rows before it. The engine decodes so, and the learner does the same row after row, in the same shapes, so
that both have the same bits; it reads the state and never writes it. `whole_chunks` is the same function as
products over a chunk, whose gradient the learner uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.models.device import has_kernels
from graft.models.recurrence import CHUNK


class ScanInputs(NamedTuple):
    """What a recurrence reads of each token."""

    q: Tensor
    """[..., K, dk]"""
    k: Tensor
    v: Tensor
    """[..., H, dv]"""
    decay: Tensor
    """[..., H] logarithm of the factor on the state, 0 or less."""
    beta: Tensor | None
    """[..., H] how much of a value is corrected; None: values are added as they are."""


class ChunkRows(NamedTuple):
    """The rows of n chunks; those that are not written yet have weight 0, and are finite."""

    k: Tensor
    """[n, K, C, dk]"""
    u: Tensor
    """[n, H, C, dv]"""
    log: Tensor
    """[n, H, C] logarithm of the decay from the beginning of the chunk up to the row."""


def empty_rows(count: int, new: ScanInputs) -> ChunkRows:
    """Rows of chunks in which nothing is written."""
    key_heads, key_dim, heads, value_dim = *new.k.shape[-2:], *new.v.shape[-2:]
    return ChunkRows(
        new.k.new_zeros(count, key_heads, CHUNK, key_dim),
        new.v.new_zeros(count, heads, CHUNK, value_dim),
        new.decay.new_zeros(count, heads, CHUNK),
    )


def write_rows(state: Tensor, rows: ChunkRows, at: Tensor | int, new: ScanInputs) -> Tensor:
    """Write row `at`, or `at` [n] of each, of the chunks and return what it reads, [n, H, dv].

    Every sum is over all C rows, with weight 0 for those after `at`: nothing but the rows decides its bits.
    """
    count, heads, _, value_dim = rows.u.shape
    group = heads // rows.k.shape[1]
    position = torch.arange(CHUNK, device=state.device)
    if isinstance(at, int):  # the learner's chunks are written side by side
        place: Any = (slice(None), slice(None), at)
        log = rows.log[:, :, at - 1] + new.decay if at else 0.0 + new.decay
        number = at
    else:
        place = (torch.arange(count, device=state.device), slice(None), at)
        before = rows.log[place[0], :, (at - 1).clamp(min=0)]
        log = torch.where(at[:, None] > 0, before, 0.0) + new.decay
        number = at[:, None]
    rows.log[place], rows.k[place] = log, new.k

    asked = torch.stack([new.k, new.q], dim=-1)  # [n, K, dk, 2]
    of_rows = torch.bmm(rows.k.flatten(0, 1), asked.flatten(0, 1)).unflatten(0, (count, -1))
    if group > 1:
        asked, of_rows = (x.repeat_interleave(group, 1) for x in (asked, of_rows))
    of_state = torch.bmm(state.flatten(0, 1), asked.flatten(0, 1)).view(count, heads, value_dim, 2)
    of_state = of_state * log.exp()[..., None, None]

    is_seen = (position <= number).view(-1, 1, CHUNK)  # [n or 1, 1, C]
    since = (log[..., None] - rows.log).masked_fill(~is_seen, -torch.inf)
    weights = of_rows * since.exp()[..., None]  # [n, H, C, 2]
    u = new.v
    if new.beta is not None:
        is_own = (position == number).view(-1, 1, CHUNK)
        stored = _sum(weights[..., 0].masked_fill(is_own, 0.0), rows.u)
        u = (u - of_state[..., 0] - stored) * new.beta[..., None]
    rows.u[place] = u
    return of_state[..., 1] + _sum(weights[..., 1], rows.u)


def _sum(weights: Tensor, u: Tensor) -> Tensor:
    """[n, H, dv] of weights [n, H, C] and u [n, H, C, dv]."""
    summed = torch.bmm(weights.flatten(0, 1)[:, None].contiguous(), u.flatten(0, 1))
    return summed.view(*u.shape[:2], u.shape[3])


def next_state(state: Tensor, rows: ChunkRows) -> Tensor:
    """The state [n, H, dv, dk] after chunks whose rows are all written."""
    heads, last = rows.u.shape[1], rows.log[..., -1:]
    share = rows.u * (last - rows.log).exp()[..., None]
    k = rows.k.repeat_interleave(heads // rows.k.shape[1], 1)
    added = torch.bmm(share.flatten(0, 1).transpose(1, 2).contiguous(), k.flatten(0, 1))
    return state * last.exp()[..., None] + added.view(state.shape)


def whole_chunks(state: Tensor, new: ScanInputs) -> tuple[Tensor, Tensor]:
    """What every row reads, [n, C, H, dv], and the next state, of inputs [n, C, ...], in products."""
    group = new.v.shape[2] // new.k.shape[2]
    q, k = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (new.q, new.k))
    v, log = new.v.transpose(1, 2), new.decay.transpose(1, 2).cumsum(-1)
    positions = torch.arange(log.shape[-1], device=log.device)
    is_later = positions > positions[:, None]
    since = (log[..., None] - log[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    share = log.exp()[..., None]
    u = v
    if new.beta is not None:
        beta = new.beta.transpose(1, 2)[..., None]
        missing = v - share * (k @ state.transpose(-1, -2))
        stored = (k @ k.transpose(-1, -2)) * since * beta
        u = torch.linalg.solve_triangular(stored, missing * beta, upper=False, unitriangular=True)
    read = share * (q @ state.transpose(-1, -2)) + ((q @ k.transpose(-1, -2)) * since) @ u
    left = (log[..., -1:] - log).exp()[..., None]
    added = (u * left).transpose(-1, -2) @ k
    return read.transpose(1, 2), state * share[:, :, -1:] + added


class _RowAfterRow(torch.autograd.Function):
    """`whole_chunks` in the order of the engine; its gradient is that of the products."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, *new: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(state, *new)
        if has_kernels(state.device):
            from graft.models.kernels.chunks import scan

            return scan(state, ScanInputs(*new))
        inputs, rows = ScanInputs(*new), empty_rows(len(state), ScanInputs(*new))
        read = new[2].new_empty(new[2].shape)
        for number in range(new[0].shape[1]):
            row = ScanInputs(*(None if x is None else x[:, number] for x in inputs))  # type: ignore[arg-type]
            read[:, number] = write_rows(state, rows, number, row)
        return read, next_state(state, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        ]
        with torch.enable_grad():
            outputs = whole_chunks(inputs[0], ScanInputs(*inputs[1:]))  # type: ignore[arg-type]
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return tuple(next(gradients) if x is not None and x.requires_grad else None for x in inputs)


def scan_chunks(state: Tensor, new: ScanInputs, in_order: bool) -> tuple[Tensor, Tensor]:
    """What every row of n chunks reads, [n, C, H, dv], and the state after them; inputs are [n, C, ...].

    in_order   row after row, as the engine decodes
    """
    if not in_order:
        return whole_chunks(state, new)
    return _RowAfterRow.apply(state, *new)
