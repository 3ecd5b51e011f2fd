"""The recurrence by the kernel: a token alone has the bits that it has in a chunk, whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graft.models import recurrence_probe
from graft.models.decoder import Decoder
from graft.models.layers import chunks as plain
from graft.models.layers.chunks import ChunkRows, ScanInputs, whole_chunks
from graft.models.recurrence import CHUNK, Recurrence
from graft.models.shape import ModelShape

pytest.importorskip("triton")

from graft.models.kernels import chunks as kernels
from graft.models.kernels.chunks import NONE, advance, scan

SIZES = [(1, 2, 16, 16, True), (2, 2, 24, 12, True), (1, 2, 48, 16, False)]
"""Key heads, value heads, their sizes, and whether values are corrected (delta net) or not (Mamba-2)."""


def draw(sizes: tuple[int, int, int, int, bool], *lead: int) -> tuple[Tensor, ScanInputs]:
    """A state for each of `lead[0]`, and inputs [*lead, ...]; keys have length 1."""
    key_heads, heads, key_dim, value_dim, has_beta = sizes
    torch.manual_seed(sum(sizes))
    q, k = (torch.randn(*lead, key_heads, key_dim) for _ in range(2))
    decay, beta = -torch.rand(*lead, heads), torch.rand(*lead, heads)
    v, state = torch.randn(*lead, heads, value_dim), torch.randn(lead[0], heads, value_dim, key_dim)
    k = k / k.norm(dim=-1, keepdim=True)
    return state, ScanInputs(q, k, v, decay, beta if has_beta else None)


def moved(new: ScanInputs, device: torch.device) -> ScanInputs:
    return ScanInputs(*(None if x is None else x.to(device) for x in new))  # type: ignore[arg-type]


def tokens_of(new: ScanInputs, *places: tuple[int, slice]) -> ScanInputs:
    """Some tokens of inputs [n, C, ...] in one list."""
    return ScanInputs(
        *(
            None if x is None else torch.cat([x[number, some] for number, some in places])
            for x in new
        )  # type: ignore[arg-type]
    )


def table(*rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)


def no_rows(sizes: tuple[int, int, int, int, bool], device: torch.device) -> ChunkRows:
    """Slots of rows in which nothing can be trusted; it is finite."""
    key_heads, heads, key_dim, value_dim, _ = sizes
    shapes = (key_heads, CHUNK, key_dim), (heads, CHUNK, value_dim), (heads, CHUNK)
    return ChunkRows(*(torch.full((3, *shape), 1e4, device=device) for shape in shapes))


@pytest.mark.parametrize("sizes", SIZES)
def test_whole_chunks_are_those_of_the_plain_form(
    sizes: tuple[int, int, int, int, bool], kernel_device: torch.device
) -> None:
    state, new = draw(sizes, 2, CHUNK)
    read, after = scan(state.to(kernel_device), moved(new, kernel_device))
    for mine, its in zip((read, after), whole_chunks(state, new), strict=True):
        torch.testing.assert_close(mine.cpu(), its, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("width", [1, 5])
def test_chunks_that_end_early_are_read_alike(width: int, kernel_device: torch.device) -> None:
    state, new = draw(SIZES[0], 1, CHUNK)
    state, new = state.to(kernel_device), moved(new, kernel_device)
    short = ScanInputs(*(None if x is None else x[:, :width] for x in new))  # type: ignore[arg-type]
    assert torch.equal(scan(state, short)[0], scan(state, new)[0][:, :width])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("at", [1, CHUNK - 1])
def test_a_token_alone_has_the_bits_of_its_chunk(
    at: int, sizes: tuple[int, int, int, int, bool], kernel_device: torch.device
) -> None:
    """After a part with those before it, and beside the first token of another chunk; the next state too."""
    state, new = draw(sizes, 2, CHUNK)
    state, new = state.to(kernel_device), moved(new, kernel_device)
    read, after = scan(state, new)
    rows, found = no_rows(sizes, kernel_device), torch.zeros_like(after)
    parts = table((0, 0, at, 0, 0, 2, 0), device=kernel_device)
    before = advance(tokens_of(new, (0, slice(0, at))), parts, state, found, rows)
    assert torch.equal(before, read[0, :at])
    parts = table((0, 0, 1, 1, 0, 1, 1), (1, at, 1, 0, 2, 2, 0), device=kernel_device)
    some = tokens_of(new, (1, slice(0, 1)), (0, slice(at, at + 1)))
    alone = advance(some, parts, state, found, rows, is_single=True)
    assert torch.equal(alone, torch.stack([read[1, 0], read[0, at]]))
    assert torch.equal(found[0], after[0] if at == CHUNK - 1 else torch.zeros_like(after[0]))


def test_a_chunk_in_parts_has_its_bits(kernel_device: torch.device) -> None:
    """The second part beside a whole chunk; states are written in place, and rows that end are not kept."""
    cut, sizes = 13, SIZES[1]
    state, new = draw(sizes, 2, CHUNK)
    state, new = state.to(kernel_device), moved(new, kernel_device)
    read, after = scan(state, new)
    rows = no_rows(sizes, kernel_device)
    parts = table((0, 0, cut, 0, 0, 2, NONE), device=kernel_device)
    advance(tokens_of(new, (0, slice(0, cut))), parts, state, state, rows)
    rest = tokens_of(new, (1, slice(None)), (0, slice(cut, None)))
    places = (0, 0, CHUNK, 1, 0, NONE, 1), (CHUNK, cut, CHUNK - cut, 0, 2, NONE, 0)
    found = advance(rest, table(*places, device=kernel_device), state, state, rows)
    assert torch.equal(found, torch.cat([read[1], read[0, cut:]]))
    assert torch.equal(state, after)


def test_parts_without_tokens_change_nothing(kernel_device: torch.device) -> None:
    state, new = draw(SIZES[0], 2, CHUNK)
    state, new = state.to(kernel_device), moved(new, kernel_device)
    rows, kept = no_rows(SIZES[0], kernel_device), state.clone()
    parts = table((0, CHUNK - 1, 0, 0, 0, 1, 1), device=kernel_device)
    advance(tokens_of(new, (0, slice(0, 1))), parts, state, state, rows, is_single=True)
    assert torch.equal(state, kept) and all(bool((x == 1e4).all()) for x in rows)


def test_gradients_are_those_of_products(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "has_kernels", lambda _: True)
    state, new = draw(SIZES[0], 1, 9)
    leaves = [x.to(kernel_device).requires_grad_() for x in (state, *new) if x is not None]
    found = plain.scan_chunks(leaves[0], ScanInputs(*leaves[1:]), in_order=True)[0]
    wanted = whole_chunks(leaves[0], ScanInputs(*leaves[1:]))[0]
    pull = torch.randn(found.shape, device=kernel_device)
    both = (torch.autograd.grad(each, leaves, pull) for each in (found, wanted))
    for mine, its in zip(*both, strict=True):
        torch.testing.assert_close(mine, its)


def test_the_probe_compares_tokens_one_by_one_with_their_chunk(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence_probe, "COUNT", 1)
    shape = ModelShape(
        "granitemoehybrid", 16, 16, 2, 2, 1, 8, 16, qk_norm=False,
        recurrence=Recurrence("mamba", 3, 1, 8, 1, 8, conv_bias=True), recurrent_layers=(0,),
    )  # fmt: skip
    decoder = Decoder(shape).to(kernel_device)
    assert recurrence_probe.recurrence_holds(decoder)

    def in_other_bits(state: Tensor, new: ScanInputs) -> tuple[Tensor, Tensor]:
        read, after = scan(state, new)
        return read * (1 + 1e-6), after

    monkeypatch.setattr(kernels, "scan", in_other_bits)
    assert not recurrence_probe.recurrence_holds(decoder)
