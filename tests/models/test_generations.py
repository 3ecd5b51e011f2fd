"""What GPUs of other generations than Hopper compute with, as torch and Triton would describe them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from graft.models import device, product_probe
from graft.models.decoder import Decoder
from graft.models.kernels import interval, launch
from graft.models.shape import ModelShape


class Driver:
    """Triton's, of a GPU that is not there."""

    def get_current_target(self) -> str:
        return "cuda"


class NoCompiler:
    def get_current_target(self) -> str:
        raise RuntimeError("Failed to find C compiler.")


@pytest.fixture
def generation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """A GPU of this compute capability."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    cached = device.why_no_kernels, device.has_large_shared_memory
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=Driver()))
    yield torch.device("cuda")
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("generation", [(7, 5)], indirect=True)
def test_gpus_before_ampere_compute_in_plain_pytorch(generation: torch.device) -> None:
    assert not device.has_kernels(generation)
    assert "older than the Ampere generation" in device.why_no_kernels(generation)


@pytest.mark.parametrize("generation", [(9, 0)], indirect=True)
def test_so_does_one_on_a_machine_where_triton_does_not_start(
    generation: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=NoCompiler()))
    why = "Triton does not start: Failed to find C compiler."
    assert device.why_no_kernels(generation) == why and not device.has_kernels(generation)


@pytest.mark.parametrize(
    ("generation", "pack"), [((9, 0), 2), ((10, 0), 2), ((12, 0), 1)], indirect=["generation"]
)
def test_a_workstations_gpu_takes_smaller_tiles(generation: torch.device, pack: int) -> None:
    assert device.has_kernels(generation)
    is_large = device.has_large_shared_memory(generation)
    assert interval.plan(torch.bfloat16, 2, 128, is_large).pack == pack


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
