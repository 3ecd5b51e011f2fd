"""FSDP2, unit by unit: of our decoder (`decoder`) and of transformers' modules.

Gradients are summed over the processes, not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard


def shard_module(
    module: nn.Module, block_classes: Collection[type[nn.Module]], mesh: DeviceMesh, offload: bool
) -> None:
    """Shard the parameters of a module over the dimension "dp" of the mesh; it keeps its dtype."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [part for part in module.modules() if type(part) in block_classes]
    for part in (*blocks, module):
        shard_unit(part, mesh, policy, offload)


def shard_unit(
    unit: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: bool,
    place: Callable[[nn.Parameter], Shard | None] | None = None,
) -> None:
    """Shard the parameters of `unit` that no smaller unit in it has; `place` chooses their dimension."""
    pinned = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    sharded = fully_shard(
        unit,
        mesh=mesh["dp"],
        shard_placement_fn=place,
        mp_policy=policy,
        offload_policy=pinned if offload else OffloadPolicy(),
    )
    sharded.set_gradient_divide_factor(1.0)  # a sum
    sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale inside a reduction
