"""Turn trajectories into `[N, T]` grids of log-probs, entropies and values, differentiable.

The model runs once over the unique tokens of the forest; the head once per trained token, on the
hidden state before it. Gathering to the grid repeats a shared token in every row that passes through
it, and the backward pass of the gather adds up their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from graft.models.critic import Critic
from graft.models.decoder import Attend, Decoder
from graft.models.ops import gather_rows
from graft.models.tree.attention import attention_over
from graft.models.tree.packing import count_before, is_read, pack, shorten
from graft.models.truncation import Truncation
from graft.structure import FIRST_ROW_ID, allowed_by, read_row
from graft.transfer import transfer
from graft.types import Trajectory


class Forest:
    """A packed set of trajectories on a device, to be evaluated by one or several models.

    Only tokens before a trained one are computed. All indices are computed on the CPU, where the mask
    must be, and sent in one copy, while a GPU computes the previous micro-batch.

        N rows, T columns, K tokens that are computed, U tokens that are trained, each once
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], mask_NT: Tensor, device: torch.device
    ) -> None:
        packed = pack(trajectories, width=mask_NT.shape[1])
        is_wanted = torch.zeros(len(packed) + 1, dtype=torch.bool)  # the last is padding
        is_wanted[packed.source[mask_NT]] = True
        is_wanted = is_wanted[:-1]
        wanted = is_wanted.nonzero()[:, 0]
        keep = is_read(packed.ends, is_wanted)
        kept = keep.nonzero()[:, 0]
        new_row = count_before(keep)
        modes, self._rows = number_rows(packed.modes[wanted], packed.masks)
        slots = torch.full((len(packed) + 1,), len(wanted))
        slots[wanted] = torch.arange(len(wanted))
        moved = transfer(
            {
                "tokens": packed.tokens[kept],
                "positions": packed.positions[kept],
                "before": new_row[1:][packed.parents[wanted]] - 1,
                "actions": packed.actions[wanted],
                "modes": modes,
                "slots": slots[packed.source],
            },
            device,
        )
        self.tokens, self.positions = moved["tokens"], moved["positions"]  # [K]
        self.before = moved["before"]  # [U] the token each trained one follows
        self.actions = moved["actions"]  # [U]
        self.modes = moved["modes"]  # [U] rows of `table`
        self.slots_NT = moved["slots"]  # U, the index of a zero, where nothing is trained
        self.runs = shorten(packed.runs, new_row)
        self.ends = new_row[packed.ends[kept]]  # [K] on the CPU
        self._attentions: dict[tuple[int, int, bool, tuple[int, ...]], Attend] = {}

    def attention(
        self, heads: int, kv_heads: int, in_order: bool = False, windows: tuple[int, ...] = ()
    ) -> Attend:
        """Attention among these tokens, for a model with this many heads; see `attention_over`."""
        key = heads, kv_heads, in_order, windows
        if key not in self._attentions:
            self._attentions[key] = attention_over(
                self.runs, self.ends, heads, kv_heads, self.tokens.device, in_order, windows
            )
        return self._attentions[key]

    def table(self, allowed: Tensor | None, width: int) -> Tensor | None:
        """[rows, width] bool, which `modes` index: rows that structures left, then those of `allowed`."""
        if not self._rows:
            return allowed
        if allowed is None:
            allowed = torch.ones(1, width, dtype=torch.bool, device=self.tokens.device)
        rows = np.stack([allowed_by(read_row(row), allowed.shape[1]) for row in self._rows])
        return torch.cat([torch.from_numpy(rows).to(allowed.device), allowed])

    def _grid(self, values: Tensor) -> Tensor:
        padded = torch.cat([values, values.new_zeros(1)])
        return gather_rows(padded, self.slots_NT.flatten()).view(self.slots_NT.shape)

    def add_rows(self, grid_NT: Tensor) -> Tensor:
        """[U] the sum of a grid over the rows that pass through each trained token."""
        # the backward pass of `_grid` computes its transpose in one order
        with torch.enable_grad():
            values = torch.zeros(len(self.actions), device=grid_NT.device, requires_grad=True)
            return torch.autograd.grad(self._grid(values), values, grid_NT)[0]

    def logprobs(
        self,
        model: Decoder,
        temperature: float = 1.0,
        allowed: Tensor | None = None,
        truncation: Truncation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each chosen action and entropy of its distribution, both [N, T]."""
        allowed = self.table(allowed, model.shape.head_rows)
        logp, entropy = model.action_logprobs(self, temperature, allowed, truncation=truncation)
        return self._grid(logp), self._grid(entropy)

    def vocab_logprobs(
        self,
        model: Decoder,
        temperature: float = 1.0,
        allowed: Tensor | None = None,
        truncation: Truncation | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same and, where a token was chosen, the log-prob of any token, all [N, T]."""
        how = self.table(allowed, model.shape.head_rows), model.shape.vocab_size, truncation
        logp, entropy, vocab_logp = model.action_logprobs(self, temperature, *how)
        return self._grid(logp), self._grid(entropy), self._grid(vocab_logp)

    def compared_logprobs(
        self,
        model: Decoder,
        temperature: float,
        allowed: Tensor | None,
        truncation: Truncation | None,
        compare: Callable[[Tensor, Tensor], Tensor],
        vocab_size: int | None = None,
    ) -> tuple[Tensor, ...]:
        """What `logprobs` returns, or with `vocab_size` `vocab_logprobs`, and the result of `compare`
        (see `Decoder.action_logprobs`), a grid [N, T] of its own."""
        how = (
            temperature,
            self.table(allowed, model.shape.head_rows),
            vocab_size,
            truncation,
            compare,
        )
        *of_actions, compared = model.action_logprobs(self, *how)
        return (*map(self._grid, of_actions), compared)

    def values(self, critic: Critic) -> Tensor:
        """The critic's value of the state before each decision, [N, T]."""
        attention = self.attention(*critic.body.own_heads, windows=critic.body.shape.windows)
        return self._grid(critic(self.tokens, self.positions, attention, self.before))


def number_rows(modes: Tensor, masks: Mapping[int, str]) -> tuple[Tensor, list[str]]:
    """Modes [U] as rows of `Forest.table`, and the rows before those of the action space.

    modes [0, row a, 0, row b, row a] -> [2, 0, 2, 1, 0], rows a and b; without any the modes as they are
    """
    is_row = modes >= FIRST_ROW_ID
    if not is_row.any():
        return modes, []
    ids, numbers = modes[is_row].unique(return_inverse=True)
    modes = modes + len(ids)
    modes[is_row] = numbers
    return modes, [masks[mode] for mode in ids.tolist()]
