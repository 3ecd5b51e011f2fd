"""How many tokens of which drafts are worth their time.

rows 3, a step takes 1 + rows / 4     no drafts          3 tokens in 1.75      1.71 a unit of time
drafts of row 0 accepted by .8        its 1st token      3.8 in 2.00           1.90
                                      its 2nd (.64)      4.44 in 2.25          1.97
                                      its 3rd (.51)      4.95 in 2.50          1.98
                                      its 4th (.41)      5.36 in 2.75          1.95: three are worth it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graft.engine.native.drafts.index import MAX_MATCH, DraftSource, Text

MAX_DRAFT = 8
"""Tokens of a draft."""
MIN_GAIN = 1.02
"""Tokens in a time with drafts, over those without, at least."""
MIN_SHARE = 0.05
"""Of a drafted token's chance; later ones of the draft are not looked at."""
PRIOR, PRIOR_TRIALS = 0.5, 4.0
"""The share of tokens that are accepted before any was tried, and how many trials that is worth."""
TEXT_TRIALS = 8.0
"""Trials of one text that count as much as those of all."""
TEXT_MEMORY, MEMORY = 0.9, 0.998
"""What a trial still counts after another draft for its text; after another round."""
FREE_ROWS = 32.0
"""Rows that take as long as a step without rows, until times were measured."""
STEP_MEMORY = 0.99
FIRST_DRAWN = 2.0
"""Tokens that a row draws in a step with drafts, until bursts were measured."""
TRY_AGAIN = 32
"""Bursts after which the slower way is taken once."""
BURST_WEIGHT = 0.3
"""Of the latest burst in a mean."""


class Acceptance:
    """The shares of drafted tokens that were accepted after their predecessors, by source and match."""

    def __init__(self) -> None:
        lengths = range(MAX_MATCH + 1)
        self._trials = {source: [0.0 for _ in lengths] for source in DraftSource}
        self._accepted = {source: [0.0 for _ in lengths] for source in DraftSource}

    def share(self, source: DraftSource, length: int, text: Text) -> float:
        """The share for a match of this length, in a text that may differ from the others."""
        trials = self._trials[source][length] + PRIOR_TRIALS
        accepted = self._accepted[source][length] + PRIOR_TRIALS * PRIOR
        return (text.accepted + TEXT_TRIALS * accepted / trials) / (text.trials + TEXT_TRIALS)

    def add(self, source: DraftSource, length: int, text: Text, count: int, accepted: int) -> None:
        """Add a draft of `count` tokens, whose first `accepted` were right; those after a wrong one do not
        count."""
        trials = min(accepted + 1, count)
        self._trials[source][length] += trials
        self._accepted[source][length] += accepted
        text.trials = text.trials * TEXT_MEMORY + trials
        text.accepted = text.accepted * TEXT_MEMORY + accepted

    def forget(self) -> None:
        """Trust old trials a little less, so that what did not pay is tried again."""
        for counts in (*self._trials.values(), *self._accepted.values()):
            counts[:] = [count * MEMORY for count in counts]


class RowTimes:
    """The time of a step by its rows, a line through the times of late: a + b rows."""

    def __init__(self, free_rows: float = FREE_ROWS) -> None:
        self._free_rows = free_rows
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a step of `rows` rows."""
        # one pause of the process must not count as much as all other steps
        seconds = min(seconds, 4 * self(rows)) if self._weight > 1 else seconds
        for name, value in (
            ("_weight", 1.0),
            ("_rows", float(rows)),
            ("_seconds", seconds),
            ("_squares", float(rows * rows)),
            ("_products", rows * seconds),
        ):
            setattr(self, name, getattr(self, name) * STEP_MEMORY + value)

    def __call__(self, rows: int) -> float:
        """The time of a step of `rows` rows; in an unknown unit before the first."""
        if not self._weight:
            return 1.0 + rows / self._free_rows
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        usual = seconds / (self._free_rows + mean)
        spread = max(self._squares / self._weight - mean * mean, 0.0)
        together = self._products / self._weight - mean * seconds
        # a slope that few different numbers of rows show is hardly known
        slope = (together + usual) / (spread + 1.0)
        return seconds + min(max(slope, 0.0), seconds / mean) * (rows - mean)


def choose_counts(
    shares: Sequence[float],
    limits: Sequence[int],
    rows: int,
    seconds: Callable[[int], float],
) -> list[int]:
    """Tokens to draft for each row, so that a step draws most tokens in its time.

    shares   of drafted tokens that are accepted, by row
    limits   tokens of each draft
    rows     of the step without drafts
    """
    chances = [
        (share**place, row)
        for row, (share, limit) in enumerate(zip(shares, limits, strict=True))
        for place in range(1, limit + 1)
        if share**place >= MIN_SHARE
    ]
    chances.sort(reverse=True)
    tokens, best, best_count = float(rows), rows / seconds(rows) * MIN_GAIN, 0
    for number, (chance, _) in enumerate(chances, 1):
        tokens += chance
        rate = tokens / seconds(rows + number)
        if rate > best:
            best, best_count = rate, number
    counts = [0] * len(shares)
    for _, row in chances[:best_count]:
        counts[row] += 1
    return counts


class BurstPace:
    """How fast rows draw in bursts with drafts and in those without, by the number of rows.

    Each way is tried, then the faster one is taken; at times the other one again, since texts change.
    """

    def __init__(self) -> None:
        self._speed: dict[tuple[int, bool], float] = {}
        self._bursts: dict[int, int] = {}
        self.drawn = FIRST_DRAWN
        """Tokens of a row and step with drafts, and a quarter more."""

    def should_draft(self, rows: int) -> bool:
        """Whether the next burst of so many rows should have drafts."""
        number = self._bursts[rows] = self._bursts.get(rows, 0) + 1
        with_drafts, without = (self._speed.get((rows, way)) for way in (True, False))
        if with_drafts is None or without is None:
            return with_drafts is None
        is_better = with_drafts > without
        return is_better if number % TRY_AGAIN else not is_better

    def add(self, rows: int, has_drafts: bool, steps: int, drawn: float, seconds: float) -> None:
        """Add a burst of so many steps in which a row drew `drawn` tokens."""
        speed, key = drawn / seconds, (rows, has_drafts)
        before = self._speed.get(key, speed)
        self._speed[key] = before + (speed - before) * BURST_WEIGHT
        if has_drafts and steps:
            pace = max(1.25 * drawn / steps, 1.0)
            self.drawn += (pace - self.drawn) * BURST_WEIGHT
