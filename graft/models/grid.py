"""From rows of trajectories to `[N, T]` grids of log-probs, entropies and values, and back by autograd.

The model runs once over the unique tokens of the forest; the head once per trained token, on the
hidden state before it. Gathering to the grid repeats a shared token in every row that passes through
it, and the backward pass of that gather adds their gradients up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.functions import gather_rows
from graft.models.logprobs import action_logprobs
from graft.models.packing import Packed, TreeAttention, pack
from graft.types import Trajectory


class Forest:
    """A packed set of rows on a device, ready to be evaluated by one or several models."""

    def __init__(self, rows: Sequence[Trajectory], mask_NT: Tensor, device: torch.device) -> None:
        self.packed: Packed = pack(rows, width=mask_NT.shape[1]).to(device)
        packed = self.packed
        wanted = torch.zeros(len(packed) + 1, dtype=torch.bool, device=device)
        wanted[packed.source[mask_NT.to(device)]] = True
        self.wanted = wanted[:-1].nonzero()[:, 0]  # [U] the tokens that are trained, each once
        slots = torch.full((len(packed) + 1,), len(self.wanted), device=device)
        slots[self.wanted] = torch.arange(len(self.wanted), device=device)
        self.slots_NT = slots[packed.source]  # U, the zero slot, where nothing is trained

    def _attention(self, model: Decoder) -> TreeAttention:
        return TreeAttention(self.packed, model.shape.heads, model.shape.kv_heads)

    def _grid(self, values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(1)])[self.slots_NT]

    def logprobs(
        self, model: Decoder, temperature: float = 1.0, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each chosen action and entropy of its distribution, both [N, T]."""
        packed = self.packed
        hidden = model(packed.tokens, packed.positions, self._attention(model))
        logp, entropy = action_logprobs(
            gather_rows(hidden, packed.parents[self.wanted]),
            model.head_weight,
            packed.actions[self.wanted],
            modes=packed.modes[self.wanted],
            allowed=allowed,
            temperature=temperature,
        )
        return self._grid(logp), self._grid(entropy)

    def values(self, critic: Critic) -> Tensor:
        """The critic's value of the state each decision was taken in, [N, T]."""
        packed = self.packed
        values = critic(packed.tokens, packed.positions, self._attention(critic.body))
        return self._grid(values[packed.parents[self.wanted]])
