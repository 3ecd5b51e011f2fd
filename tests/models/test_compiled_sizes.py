"""Compiled for each GPU generation, kernels fit its shared memory: a launch that does not is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from graft.models import device, product_probe
from graft.models.decoder import Decoder
from graft.models.kernels import interval
from graft.models.shape import ModelShape
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
    assert names <= set(found)
    assert not {name: size for name, size in found.items() if size > KILOBYTES[capability] * 1024}


@pytest.fixture
def generation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """A GPU of this compute capability, as torch would describe it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    cached = device.why_no_kernels, interval.is_roomy
    for function in cached:
        function.cache_clear()
    yield torch.device("cuda")
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("generation", [(7, 5)], indirect=True)
def test_gpus_before_ampere_compute_in_plain_pytorch(generation: torch.device) -> None:
    assert not device.has_kernels(generation)
    assert "older than the Ampere generation" in device.why_no_kernels(generation)


@pytest.mark.parametrize(
    ("generation", "pack"), [((9, 0), 2), ((10, 0), 2), ((12, 0), 1)], indirect=["generation"]
)
def test_a_workstations_gpu_takes_smaller_tiles(generation: torch.device, pack: int) -> None:
    assert device.has_kernels(generation)
    assert interval.plan(torch.bfloat16, 2, 128, interval.is_roomy(generation)).pack == pack


@pytest.mark.parametrize("generation", [(12, 0)], indirect=True)
def test_exactness_is_claimed_where_bits_were_compared(
    generation: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape(vocab_size=30, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ff=48)
    decoder = Decoder(shape).initialise(0).to(torch.bfloat16)
    monkeypatch.setattr(Decoder, "device", generation)
    order, note = product_probe.find_kernel_order(decoder)
    assert order is None
    assert "compute capability is 12.0, and bits were compared on 9.0 (Hopper) only" in note
