"""What a step refuses to learn from: no episodes, mixed samplings, another policy's, old ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graft.api.collect import TEMPERATURE, TRUNCATION
from graft.types import Author, Episode
from graft.user_code import UserCodeError, describe_value

if TYPE_CHECKING:
    from graft.api.policy import Policy
    from graft.models.truncation import Truncation


def check_episodes(episodes: Any) -> list[Episode]:
    """Episodes with something to learn from."""
    if isinstance(episodes, Episode):
        raise UserCodeError("step() takes a list of episodes; write learner.step([episode])")
    way_out = "give the list that graft.collect(...) returned"
    if not isinstance(episodes, Sequence) or isinstance(episodes, str):
        raise UserCodeError(
            f"step() takes a list of episodes, not {describe_value(episodes)}; {way_out}"
        )
    for number, episode in enumerate(episodes):
        if not isinstance(episode, Episode):
            raise UserCodeError(
                f"episodes[{number}] is {describe_value(episode)}; it must be a graft.Episode: {way_out}"
            )
    if not episodes:
        raise UserCodeError(
            "step() was given no episodes; there is nothing to learn from: " + way_out
        )
    return list(episodes)


def refuse_foreign(episodes: Sequence[Episode], policy: Policy) -> None:
    """Refuse tokens and actions that the policy does not have."""
    shape = policy.model.shape
    for episode in episodes:
        token = max((max(span.tokens, default=0) for span in episode.spans), default=0)
        action = max((max(span.actions, default=0) for span in episode.spans), default=0)
        if token >= shape.vocab_size or action >= shape.head_rows:
            what = f"token {token}" if token >= shape.vocab_size else f"action {action}"
            raise UserCodeError(
                f"the episode of task {episode.task.id!r} has {what}, and this policy has "
                f"{shape.vocab_size} tokens and {shape.head_rows} actions: another model sampled it. Learn "
                "from episodes of graft.Engine(policy), or text as SFT rows: graft.sft"
            )


def refuse_old(episodes: Sequence[Episode], version: int, staleness: int) -> None:
    """Refuse samples of weights that have been updated since: a gradient holds for those that sampled."""
    from graft.rollout.outcomes import is_unsampled

    versions = {
        span.version
        for episode in episodes
        if not is_unsampled(episode)
        for span in episode.spans
        if span.author is Author.POLICY
    }
    if not versions:
        return
    if max(versions) > version:
        raise UserCodeError(
            f"these episodes were sampled by version {max(versions)} of a policy, and this one is at version "
            f"{version}: another policy sampled them, or this one before it was loaded; collect new ones"
        )
    if version - min(versions) > staleness:
        raise UserCodeError(
            f"these episodes were sampled by version {min(versions)} of the policy, which is at version "
            f"{version}: it was updated since, perhaps from them. Collect new ones; for several passes over "
            "the episodes of a step give Learner(epochs=2), for older ones "
            f"Learner(staleness={version - min(versions)}), which weighs each token by its probability now"
        )


def refuse_lone_attempts(episodes: Sequence[Episode], preset: Any) -> None:
    from graft.train.monitor.settings_check import compares_attempts

    credit = compares_attempts(preset)
    if credit and all(len(episode.leaves) == 1 for episode in episodes):
        raise UserCodeError(
            f"every episode has one attempt, and the credit {credit!r} compares the attempts at a task: "
            "all advantages would be 0. Collect with samples=8, or use Learner(algo='reinforce')"
        )


def temperature_of(episodes: Sequence[Episode]) -> float:
    """The temperature of the samples: the trained log-probs are those of the distribution drawn from."""
    found = sorted({float(one.spans[0].info.get(TEMPERATURE, 1.0)) for one in episodes})
    if len(found) > 1:
        raise UserCodeError(
            f"these episodes were sampled at temperatures {found[0]:g} and {found[-1]:g}; a step learns "
            "from one temperature: collect and call step() for each"
        )
    if found[0] == 0:
        raise UserCodeError(
            "these episodes are greedy (temperature=0), so no other answer had a chance and there is "
            "nothing to learn; collect with temperature=1"
        )
    return found[0]


def truncation_of(episodes: Sequence[Episode]) -> Truncation | None:
    """What sampling kept of each distribution; None: everything."""
    from graft.models.truncation import Truncation

    found = {Truncation(*one.spans[0].info.get(TRUNCATION, ())) for one in episodes}
    if len(found) > 1:
        raise UserCodeError(
            "these episodes were sampled with different top_p or top_k; a step learns from one "
            "truncation: collect and call step() for each"
        )
    kept = found.pop()
    return None if kept == Truncation() else kept
