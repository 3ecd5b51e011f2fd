"""The tree mask in the forms that transformers' attention takes.

A prepared mask [1, 1, K, K] is used unchanged. Models with several kinds of layers take one mask per
kind, by name. A sliding window of 3 lets a token attend to itself and the two before it, counted along
its own path and not along the packed list:

    "12" -> "abc"     tokens      1 2 a b c d e      full: d attends to 1 2 d
         -> "de"      positions   0 1 2 3 4 2 3      window of 3: d to 1 2 d, e to 2 d e
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.models.tree.packing import interval_mask

FULL, SLIDING = "full_attention", "sliding_attention"
KNOWN_WINDOWS = {"sliding_window", "sliding_window_pattern", "max_window_layers"}
"""Config entries on windows that `layer_types` and `sliding_window` cover."""


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Which tokens the layers of a model attend to."""

    kinds: tuple[str, ...] = (FULL,)
    """The distinct kinds of layers; a model with several takes a mask for each."""
    window: int = 0
    """Tokens that a sliding layer attends to, the query itself included; 0: no sliding layer."""

    @classmethod
    def of(cls, config: Any) -> TreeMask:
        """Make the mask of a text model's transformers config; a ValueError names what cannot be masked."""
        kinds = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
        window = getattr(config, "sliding_window", None)
        if not kinds:
            is_used = window is not None and getattr(config, "use_sliding_window", True)
            kinds = (SLIDING,) if is_used else (FULL,)
        if unknown := sorted(set(kinds) - {FULL, SLIDING}):
            raise ValueError(f"it has layers of kind {', '.join(unknown)}")
        if SLIDING in kinds and (not isinstance(window, int) or window < 1):
            raise ValueError(f"its layers slide over a window of sliding_window={window!r}")
        if limits := _other_limits(config):
            raise ValueError(f"its config limits attention by {', '.join(limits)}")
        return cls(kinds, window if SLIDING in kinds and isinstance(window, int) else 0)

    def masks(self, ends: Tensor, positions: Tensor, additive: torch.dtype | None) -> Any:
        """The model's `attention_mask`: one mask, or one for each kind of layer.

        True where a query may attend; with `additive` a mask of that dtype, to be added to scores.
        """
        tree = interval_mask(ends)
        seen: Mapping[str, Tensor] = {FULL: tree}
        if SLIDING in self.kinds:
            near = positions[:, None] - positions[None, :] < self.window
            seen = {FULL: tree, SLIDING: tree & near}
        found = {kind: _shaped(seen[kind], additive) for kind in self.kinds}
        return found if len(found) > 1 else found[self.kinds[0]]


def _shaped(seen: Tensor, additive: torch.dtype | None) -> Tensor:
    if additive is not None:
        low = torch.finfo(additive).min
        seen = torch.zeros(seen.shape, dtype=additive, device=seen.device).masked_fill_(~seen, low)
    return seen[None, None]


def _other_limits(config: Any) -> list[str]:
    """Windows and chunks under unknown names: a short probe would not reach their end."""
    return sorted(
        f"{name}={value}"
        for name, value in config.to_dict().items()
        if ("window" in name or "chunk" in name)
        and name.lstrip("_") not in KNOWN_WINDOWS
        and isinstance(value, int)
        and not isinstance(value, bool)
        and value > 0
    )
