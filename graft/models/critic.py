"""A critic: a decoder with a scalar head, the value of each state."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from graft.models.decoder import Attend, Decoder


class Critic(nn.Module):
    """Starts from the policy's weights; the value head starts at zero."""

    def __init__(self, policy: Decoder) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy)
        self.body.head = self.body.action_bias = None  # unused: values need no vocabulary
        self.body.requires_grad_(True)  # also where the policy trains the rows of its actions only
        self.value = nn.Linear(policy.shape.width, 1, bias=True, device=policy.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """[T] values in fp32; with `rows` [R] only theirs."""
        hidden = self.body(tokens, positions, attend, rows=rows)
        return self.value(hidden.float())[:, 0]
