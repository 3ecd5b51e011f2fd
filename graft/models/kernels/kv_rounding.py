"""Rows in eight bits (`models.kv_slots`) in kernels: the same codes and scales, made and read.

Numbers are made from bits: Triton's interpreter does not round to e4m3 as hardware does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.models.kv_slots import CARRY, HIGHEST, LARGEST, LOWEST

_CARRY, _LARGEST = tl.constexpr(CARRY), tl.constexpr(LARGEST)
_LOWEST, _HIGHEST = tl.constexpr(LOWEST), tl.constexpr(HIGHEST)
_NOT_FINITE = tl.constexpr(255)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)

TO_BF16 = tl.constexpr("""
{   .reg .b32 pair, sign, power;        mov.b32 power, 0x7B807B80;
    prmt.b32 pair, $2, 0, 0x1404;       and.b32 sign, pair, 0x80008000;    shr.b32 pair, pair, 4;
    lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;    mul.rn.bf16x2 $0, pair, power;
    prmt.b32 pair, $2, 0, 0x3424;       and.b32 sign, pair, 0x80008000;    shr.b32 pair, pair, 4;
    lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;    mul.rn.bf16x2 $1, pair, power;   }
""")
"""Four codes to bfloat16: a code shifted into a bfloat16 is its number times 2 ** -120, subnormals too."""


@triton.jit
def exponent_of(first, second):
    """Exponents plus 127 [rows] of the scales of rows whose halves are [rows, n] in float32."""
    bits = tl.maximum(
        first.to(tl.int32, bitcast=True) & 0x7FFFFFFF,
        second.to(tl.int32, bitcast=True) & 0x7FFFFFFF,
    )
    largest = tl.max(bits, 1)
    exponent = tl.minimum(tl.maximum(((largest + _CARRY) >> 23) - 7, _LOWEST), _HIGHEST)
    return tl.where(largest >= 0x7F800000, _NOT_FINITE, exponent)


@triton.jit
def encode(x, exponent):
    """Codes, integers, of numbers x in float32; `exponent_of` them with as many axes."""
    scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    size = tl.minimum(tl.abs(scaled), _LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # neighbours of 2 ** 14 are 2 ** -9 apart
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(size < 0.015625, small, normal) | sign


@triton.jit
def widen(codes, dtype: tl.constexpr):
    """The numbers of codes [...], bytes, before their scale."""
    if dtype == tl.bfloat16 and COMPILED:
        return tl.inline_asm_elementwise(
            TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    code = codes.to(tl.int32)
    normal = (((code & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    small = (code & 7).to(tl.float32) * 0.001953125
    size = tl.where((code & 0x78) == 0, small, normal)
    return tl.where(code >= 0x80, -size, size).to(dtype)


@triton.jit
def scale_of(exponent):
    """The scale of this exponent, in float32."""
    bits = tl.where(exponent == _NOT_FINITE, 0x7FC00000, exponent << 23)
    return bits.to(tl.float32, bitcast=True)
