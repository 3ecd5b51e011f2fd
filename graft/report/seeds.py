"""Several seeds of one recipe in a report: scores with their spread, and a line per run.

    sampled 0.290 ± 0.010 → 0.942 ± 0.008 over 3 seeds

± is the sample's standard deviation over the runs that have the score.
"""

from __future__ import annotations

from collections.abc import Sequence

from graft.config import ConfigError
from graft.report.markup import note, section, shown, table
from graft.runs import RunRecord
from graft.runs.seed_means import deviation, mean_of
from graft.runs.settings import differing, seed_groups
from graft.train.monitor.formatting import score
from graft.train.monitor.labels import SCORE_COLUMNS


def check_seeds(records: Sequence[RunRecord]) -> None:
    """Complain about runs that are not the same recipe with other seeds."""
    configs = [record.config for record in records]
    if len(seed_groups(configs)) == 1:
        return
    apart = [name for name in differing(configs) if not name.startswith("run.")]
    why = f"they differ in {', '.join(apart[:5])}" if apart else "their config.yaml cannot be read"
    raise ConfigError(
        f"a report of several runs is about one recipe with several seeds, and {why}; give runs that differ "
        "in run.seed alone, or one run. `graft view` compares others"
    )


def result(records: Sequence[RunRecord]) -> str:
    """The scores in one line of markup; "" where nothing was scored."""
    told: list[str] = []
    for name in ("sampled", "greedy"):
        before, after = _known(records, name)
        if before and after:
            told.append(f"{name} {_spread(before)} → <b>{_spread(after)}</b>")
        elif before:
            told.append(f"{name} {_spread(before)} before training")
    return f"{'; '.join(told)} over {len(records)} seeds" if told else ""


def scores(records: Sequence[RunRecord]) -> str:
    """Means with their spread, then run by run."""
    names = list(dict.fromkeys(name for record in records for of in record.scores for name in of))
    rows: list[Sequence[str]] = []
    for name in names:
        before, after = _known(records, name)
        change = f"{mean_of(after) - mean_of(before):+.3f}" if before and after else "-"
        rows.append((shown(name), _spread(before), _spread(after), change))
    parts = [table(rows, SCORE_COLUMNS)] if rows else []
    if any(len(known) != len(records) for name in names for known in _known(records, name)):
        parts.append(note("Some runs have no score yet; means are over those that have one."))
    each = [
        (
            shown(record.name, 200),
            shown(record.config.get("run", {}).get("seed", "?")),
            str(record.status),
            *(score(of.get("sampled")) for of in record.scores),
        )
        for record in records
    ]
    parts.append(table(each, ("run", "seed", "status", "sampled before", "sampled after")))
    return section("Before and after", *parts)


def _known(records: Sequence[RunRecord], name: str) -> tuple[list[float], list[float]]:
    """The score before and after, of the runs that have it."""
    before, after = zip(*(record.scores for record in records), strict=True)
    return [of[name] for of in before if name in of], [of[name] for of in after if name in of]


def _spread(values: Sequence[float]) -> str:
    return f"{mean_of(values):.3f} ± {deviation(values):.3f}" if values else "-"
