"""What a bank reports: one row per case group, with every failure by name."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Row:
    """One line of the table: `count` attempts of `group`, those that failed, and what was measured.

    `Row("programs", "landlock, uid 12345", 10000, [], {"most memory, of the limit": 0.97})`
    """

    bank: str
    group: str
    count: int
    failures: list[str] = field(default_factory=list)
    measured: dict[str, float | int | str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failures

    def line(self) -> str:
        """`programs | landlock, uid 12345 | 10,000 | 0 | most memory, of the limit 0.97 | 81 s`"""
        measured = ", ".join(f"{name} {value}" for name, value in self.measured.items())
        cells = [self.bank, self.group, f"{self.count:,}", f"{len(self.failures):,}", measured]
        return f"| {' | '.join(cells)} | {self.seconds:.0f} s |"


HEAD = "| bank | group | attempts | failed | measured | time |\n|---|---|---|---|---|---|"
