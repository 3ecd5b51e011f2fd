"""Top-k, top-p and min-p of a recipe: what the learner's log-probs are of, and where they are refused."""

from __future__ import annotations

from graft.config import Config, ConfigError
from graft.models.truncation import Truncation


def truncation_of(config: Config) -> Truncation | None:
    """What sampling keeps of a distribution; None: everything."""
    rollout = config.rollout
    found = Truncation(rollout.top_k, rollout.top_p, rollout.min_p)
    return None if found == Truncation() else found


def refuse_truncation(config: Config, branch: object) -> None:
    """Refuse top-k, top-p and min-p where the log-probs of what was drawn cannot be known."""
    truncation, engine = truncation_of(config), config.engine.name
    if truncation is None:
        return
    given = ", ".join(
        f"rollout.{name}={value:g}"
        for name, value in truncation._asdict().items()
        if value != Truncation._field_defaults[name]
    )
    if branch == "counterfactual":
        raise ConfigError(
            f"{given}: the branch 'counterfactual' forces calls that a truncated distribution may not "
            "contain, so their log-probs are not of a draw; leave it out, or take another branch"
        )
    if engine == "sglang":
        raise ConfigError(
            f"{given}: SGLang reports log-probs from before the truncation, not of the distribution "
            "that it draws from; leave it out, or take engine.name=native or vllm"
        )
    if engine == "vllm" and truncation.min_p and truncation.top_p < 1:
        raise ConfigError(
            f"{given}: vLLM applies min_p first and top_p to what it leaves, the learner (as "
            "transformers) each to the whole; give one of the two, or take engine.name=native"
        )
