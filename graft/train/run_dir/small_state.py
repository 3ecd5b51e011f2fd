"""What a trainer keeps beside tensors of the model's size: counts of updates, random states, an anchor.

    trainer/state.json           {"steps": 40, "random": {"python": [3, null], "numpy": ["MT19937", ...]}}
    trainer/state.safetensors    random/python, random/torch, ...; anchor/NAME: the reference of a KL term

They are not beside the weights, where other software would read the tensors as the model's. Neither file
can hold code.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from graft.files import write_json
from graft.models.io.save import save_tensors
from graft.train.errors import RunStopped
from graft.trust.bounds import parse_json, read_bytes

NUMBERS, TENSORS = "state.json", "state.safetensors"
COUNTS = ("steps", "critic_steps", "reference_moved")


def save_small(small: Mapping[str, Any], folder: Path) -> None:
    """Write the counts, the random states and the anchor."""
    folder.mkdir(exist_ok=True)
    states = small["random"]
    name, of_numpy, *rest = states["numpy"]
    version, of_python, gauss = states["python"]
    counts = {key: small[key] for key in COUNTS if key in small}
    written = {"python": [version, gauss], "numpy": [name, *rest]}
    write_json(folder / NUMBERS, {**counts, "random": written})
    tensors = {
        "random/python": torch.tensor(of_python),
        "random/numpy": torch.from_numpy(of_numpy.astype(np.int64)),
        "random/torch": states["torch"],
    }
    tensors |= {f"random/cuda/{number}": state for number, state in enumerate(states["cuda"])}
    tensors |= {f"anchor/{name}": value for name, value in small.get("anchor", {}).items()}
    save_tensors(tensors, folder / TENSORS)


def load_small(folder: Path) -> dict[str, Any]:
    """What `save_small` wrote."""
    try:
        found: dict[str, Any] = parse_json(read_bytes(folder / NUMBERS))
        tensors = load_file(folder / TENSORS)
        version, gauss = found["random"]["python"]
        name, *rest = found["random"]["numpy"]
        found["random"] = {
            "python": (version, tuple(tensors["random/python"].tolist()), gauss),
            "numpy": (name, tensors["random/numpy"].numpy().astype(np.uint32), *rest),
            "torch": tensors["random/torch"],
            "cuda": [tensors[key] for key in _numbered(tensors, "random/cuda/")],
        }
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise RunStopped(
            f"{folder} does not hold the state of a trainer ({type(error).__name__}: {error}); remove it "
            "to resume from the checkpoint before"
        ) from error
    anchor = {
        key.removeprefix("anchor/"): value for key, value in tensors.items() if "anchor/" in key
    }
    return {**found, "anchor": anchor}


def _numbered(names: Mapping[str, Any], start: str) -> list[str]:
    return [f"{start}{n}" for n in range(sum(name.startswith(start) for name in names))]


def get_random_states() -> dict[str, Any]:
    """The states that custom environments and rewards draw from: graft's own draws are keyed."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
