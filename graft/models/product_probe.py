"""Finds on this GPU which matrix products must be our own so that no row depends on the number of rows.

Each weight of a block of each kind, and the head, is multiplied by many random rows at once and by 1, 2, ...,
6,144 of them, from several places. A library that divides K between programs for few rows adds in another
order there. Our own product (`kernels.fixed_product`) then takes its place: below the number of rows from
which the library's bits are those of all rows, if ours are too; else for any number. For few rows it also
replaces a library that holds, which is slower there. The products of experts and their router are always
our own (`kernels.experts`), and only checked; so are the chunks of recurrent layers (`kernels.chunks`).
Shapes and GPU decide, so this runs at every start; it takes the time of some thousand products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.device import HOPPER
from graft.models.layers.attention import Attention
from graft.models.layers.experts import ExpertMLP
from graft.models.layers.mlp import GatedMLP
from graft.models.ops import FEW_ROWS
from graft.models.recurrence_probe import recurrence_holds
from graft.models.row_order import NEVER, RowOrder
from graft.models.tree.attention import why_no_kernel

COUNTS = (
    *range(1, 513),
    *(513, 640, 768, 777, 896, 1000, 1024, 1025, 1500, 2048, 3000, 4096, 6144),
)
"""Numbers of rows, ascending; all up to the engine's batches. A library's choice may alternate: of one GPU
it divided K for 144 rows, neither for 129 nor for 160."""

MAX_ROWS = 8192
MAX_BYTES = 1 << 30
"""Of the product of all rows, which are then fewer."""

FEW_CHAINED, SMALL_BYTES = 64, 16_000_000
"""Rows up to which our own product is faster than the library where launches overlap, and the weights with
which a product takes not much longer than its launch (12.6 MB were measured). Else it is as many rows as
`kernels.skinny` takes without an order."""

COMPILERS = 8
"""Threads that compile kernels."""

MLP = TypeVar("MLP", GatedMLP, ExpertMLP)
Product = Callable[[Tensor], Tensor]


class Rivals(NamedTuple):
    """One product of the decoder, computed in two ways."""

    rows: Tensor
    library: Product
    own: Product
    few: int = 0
    """Below as many rows our own is taken where both hold, because it is faster."""


_found: dict[tuple[str, str], tuple[RowOrder | None, str]] = {}


def why_not(decoder: Decoder) -> str:
    """Why the kernels cannot compute this model in one order; empty if they can."""
    if decoder.device.type != "cuda":
        return f"the device is {decoder.device.type}"
    if decoder.dtype != torch.bfloat16:
        return f"the weights are {decoder.dtype}, and only bfloat16 was made for it"
    if not decoder.is_whole:
        return "the model is split over processes"
    if (generation := torch.cuda.get_device_capability(decoder.device)) != HOPPER:
        number = ".".join(map(str, generation))
        return f"this GPU's compute capability is {number}, and bits were compared on 9.0 (Hopper) only"
    size = decoder.shape.head_dim
    if size & (size - 1):
        return f"head size {size} is no power of two, and only such were compared on a GPU"
    return why_no_kernel(size, decoder.dtype, decoder.device)


@torch.no_grad()
def find_kernel_order(decoder: Decoder) -> tuple[RowOrder | None, str]:
    """The order for this model on this GPU, or None; and a line that says what was found."""
    if reason := why_not(decoder):
        return None, f"model.exact has no effect: {reason}"
    key = decoder.shape.layer_key, str(decoder.device)
    if key not in _found:
        _found[key] = _search(decoder)
    return _found[key]


def _search(decoder: Decoder) -> tuple[RowOrder | None, str]:
    by_shape: dict[tuple[int, int], list[Rivals]] = {}
    for shape, rivals in _products(decoder):
        by_shape.setdefault(shape, []).append(rivals)
    if decoder.device.type == "cuda":
        _compile(by_shape, decoder.device)
    fixed: dict[tuple[int, int], int] = {}
    for shape, products in by_shape.items():
        if (rows := _library_from(products)) is None:
            return None, (
                f"model.exact has no effect: rows of the product with {shape[0]} x {shape[1]} depend "
                "on their number, in the library and in our own kernel"
            )
        if rows:
            fixed[shape] = rows
    order = RowOrder(fixed=fixed, gate_rows=_gate_rows(decoder, fixed))
    if not all(_experts_hold(layer, order) for layer in _mlps(decoder, ExpertMLP)):
        return None, "model.exact has no effect: a token's experts depend on the tokens beside it"
    if not recurrence_holds(decoder):
        return None, "model.exact has no effect: a token alone has other bits than in its chunk"
    names = ", ".join(
        f"{n} x {k} " + ("for any number of rows" if rows == NEVER else f"below {rows} rows")
        for (n, k), rows in sorted(fixed.items())
    )
    return order, (
        f"model.exact: of {len(by_shape)} shapes of products our own kernel computes "
        f"{names or 'none'}, and the library the others"
    )


def _compile(by_shape: Mapping[tuple[int, int], list[Rivals]], device: torch.device) -> None:
    """Launch our own kernel for few rows with each tile, in threads: kernels that were never compiled for
    these shapes take longer than the search."""
    from graft.models.kernels.fixed_product import tile_of

    def launch(rivals: Rivals, count: int) -> None:
        with torch.cuda.device(device):
            rivals.own(rivals.rows[:count])

    with ThreadPoolExecutor(COMPILERS, "graft-compile") as pool:
        launches = [
            pool.submit(launch, products[0], count)
            for (outputs, _), products in by_shape.items()
            for count in {tile_of(n, outputs): n for n in range(1, FEW_CHAINED + 1)}.values()
        ]
    for each in launches:
        each.result()


def _library_from(products: list[Rivals]) -> int | None:
    """The rows from which the library computes these products of one shape; None: neither way holds."""
    wholes = [rivals.library(rivals.rows) for rivals in products]
    both = list(zip(products, wholes, strict=True))
    found = max(holds_from(rivals.library, rivals.rows, whole) for rivals, whole in both)
    if found < NEVER:
        margin = 1 << (found - 1).bit_length() if found else 0  # for what is not tried
        rows = max(margin, min(rivals.few for rivals in products))
        if all(holds_from(each.own, each.rows[:rows], whole) == 0 for each, whole in both):
            return rows
    if found == 0:
        return 0
    if all(holds_from(each.own, each.rows, each.own(each.rows)) == 0 for each in products):
        return NEVER
    return None


def _products(decoder: Decoder) -> Iterator[tuple[tuple[int, int], Rivals]]:
    """Every kind of product of the decoder, with the shape of its weight."""
    from graft.models.kernels.fixed_product import fixed_linear
    from graft.models.kernels.head_rows import logits_in_rows
    from graft.models.kernels.launch import chained

    is_chained = chained(decoder.device)["CHAINED"]
    blocks: list[Any] = [decoder.blocks[layer] for layer in decoder.shape.kinds]
    linears = []
    for mixer in (block.attention for block in blocks if block.attention is not None):
        linears += [mixer.qkv if isinstance(mixer, Attention) else mixer.inputs, mixer.out]
    for mlp in _mlps(decoder, GatedMLP):
        linears += [mlp.gate_up, mlp.down]
    for mlp in _mlps(decoder, ExpertMLP):
        linears += [mlp.shared_gate_up, mlp.shared_down] if mlp.experts.shared_ff else []
    for linear in linears:
        weight, bias = linear.weight, linear.bias
        is_small = weight.numel() * weight.itemsize <= SMALL_BYTES
        yield (
            (len(weight), weight.shape[1]),
            Rivals(
                _noise(weight),
                lambda x, w=weight, b=bias: F.linear(x, w, b),
                lambda x, w=weight, b=bias: fixed_linear(x, w, b),
                few=(FEW_CHAINED if is_chained and is_small else FEW_ROWS) + 1,
            ),
        )
    rows, head = decoder.biased(_noise(decoder.head_weight))
    shape = len(head), head.shape[1]
    own = RowOrder(fixed={shape: NEVER})
    yield (
        shape,
        Rivals(
            rows,
            lambda x: logits_in_rows(x, head, None)[1],
            lambda x: logits_in_rows(x, head, own)[1],
        ),
    )


def _mlps(decoder: Decoder, kind: type[MLP]) -> list[MLP]:
    """One layer of this kind, or none."""
    blocks: list[Any] = [decoder.blocks[layer] for layer in decoder.shape.kinds]
    return [block.mlp for block in blocks if isinstance(block.mlp, kind)][:1]


def _experts_hold(layer: ExpertMLP, order: RowOrder) -> bool:
    """Whether tokens have the bits among any others that they have in training, where the gate is apart.

    The products of a shared expert are those of the order.
    """
    rows, before = _noise(layer.router.weight), layer.order

    def compute(x: Tensor) -> Tensor:
        return layer(x.float(), None)[1]

    layer.order = order
    try:
        with torch.enable_grad():
            whole = compute(rows).detach()
        return holds_from(compute, rows, whole) == 0
    finally:
        layer.order, layer.load = before, None  # the load is that of random rows


def _gate_rows(decoder: Decoder, fixed: Mapping[tuple[int, int], int]) -> int:
    """Rows up to which our own product with gate|up has the gate inside; 0 if that changes a bit."""
    from graft.models.kernels.fixed_product import fixed_linear
    from graft.models.kernels.gate import gated

    mlp = next(iter(_mlps(decoder, GatedMLP)), None)
    if mlp is None:
        return 0
    weight, bias = mlp.gate_up.weight, mlp.gate_up.bias
    most = fixed.get((len(weight), weight.shape[1]), 1) - 1
    rows = _noise(weight)[: most + 1]
    gate = decoder.shape.activation
    whole = gated(fixed_linear(rows, weight, bias), gate)
    inside = holds_from(lambda x: fixed_linear(x, weight, bias, gate=gate), rows, whole)
    return most if inside == 0 else 0


def _noise(weight: Tensor) -> Tensor:
    """Rows to multiply by weight [N, K]."""
    outputs, inputs = weight.shape
    count = min(MAX_ROWS, MAX_BYTES // (outputs * weight.itemsize))
    generator = torch.Generator(weight.device).manual_seed(0)
    return torch.randn(count, inputs, generator=generator, device=weight.device, dtype=weight.dtype)


def holds_from(product: Product, rows: Tensor, whole: Tensor) -> int:
    """The rows from which a product has the bits of the same rows in `whole`, the product of all.

    0 for any number, NEVER if the largest one tried differs.
    """
    counts = [count for count in COUNTS if count < len(rows)]
    starts = [number * 37 % (len(rows) - count + 1) for number, count in enumerate(counts)]
    flags = [  # read at once: to wait for each would take longer than the products
        (product(rows[at : at + count]) == whole[at : at + count]).all()
        for at, count in zip(starts, counts, strict=True)
    ]
    are_equal: list[bool] = torch.stack(flags).tolist() if flags else []
    found = NEVER
    for count, is_equal in reversed([*zip(counts, are_equal, strict=True)]):
        if not is_equal:
            return found
        found = count
    return 0
