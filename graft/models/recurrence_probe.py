"""Finds whether the kernel of recurrent layers gives a token alone the bits that it has in its chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.layers.chunks import ScanInputs, empty_rows
from graft.models.recurrence import CHUNK

COUNT = 8
"""Chunks side by side."""


@torch.no_grad()
def recurrence_holds(decoder: Decoder) -> bool:
    """Whether tokens one after the other have the bits of a chunk, and the state after them too.

    Chunks of noise in the sizes of the model; True of a model whose layers carry no state.
    """
    sizes = decoder.shape.recurrence
    if sizes is None or not sizes.has_state:
        return True
    from graft.models.kernels.chunks import advance, scan

    device, heads = decoder.device, sizes.value_heads
    generator = torch.Generator(device).manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(COUNT, *size, generator=generator, device=device)

    q, k = (F.normalize(noise(CHUNK, sizes.key_heads, sizes.key_dim), dim=-1) for _ in range(2))
    beta = noise(CHUNK, heads).sigmoid() if sizes.kind == "delta" else None
    new = ScanInputs(q, k, noise(CHUNK, heads, sizes.value_dim), -noise(CHUNK, heads).abs(), beta)
    state = noise(heads, sizes.value_dim, sizes.key_dim)
    read, after = scan(state, new)
    number, found = torch.arange(COUNT, device=device), torch.empty_like(after)
    rows = empty_rows(COUNT, _row(new, 0))
    are_equal: list[Tensor] = []
    for at in range(CHUNK):
        columns = number, 0 * number + at, 0 * number + 1, number, number, number, number
        parts = torch.stack(columns, 1)
        alone = advance(_row(new, at), parts, state, found, rows, is_single=True)
        are_equal.append((alone == read[:, at]).all())
    are_equal.append((found == after).all())
    return bool(torch.stack(are_equal).all())


def _row(new: ScanInputs, at: int) -> ScanInputs:
    """Row `at` of every chunk."""
    return ScanInputs(*(None if x is None else x[:, at] for x in new))  # type: ignore[arg-type]
