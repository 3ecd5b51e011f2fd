"""Operations on any kind of policy: a decoder, a sharded decoder, or a transformers model.

    save_policy   write a folder that transformers opens
    host_copy     a copy in host memory, to be written while training continues

For a sharded policy these are collective: all its processes call them and read the weights in their
order, because each tensor is gathered when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.io.save import TokenIds, save_weights
from graft.models.io.tensor_names import weights_of, whole_state


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
        return
    weights = weights_of(policy)
    if folder is not None:
        save_weights(policy.shape, weights, folder, policy.dtype, special, source)
    else:
        for name in weights:
            weights[name]  # gathered if it is sharded


class _HostCopy:
    """A transformers model with a copy of its state dict in host memory, to be saved."""

    def __init__(self, policy: Any, state: Mapping[str, Tensor]) -> None:
        self.policy = policy
        self.state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.state

    def save(self, folder: Path, **options: Any) -> None:
        self.policy.save(folder, **options)


@torch.no_grad()
def host_copy(policy: Any, *, keep: bool) -> Any:
    """A copy of the policy in host memory, to be saved; None unless `keep`."""
    if not isinstance(policy, Decoder):
        state = whole_state(policy)
        return _HostCopy(policy, state) if keep else None
    weights = weights_of(policy)
    copy = Decoder.empty(policy.shape, policy.dtype, "cpu") if keep else None
    if copy is not None and policy.shape.extra:
        copy.head_weight.zero_()  # padding rows
    views = {} if copy is None else weights_of(copy)
    for name in weights:
        tensor = weights[name]  # gathers: every process must read it, also without keep
        if copy is not None:
            views[name].copy_(tensor)
    return copy
