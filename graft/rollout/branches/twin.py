"""A second path out of the past of a finished one: the same first tokens, then another decision.

    finished   0 task "Sort." -> 1 policy "So compare A and B" -> 2 env ": A < B" -> 3 policy "Done."
    twin       of the first tokens up to "So":

        0 task "Sort."
        └── 1 policy "So"                     the span was split, both paths go through it
            ├── 2 policy " compare A and B" -> 3 env ": A < B" -> 4 policy "Done."
            └── 5 policy " swap"              forced, trained, the first decision of its own

The engine keeps what it has computed of the shared tokens. The environment is posed anew and lives
through the turns that were complete by then, so that what is hidden in it stands as it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from graft.actions.actions import Decisions
from graft.rollout.live_trajectory import LiveTrajectory, replay
from graft.types import NO_ACTION, Author, Span


async def branch_off(path: LiveTrajectory, at: int) -> LiveTrajectory:
    """A path with the first `at` tokens of `path`, whose context must still be open."""
    builder = path.builder
    if path.past:
        raise ValueError(
            f"an attempt at {builder.episode.task.env} spreads over {len(path.past) + 1} contexts, "
            "because a wrapper or (model.history=template) the chat template rewrites the history; "
            "counterfactual attempts share the beginning of one context. Leave that wrapper out, set "
            "model.history=append, or take rollout.branch=independent"
        )
    tip = builder.cut(path.tip, at)
    spans = [builder.episode.spans[i] for i in builder.episode.walk(tip)]
    heard = path.actions[: _complete_turns(spans)]
    env = await builder.fresh_env()
    turns = await replay(env, builder.setup, builder.episode.task, heard)
    twin = builder.add(path.context.fork(builder.key(len(builder.paths)), at=at), env, tip)
    twin.twin_of = path
    twin.transcripts = [one for one in path.transcripts if one.length <= at]
    twin.actions = heard
    twin.reward = sum(span.reward for span in spans)
    twin.metrics["turns"] = float(len(turns))
    twin.metrics["rewritten"] = 1.0
    for turn in turns:
        twin.count(turn.info)
        twin.info = turn.info
    return twin


def force(path: LiveTrajectory, decisions: Decisions, logprobs: Sequence[float], tool: str) -> None:
    """Decide in the policy's name; `logprobs` are what it thought of each of these decisions."""
    setup, episode = path.builder.setup, path.builder.episode
    thought = iter(logprobs)
    is_decision = [action != NO_ACTION for action in decisions.actions]
    span = Span(
        path.tip,
        Author.POLICY,
        decisions.tokens,
        decisions.actions,
        [next(thought) if is_own else 0.0 for is_own in is_decision],
        [0.0] * len(is_decision),
        decisions.modes,
        mask=is_decision,
        version=setup.engine.version,
        text=setup.chat.tokenizer.decode_after(decisions.tokens),
        info={"forced": tool},
    )
    path.tip = episode.append(span)
    path.context.append(decisions.tokens)
    path.context.mode = decisions.mode


def _complete_turns(spans: Sequence[Span]) -> int:
    """Turns that somebody has answered: runs of policy spans with something behind them."""
    policy = [span.author is Author.POLICY for span in spans]
    return sum(before and not after for before, after in pairwise(policy))
