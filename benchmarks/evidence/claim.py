"""The types of claims, and the model that most of them train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: settings on top of the claim's."""

    name: str
    settings: tuple[str, ...]
    form: tuple[str, ...] = ()
    """Settings that change the warm-up as well, such as the way in which calls are written."""


@dataclass(frozen=True)
class Claim:
    """A claim, and runs that differ in nothing but the settings of their arms.

    All arms of a seed start from the same warm-up (arms of another form: from the same number of examples in
    their form), sample as many tokens, and are scored on the same tasks.
    """

    name: str
    title: str
    source: str
    recipe: str
    """Its environment and rewards; the rest is below."""
    settings: tuple[str, ...]
    """Settings of the warm-up and of all arms."""
    warm_up: tuple[str, ...]
    rl: tuple[str, ...]
    arms: tuple[Arm, ...]
    tokens: int
    """Sampled tokens of each run: the step that reaches this number is the last one."""
    tasks: int
    """Held-out tasks, one sampled attempt at each."""
    refuted_by: str
    scale: str
    """What the runs are, for the reader of a verdict."""
    verdict: str = ""
    """Empty until the runs have been looked at."""
    reward: str = ""
    """Scores all arms, if their own rewards differ or are not what is claimed; empty: the recipe's."""
    columns: tuple[tuple[str, str], ...] = ()
    """Heading and metric of a step: the mean at the end of a run is shown beside its score."""


@dataclass(frozen=True)
class Absent:
    """A claim without runs here."""

    title: str
    source: str
    experiment: str
    minutes: int
    """Estimated minutes on one H200, all arms and seeds."""


def small_model(alphabet: str, length: int) -> tuple[str, ...]:
    """Two layers of width 64: a run takes a minute of one core."""
    shape = (
        "{family: qwen3, width: 64, layers: 2, heads: 2, kv_heads: 2, head_dim: 32, ff: 128, tied: false, "
        f"rope_theta: 100.0, max_positions: {length}}}"
    )
    return f"model.shape={shape}", f"model.alphabet='{alphabet}'"
