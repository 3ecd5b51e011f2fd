"""FSDP2 for any module, block by block: the counterpart of `decoder` for transformers' modules.

Gradients are summed over the processes, not averaged. The module keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)


def shard_module(
    module: nn.Module, block_classes: Collection[type[nn.Module]], mesh: DeviceMesh, offload: bool
) -> None:
    """Shard its parameters over the dimension "dp" of the mesh."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload_policy = (
        CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    )
    blocks = [part for part in module.modules() if type(part) in block_classes]
    for part in (*blocks, module):
        sharded = fully_shard(
            part, mesh=mesh["dp"], mp_policy=policy, offload_policy=offload_policy
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
