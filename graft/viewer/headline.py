"""The first lines about a run: what was trained, its held-out score before and after, how long, on what.

headline(RunRecord(Path("runs/quickstart")))
{"words": "The held-out score rose from 0.318 to 0.954.",
 "score": {"before": 0.318, "after": 0.954, "errors": [0.033, 0.015], "of": "200 tasks; ± is ..."},
 "facts": [["Time", "7 min 40 s", "warm-up 2:20, reinforce 5:20"], ...], "leakage": ""}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from graft.runs import PHASE_WORDS, RunRecord
from graft.runs.curves import deviation, mean_of, numbers
from graft.train.monitor.formatting import clock_face
from graft.train.run_dir.trackers import Phase

PROPOSED, ACCEPTED = "engine/drafts_proposed", "engine/drafts_accepted"
SCORE = "sampled"
"""The score of the headline: one sampled attempt at each task."""
WIDTH = 1.96
"""Standard errors to either side of a mean that make a 95% interval."""
LONGEST = 1000
WORDS: Mapping[str, str] = {**PHASE_WORDS, "eval": "evaluation"}


def headline(record: RunRecord, seeds: Sequence[RunRecord] = ()) -> dict[str, Any]:
    """`seeds` are all runs of the recipe; of several the score is their mean."""
    leaked = next(filter(None, (one.leakage for one in (record, *seeds))), "")[:LONGEST]
    score = _seed_score(seeds) if len(seeds) > 1 else _score(record)
    return {
        "words": _words(record, score, "score" if leaked else "held-out score"),
        "score": score,
        "facts": [fact for tell in FACTS if (fact := tell(record))],
        "leakage": leaked,
    }


def _score(record: RunRecord) -> dict[str, Any] | None:
    before, after = (scores.get(SCORE) for scores in record.scores)
    if not _is_number(before) and not _is_number(after):
        return None
    given: Any = record.summary.get("standard_error") or record.saved_state.get("standard_error")
    known = numbers(given) if isinstance(given, dict) else {}
    # tasks that all score the same have an error of 0, which says nothing about other tasks
    errors = [_finite(known.get(when)) or None for when in ("before", "after")]
    tasks = _finite(known.get("tasks"))
    of = f"{tasks:,.0f} tasks" if tasks else ""
    if any(errors):
        of += "; ± is the 95% interval"
    return {"before": _finite(before), "after": _finite(after), "errors": errors, "of": of}


def _seed_score(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Means over the seeds; the errors are those of the means."""
    scores = [record.scores for record in records]
    sides = [
        [pair[side][SCORE] for pair in scores if _is_number(pair[side].get(SCORE))]
        for side in (0, 1)
    ]
    if not any(sides):
        return None
    before, after = (mean_of(side) if side else None for side in sides)
    errors = [deviation(side) / math.sqrt(len(side)) if len(side) > 1 else None for side in sides]
    of = f"mean of {len(records)} seeds; ± is the 95% interval over seeds"
    return {"before": before, "after": after, "errors": errors, "of": of}


def _words(record: RunRecord, score: Mapping[str, Any] | None, name: str) -> str:
    """The result in one sentence; a change within the error is not called one."""
    if score is None:
        return _without_score(record)
    before, after = score["before"], score["after"]
    if after is None:
        return f"The {name} was {before:.3f} before training; the one after it is not there yet."
    if before is None:
        return f"The {name} is {after:.3f}."
    ends = f"from {before:.3f} to {after:.3f}"
    errors = [error for error in score["errors"] if error is not None]
    if f"{before:.3f}" == f"{after:.3f}":
        return f"The {name} stayed at {after:.3f}."
    if len(errors) == 2 and abs(after - before) <= WIDTH * math.hypot(*errors):
        return f"The {name} went {ends}: too little to tell from chance."
    return f"The {name} {'rose' if after > before else 'fell'} {ends}."


def _without_score(record: RunRecord) -> str:
    pairs: tuple[tuple[Phase, str], ...] = (("rl", "reward"), ("sft", "loss"))
    for phase, metric in pairs:
        values = [value for value in record.curves[phase][metric] if math.isfinite(value)]
        if values:
            how = "stayed at" if values[-1] == values[0] else f"went from {values[0]:.3g} to"
            return (
                f"The {metric} {how} {values[-1]:.3g} in training; no held-out score was measured."
            )
    return "No step has been taken yet."


def _steps(record: RunRecord) -> list[str] | None:
    last = record.last
    if last is None:
        return None
    total = record.total_steps(last["phase"], last)
    of = f" of {total:,}" if total is not None and total != last["step"] else ""
    rollout = record.config.get("rollout", {})
    each = f"{rollout.get('tasks', '?')} × {rollout.get('samples', '?')} attempts each"
    is_rl = last["phase"] == "rl"
    return ["Trained", f"{last['step']:,}{of} steps", each if is_rl else "on given answers"]


def _time(record: RunRecord) -> list[str] | None:
    given: Any = record.summary.get("seconds_per_phase") or record.saved_state.get("seconds")
    known = numbers(given) if isinstance(given, dict) else {}
    spent = {name: value for name, value in known.items() if math.isfinite(value) and value > 0}
    if not spent:
        return None
    parts = [f"{WORDS.get(name, name)} {clock_face(value)}" for name, value in spent.items()]
    return ["Time", duration(sum(spent.values())), ", ".join(parts)[:200]]


def _model(record: RunRecord) -> list[str] | None:
    size = record.summary.get("parameters")
    path = str(record.config.get("model", {}).get("path") or "random weights")
    start = path.rstrip("/").rpartition("/")[2]
    return (
        ["Parameters", short_count(size), f"from {start}"[:200]] if isinstance(size, int) else None
    )


def _machine(record: RunRecord) -> list[str] | None:
    given, count = record.summary.get("machine"), record.summary.get("processes")
    known: dict[str, Any] = given if isinstance(given, dict) else {}
    counts = {"process": count if count != 1 else None, "thread": known.get("threads")}
    words = [f"{n} {name}{'' if n == 1 else _PLURAL[name]}" for name, n in counts.items() if n]
    device = known.get("device")
    return ["Machine", str(device)[:200], ", ".join(words)[:200]] if device else None


def _drafts(record: RunRecord) -> list[str] | None:
    curves = record.curves.get("rl")
    if curves is None or PROPOSED not in curves:
        return None
    proposed, accepted, drawn = (
        math.fsum(filter(math.isfinite, curves[name]))
        for name in (PROPOSED, ACCEPTED, "num_tokens")
    )
    if not proposed or not drawn:
        return None
    words = f"of the sampled tokens; {accepted / proposed:.0%} of those that were drafted"
    return ["Right drafts", f"{accepted / drawn:.0%}", words]


_PLURAL = {"process": "es", "thread": "s"}


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (4.2, 460, 3725, 200_000)]
    ['4 s', '7 min 40 s', '1 h 2 min', '2 d 7 h']
    """
    for size, name, part, small in _UNITS:
        if seconds >= size:
            whole, rest = divmod(int(seconds), size)
            return f"{whole:,} {name} {rest // part} {small}"
    return f"{seconds:.0f} s"


_UNITS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def short_count(count: int) -> str:
    """
    >>> [short_count(n) for n in (9760, 1_115_520, 1_540_000_000)]
    ['9,760', '1.1 million', '1.5 billion']
    """
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:,.1f} {word}"
    return f"{count:,}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _is_number(value: float | None) -> bool:
    return _finite(value) is not None


FACTS = (_steps, _time, _drafts, _model, _machine)
"""Each gives a name, a value and a few more words, or None."""
