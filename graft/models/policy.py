"""Operations on any kind of policy: a decoder, a sharded decoder, or a transformers model.

    weights_of    whole tensors by Hugging Face name, for engines and files
    save_policy   write a folder that transformers opens
    host_copy     a copy in host memory, to be written while training continues

For a sharded policy these are collective: all its processes call them and read the weights in their
order, because each tensor is gathered when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.extra_actions import ACTION_ROWS, extra_rows
from graft.models.io.save import TokenIds, save_configs, save_model, save_rows, write_weights
from graft.models.io.tensor_names import hf_names
from graft.models.parallel.shards import is_sharded
from graft.models.shape import ModelShape


def weights_of(policy: Any) -> Mapping[str, Tensor]:
    """Whole tensors by Hugging Face name; rows of actions beyond the vocabulary come last."""
    if not isinstance(policy, Decoder):
        return policy.hf_weights(whole_state(policy))
    if not policy.is_whole:
        return _GatheredPolicy(policy)
    rows = {ACTION_ROWS: extra_rows(policy)} if policy.shape.extra else {}
    return {**hf_names(policy), **rows}


class _GatheredPolicy(Mapping[str, Tensor]):
    """The tensors of a sharded policy, each gathered when it is read."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.weights = policy, policy.hf_weights()
        self.names = [*self.weights, *([ACTION_ROWS] if policy.shape.extra else [])]

    def __getitem__(self, name: str) -> Tensor:
        return self.policy.extra_rows() if name == ACTION_ROWS else self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def save_policy(
    policy: Any,
    folder: Path | None,
    *,
    special: TokenIds,
    source: str | os.PathLike[str] | None,
) -> None:
    """Write config and weights; folder None: only take part, because another process writes."""
    if not isinstance(policy, Decoder):
        state = whole_state(policy)
        if folder is not None:
            policy.save(folder, source=source, state=state)
    elif policy.is_whole:
        if folder is not None:
            save_model(policy, folder, special=special, source=source)
    else:
        weights = weights_of(policy)
        if folder is None:
            for name in weights:
                weights[name]
            return
        sizes = whole_sizes(policy.shape)
        write_weights(sizes, weights.__getitem__, folder, dtype=policy.dtype)
        save_rows(weights[ACTION_ROWS] if policy.shape.extra else None, folder, policy.dtype)
        save_configs(policy.shape, folder, policy.dtype, special, None, source)


def whole_state(policy: Any) -> dict[str, Tensor]:
    """The state dict of a transformers model, gathered if it is sharded."""
    return {
        name: tensor.full_tensor() if is_sharded(tensor) else tensor
        for name, tensor in policy.state_dict().items()
    }


class _HostCopy:
    """A transformers model with a copy of its state dict in host memory, to be saved."""

    def __init__(self, policy: Any, state: Mapping[str, Tensor]) -> None:
        self.policy = policy
        self.state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.state

    def save(self, folder: Path, **options: Any) -> None:
        self.policy.save(folder, **options)


def whole_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The size of each tensor of a Hugging Face checkpoint of this shape."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in hf_names(Decoder(shape)).items()}


@torch.no_grad()
def host_copy(policy: Any, *, keep: bool) -> Any:
    """A copy of the policy in host memory, to be saved; None unless `keep`."""
    if not isinstance(policy, Decoder):
        state = whole_state(policy)
        return _HostCopy(policy, state) if keep else None
    weights = weights_of(policy)
    with torch.device("meta"):
        copy = Decoder(policy.shape)
    if keep:
        copy = copy.to(policy.dtype).to_empty(device="cpu")
        if policy.shape.extra:
            copy.head_weight.zero_()  # padding rows
    views = weights_of(copy) if keep else {}
    for name in weights:
        tensor = weights[name]  # gathers: every process must read it, also without keep
        if keep:
            views[name].copy_(tensor)
    return copy if keep else None
