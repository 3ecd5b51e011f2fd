"""Pickles between the processes of a run, read without running code of whoever sent them.

An ordinary pickle calls any function that it names. This reader calls the constructors of data: graft's
dataclasses, enums and texts, containers, arrays, tensors. Everything else ends in an UnpicklingError.

    loads(dumps([Status.DONE, {"reward": 1.0}, torch.ones(2)]))
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

ALLOWED: dict[str, set[str]] = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice", "int", "list", "dict"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "uuid": {"UUID"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "_codecs": {"encode"},  # in arrays of older protocols
    "graft.restricted_pickle": {"_tensor"},
    "vllm.sampling_params": {"SamplingParams", "RequestOutputKind", "StructuredOutputsParams"},
    "msgspec._core": {"rebuild"},  # builds a struct of a class that is allowed itself
}  # fmt: skip
"""Module -> names of classes and functions that a pickle may call."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.Tensor):
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        content = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return _tensor, (content, str(plain.dtype).removeprefix("torch."), tuple(plain.shape))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("graft.") and module in sys.modules:
            found = super().find_class(module, name)
            is_ours = isinstance(found, type) and found.__module__.startswith("graft.")
            if is_ours and (is_dataclass(found) or issubclass(found, Enum | tuple | str)):
                return found
        raise pickle.UnpicklingError(
            f"a message between processes names {module}.{name}, which is not data; what an environment puts "
            "into info, metrics or a task must consist of texts, numbers, lists and dicts"
        )


def dumps(value: Any) -> bytes:
    content = io.BytesIO()
    _Pickler(content, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getvalue()


def loads(content: bytes | bytearray | memoryview) -> Any:
    """The value of `dumps`; what stands behind it is ignored."""
    return _Unpickler(io.BytesIO(content)).load()


def _tensor(content: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise pickle.UnpicklingError(f"{dtype!r} is no dtype of torch")
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(kind).view(shape)
