"""The labels that commands print beside numbers.

    WATCHED            spread 0.412      the metric reward_std, in three digits
    SCORE_COLUMNS      held out  before  after  change

The display, the table of scores and `graft runs` take their labels from here; docs/metrics.md explains each
of them, and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class WatchedMetric(NamedTuple):
    """A metric that the display shows during a run."""

    metric: str
    word: str
    form: Callable[[float], str]
    is_brief: bool = True
    """Whether the one-line summary of a phase shows it too."""


WATCHED: tuple[WatchedMetric, ...] = (
    WatchedMetric("reward", "reward", "{:.3f}".format),
    WatchedMetric("accuracy", "accuracy", "{:.3f}".format),
    WatchedMetric("loss", "loss", "{:.3f}".format),
    WatchedMetric("reward_std", "spread", "{:.3f}".format, is_brief=False),
    WatchedMetric("entropy", "entropy", "{:.3f}".format),
    WatchedMetric("completions/mean_length", "length", "{:,.0f}".format, is_brief=False),
    WatchedMetric("distill/kl", "teacher", "{:.3f}".format),
    WatchedMetric("distill/divergence", "divergence", "{:.4f}".format),
    WatchedMetric("tools/rate", "tools", "{:.0%}".format),
    WatchedMetric("sampling/sampling_logp_difference/mean", "gap", "{:.1e}".format, is_brief=False),
    WatchedMetric("clip_ratio/region_mean", "clipped", "{:.1%}".format, is_brief=False),
    WatchedMetric("tokens_per_second", "tokens/s", "{:,.0f}".format),
)
"""In the order of the display. Where there is a reward the loss is left out: a policy-gradient loss near 0
is normal and does not measure progress."""

RECENT = 10
"""Steps behind the middle column of the live table."""

LIVE_COLUMNS = ("now", f"last {RECENT}", "first")
SCORE_COLUMNS = ("held out", "before", "after", "change")
RUN_COLUMNS = ("run", "status", "step", "now", "held out", "settings", "active", "size")
PHASE_WORDS: Mapping[str, str] = {"sft": "warm-up", "rl": "reinforce"}


def watched(metrics: Mapping[str, float], is_brief: bool = False) -> list[WatchedMetric]:
    """The rows of `WATCHED` that these metrics have."""
    return [
        row
        for row in WATCHED
        if row.metric in metrics
        and (row.is_brief or not is_brief)
        and not (row.metric == "loss" and "reward" in metrics)
    ]


def in_words(metrics: Mapping[str, float], is_brief: bool = False) -> str:
    """ "reward 0.500  tools 93%": the shown metrics of a step in one line."""
    rows = watched(metrics, is_brief)
    return "  ".join(f"{row.word} {row.form(metrics[row.metric])}" for row in rows)
