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
CHUNK = 1 << 20
"""Bytes of blocks that are unpacked at a time, each with an index of 4 bytes."""


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., 32 G] in bfloat16 of blocks [..., G, 16] and scales [..., G], on their device.

    Bytes 0x21 and 0xf0 with scale 128: 2 * (0.5, 1, 0, -6) = 1, 2, 0, -12.
    """
    size, flat, first = blocks.shape[-1], blocks.flatten(0, -2), scales.flatten()
    pairs = _pairs(blocks.device)
    values = torch.empty(len(flat), size, dtype=torch.int32, device=blocks.device)
    for start in range(0, len(flat), rows := max(CHUNK // size, 1)):
        part = slice(start, start + rows)
        numbers = flat[part].int().add_(first[part, None].int().mul_(256))
        torch.index_select(pairs, 0, numbers.flatten(), out=values[part].view(-1))
    return values.view(torch.bfloat16).view(*blocks.shape[:-2], -1)


def _pairs(device: torch.device) -> Tensor:
    """[65536]: the two numbers of a byte in 4 bytes, for 256 scales of 256 bytes."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64)
    powers = [math.ldexp(1.0, exponent - 127) for exponent in range(255)]
    power = torch.tensor([*powers, math.nan], dtype=torch.float64)[:, None, None]
    byte = torch.arange(256)
    both = torch.stack([values[byte & 15], values[byte >> 4]], 1) * power  # [256, 256, 2]
    return both.to(device, torch.bfloat16).flatten().view(torch.int32)


def unpacked_sizes(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The sizes with each X_blocks and X_scales that belong together as X; all others as they are."""
    unpacked = dict(sizes)
    for name, size in sizes.items():
        stem = name.removesuffix(BLOCKS)
        if stem != name and len(size) == 4 and sizes.get(stem + SCALES) == size[:-1]:
            del unpacked[name], unpacked[stem + SCALES]
            unpacked[stem] = (size[0], 2 * size[2] * size[3], size[1])
    return unpacked
