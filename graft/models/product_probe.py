"""Finds on this GPU which matrix products must be our own so that no row depends on the number of rows.

Each weight of the first block, and the head, is multiplied by many random rows at once and by 1, 2, ...,
2,048 of them, from several places. A library that divides K between programs for few rows adds in another
order there: then our own product (`kernels.fixed_product`) is compared in the same way and takes its place.
Shapes and GPU decide, so this runs at every start; it takes the time of some hundred products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.row_order import RowOrder
from graft.models.tree.attention import why_no_kernel

COUNTS = (
    *(1, 2, 3, 4, 5, 8, 13, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256, 257, 384, 512, 768, 1024),
    *(1500, 2048),
)
"""Numbers of rows: the engine's batches, its padded prompts, and some between them."""

MOST_ROWS = 8192
MAX_BYTES = 1 << 30
"""Of the product of all rows, which are then fewer."""

Product = Callable[[Tensor], Tensor]

_found: dict[tuple[str, str], tuple[RowOrder | None, str]] = {}


def why_not(decoder: Decoder) -> str:
    """Why the kernels cannot compute this model in one order; empty if they can."""
    if decoder.device.type != "cuda":
        return f"the device is {decoder.device.type}"
    if decoder.dtype != torch.bfloat16:
        return f"the weights are {decoder.dtype}, and only bfloat16 was made for it"
    if not decoder.is_whole:
        return "the model is split over processes"
    return why_no_kernel(decoder.shape.head_dim, decoder.dtype, decoder.device)


@torch.no_grad()
def find_kernel_order(decoder: Decoder) -> tuple[RowOrder | None, str]:
    """The order for this model on this GPU, or None; and a line that says what was found."""
    if reason := why_not(decoder):
        return None, f"model.exact=gpu has no effect: {reason}"
    key = repr(replace(decoder.shape, layers=1)), str(decoder.device)
    if key not in _found:
        _found[key] = _search(decoder)
    return _found[key]


def _search(decoder: Decoder) -> tuple[RowOrder | None, str]:
    fixed: set[tuple[int, int]] = set()
    known: set[tuple[int, int]] = set()
    for shape, inputs, library, own in _products(decoder):
        known.add(shape)
        if shape in fixed or rows_hold(library, inputs):
            continue
        if not rows_hold(own, inputs):
            return None, (
                f"model.exact=gpu has no effect: rows of the product with {shape[0]} x {shape[1]} depend "
                "on their number, in the library and in our own kernel"
            )
        fixed.add(shape)
    names = ", ".join(f"{n} x {k}" for n, k in sorted(fixed)) or "none"
    return RowOrder(fixed=frozenset(fixed)), (
        f"model.exact=gpu: of {len(known)} shapes of products our own kernel computes {names}; the "
        "library's rows do not depend on their number in the others"
    )


def _products(decoder: Decoder) -> Iterator[tuple[tuple[int, int], Tensor, Product, Product]]:
    """Shape, rows, the library's product and our own, of every kind of product of the decoder."""
    from graft.models.kernels.fixed_product import fixed_linear
    from graft.models.kernels.head import logits_in_rows

    block: Any = decoder.blocks[0]
    for linear in (block.qkv, block.out, block.gate_up, block.down):
        weight, bias = linear.weight, linear.bias
        yield (
            (len(weight), weight.shape[1]),
            _noise(weight),
            lambda x, w=weight, b=bias: F.linear(x, w, b),
            lambda x, w=weight, b=bias: fixed_linear(x, w, b),
        )
    rows, head = decoder.biased(_noise(decoder.head_weight))
    shape = len(head), head.shape[1]
    own = RowOrder(fixed=frozenset({shape}))
    yield (
        shape,
        rows,
        lambda x: logits_in_rows(x, head, None)[1],
        lambda x: logits_in_rows(x, head, own)[1],
    )


def _noise(weight: Tensor) -> Tensor:
    """Rows to multiply by weight [N, K]."""
    outputs, inputs = weight.shape
    count = min(MOST_ROWS, MAX_BYTES // (outputs * weight.itemsize))
    generator = torch.Generator(weight.device).manual_seed(0)
    return torch.randn(count, inputs, generator=generator, device=weight.device, dtype=weight.dtype)


def rows_hold(product: Product, rows: Tensor) -> bool:
    """Whether some rows, multiplied alone, have the bits that they have among all."""
    whole = product(rows)
    for number, count in enumerate(count for count in COUNTS if count < len(rows)):
        start = number * 37 % (len(rows) - count + 1)
        if not torch.equal(product(rows[start : start + count]), whole[start : start + count]):
            return False
    return True
