"""Action spaces: which action each mode allows, and the way through JSON."""

from __future__ import annotations

import numpy as np
import pytest

from graft.actions.space import ActionSpace


def test_without_a_table_mode_zero_allows_tokens_and_no_extra_action() -> None:
    space = ActionSpace(3, extra=2)
    assert (space.num_modes, space.num_actions) == (1, 5)
    assert space.row(0).tolist() == [True, True, True, False, False]
    assert space.allows(0, 2) and not space.allows(0, 3) and not space.allows(0, 5)


def test_a_table_holds_what_each_mode_allows() -> None:
    space = ActionSpace(3, extra=1, allowed=np.array([[1, 1, 1, 1], [0, 1, 1, 0]], dtype=bool))
    assert space.num_modes == 2
    assert [space.allows(1, action) for action in range(4)] == [False, True, True, False]


def test_the_table_is_our_own_copy_and_cannot_be_written() -> None:
    allowed = np.ones((1, 3), dtype=bool)
    space = ActionSpace(3, allowed=allowed)
    allowed[0, 1] = False
    assert space.allows(0, 1)
    with pytest.raises(ValueError, match="read-only"):
        space.row(0)[0] = False


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: ActionSpace(0), "vocab_size=0"),
        (lambda: ActionSpace(3, extra=-1), "extra=-1"),
        (lambda: ActionSpace(3, allowed=np.ones((1, 4), dtype=bool)), r"need \[modes, 3\]"),
        (
            lambda: ActionSpace(2, allowed=np.array([[1, 0], [0, 0]], dtype=bool)),
            "mode 1 allows no",
        ),
        (lambda: ActionSpace(2).row(1), "mode 1 is outside"),
    ],
)
def test_what_makes_no_sense_is_refused(make, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()
