"""What an evaluation measures and how, as a caller asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graft.config import ConfigError
from graft.rollout.options import RolloutOptions
from graft.user_code import describe_value


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions(RolloutOptions):
    """The options of attempts, with the sets to attempt and the measures; see `RolloutOptions`."""

    on: str = ""
    """The sets, with commas; empty: the recipe's own. See `graft.evaluate.task_sets`."""
    args: Sequence[str] = ()
    """LABEL.key=value: arguments of one set."""
    k: Sequence[int] = ()
    """pass@k and maj@k; empty: the number of attempts."""
    solved: float = 1.0
    """The least reward of a right attempt."""
    tools: bool = True
    """False: the same tasks without any tool."""
    prompt: str = ""
    """A system prompt for all sets: a name of `arpo_prompts.PROMPTS`, or a file."""

    def __post_init__(self) -> None:
        RolloutOptions.__post_init__(self)
        counts = [
            (name, getattr(self, name)) for name in ("tasks", "samples", *RolloutOptions.LIMITS)
        ]
        for name, value in [*counts, *(("k", k) for k in self.k)]:
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {describe_value(value)}; give a whole number from 1")
        if self.samples is not None and max(self.k, default=0) > self.samples:
            raise ConfigError(
                f"k={max(self.k)} needs as many attempts per task, and samples={self.samples}: leave samples "
                "out"
            )

    def choose_samples(self, default: int) -> EvalOptions:
        """The options with the number of attempts per task: the largest k, else `default`; 0: rows decide."""
        samples = self.samples or max(self.k, default=default) or None
        return replace(self, samples=samples, k=sorted({*self.k}) or [samples] if samples else [])
