"""Which precision a recipe gets on which device, and the note where it is not the one that was set."""

from __future__ import annotations

import pytest
import torch

from graft.config import load_config
from graft.models import device_choice
from graft.models.device_choice import choose_dtype, prefer_blas
from graft.planning.forecast import forecast
from graft.train.build import build_run
from graft.train.memory.device_memory import DeviceMemory

CPU = torch.device("cpu")
IN_SOFTWARE = "dtype=bfloat16, but this cpu emulates it"


@pytest.mark.parametrize("is_native", [True, False])
def test_a_cpu_that_computes_bfloat16_in_software_is_given_float32(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_choice, "has_native_bf16", lambda _: is_native)
    assert choose_dtype("auto", CPU) == (torch.float32, "")
    assert choose_dtype("float32", CPU) == (torch.float32, "")
    dtype, note = choose_dtype("bfloat16", CPU)
    assert dtype == (torch.bfloat16 if is_native else torch.float32)
    assert note.startswith(IN_SOFTWARE) != is_native


def test_a_run_and_its_forecast_note_that_they_take_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_choice, "has_native_bf16", lambda _: False)
    config = load_config("quickstart", ["model.dtype=bfloat16", "model.device=cpu"])
    components = build_run(config)
    assert components.policy.dtype == torch.float32
    assert any(note.startswith(IN_SOFTWARE) for note in components.notes)
    found = forecast(config, probing=False, device_memory=DeviceMemory(CPU, 10**11, name="a CPU"))
    assert found.dtype == torch.float32
    assert [note.startswith(IN_SOFTWARE) for note in found.notes] == [True]


@pytest.mark.parametrize(
    ("machine", "dtype", "is_onednn"),
    [
        ("aarch64", torch.float32, False),
        ("aarch64", torch.bfloat16, True),
        ("x86_64", torch.float32, True),
    ],
)
def test_float32_products_are_those_of_blas_on_arm(
    machine: str, dtype: torch.dtype, is_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    monkeypatch.setattr(device_choice.platform, "machine", lambda: machine)
    prefer_blas(CPU, dtype)
    assert torch.backends.mkldnn.enabled == is_onednn
