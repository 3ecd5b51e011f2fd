"""Episodes by environment and by data source: the parts of a mix whose metrics are shown apart.

one environment        its data sources, where the episodes have several: "nq", "hotpotqa"
several environments   each by its name, "qa", and its data sources, where it has several: "qa.nq"
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from graft.types import Episode, Leaf, Status

MAX_SOURCES = 32
"""Of one environment. A file with more has a source per row or nearly so: these are no groups."""


def groups_of(
    episodes: Sequence[Episode], envs: Sequence[str] = (), every_source: bool = False
) -> dict[str, list[Episode]]:
    """Label -> episodes. `envs` are the environments of the run, if it has more than one.

    every_source  also the data source of an environment that has a single one
    """
    several = len(envs) > 1
    found: dict[str, list[Episode]] = {}
    for env in envs if several else [""]:
        own = [episode for episode in episodes if not several or episode.task.env == env]
        if several and own:
            found[_label(env)] = own
        sources = list(dict.fromkeys(episode.task.data_source for episode in own))
        if (len(sources) > 1 or (every_source and not several)) and len(sources) <= MAX_SOURCES:
            for source in sources:
                label = _label(f"{env}.{source}" if several else source)
                found[label] = [one for one in own if one.task.data_source == source]
    return found


def has_reward(leaf: Leaf) -> bool:
    """Whether it counts in means of rewards: failed attempts do not, those that a twin replaces do."""
    return leaf.status.is_trainable or leaf.status is Status.REPLACED


def rewards_by_group(episodes: Sequence[Episode], envs: Sequence[str]) -> dict[str, float]:
    """reward/NAME: the mean reward of the policy's attempts in each group."""
    found: dict[str, float] = {}
    for label, own in groups_of(episodes, envs).items():
        leaves = [leaf for episode in own for leaf in episode.leaves if leaf.is_attempt]
        if rewards := [leaf.reward for leaf in leaves if has_reward(leaf)]:
            found[f"reward/{label}"] = fmean(rewards)
    return found


def _label(name: str) -> str:
    """The label as part of a metric's name, where a slash divides."""
    return name.replace("/", "_") or "-"
