"""The sums of a step's micro-batches, over all processes."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.train.processes import Processes

SAMPLING_GAP = "sampling/sampling_logp_difference"
"""Metrics of |log-prob of the learner - log-prob of the engine| over trained tokens: mean, max, p999."""

IS_EXACT = "sampling/exact"
"""1: engine and learner add in one order (`models.row_order`), so that the gap is 0; 0: as is fastest."""

BALANCE_LOSS, Z_LOSS = "experts/balance_loss", "experts/z_loss"

WEIGHTED = ("loss", "loss/value", "loss/observations", BALANCE_LOSS, Z_LOSS)
"""Metrics that are sums with the weights of a reduction; the others are means over trained tokens."""

IMPORTANCE = "sampling/importance_sampling_ratio"
"""Metrics of the weights between engine and learner: mean, and ess, the share of tokens that count."""


def step_totals(
    reports: list[dict[str, Tensor]], gaps: list[Tensor], count: int, processes: Processes
) -> dict[str, float]:
    """Metrics of a step with `count` trained tokens, from the sums of its micro-batches."""
    read = _read(reports)
    if processes.world > 1:
        mine = (read, [gap.cpu() for gap in gaps]) if not processes.tp_rank else ([], [])
        gathered = processes.gather(mine, "the metrics of the step")
        read = [report for own, _ in gathered for report in own]
        gaps = [gap for _, own in gathered for gap in own]
    totals: dict[str, float] = {}
    for report in read:
        for name, value in report.items():
            if name.endswith("/max"):
                totals[name] = max(totals.get(name, 0.0), value)
            else:
                share = value if name in WEIGHTED else value / max(count, 1)
                totals[name] = totals.get(name, 0.0) + share
    totals[f"{SAMPLING_GAP}/p999"] = high(gaps, count)
    return totals


def _read(reports: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """The sums from the device in one copy: the host waits here until the device is done."""
    if not reports:
        return []
    numbers = iter(torch.cat([torch.stack(list(r.values())) for r in reports]).tolist())
    return [{name: next(numbers) for name in report} for report in reports]


def high(gaps: list[Tensor], count: int) -> float:
    """The gap that at most one of `count` trained tokens in a thousand exceeds; the rest are -1."""
    if not count:
        return 0.0
    gap = torch.cat(gaps)
    return float(gap.kthvalue(len(gap) - count // 1000).values)
