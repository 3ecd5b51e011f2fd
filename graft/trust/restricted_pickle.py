"""Pickles between the processes of a run, read without running code of whoever sent them.

An ordinary pickle calls any function that it names. This reader calls the constructors of data: graft's
dataclasses, enums and texts, containers, arrays, tensors. Everything else ends in an UnpicklingError.

    loads(dumps([Status.DONE, {"reward": 1.0}, torch.ones(2)]))

Where the environment variable GRAFT_SECRET is set, alike in all processes, a message begins with its
HMAC-SHA256 and is not read before this is checked: a stranger in the network cannot write one.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
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
    "graft.trust.restricted_pickle": {"_tensor"},
    "vllm.sampling_params": {"SamplingParams", "RequestOutputKind", "StructuredOutputsParams"},
    "msgspec._core": {"rebuild"},  # builds a struct of a class that is allowed itself
}  # fmt: skip
"""Module -> names of classes and functions that a pickle may call."""


SECRET = "GRAFT_SECRET"
LENGTH, MAC = 8, hashlib.sha256().digest_size
"""Bytes before a signed pickle: its HMAC, and its length."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Enum):  # Python 3.11.0 to 3.11.3 would name getattr
            return type(obj), (obj.value,)
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
    secret = os.environ.get(SECRET, "")
    if not secret:
        return content.getvalue()
    signed = content.getbuffer().nbytes.to_bytes(LENGTH, "little") + content.getvalue()
    return _mac(secret, signed) + signed


def loads(content: bytes | bytearray | memoryview) -> Any:
    """The value of `dumps`; what stands behind it is ignored."""
    secret = os.environ.get(SECRET, "")
    return _Unpickler(io.BytesIO(_checked(secret, content) if secret else content)).load()


def _checked(secret: str, content: bytes | bytearray | memoryview) -> memoryview:
    """The pickle in a signed message."""
    message = memoryview(content)
    end = MAC + LENGTH + int.from_bytes(message[MAC : MAC + LENGTH], "little")
    if not hmac.compare_digest(_mac(secret, message[MAC:end]), bytes(message[:MAC])):
        raise pickle.UnpicklingError(
            f"a message between processes is not signed with this process's {SECRET}: it is of a process "
            f"with another secret or none, or of a stranger. Set {SECRET} to one random text on all machines"
        )
    return message[MAC + LENGTH : end]


def _mac(secret: str, content: bytes | memoryview) -> bytes:
    return hmac.digest(secret.encode(), content, "sha256")


def _tensor(content: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise pickle.UnpicklingError(f"{dtype!r} is no dtype of torch")
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(kind).view(shape)
