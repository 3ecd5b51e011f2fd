"""Settings of TRL, verl, OpenRLHF, EARL and others, and graft's key for each: `peer_table.txt`.

    THEIRS OF TRL | OF VERL | OF OTHERS -> KEY REMARK

A dotted name stands for every key that ends with it, the longest first: "optim.lr" is
`actor_rollout_ref.actor.optim.lr`; "profiler.*" is every key below a section of that name. The first word
after the arrow is graft's key, the rest explains the difference; "-": graft has no such key. Indented lines
continue the one before. `docs/from-trl-verl.md` is made from this table.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class PeerRow(NamedTuple):
    """One line of the table."""

    section: str
    """What the keys are about, such as "the optimizer"."""
    trl: tuple[str, ...]
    verl: tuple[str, ...]
    others: tuple[str, ...]
    key: str
    """graft's key, or "-"."""
    remark: str

    @property
    def entry(self) -> str:
        return f"{self.key} {self.remark}".strip()


def read_table() -> list[PeerRow]:
    rows: list[PeerRow] = []
    section = ""
    table = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for line in table.strip().replace("\n    ", " ").splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
            continue
        names, _, entry = line.partition(" -> ")
        trl, verl, others = (tuple(part.split()) for part in f"{names} | | ".split("|")[:3])
        key, _, remark = entry.partition(" ")
        rows.append(PeerRow(section, trl, verl, others, key, remark))
    return rows
