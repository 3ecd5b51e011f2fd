"""GGUF's blocks of quantised numbers, dequantised by torch on the device where their bytes are.

    Q8_0    32 numbers  = scale (fp16), 32 of 8 bits
    Q4_0    32 numbers  = scale, 32 of 4 bits: in the low halves of 16 bytes, then in the high ones
    Q4_1    32 numbers  = scale and minimum (fp16), 32 of 4 bits
    Q5_0    32 numbers  = scale, the fifth bits, 32 of 4 bits; Q5_1 with a minimum
    MXFP4   32 numbers  = scale (a power of two), 32 indices of 4 bits; IQ4_NL with an fp16 scale
    Q2_K    256 numbers = 16 scales and minima of 4 bits, 256 of 2 bits, scale and minimum (fp16)
    Q3_K    256 numbers = the third bits, 256 of 2 bits, 16 scales of 6 bits, scale
    Q4_K    256 numbers = scale and minimum, 8 scales and 8 minima of 6 bits, 256 of 4 bits
    Q5_K    256 numbers = as Q4_K, the fifth bits between
    Q6_K    256 numbers = 256 low halves, 256 upper quarters, 16 scales of 8 bits, scale
    IQ4_XS  256 numbers = scale, 8 scales of 6 bits, 256 indices of 4 bits

Each product and difference is one operation of fp32 in the order of the gguf package, which gives its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds that are numbers as they stand."""
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What an index of 4 bits stands for."""
CACHED, MANY = 1 << 20, 1 << 26
"""Numbers that are dequantised at a time: on a CPU about what its cache holds, on a GPU what fills it."""


class Blocks(NamedTuple):
    """A kind of block: its numbers, its bytes, and the fp32 numbers of blocks of bytes."""

    numbers: int
    num_bytes: int
    decode: Callable[[Tensor], Tensor]


@torch.no_grad()
def dequantise(raw: Tensor, kind: str, out: Tensor) -> None:
    """Write the numbers of the bytes `raw`, of a kind of `PLAIN` or `BLOCKS`, into the contiguous `out`."""
    if kind in PLAIN:
        out.view(-1).copy_(as_dtype(raw, PLAIN[kind]))
        return
    count, num_bytes, decode = BLOCKS[kind]
    blocks, rows = raw.view(-1, num_bytes), out.view(-1, count)
    step = (CACHED if raw.device.type == "cpu" else MANY) // count
    for some, into in zip(blocks.split(step), rows.split(step), strict=True):
        into.copy_(decode(some).view(-1, count))


def as_dtype(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied if they lie at an odd place in memory."""
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype)


def _scale(blocks: Tensor, start: int) -> Tensor:
    """[n, 1]: the fp16 at byte `start` of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _shifted(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """[..., S, W]: bytes [..., W] shifted by each of S numbers of bits, and masked."""
    # a number each, not a tensor of them: seven times faster on a CPU
    return torch.stack([(packed >> bits) & mask for bits in shifts], -2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scale(blocks, 0))


def _low(packed: Tensor) -> Tensor:
    """[n, 32] of 16 bytes: their low halves, then their high ones."""
    return _shifted(packed, range(0, 8, 4), 15).flatten(1)


def _fifth(packed: Tensor) -> Tensor:
    """[n, 32] of 4 bytes: a bit for each number, as its fifth."""
    return _shifted(packed.unsqueeze(-1), range(8), 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _low(blocks[:, 2:]).float().sub_(8).mul_(_scale(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _low(blocks[:, 4:]).float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _low(blocks[:, 6:]) | _fifth(blocks[:, 2:6])
    return numbers.float().sub_(16).mul_(_scale(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _low(blocks[:, 8:]) | _fifth(blocks[:, 4:8])
    return numbers.float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _chosen(values: tuple[int, ...], indices: Tensor) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=indices.device)
    return table.index_select(0, indices.flatten().int()).view(indices.shape)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[
        :, :1
    ].int()  # halved, since the values are doubled; below 2 the power is subnormal
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return _chosen(DOUBLED_E2M1, _low(blocks[:, 1:])).mul_(bits.view(torch.float32))


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _chosen(IQ4, _low(blocks[:, 2:])).mul_(_scale(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = _shifted(blocks[:, 4:8].unsqueeze(-1), range(0, 8, 4), 15).flatten(1)
    high = _shifted(blocks[:, 2:4].unsqueeze(-1), range(0, 8, 2), 3).flatten(1)
    scales = _scale(blocks, 0) * (low | (high << 4)).float().sub_(32)
    quants = _shifted(blocks[:, 8:].unflatten(1, (8, 16)), range(0, 8, 4), 15).flatten(2)
    return _chosen(IQ4, quants).mul_(scales[..., None])


def _quarters(packed: Tensor) -> Tensor:
    """[n, 16, 16]: 2 bits of each of 32 bytes, then the next 2, and so on; 32 more bytes."""
    return _shifted(packed.unflatten(1, (2, 32)), range(0, 8, 2), 3).view(-1, 16, 16)


def _q2_k(blocks: Tensor) -> Tensor:
    scale = _scale(blocks, 80) * (blocks[:, :16] & 15)
    least = _scale(blocks, 82) * (blocks[:, :16] >> 4)
    return _quarters(blocks[:, 16:80]).float().mul_(scale[..., None]).sub_(least[..., None])


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = _shifted(low, range(0, 8, 4), 15).flatten(1)
    scales = scales | (_shifted(high, range(0, 8, 2), 3).flatten(1) << 4)
    scale = _scale(blocks, 108) * scales.float().sub_(32)
    third = _shifted(blocks[:, :32], range(8), 1).view(-1, 16, 16) << 2
    return (_quarters(blocks[:, 32:96]) | third).float().sub_(4).mul_(scale[..., None])


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 8] scales and [n, 8] minima of 12 bytes.

    Bytes 0-3 hold the first four scales, 4-7 the first four minima; their upper two bits, and the halves
    of bytes 8-11, are the other four.
    """
    first, second, third = packed.unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return scales, minima


def _scaled(blocks: Tensor, quants: Tensor) -> Tensor:
    """scale * q - minimum of quants [n, 8, 32], with the scales in the first 16 bytes of the blocks."""
    scales, minima = _six_bits(blocks[:, 4:16])
    scale, least = _scale(blocks, 0) * scales, _scale(blocks, 2) * minima
    return quants.float().mul_(scale[..., None]).sub_(least[..., None])


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = _shifted(blocks[:, 16:48], range(8), 1)
    return _scaled(blocks, _nibbles(blocks[:, 48:], 32) | (fifth << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    upper = _shifted(blocks[:, 128:192].unflatten(1, (2, 32)), range(0, 8, 2), 3)
    low = _nibbles(blocks[:, :128], 64)
    quants = (low.view(upper.shape) | (upper << 4)).float().sub_(32)
    scales = _scale(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return quants.view(-1, 16, 16).mul_(scales[..., None])


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """[n, 8, 32]: the low halves of `width` bytes, then their high halves, and so on."""
    halves = _shifted(packed.unflatten(1, (-1, width)), range(0, 8, 4), 15)
    return halves.view(len(packed), -1, 32)


BLOCKS = {
    "Q8_0": Blocks(32, 34, _q8_0),
    "Q4_0": Blocks(32, 18, _q4_0),
    "Q4_1": Blocks(32, 20, _q4_1),
    "Q5_0": Blocks(32, 22, _q5_0),
    "Q5_1": Blocks(32, 24, _q5_1),
    "MXFP4": Blocks(32, 17, _mxfp4),
    "IQ4_NL": Blocks(32, 18, _iq4_nl),
    "IQ4_XS": Blocks(256, 136, _iq4_xs),
    "Q2_K": Blocks(256, 84, _q2_k),
    "Q3_K": Blocks(256, 110, _q3_k),
    "Q4_K": Blocks(256, 144, _q4_k),
    "Q5_K": Blocks(256, 176, _q5_k),
    "Q6_K": Blocks(256, 210, _q6_k),
}
"""By llama.cpp's names; others are read by the gguf package."""
