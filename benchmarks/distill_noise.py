"""How much the gradients of two batches agree, for each way to learn from a teacher.

    python -m benchmarks.distill_noise runs/distill/start-sft-0 rollout.tasks=16 rollout.samples=8
    python -m benchmarks.distill_noise runs/distill/start-sft-0 --methods "opd;gkd;gkd, reverse"

The student attempts the tasks of each batch once, and every method takes the gradient of the same attempts.
Agreement is the mean cosine between the gradients of two different batches: near 1, one batch says what all
say; near 0, a step is noise, and a larger learning rate only takes larger random steps.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from statistics import mean

import torch
from torch import Tensor

from graft.algos.algorithm import Algorithm
from graft.config import load_config
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.collector import RolloutRequest
from graft.train.build import build_run
from graft.train.learner import Learner
from graft.train.learner_build import make_learner
from graft.train.rollouts.rollout_engine import make_collector
from graft.train.tasks import TaskStream
from graft.types import Episode

_SAMPLED = "distill.divergence=null"
METHODS = {
    "grpo": ["algo.name=grpo", "algo.reduction=token", "distill.teacher=", _SAMPLED],
    "opd": ["algo.name=opd", _SAMPLED],
    "opd, differences within 1": [
        "algo.name=opd",
        _SAMPLED,
        "algo.credit=[{teacher_kl: {clip: 1.0}}]",
    ],
    "gkd": ["distill.divergence={js: {beta: 0.5}}"],
    "gkd, reverse": ["distill.divergence=reverse"],
    "gkd, forward": ["distill.divergence=forward"],
}


def gradient(learner: Learner, algo: Algorithm, episodes: list[Episode]) -> Tensor:
    """Of all weights, as one vector; the weights stay as they are."""
    taken: list[Tensor] = []

    def record() -> dict[str, float]:
        grads = [p.grad for p in learner.policy.parameters() if p.grad is not None]
        taken.append(torch.cat([grad.flatten() for grad in grads]))
        learner.discard()
        return {}

    learner.optimizer.step = record  # type: ignore[method-assign]
    rows = trajectories_of(episodes)
    batch = algo.shape(learner.annotate(to_batch(rows)))
    batch = algo.prepare(batch.replace(advantages=algo.credit(batch.zeros(), batch)))
    learner.update(batch)
    return taken[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("student")
    parser.add_argument("overrides", nargs="*", help="key=value for every method")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--methods", type=lambda text: text.split(";"), default=list(METHODS))
    options = parser.parse_args(arguments)
    shared = [f"model.path={options.student}", "model.shape={}", "sft.steps=0", "train.steps=1"]
    shared += options.overrides
    batches: list[list[Episode]] = []
    print("| method | agreement of two batches | norm of the gradient |\n|---|---|---|")
    for name in options.methods:
        config = load_config("distill/toy", [*shared, *METHODS[name]])
        components = build_run(config)
        if not batches:
            tasks, collector = (
                TaskStream(config.task.envs, config.run.seed),
                make_collector(components),
            )
            for _ in range(options.batches):
                request = RolloutRequest(
                    [next(tasks) for _ in range(config.rollout.tasks)], "a batch"
                )
                batches.append(collector.submit(request).result())
            collector.close()
        learner = make_learner(components, None)
        found = [gradient(learner, components.algo, episodes) for episodes in batches]
        pairs = combinations(found, 2)
        agreement = mean(float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairs)
        print(f"| {name} | {agreement:.2f} | {mean(float(g.norm()) for g in found):.2g} |")


if __name__ == "__main__":
    main()
