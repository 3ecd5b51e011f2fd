"""Any module split over processes with FSDP2, block by block: what `sharded` does for our own decoder.

Gradients are added up over the processes, not averaged, as everywhere here. The module keeps its dtype.
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
    """Split its parameters over the dimension "dp" of the mesh."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    waiting = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    blocks = [part for part in module.modules() if type(part) in block_classes]
    for part in (*blocks, module):
        split = fully_shard(part, mesh=mesh["dp"], mp_policy=policy, offload_policy=waiting)
        split.set_gradient_divide_factor(1.0)
        split.set_force_sum_reduction_for_comms(True)
