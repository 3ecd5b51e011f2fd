"""Compiled for each GPU generation, kernels fit its shared memory: a launch that does not is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.models.compiling import run_compiler

KILOBYTES = {86: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of a program: RTX 3090 and 4090, H100, B200, RTX 5090. An A100 has more than the first."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", KILOBYTES)
def test_kernels_fit_shared_memory(capability: int, tmp_path: Path) -> None:
    found = json.loads(run_compiler("compiled_sizes.py", tmp_path, str(capability)))
    names = {"extend._extend", "decode._attend"}
    if capability >= 90:
        names |= {f"interval_kernels.{name}" for name in ("forward", "backward_q", "backward_kv")}
    if capability == 90:
        names |= {"fixed_product._product", "path_attention._walk", "segments._attend"}
        names |= {"experts._multiply", "chunks._advance"}
        names |= {f"expert_gradients.{name}" for name in ("_gate_backward", "_grad_bias")}
    assert names <= set(found)
    assert not {name: size for name, size in found.items() if size > KILOBYTES[capability] * 1024}
