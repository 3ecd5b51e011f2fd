"""Compiled for a Hopper GPU, kernels that must agree multiply and add with the same instructions.

The interpreter shows that they compute one function in one order of blocks; inside a block the order is the
compiler's, and depends on the layout that it chooses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    script = Path(__file__).parent / "compiled_order.py"
    cache = str(tmp_path_factory.mktemp("triton"))
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(script.parents[2]), kept.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**kept, "TRITON_CACHE_DIR": cache, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_decoding_prompts_and_learner_multiply_and_add_alike(
    compiled: dict[str, list[Any]], size: int
) -> None:
    products, sums = compiled[f"learner {size}"]
    assert any(f"m64n{size}k16" in product for product in products)
    assert [shape for shape, _ in sums] == ["64x64xf32"] * 2
    assert compiled[f"prompts {size}"] == compiled[f"decoding {size}"] == [products, sums]


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
