"""Whether the engine serves the weights that are trained: the log-probs of a probe text, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from graft.engine.engine_group import group_of, lead
from graft.models.shape import ARCHITECTURES
from graft.models.tree.forest import Forest
from graft.protocols import Engine
from graft.tolerances import tolerances
from graft.train.components import RunComponents
from graft.train.distributed.collector import load_engines
from graft.train.errors import RunStopped
from graft.train.learner import Learner
from graft.train.rollouts.rollout_engine import NoEngine, is_external
from graft.types import Author, Episode, Leaf, Span, Task

CHECKED = 48
"""Tokens that engine and learner score before training begins."""


def check_engine(components: RunComponents, learner: Learner) -> None:
    """Compare log-probs once in a run, if the engine may serve other weights than are trained."""
    config, engine = components.config, components.engine
    is_certain = learner.lora is None and not is_external(config)
    if is_certain or components.is_checked or isinstance(engine, NoEngine):
        return

    def publish() -> None:
        weights = components.weights_to_publish()
        load_engines(weights, engine.version, engine, components.processes, engine.load)

    gap = check_served(learner, engine, publish, min(CHECKED, config.rollout.max_context - 1))
    components.is_checked = True
    if is_external(config):
        what = "log-probs" if learner.lora is None else "log-probs with adapters"
        components.notes.append(
            f"{config.engine.name}: {what} agree with the learner's, {gap:.1g} apart on average"
        )


@torch.no_grad()
def check_served(
    learner: Learner,
    engine: Engine,
    publish: Callable[[], None] | None = None,
    length: int = CHECKED,
) -> float:
    """Stop a run whose engine does not serve the weights that are trained; else the mean distance of
    the log-probs of the two, over a text of `length` tokens.

    `publish` gives the policy's weights to the engine; None: it has the same tensors. Fresh LoRA
    adapters are a no-op, so the check loads random non-zero ones first.
    """
    publish = publish or (lambda: engine.load(None, version=engine.version))
    lora = learner.lora
    tokens = _probe_tokens(learner, length)
    with nullcontext() if lora is None else lora.using(lora.random_snapshot()):
        publish()
        scored = _scores_of(tokens, engine, learner.temperature)
        served = torch.tensor(scored)
        trained = _logprobs_of(tokens, learner)
    if lora is not None:
        publish()  # drops whatever it has cached of them
    gap = float((served - trained).abs().mean())
    most = tolerances(learner.policy.dtype).probe_gap
    if not gap <= most:
        raise RunStopped(
            f"the engine does not serve the weights that are trained: with the same "
            f"{'weights' if lora is None else 'adapters'} its log-probs of {len(scored)} tokens are "
            f"{gap:.3g} away from the learner's on average, and rounding explains {most:g} at most. "
            "Nothing was trained; another version of the engine may do better, and engine.name=native "
            f"has the learner's own tensors ({', '.join(ARCHITECTURES)} models)"
        )
    return gap


def _scores_of(tokens: list[int], engine: Engine, temperature: float) -> list[float]:
    """The engine's log-probs of all tokens but the first, in every process that holds it."""
    found: Any = lead(engine, lambda: engine.score([tokens], [[1]], [tokens[1:]], 0, temperature))
    group = group_of(engine)
    return (found if group is None else group.share(found))[0][0][0]


def _probe_tokens(learner: Learner, length: int) -> list[int]:
    """A text that mode 0 allows; the same for every run."""
    allowed = torch.ones(learner.policy.shape.vocab_size, dtype=torch.bool)
    if learner.allowed is not None:
        allowed = learner.allowed[0, : len(allowed)].cpu()
    tokens = allowed.nonzero()[:, 0]
    count = max(min(length, learner.policy.shape.max_positions), 2)
    generator = torch.Generator().manual_seed(0)
    return tokens[torch.randint(len(tokens), (count,), generator=generator)].tolist()


def _logprobs_of(tokens: Sequence[int], learner: Learner) -> Tensor:
    """The learner's log-probs of all tokens but the first, on the CPU."""
    rest = list(tokens[1:])
    count = len(rest)
    episode = Episode(Task("served", ""))
    episode.append(Span(None, Author.TASK, list(tokens[:1])))
    zeros = [0.0] * count
    policy = Span(0, Author.POLICY, rest, rest, zeros, zeros, [0] * count, [True] * count)
    episode.leaves.append(Leaf((episode.append(policy),)))
    forest = Forest(
        list(episode.trajectories()), torch.ones(1, count, dtype=torch.bool), learner.policy.device
    )
    logp, _ = forest.logprobs(learner.policy, learner.temperature, learner.allowed)
    return logp[0].cpu()
