"""A twin: a second trajectory from the middle of a finished one, with another decision there.

    finished   0 task "Sort." -> 1 policy "So compare A and B" -> 2 env ": A < B" -> 3 policy "Done."
    twin       of the first tokens up to "So":

        0 task "Sort."
        └── 1 policy "So"                     the span was split, both trajectories go through it
            ├── 2 policy " compare A and B" -> 3 env ": A < B" -> 4 policy "Done."
            └── 5 policy " swap"              forced, trained, the first decision of its own

The engine reuses the keys and values of the shared tokens. The environment is reset and replays the
turns that were complete by then, so that its hidden state is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from graft.actions.actions import Decisions
from graft.rollout.demonstration import decided
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.live_trajectory import LiveTrajectory
from graft.rollout.user_calls import replay
from graft.types import Author, Span


async def branch_off(
    builder: EpisodeBuilder, trajectory: LiveTrajectory, at: int
) -> LiveTrajectory:
    """A twin with the first `at` tokens of `trajectory`, whose context must still be open."""
    if trajectory.past:
        raise ValueError(
            f"an attempt at {builder.episode.task.env} spreads over {len(trajectory.past) + 1} contexts, "
            "because a wrapper or (model.history=template) the chat template rewrites the history; "
            "counterfactual attempts share the beginning of one context. Leave that wrapper out, set "
            "model.history=append, or take rollout.branch=independent"
        )
    tip = builder.cut(trajectory.tip, at)
    spans = [builder.episode.spans[i] for i in builder.episode.walk(tip)]
    replayed = trajectory.actions[: _complete_turns(spans)]
    env = await builder.fresh_env()
    turns = await replay(env, builder.setup, builder.episode.task, replayed)
    key = builder.key(len(builder.trajectories))
    twin = builder.add(trajectory.context.fork(key, at=at), env, tip)
    twin.twin_of = trajectory
    twin.transcripts = [one for one in trajectory.transcripts if one.length <= at]
    twin.actions = replayed
    twin.reward = sum(span.reward for span in spans)
    twin.metrics["turns"] = float(len(turns))
    twin.metrics["rewritten"] = 1.0
    for turn in turns:
        twin.count_tools(turn.info)
        twin.info = turn.info
    return twin


def force(
    trajectory: LiveTrajectory, decisions: Decisions, logprobs: Sequence[float], tool: str
) -> None:
    """Append decisions in the policy's name; `logprobs` are the policy's own of each decision."""
    setup, own = trajectory.draft.setup, iter(logprobs)
    text = setup.chat.tokenizer.decode_after(decisions.tokens)
    span = decided(trajectory.tip, decisions, text)
    span.logprobs = [next(own) if is_decision else 0.0 for is_decision in span.mask]
    span.version, span.info = setup.engine.version, {"forced": tool}
    trajectory.tip = trajectory.draft.episode.append(span)
    trajectory.context.append(decisions.tokens)
    trajectory.context.mode = decisions.mode


def _complete_turns(spans: Sequence[Span]) -> int:
    """Turns that were answered: runs of policy spans with another author's span behind them."""
    policy = [span.author is Author.POLICY for span in spans]
    return sum(before and not after for before, after in pairwise(policy))
