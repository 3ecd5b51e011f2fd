"""Products in one order of adding, and the probe that finds out where they are needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models import product_probe
from graft.models.decoder import Decoder
from graft.models.layers.experts import ExpertMLP
from graft.models.row_order import NEVER, RowOrder
from graft.models.shape import Experts, ModelShape

pytest.importorskip("triton")

from graft.models.kernels import fixed_product
from graft.models.kernels.fixed_product import Tile, fixed_linear, tile_of
from graft.models.kernels.gate import gated
from graft.models.ops import gate_product


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_the_product_is_torchs(rows: int, kernel_device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 70), torch.randn(33, 70), torch.randn(33)
    is_gpu = kernel_device.type == "cuda"  # tiles are made for bf16, and too large for fp32
    dtype = torch.bfloat16 if is_gpu else torch.float32
    close: dict[str, Any] = {"atol": 2e-2, "rtol": 2e-2} if is_gpu else {"atol": 2e-5, "rtol": 1e-5}
    x, weight, bias = (tensor.to(kernel_device, dtype) for tensor in (x, weight, bias))
    want = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(fixed_linear(x, weight, bias), want, **close)
    wide = torch.full((rows, 40), 7.0, device=kernel_device, dtype=dtype)
    fixed_linear(x, weight, out=wide[:, :33])
    want = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(wide[:, :33], want, **close)
    assert (wide[:, 33:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_has_the_bits_that_it_has_among_others(
    dtype: torch.dtype, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles of one size: whether others add alike is the device's, and the probe's to find out."""
    monkeypatch.setattr(fixed_product, "tile_of", lambda rows, outputs: Tile(32, 16, 64, 4, 3))
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 150).to(kernel_device, dtype) for n in (70, 48))
    whole = fixed_linear(x, weight)
    for start, stop in ((0, 1), (5, 8), (3, 67)):
        assert torch.equal(fixed_linear(x[start:stop], weight), whole[start:stop])


def test_a_gate_inside_the_product_has_the_bits_of_one_after_it(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_product, "tile_of", lambda rows, outputs: Tile(32, 16, 64, 4, 3))
    torch.manual_seed(0)
    shapes = (70, 150), (2 * 40, 150), (2 * 40,)
    x, weight, bias = (torch.randn(shape).to(kernel_device, torch.bfloat16) for shape in shapes)
    for of_weight in ((weight,), (weight, bias)):
        want = gated(fixed_linear(x, *of_weight))
        assert torch.equal(fixed_linear(x, *of_weight, gate="silu"), want)


FEW = dict.fromkeys([(64, 32), (32, 32), (96, 32), (32, 48)], 5)
"""The decoder's shapes in a block, and the rows below which our own kernel multiplies in any case."""


def by_rows(change: float) -> Any:
    """A product whose rows depend on their number below 9, as where K is divided."""
    linear = torch.nn.functional.linear
    return lambda x, *args: linear(x, *args) + (change if len(x) < 9 else 0.0)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """With products that hold, in the library and in our own kernel."""
    shape = ModelShape(vocab_size=30, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ff=48)
    monkeypatch.setattr(product_probe, "_found", {})
    monkeypatch.setattr(product_probe, "why_not", lambda decoder: "")
    monkeypatch.setattr(product_probe, "COUNTS", (1, 5, 12, 20))
    monkeypatch.setattr(product_probe, "MAX_ROWS", 32)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        found = (x[:, None, :].double() * weight.double()).sum(-1).float()
        if how.get("gate"):
            return gate_product(found)
        return found if "out" not in how else how["out"].copy_(found)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr("graft.models.kernels.fixed_product.fixed_linear", product)
    monkeypatch.setattr("graft.models.kernels.head.fixed_linear", product)
    monkeypatch.setattr("graft.models.kernels.gate.gated", lambda x, _: gate_product(x))
    monkeypatch.setattr(torch, "mm", lambda x, w, out: product(x, w.T, out=out))
    return Decoder(shape).initialise(0)


def test_where_rows_do_not_depend_on_their_number_the_library_multiplies(decoder: Decoder) -> None:
    order, note = product_probe.find_kernel_order(decoder)
    assert order == RowOrder(fixed=FEW, gate_rows=4)
    assert "of 5 shapes of products our own kernel computes 32 x 32 below 5 rows, " in note


def test_where_launches_overlap_our_own_kernel_multiplies_more_rows_with_small_weights(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graft.models.kernels.launch.chained", lambda device: {"CHAINED": True})
    monkeypatch.setattr(product_probe, "SMALL_BYTES", 32 * 64 * 4)  # all but the 96 x 32 of gate|up
    order, _ = product_probe.find_kernel_order(decoder)
    assert order == RowOrder(
        fixed={shape: 65 if shape != (96, 32) else 5 for shape in FEW}, gate_rows=4
    )


def test_where_our_own_kernel_adds_in_another_order_the_library_multiplies_few_rows_too(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.nn.functional.linear
    monkeypatch.setattr(
        "graft.models.kernels.fixed_product.fixed_linear",
        lambda *args, **how: own(*args, **how) + 1.0,
    )
    order, note = product_probe.find_kernel_order(decoder)
    assert order == RowOrder() and "our own kernel computes none, and the library" in note


def test_where_they_do_our_own_kernel_multiplies(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = torch.nn.functional.linear

    def splits_k(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_changed = weight.shape[1] == 48 and len(x) < 9  # the last product of a block
        return linear(x, weight, bias) + (1e-6 if is_changed else 0.0)

    monkeypatch.setattr(torch.nn.functional, "linear", splits_k)
    order, note = product_probe.find_kernel_order(decoder)
    assert order is not None and order.fixed == FEW | {(32, 48): 16}
    assert ", 32 x 48 below 16 rows, " in note  # 12 is the first that holds
    block: Any = decoder.blocks[0]
    is_own = [order.is_fixed(rows, block.mlp.down.weight) for rows in (1, 15, 16, 1000)]
    assert is_own == [True, True, False, False] and not order.is_fixed(
        5, block.attention.out.weight
    )


def test_where_the_library_never_adds_as_our_own_kernel_does_ours_multiplies_any_number(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", lambda x, w, out: out.copy_(by_rows(1e-6)(x, w.T) + 1.0))
    order, note = product_probe.find_kernel_order(decoder)
    assert order == RowOrder(fixed=FEW | {(30, 32): NEVER}, gate_rows=4)
    assert "computes 30 x 32 for any number of rows, " in note


def test_a_gate_that_changes_a_bit_inside_the_product_stays_outside(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graft.models.kernels.gate.gated", lambda x, _: gate_product(x) + 1e-6)
    order, _ = product_probe.find_kernel_order(decoder)
    assert order == RowOrder(fixed=FEW, gate_rows=0)


def test_experts_are_compared_in_the_order_that_was_found(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an order the products of a shared expert are the fastest ones, whose rows depend on their
    number."""

    def forward(layer: Any, x: Tensor, delta: None) -> tuple[Tensor, Tensor]:
        return x, x + float(layer.order is None and len(x) < 9)

    monkeypatch.setattr(ExpertMLP, "forward", forward)
    experts = Experts(4, 2, 16, router="sigmoid", shared_ff=16)
    shape = replace(decoder.shape, family="glm4_moe", experts=experts, qk_norm=False)
    model = Decoder(shape).initialise(0)
    order, note = product_probe.find_kernel_order(model)
    assert order is not None, note
    assert model.blocks[0].mlp.order is None  # type: ignore[union-attr]


def test_the_library_multiplies_from_the_count_after_the_last_that_differs() -> None:
    rows = torch.arange(9000.0)[:, None]

    def differs_at(*counts: int) -> Any:
        return lambda x: x + float(len(x) in counts)

    found = [
        product_probe.holds_from(differs_at(*counts), rows, rows)
        for counts in ((), (1,), (1, 64, 128), (6144,))
    ]
    assert found == [0, 2, 129, NEVER]


def test_tiles_fill_the_device() -> None:
    sizes = {rows: tile_of(rows, 1024)[:2] for rows in (1, 16, 17, 128, 256, 512, 513, 32_768)}
    assert sizes == {
        1: (16, 16), 16: (16, 16), 17: (64, 16), 128: (64, 16), 256: (64, 32), 512: (64, 64),
        513: (128, 128), 32_768: (128, 128),
    }  # fmt: skip
    assert tile_of(16, 4096)[:2] == (16, 32)  # 128 programs
    for rows in (1, 7, 100, 300, 5000):
        for outputs in (33, 1024, 151_936):
            tile = tile_of(rows, outputs)
            in_memory = (tile.rows + tile.outputs) * tile.inputs * tile.stages * 2  # bf16
            assert in_memory <= 227 * 1024


def test_where_neither_holds_there_is_no_order(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = by_rows(1e-6)
    monkeypatch.setattr(torch.nn.functional, "linear", changed)
    monkeypatch.setattr("graft.models.kernels.fixed_product.fixed_linear", changed)
    order, note = product_probe.find_kernel_order(decoder)
    assert order is None and "depend on their number" in note


def test_on_a_cpu_the_probe_says_why_it_does_nothing() -> None:
    shape = ModelShape(vocab_size=30, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ff=48)
    order, note = product_probe.find_kernel_order(Decoder(shape))
    assert order is None and note == "model.exact has no effect: the device is cpu"
