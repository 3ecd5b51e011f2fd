"""Weights through memory: tensors as text, in the form of SGLang's /update_weights_from_tensor.

    in GPU memory, server on this machine   handles of that memory (CUDA IPC): the server copies from it
    else                                    the values themselves, in base64: no common folder is needed

The text is a pickle, which the server reads with a list of allowed classes: only torch's own are in it.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 500_000_000
"""Tensors that are sent, and for split models gathered, at a time."""


class TensorBucket:
    """Some of the tensors, and their texts, each of which is made once for all servers."""

    def __init__(self, tensors: list[tuple[str, Tensor]], is_last: bool) -> None:
        self.tensors, self.is_last = tensors, is_last
        self.is_on_gpu = all(tensor.is_cuda for _, tensor in tensors)
        self.text = cache(self._text)

    def _text(self, by_handle: bool) -> str:
        stream = io.BytesIO()
        if by_handle:
            _HandlePickler(stream).dump([(name, tensor.detach()) for name, tensor in self.tensors])
        else:
            # copies: a view would be sent with the whole storage behind it
            copies = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in self.tensors]
            pickle.dump(copies, stream)
        return base64.b64encode(stream.getbuffer()).decode("ascii")


def buckets_of(weights: Mapping[str, Tensor], size: int = BUCKET_BYTES) -> Iterator[TensorBucket]:
    """Buckets of about `size` bytes, in order; each tensor is read once."""
    tensors: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights.items():
        if tensors and num_bytes + tensor.nbytes > size:
            yield TensorBucket(tensors, is_last=False)
            tensors, num_bytes = [], 0
        tensors.append((name, tensor))
        num_bytes += tensor.nbytes
    yield TensorBucket(tensors, is_last=True)


class _HandlePickler(pickle.Pickler):
    """Writes a GPU tensor as the handle of its memory, and its device by UUID.

    Device numbers depend on CUDA_VISIBLE_DEVICES, and SGLang also finds a device by its UUID.
    """

    def reducer_override(self, obj: Any) -> Any:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        rebuild, arguments = reduce_tensor(obj)
        # type, size, stride, offset, storage class, dtype, device, handle, ...
        uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:])
