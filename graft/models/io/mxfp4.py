"""Weights in mxfp4, as gpt-oss is stored: 4 bits a number, and a power of two for each 32 of them.

    X_blocks [E, R, G, 16] uint8   two numbers a byte, the lower half first
    X_scales [E, R, G]     uint8   exponents, 127 more than they are
    X        [E, 32 G, R]          what other checkpoints of the model have

The 4 bits are a sign, two of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
The product with a power of two is exact in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CHUNK = 1 << 22
"""Bytes of blocks that are unpacked at a time: 12 bytes of memory for each."""


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., 32 G] in bfloat16 of blocks [..., G, 16] and scales [..., G], on their device.

    Bytes 0x21 and 0xf0 with scale 128: 2 * (0.5, 1, 0, -6) = 1, 2, 0, -12.
    """
    device, kind = blocks.device, torch.bfloat16
    values = [*MAGNITUDES, *(-value for value in MAGNITUDES)]
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    pair_of = torch.tensor(pairs, dtype=kind, device=device)
    powers = [math.ldexp(1.0, exponent - 127) for exponent in range(255)]
    power_of = torch.tensor([*powers, math.nan], dtype=kind, device=device)
    size, flat, flat_scales = blocks.shape[-1], blocks.flatten(0, -2), scales.flatten()
    found = torch.empty(len(flat), 2 * size, dtype=kind, device=device)
    for start in range(0, len(flat), rows := max(CHUNK // size, 1)):
        part = slice(start, start + rows)
        numbers = pair_of[flat[part].int()].flatten(1)
        torch.mul(numbers, power_of[flat_scales[part].int()][:, None], out=found[part])
    return found.view(*blocks.shape[:-2], -1)


def unpacked_sizes(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The sizes with each X_blocks and X_scales that belong together as X; all others as they are."""
    found = dict(sizes)
    for name, size in sizes.items():
        stem = name.removesuffix(BLOCKS)
        if stem != name and len(size) == 4 and sizes.get(stem + SCALES) == size[:-1]:
            del found[name], found[stem + SCALES]
            found[stem] = (size[0], 2 * size[2] * size[3], size[1])
    return found
