"""What became of finished episodes: groups of equal rewards, attempts that are missing, recorded rows."""

from __future__ import annotations

from collections.abc import Sequence

from graft.types import Author, Episode, Leaf, Status


def is_flat(episode: Episode) -> bool:
    """True if all attempts of the policy earned the same: their group-relative advantage is 0.

    Counterfactual attempts do not count; an attempt that a twin replaces in training does. The seats
    of a game are groups of their own.
    """
    rewards: dict[str, set[float]] = {}
    for leaf in filter(lambda one: one.has_acted, episode.leaves):
        if leaf.twin is None and (leaf.status.is_trainable or leaf.status is Status.REPLACED):
            rewards.setdefault(leaf.seat, set()).add(leaf.reward)
    return all(len(one) < 2 for one in rewards.values())


def missing_share(episodes: Sequence[Episode], samples: int) -> float:
    """Share of the attempts that a branch should have made and has not. A task that could not be posed
    has one leaf with the reason, and does not count."""
    attempts = [[leaf for leaf in episode.leaves if leaf.is_attempt] for episode in episodes]
    posed = [leaves for leaves in attempts if any(leaf.metrics for leaf in leaves) or not leaves]
    lacking = sum(max(samples - num_attempts(leaves), 0) for leaves in posed)
    return lacking / max(samples * len(posed), 1)


def num_attempts(leaves: Sequence[Leaf]) -> int:
    """Leaves without a seat, and games: the seats of one game are one attempt."""
    matches = {leaf.match for leaf in leaves if leaf.seat}
    return len(matches) + sum(not leaf.seat for leaf in leaves)


def unsampled(episode: Episode, version: int) -> Episode:
    """A row that is learned among the attempts of weights `version`: nothing sampled its tokens, so they
    have no log-probs, and the learner uses its own."""
    for span in episode.spans:
        span.logprobs, span.entropies, span.version = [], [], version
    return episode


def is_unsampled(episode: Episode) -> bool:
    """Whether an episode is a recorded row, not an attempt."""
    spans = [span for span in episode.spans if span.author is Author.POLICY and span.tokens]
    return bool(spans) and not any(span.logprobs for span in spans)
