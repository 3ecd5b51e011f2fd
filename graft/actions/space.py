"""The choices of a policy: the vocabulary, extra actions after it, and a table of modes.

A mode is one integer per token; `allowed[mode]` is the row of actions that are possible there. The
sampler masks with it, the rollout records it, and the learner applies the same row: sampling and
training have the same support by construction.

    vocabulary a b c, one extra action "call" (id 3), two modes
        mode 0  any token or the call     [1 1 1 1]
        mode 1  inside the call: b or c   [0 1 1 0]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.bool_]


class ActionSpace:
    """`vocab_size` tokens, then `extra` actions; `allowed` [modes, vocab_size + extra].

    Without a table there is one mode, 0, that allows every token and no extra action.

    >>> space = ActionSpace(3, extra=1, allowed=np.array([[1, 1, 1, 1], [0, 1, 1, 0]], dtype=bool))
    >>> space.num_modes, space.num_actions, space.allows(1, 3)
    (2, 4, False)
    """

    def __init__(self, vocab_size: int, extra: int = 0, allowed: Table | None = None) -> None:
        if vocab_size < 1 or extra < 0:
            raise ValueError(f"vocab_size={vocab_size}, extra={extra}: need at least 1 and 0")
        if allowed is not None:
            allowed = np.array(allowed, dtype=np.bool_)  # a copy, made read-only below
            if allowed.ndim != 2 or len(allowed) < 1 or allowed.shape[1] != vocab_size + extra:
                raise ValueError(
                    f"allowed has shape {allowed.shape}; need [modes, {vocab_size + extra}] "
                    f"({vocab_size} tokens and {extra} extra actions)"
                )
            empty = np.flatnonzero(~allowed.any(axis=1))
            if len(empty):
                raise ValueError(f"mode {empty[0]} allows no action at all")
            allowed.setflags(write=False)
        self.vocab_size = vocab_size
        self.extra = extra
        self.allowed = allowed

    @property
    def num_actions(self) -> int:
        return self.vocab_size + self.extra

    @property
    def num_modes(self) -> int:
        return 1 if self.allowed is None else len(self.allowed)

    def row(self, mode: int) -> Table:
        """The actions of a mode, [vocab_size + extra]."""
        if not 0 <= mode < self.num_modes:
            raise ValueError(f"mode {mode} is outside this space of {self.num_modes} modes")
        if self.allowed is None:
            return np.arange(self.num_actions) < self.vocab_size
        return self.allowed[mode]

    def allows(self, mode: int, action: int) -> bool:
        return 0 <= action < self.num_actions and bool(self.row(mode)[action])
