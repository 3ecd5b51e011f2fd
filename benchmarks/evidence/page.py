"""Writes docs/evidence.md from results.jsonl and the claims.

python -m benchmarks.evidence.page             # tests/test_evidence.py fails when the page is not up to date
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.evidence.claim import Claim
from benchmarks.evidence.claims import ABSENT, CLAIMS
from benchmarks.evidence.elsewhere import ELSEWHERE

Row = dict[str, Any]
RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
WIDTH = 50
BLOCKS = "▁▂▃▄▅▆▇█"

HEAD = """\
# Evidence

What helps, measured here with several seeds, and what is not known yet. This page is written from
`benchmarks/evidence/results.jsonl`; `claims.py`, `tool_claims.py` and `branch_claims.py` beside it say what
the runs of a claim are. A verdict holds at the scale that it names and at no other: models of this size tell
whether an implementation does what it says, and little about a model of billions.

```
python -m benchmarks.evidence --list
python -m benchmarks.evidence turns --seeds 3 4 5 --minutes 20    # more seeds; repeat until nothing is left
python -m benchmarks.evidence.page                                # this page
```

All arms of a seed start from the same warm-up (from as many examples where an arm says what these show),
sample as many tokens, and are scored on the same held-out tasks, one sampled attempt at each. ± is the
standard deviation over seeds (n - 1). In a figure each digit is a seed, `*` several of them; the bars beside
it are the mean reward of training, from the first part of the run to the last.
"""

ELSEWHERE_HEAD = """\
## Measured on other pages

Small models too, with runs of their own; the pages have numbers, seeds, machines and commands.

| claim | source | verdict | scale | numbers |
|---|---|---|---|---|
"""

ABSENT_HEAD = """\
## Not run

No result is claimed for these. They need a GPU; minutes are estimates for one H200, all arms and three seeds.

| claim | source | experiment | minutes |
|---|---|---|---|
"""


def render(rows: list[Row]) -> str:
    """The whole page; claims without a row stay away from it."""
    sections = [section(claim, rows) for claim in CLAIMS.values()]
    lines = [
        f"| {claim.title} | {claim.source} | {claim.experiment} | {claim.minutes} |\n"
        for claim in ABSENT
    ]
    others = [
        f"| {one.claim} | {one.source} | {one.verdict} | {one.scale} | "
        f"[{one.where.partition('.')[0]}]({one.where}) |\n"
        for one in ELSEWHERE
    ]
    parts = [HEAD, *filter(None, sections), exactness(rows)]
    parts += [ELSEWHERE_HEAD + "".join(others), ABSENT_HEAD + "".join(lines)]
    made = {row["claim"] for row in rows}
    if ready := [name for name in CLAIMS if name not in made]:
        parts.append(
            "Runs on a CPU that are written and were not made: "
            f"`python -m benchmarks.evidence {' '.join(ready)}`.\n"
        )
    return "\n".join(filter(None, parts))


def section(claim: Claim, rows: list[Row]) -> str:
    """One claim: table, figure, verdict, where the numbers come from."""
    rows = [row for row in rows if row["claim"] == claim.name and "arm" in row]
    by_arm = {arm.name: [row for row in rows if row["arm"] == arm.name] for arm in claim.arms}
    by_arm = {name: sorted(of, key=lambda row: row["seed"]) for name, of in by_arm.items() if of}
    if not by_arm:
        return ""
    headings = ["arm", "score", "by seed", *(name for name, _ in claim.columns)]
    headings += ["tool calls"] if any(row.get("calls") for row in rows) else []
    headings += ["turns at the end", "entropy at the end", "largest gap", "steps", "seconds"]
    lines = [
        f"## {claim.title}",
        "",
        f"Claimed by {claim.source}. Here: {claim.scale}; {claim.tokens:,} sampled tokens a run, "
        f"{claim.tasks} held-out tasks.",
        "",
        f"| {' | '.join(headings)} |",
        "|" + "---|" * len(headings),
        *(table_line(name, of, claim, "tool calls" in headings) for name, of in by_arm.items()),
        "",
        "```",
        *figure(by_arm),
        "```",
        "",
        f"Refuted by: {claim.refuted_by}.",
        "",
        f"**Verdict.** {claim.verdict or 'None yet: the runs are not complete.'}",
        "",
        source_line(claim, rows),
        "",
    ]
    return "\n".join(lines)


def table_line(name: str, rows: list[Row], claim: Claim, has_calls: bool) -> str:
    cells = [
        name,
        spread([row["score"] for row in rows]),
        ", ".join(f"{row['score']:.3f}" for row in rows),
        *(f"{mean(row['columns'][column] for row in rows):.3g}" for column, _ in claim.columns),
        *([f"{mean(row['calls'] for row in rows):,.0f}"] if has_calls else []),
        f"{mean(row['turns'] for row in rows):.2f}",
        f"{mean(row['entropy'] for row in rows):.2f}",
        f"{max(row['gap'] for row in rows):.1g}",
        " to ".join(dict.fromkeys(str(f(row["steps"] for row in rows)) for f in (min, max))),
        f"{mean(row['seconds'] for row in rows):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def spread(values: list[float]) -> str:
    """0.905 ± 0.004; of a single seed the number alone."""
    text = f"{mean(values):.3f}"
    return f"{text} ± {stdev(values):.3f}" if len(values) > 1 else text


def figure(by_arm: dict[str, list[Row]]) -> list[str]:
    """A line for each arm: its seeds on one axis, and the mean curve of training as bars."""
    scores = [row["score"] for rows in by_arm.values() for row in rows]
    low, high = min(scores), max(scores)
    rewards = [value for rows in by_arm.values() for row in rows for value in row["curve"]]
    margin = max(map(len, by_arm))
    axis = f"{low:.3f}".ljust(WIDTH - 5) + f"{high:.3f}"
    return [
        f"{'':<{margin}}  {axis}",
        *(
            f"{name:<{margin}}  {strip(rows, low, high)}  "
            f"{bars(mean_curve(rows), min(rewards), max(rewards))}"
            for name, rows in by_arm.items()
        ),
    ]


def strip(rows: list[Row], low: float, high: float) -> str:
    """The seeds at the places of their scores: "···0····21"."""
    cells = ["·"] * WIDTH
    for row in rows:
        place = round((WIDTH - 1) * (row["score"] - low) / ((high - low) or 1.0))
        cells[place] = "*" if cells[place] != "·" else str(row["seed"])[-1]
    return "".join(cells)


def bars(values: Iterable[float], low: float, high: float) -> str:
    """
    >>> bars([0.0, 0.5, 1.0], 0.0, 1.0)
    '▁▅█'
    """
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * (value - low) / ((high - low) or 1.0))] for value in values)


def mean_curve(rows: list[Row]) -> list[float]:
    return [mean(values) for values in zip(*(row["curve"] for row in rows), strict=True)]


def source_line(claim: Claim, rows: list[Row]) -> str:
    commits = ", ".join(f"`{commit}`" for commit in sorted({row["commit"] for row in rows}))
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    minutes = sum(row["seconds"] for row in rows) / 60
    return (
        f"Commit {commits}, `python -m benchmarks.evidence {claim.name}`, {machines}, shared with other "
        f"work: {minutes:.0f} minutes of steps for {len(rows)} runs, no GPU."
    )


def exactness(rows: list[Row]) -> str:
    """The quickstart on an H200, with equal bits and without, from rows of `exactness.py`."""
    rows = [row for row in rows if row["claim"] == 9]
    if not rows:
        return ""
    cases = sorted({(row["staleness"], not row["exact"]) for row in rows})
    lines: list[str] = []
    for staleness, differs in cases:
        of = [r for r in rows if (r["staleness"], not r["exact"]) == (staleness, differs)]
        cells = [
            f"{'not exact' if differs else 'exact'}, staleness {staleness}",
            spread([row["after"]["sampled"] for row in of]),
            spread([row["after"]["greedy"] for row in of]),
            f"{mean(row['gap_mean'] for row in of):.1g}, {max(row['gap_max'] for row in of):.2g}",
            f"{mean(row['seconds'] for row in of):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    minutes = sum(row["seconds"] for row in rows) / 60
    return "\n".join([
        "## Equal bits in bfloat16, on a GPU",
        "",
        "The quickstart, 500 held-out tasks, three seeds; gap of log-probs: mean, largest.",
        "",
        "| arm | sampled | greedy | gap | seconds |",
        "|---|---|---|---|---|",
        *lines,
        "",
        "**Verdict.** In this regime exactness decides nothing: without it scores are as high or higher, and",
        "staleness 4, whose gap is thousands of times larger, costs little. The use of exactness is that a",
        "difference is a bug ([engine](engine.md)), not a higher curve.",
        "Long runs and large models were not measured.",
        "",
        f"Commit `ed19ad6`, `python -m benchmarks.evidence.exactness`, {rows[0]['machine']['device']}: "
        f"{minutes:.0f} GPU minutes.",
        "",
    ])  # fmt: skip


def today() -> str:
    """The page that the results make."""
    return render([json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()])


if __name__ == "__main__":
    PAGE.write_text(today(), encoding="utf-8")
