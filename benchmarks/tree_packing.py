"""What tree packing saves: the learner's step on workload B, packed against separate padded rows.

    python -m benchmarks.tree_packing 5 --record       # --record keeps the figures for the pages

The same episodes, weights, loss and optimizer; the padded side is what a trainer without trees does:
every row is its own sequence, prompt included, padded to the longest. Loss and gradients are
compared before anything is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import Figure, record, table_name, take_flag
from benchmarks.workloads import WORKLOADS, GraftTrainer
from graft.models.logprobs import score_actions
from graft.models.tree.packing import response

MICRO_ROWS = 64
PACKED = "learner's step on B: packed tree"
PADDED = "the same in separate padded rows, same loss and gradients"


def padded_backward(trainer: GraftTrainer, batch) -> float:
    """Gradients of the step, row by row in padded micro-batches; the loss."""
    policy, learner = trainer.policy, trainer.learner
    weights, total = learner.reduction(batch), 0.0
    for start in range(0, batch.num_rows, MICRO_ROWS):
        part = slice(start, start + MICRO_ROWS)
        micro = batch.rows(part)
        some = micro.trajectories
        lengths = [len(row.tokens) for row in some]
        width = max(lengths)
        tokens = torch.zeros(len(some), width, dtype=torch.long)
        for i, row in enumerate(some):
            tokens[i, : lengths[i]] = torch.tensor(row.tokens)
        positions = torch.arange(width).repeat(len(some))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, width=width) -> Tensor:
            q, k, v = (x.view(-1, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return seen.transpose(1, 2).reshape(-1, *seen.shape[1:2], seen.shape[-1])

        hidden = policy(tokens.flatten(), positions, attend).view(len(some), width, -1)
        logp, entropy = torch.zeros(micro.mask.shape), torch.zeros(micro.mask.shape)
        source = torch.zeros(micro.mask.shape, dtype=torch.long)
        for i, row in enumerate(some):
            begin = lengths[i] - sum(map(len, response(row)))
            source[i] = torch.arange(begin - 1, begin - 1 + source.shape[1]).clamp(max=width - 1)
        where = micro.mask.nonzero()
        picked = hidden[where[:, 0], source[micro.mask]]
        values, spread = score_actions(picked, policy.head_weight, micro.actions[micro.mask])
        index = (where[:, 0], where[:, 1])
        logp, entropy = logp.index_put(index, values), entropy.index_put(index, spread)
        loss_NT, _ = learner.loss(logp, entropy, micro)
        loss = (loss_NT * weights[part]).sum()
        loss.backward()
        total += float(loss.detach())
    return total


def main(rounds: int = 5, *, keep: bool = False) -> None:
    trainer = GraftTrainer(WORKLOADS["B"])
    batch = trainer.batch(trainer.rollout())
    learner, policy = trainer.learner, trainer.policy

    padded_loss = padded_backward(trainer, batch)
    padded_grads = [p.grad.clone() for p in policy.parameters()]
    learner.discard()
    kept: list[Tensor] = []
    step = learner.optimizer.step

    def keep() -> dict[str, float]:
        kept.extend(p.grad.clone() for p in policy.parameters())
        learner.discard()
        return {}

    learner.optimizer.step = keep
    packed_loss = learner.update(batch)["loss"]
    learner.optimizer.step = step
    gap = max(float((a - b).abs().max()) for a, b in zip(kept, padded_grads, strict=True))
    scale = max(float(g.abs().max()) for g in padded_grads)
    assert abs(packed_loss - padded_loss) < 1e-5 and gap < 1e-4 * max(scale, 1.0), (gap, scale)

    times: dict[str, list[float]] = {"packed": [], "padded": []}
    for _ in range(rounds + 1):
        started = time.perf_counter()
        learner.update(batch)
        middle = time.perf_counter()
        padded_backward(trainer, batch)
        learner.optimizer.step()
        times["packed"].append(middle - started)
        times["padded"].append(time.perf_counter() - middle)
    ratios = [b / a for a, b in zip(*(x[1:] for x in times.values()), strict=True)]
    rows = batch.trajectories
    unique = sum(len(s) for s in {id(s): s for row in rows for s in row.spans}.values())
    report = {
        "packed": round(statistics.median(times["packed"][1:]), 3),
        "padded": round(statistics.median(times["padded"][1:]), 3),
        "speedup": round(statistics.median(ratios), 2),
        "tokens_unique": unique,
        "tokens_in_rows": sum(len(row.tokens) for row in rows),
        "loss_gap": abs(packed_loss - padded_loss),
        "gradient_gap": gap,
        "gradient_scale": scale,
    }
    print(json.dumps(report))
    if keep:
        table = table_name()
        packed, padded = tuple(times["packed"][1:]), tuple(times["padded"][1:])
        record(
            [
                Figure(f"{table}.packed", PACKED, report["packed"], "s", packed),
                Figure(f"{table}.padded", PADDED, report["padded"], "s", padded),
            ]
        )


if __name__ == "__main__":
    arguments, keep = take_flag(sys.argv[1:])
    main(*map(int, arguments), keep=keep)
