"""Which known name a wrong one was meant to be."""

from __future__ import annotations

import pytest

from graft.spelling import nearest


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("GRPO", "grpo"),
        ("gpro", "grpo"),  # as near to gspo by common letters; swapped letters decide
        ("grop", "grpo"),
        ("gsop", "gspo"),
        ("grp", "grpo"),
        ("dr_gpro", "dr_grpo"),
        ("zzz", None),
    ],
)
def test_the_name_that_was_meant(written: str, meant: str | None):
    assert nearest(written, ["cispo", "dr_grpo", "gmpo", "grpo", "gspo", "grpo_passk"]) == meant
