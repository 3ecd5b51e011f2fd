"""Launches that overlap are made on GPUs that can, and wait before they touch memory."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
import torch

import graft

pytest.importorskip("triton")

from graft.models.kernels.launch import chained


@pytest.mark.parametrize(
    ("capability", "is_chained"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)],
)
def test_launches_overlap_from_hopper_on(
    capability: tuple[int, int], is_chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = chained.__wrapped__(torch.device("cuda"))
    assert found == ({"CHAINED": True, "launch_pdl": True} if is_chained else {"CHAINED": False})


def test_elsewhere_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chained(torch.device("cpu")) == {"CHAINED": False}
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert chained.__wrapped__(torch.device("cuda")) == {"CHAINED": False}


def kernels() -> dict[str, ast.FunctionDef]:
    """Every function with a parameter CHAINED, by file and name."""
    found: dict[str, ast.FunctionDef] = {}
    for path in Path(graft.__file__).parent.rglob("kernels/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "CHAINED" in [a.arg for a in node.args.args]:
                found[f"{path.name}:{node.name}"] = node
    return found


@pytest.mark.parametrize("name", sorted(kernels()))
def test_every_such_kernel_waits_first(name: str) -> None:
    """What is read before it may not be written yet; what is written may still be read."""
    first = textwrap.dedent(ast.unparse(kernels()[name].body[0]))
    assert first == "if CHAINED:\n    after_previous()"


def test_all_kernels_of_a_decode_step_are_among_them() -> None:
    names = {"norm.py:_forward", "rope.py:_forward", "gate.py:_forward", "segments.py:_attend"}
    names |= {"routing.py:_route", "routing.py:_group", "experts.py:_multiply", "experts.py:_sum"}
    assert names | {"segments.py:_merge", "fixed_product.py:_product"} == set(kernels())
