"""Compiled for a Hopper GPU, kernels that must agree multiply and add with the same instructions.

The interpreter shows that they compute one function in one order of blocks; inside a block the order is the
compiler's, and depends on the layout that it chooses.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

pytest.importorskip("triton")

from graft.models.kernels import chunks, path_attention
from graft.models.recurrence import CHUNK
from tests.models.compiling import run_compiler


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cache = tmp_path_factory.mktemp("triton")
    return json.loads(run_compiler("compiled_order.py", cache))


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_decoding_prompts_and_learner_add_keys_in_products_of_sixteen(
    compiled: dict[str, list[Any]], size: int
) -> None:
    """Tiles of 128 rows and of 16 are different instructions, of which a GPU adds 16 numbers at a time in
    one order; no other operation adds: what is reduced are maxima, whose order does not matter."""
    for name, instruction in (("learner", "m64n"), ("prompts", "m64n"), ("decoding", "m16n8")):
        products = compiled[f"{name} {size}"][0]
        assert products and all(instruction in p and "k16" in p for p in products)
    assert compiled[f"prompts {size}"] == compiled[f"learner {size}"]
    parts = (path_attention.fold_block, path_attention.add_weights, path_attention.weigh_block)
    source = "".join(inspect.getsource(part.fn) for part in parts)
    assert "tl.sum" not in source and source.count("tl.dot") == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_decoding_fetches_pages_ahead(compiled: dict[str, list[Any]], size: int) -> None:
    """Two pages before the loop and one in it, keys and values: 128 threads that copy 16 bytes each. A
    harmless change, such as a reduction before the loop, makes the compiler load them one by one."""
    per_page = 2 * 64 * size * 2 // (128 * 16)
    assert compiled[f"decoding {size}"][2] == 3 * per_page


@pytest.mark.slow
@pytest.mark.parametrize("masked", ["", " masked"])
def test_the_heads_of_engine_and_learner_add_alike(
    compiled: dict[str, list[Any]], masked: str
) -> None:
    engine, learner = (compiled[f"head of the {one}{masked}"] for one in ("engine", "learner"))
    assert engine == learner and len(engine[1]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_head_norms_of_engine_and_learner_add_alike(
    compiled: dict[str, list[Any]], size: int
) -> None:
    engine, learner = (compiled[f"rotation of the {one} {size}"] for one in ("engine", "learner"))
    assert engine == learner and len(engine[1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "mamba"])
@pytest.mark.parametrize("form", ["decoding", "prompts", "learner"])
def test_recurrences_add_in_products_without_tensor_cores(
    compiled: dict[str, list[Any]], kind: str, form: str
) -> None:
    """One thread adds all numbers of a tile to a result, one after the other. What is reduced over rows is
    a pick of one row of a delta net: the others are 0."""
    products, reductions, chains = compiled[f"{kind}: {form}"]
    assert not products and reductions == (2 if kind == "delta" else 0)
    # a product alone, and sums over rows or over steps of keys, whose first number may be one as well
    assert set(chains) <= {1, CHUNK - 1, CHUNK} and CHUNK in chains
    assert compiled[f"{kind}: decoding"] == compiled[f"{kind}: {form}"]
    source = inspect.getsource(chunks._advance.fn)
    assert source.count("tl.dot(") == source.count('input_precision="ieee"') == 7
    assert source.count("tl.sum(tl.where(is_row") == source.count("tl.sum") == 2
