"""Builds a decoder on its device from named tensors: peak memory is one model and what is being read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.finite import find_unusable
from graft.models.io.tensor_names import hf_names, hf_sizes
from graft.models.shape import ModelShape


class ModelFileError(ValueError):
    """Files that are not a usable model; the message names the file, the tensor and what to do."""


class NotAModel(ModelFileError):
    """A path at which there is no model."""

    is_usage = True


def build_decoder(
    shape: ModelShape,
    stored: Mapping[str, tuple[int, ...]],
    fill: Callable[[Mapping[str, Tensor]], None],
    *,
    origin: str,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Decoder:
    """A decoder whose tensors `fill` writes, by name; `stored` are the sizes of the tensors in `origin`.

    Names and sizes are compared first, so a wrong checkpoint is refused before anything is read.
    """
    check_sizes(shape, stored, origin)
    decoder = Decoder.empty(shape, dtype, device)
    views = hf_names(decoder)
    with torch.no_grad():
        fill(views)
    if find_unusable(
        dict(decoder.named_parameters())
    ):  # hundreds, where experts have thousands of names
        check_finite(views, origin)
    return decoder


def check_finite(tensors: Mapping[str, Tensor], origin: str) -> None:
    """Refuse weights that hold NaN or inf: every token of theirs would be garbage."""
    if why := find_unusable(tensors):
        raise ModelFileError(
            f"{why} in {origin}, so nothing can be computed with it; take the checkpoint before it, or "
            "download or save it again"
        )


def check_sizes(shape: ModelShape, stored: Mapping[str, tuple[int, ...]], origin: str) -> None:
    """Raise unless these are the names and sizes of a model of this shape."""
    wanted = hf_sizes(shape)
    faults = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in stored if name not in wanted],
        "of the wrong size": [
            f"{name} {list(stored[name])}, config says {list(wanted[name])}"
            for name in wanted
            if name in stored and stored[name] != wanted[name]
        ],
    }
    if any(faults.values()):
        listed = "; ".join(f"{what}: {some(names)}" for what, names in faults.items() if names)
        raise ModelFileError(
            f"the tensors in {origin} are not those of its config. {listed}. "
            f"Use config and weights of the same model"
        )


def first_line(error: Exception) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def some(names: Sequence[str], most: int = 5) -> str:
    """
    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
