"""A critic sharded over the same mesh as its policy (see `decoder`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from graft.models.decoder import Attend
from graft.models.parallel.decoder import ShardedDecoder, apply_fsdp, shard_over_tp
from graft.models.parallel.shards import local, local_tensor


class ValueHead(nn.Module):
    """One value per hidden state, in fp32; its weights start at zero."""

    def __init__(self, width: int, mesh: DeviceMesh) -> None:
        super().__init__()
        weight, bias = torch.zeros(1, width, device="meta"), torch.zeros(1, device="meta")
        self.weight = shard_over_tp(weight, mesh, Replicate())
        self.bias = shard_over_tp(bias, mesh, Replicate())

    def forward(self, hidden: Tensor) -> Tensor:
        # a product with a vector: FSDP warns of results that are views, such as one column
        return hidden.float() @ local_tensor(self.weight)[0] + local_tensor(self.bias)


class ShardedCritic(nn.Module):
    """A `critic.Critic` on the mesh of its policy; `sharded_critic` makes one."""

    def __init__(self, body: ShardedDecoder) -> None:
        super().__init__()
        self.body = body
        self.body.head = None  # never used: values need no vocabulary
        self.value = ValueHead(body.shape.width, body.mesh)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """[T] values in fp32; with `rows` [R] only theirs."""
        return self.value(self.body(tokens, positions, attend, rows=rows))

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the body and of the value head."""
        value = {"value.weight": self.value.weight, "value.bias": self.value.bias}
        return {**self.body.hf_parameters(), **value}


def sharded_critic(policy: ShardedDecoder) -> ShardedCritic:
    """A critic that starts from the policy's present weights, each process from its own shards."""
    body = ShardedDecoder(policy.shape, policy.mesh, policy.dtype, policy.offload)
    body.recompute = policy.recompute
    if policy.rounds_kv:
        body.round_kv()
    critic = ShardedCritic(body)
    apply_fsdp(critic, body, exact=[critic.value])
    shards = policy.hf_parameters()
    for name, parameter in critic.hf_parameters().items():
        if name in shards:
            local(parameter).copy_(local(shards[name]))
        else:
            local(parameter).zero_()
    return critic
