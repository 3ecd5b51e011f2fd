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
from graft.models.packing import Packed, is_read, pack, shorten
from graft.models.tree_attention import TreeAttention
from graft.types import Trajectory


class Forest:
    """A packed set of rows on a device, ready to be evaluated by one or several models.

    Only tokens that a trained one comes after are computed: what nobody reads costs nothing.
    """

    def __init__(self, rows: Sequence[Trajectory], mask_NT: Tensor, device: torch.device) -> None:
        self.packed: Packed = pack(rows, width=mask_NT.shape[1]).to(device)
        packed = self.packed
        wanted = torch.zeros(len(packed) + 1, dtype=torch.bool, device=device)
        wanted[packed.source[mask_NT.to(device)]] = True
        self.wanted = wanted[:-1].nonzero()[:, 0]  # [U] the tokens that are trained, each once
        keep = is_read(packed.ends, wanted[:-1])
        self.tokens, self.positions = packed.tokens[keep], packed.positions[keep]
        self.runs = shorten(packed.runs, keep)
        self.before = keep.cumsum(0)[packed.parents[self.wanted]] - 1  # [U] the token each follows
        slots = torch.full((len(packed) + 1,), len(self.wanted), device=device)
        slots[self.wanted] = torch.arange(len(self.wanted), device=device)
        self.slots_NT = slots[packed.source]  # U, the zero slot, where nothing is trained

    def _attention(self, model: Decoder) -> TreeAttention:
        shape = model.shape
        return TreeAttention(self.runs, shape.heads, shape.kv_heads, self.tokens.device)

    def _grid(self, values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(1)])[self.slots_NT]

    def logprobs(
        self, model: Decoder, temperature: float = 1.0, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each chosen action and entropy of its distribution, both [N, T]."""
        packed = self.packed
        hidden = model(self.tokens, self.positions, self._attention(model))
        logp, entropy = action_logprobs(
            gather_rows(hidden, self.before),
            model.head_weight,
            packed.actions[self.wanted],
            modes=packed.modes[self.wanted],
            allowed=allowed,
            temperature=temperature,
        )
        return self._grid(logp), self._grid(entropy)

    def values(self, critic: Critic) -> Tensor:
        """The critic's value of the state each decision was taken in, [N, T]."""
        values = critic(self.tokens, self.positions, self._attention(critic.body))
        return self._grid(values[self.before])
