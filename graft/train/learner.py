"""The learner: trajectories and their batch in, one or more optimizer steps out.

    N rows (trajectories), T tokens behind the prompt

Weights of the loss are computed once on the whole (mini-)batch, so neither loss nor gradient depends
on how rows fall into micro-batches. The batch stays on the CPU, and each micro-batch is sent to the
device in turn. Between the first and the last of a step nothing is read from the device, so a GPU
computes one micro-batch while the host prepares the next; metrics are read once, before the step.

A policy may have actions beyond the vocabulary; its reference has none. So the two are compared only
where a vocabulary token was chosen, and by the logits of such tokens (see `algos.losses.with_kl`).

With top-k, top-p or min-p the policy's log-probs, old ones included, are those of the truncated
distribution; the reference's are of its whole one. Their KL is that of what is drawn from, to the
reference: it is finite whatever the reference would have cut off.

With adapters (`models.lora.training`) the optimizer holds only the adapters, which are merged into the
policy after each step. The reference is then the policy with the adapters that RL started with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.checked import check_loss
from graft.algos.losses import Loss, value_loss
from graft.models.action_rows import ActionRows
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.lora.training import Lora
from graft.models.parallel.shards import is_sharded
from graft.models.tree.forest import Forest
from graft.models.truncation import Truncation
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.micro_batches import share_out
from graft.train.optimizer import NonFinite, Optimizer
from graft.transfer import transfer
from graft.types import Trajectory
from graft.user_code import is_users_own, named

SAMPLING_GAP = "sampling/sampling_logp_difference"
"""Metrics of |log-prob of the learner - log-prob of the engine| over trained tokens: mean, max, p999."""

WEIGHTED = ("loss", "loss/value")
"""Metrics that are sums with the weights of a reduction; the others are means over trained tokens."""

IMPORTANCE = "sampling/importance_sampling_ratio"
"""Metrics of the weights between engine and learner: mean, and ess, the share of tokens that count."""


@dataclass(slots=True)
class Learner:
    """Owns the policy, its optimizer, and, where the algorithm needs them, a critic and a reference."""

    policy: Decoder
    optimizer: Optimizer
    loss: Loss
    reduction: Callable[[Batch], Tensor]
    tokens_per_micro: int
    temperature: float = 1.0
    truncation: Truncation | None = None
    """What sampling keeps of each distribution; its log-probs are of that."""
    allowed: Tensor | None = None
    """[modes, rows of the policy's head] bool, on its device; None: everything, always."""
    critic: Critic | None = None
    critic_optimizer: Optimizer | None = None
    value_clip: float | None = None
    value_reduction: Callable[[Batch], Tensor] | None = None
    """Of the critic's loss; None: `reduction`."""
    reference: Decoder | None = None
    lora: Lora | None = None
    rows: ActionRows | None = None
    """The head rows of actions, where nothing else is trained."""
    anchor: Mapping[str, Tensor] | None = None
    """Adapters of the reference, in place of a model of its own."""
    epochs: int = 1
    minibatches: int = 1
    seed: int = 0
    processes: ProcessGroup = ALONE
    keeps_logprobs: bool = False
    """Whether `logprobs` is filled: the learner's own of the last batch, before any update, [N, T]."""
    logprobs: Tensor | None = None
    is_joint: bool = field(init=False)
    """Whether each process holds a part of the weights, so that all must compute together."""

    def __post_init__(self) -> None:
        shape = self.policy.shape
        self.is_joint = any(map(is_sharded, self.policy.parameters()))
        if self.processes.world > 1:  # chosen by free memory, which may differ between them
            most = self.processes.most(-self.tokens_per_micro, "the size of micro-batches")
            self.tokens_per_micro = -int(most)
        if self.allowed is None and shape.extra:
            raise ValueError(
                f"the policy has {shape.extra} actions beyond the vocabulary and no table of when "
                f"they may be chosen; give allowed [modes, {shape.head_rows}]"
            )
        if self.allowed is not None and self.allowed.shape[1] != shape.head_rows:
            raise ValueError(
                f"allowed has {self.allowed.shape[1]} columns and the policy's head "
                f"{shape.head_rows} rows; widen it with False"
            )

    @torch.no_grad()
    def annotate(self, trajectories: Sequence[Trajectory], batch: Batch) -> Batch:
        """Add what the algorithm needs besides the sampled log-probs: reference and old ones, values.

        With one update per batch the policy that trains is the policy that sampled, so old log-probs
        need no pass.
        """
        extras: dict[str, Tensor] = {}
        if self.policy.shape.extra:
            extras["is_vocab_token"] = batch.actions < self.policy.shape.vocab_size
        if self.has_reference:
            compared = (
                batch.mask & extras["is_vocab_token"] if "is_vocab_token" in extras else batch.mask
            )
            with self._reference() as (reference, tokens):
                extras["ref_logprobs"] = self._over_micros(
                    trajectories,
                    batch.replace(mask=compared),  # it has no head row for other actions
                    lambda f: f.logprobs(reference, self.temperature, tokens)[0],
                )
        if self.epochs * self.minibatches > 1:
            extras["old_logprobs"] = self._over_micros(
                trajectories,
                batch,
                lambda f: f.logprobs(*self.scoring)[0],
            )
        if self.critic is not None:
            critic = self.critic
            extras["values"] = self._over_micros(trajectories, batch, lambda f: f.values(critic))
        return batch.replace(**extras) if extras else batch

    @property
    def scoring(self) -> tuple[Decoder, float, Tensor | None, Truncation | None]:
        """The policy, and of which distribution its log-probs are: the arguments of `Forest.logprobs`."""
        return self.policy, self.temperature, self.allowed, self.truncation

    @property
    def has_reference(self) -> bool:
        return self.reference is not None or self.anchor is not None

    @contextmanager
    def _reference(self) -> Iterator[tuple[Decoder, Tensor | None]]:
        """The reference, and what it may choose: vocabulary tokens only."""
        vocab_size = self.policy.shape.vocab_size
        if self.reference is not None:
            yield self.reference, None if self.allowed is None else self.allowed[:, :vocab_size]
        elif self.lora is not None and self.anchor is not None:
            tokens = None if self.allowed is None else self.allowed.clone()
            if tokens is not None:  # the policy has head rows for other actions
                tokens[:, vocab_size:] = False
            with self.lora.using(self.anchor):
                yield self.policy, tokens

    def _over_micros(
        self, trajectories: Sequence[Trajectory], batch: Batch, compute: Callable[[Forest], Tensor]
    ) -> Tensor:
        """The grid of what `compute` returns for each micro-batch."""
        grid = batch.zeros()
        parts = self._micro_batches(trajectories)
        found: list[Tensor] = []
        for part, _ in parts:
            mask = batch.mask[torch.tensor(part)]
            forest = Forest([trajectories[i] for i in part], mask, self.policy.device)
            with self._jointly("the log-probs of a micro-batch"):
                found.append(compute(forest))
        for (part, is_real), values in zip(parts, found, strict=True):
            if is_real:
                grid[torch.tensor(part)] = values.to(grid)
        self._complete(grid)
        return grid

    def _micro_batches(self, trajectories: Sequence[Trajectory]) -> list[tuple[list[int], bool]]:
        """The row numbers of each of this process's micro-batches, and whether they are its share.

        Where weights are split, all processes compute together: one that has fewer micro-batches than
        others computes the shortest row again, with weight 0.
        """
        processes = self.processes
        shares = share_out(trajectories, self.tokens_per_micro, processes.dp_size)
        own = [(part, True) for part in shares[processes.dp_rank]]
        if self.is_joint and trajectories:
            most = max(map(len, shares))
            shortest = min(range(len(trajectories)), key=lambda i: len(trajectories[i].tokens))
            own += [([shortest], False)] * (most - len(own))
        return own

    def _jointly(self, what: str) -> AbstractContextManager[None]:
        """Names a computation that all processes make together, for the message where one is late."""
        return self.processes.together(what) if self.is_joint else nullcontext()

    def _complete(self, grid: Tensor) -> None:
        """Add the rows of the other processes to a grid that has this one's."""
        if self.processes.world > 1:
            if self.processes.tp_rank:
                grid.zero_()  # another process of the group has the same rows
            self.processes.add([grid], "the log-probs of the other processes' rows")

    def update(self, trajectories: Sequence[Trajectory], batch: Batch) -> dict[str, float]:
        """All optimizer steps on this batch; metrics averaged over them."""
        totals: dict[str, float] = {}
        steps = list(self._minibatches(batch))
        seen = batch.zeros() if self.keeps_logprobs else None
        for number, index in enumerate(steps):
            # the index ascends: where it is complete, the batch need not be copied
            some = batch if len(index) == batch.num_rows else batch.rows(index)
            own = seen if number < len(steps) // self.epochs else None  # of the first pass
            step = self._step([trajectories[i] for i in index.tolist()], some, own, index)
            for name, value in step.items():
                totals[name] = totals.get(name, 0.0) + value
        if seen is not None:
            self._complete(seen)
            self.logprobs = seen
        metrics = {name: value / max(len(steps), 1) for name, value in totals.items()}
        if (square := metrics.pop(f"{IMPORTANCE}/mean_square", 0.0)) > 0:
            metrics[f"{IMPORTANCE}/ess"] = metrics[f"{IMPORTANCE}/mean"] ** 2 / square
        return {**metrics, "optimizer_steps": float(len(steps))}

    def _minibatches(self, batch: Batch) -> Iterator[Tensor]:
        """Row numbers of each optimizer step, ascending; whole groups, shuffled where there are several."""
        groups = batch.group.unique()
        if self.minibatches == 1:
            for _ in range(self.epochs):
                yield torch.arange(batch.num_rows)
            return
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed(
                self.seed * 1000 + self.optimizer.steps + epoch
            )
            shuffled = groups[torch.randperm(len(groups), generator=generator)]
            for part in shuffled.tensor_split(self.minibatches):
                index = torch.isin(batch.group, part).nonzero()[:, 0]
                if len(index):
                    yield index

    def _step(
        self, trajectories: Sequence[Trajectory], batch: Batch, seen: Tensor | None, index: Tensor
    ) -> dict[str, float]:
        """One optimizer step; its log-probs are written to rows `index` of `seen`."""
        weights = self.reduction(batch)
        shares = {"policy": weights}
        if self.critic is not None and self.value_reduction is not None:
            shares["value"] = self.value_reduction(batch)
        reports: list[dict[str, Tensor]] = []
        gaps: list[Tensor] = []
        for part, is_real in self._micro_batches(trajectories):
            number = torch.tensor(part)
            micro, device = batch.rows(number), self.policy.device
            forest = Forest([trajectories[i] for i in part], micro.mask, device)
            own = {name: share[number] * float(is_real) for name, share in shares.items()}
            moved = transfer(own, device)
            with self._jointly("the gradients of a micro-batch"):
                report, logp_NT, gap_NT = self._backward(
                    forest, micro.to(device), moved["policy"], moved.get("value", moved["policy"])
                )
            if is_real:
                reports.append(report)
                gaps.append(gap_NT.flatten())
                if seen is not None:
                    seen[index[number]] = logp_NT.to(seen)
            self.optimizer.collect()
            if self.critic_optimizer is not None:
                self.critic_optimizer.collect()
        totals = self._totals(reports, gaps, batch)
        bad = [name for name, value in totals.items() if not math.isfinite(value)]
        if bad:
            self.discard()
            cause = f", by {named(self.loss, 'loss')}" if is_users_own(self.loss) else ""
            raise NonFinite(f"{', '.join(bad)} is not a finite number{cause}; no step was taken")
        totals |= self.optimizer.step()
        if (trained := self.lora or self.rows) is not None:
            trained.merge()
        if self.critic_optimizer is not None:
            stepped = self.critic_optimizer.step()
            totals |= {f"critic/{name}": value for name, value in stepped.items()}
        return totals

    def _totals(
        self, reports: list[dict[str, Tensor]], gaps: list[Tensor], batch: Batch
    ) -> dict[str, float]:
        """The sums of the micro-batches, added up over all processes."""
        read = _read(reports)
        processes, count = self.processes, batch.num_tokens
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
        totals[f"{SAMPLING_GAP}/p999"] = _high(gaps, count)
        return totals

    def _backward(
        self, forest: Forest, micro: Batch, weights_NT: Tensor, value_weights_NT: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Gradients of one micro-batch; sums over its trained tokens, to be divided by the count.

        Also the log-probs [N, T] and their distance from the engine's, -1 where nothing is trained.
        """
        if self.policy.shape.extra and self.has_reference:
            logp, entropy, any_token = forest.vocab_logprobs(*self.scoring)
            micro = micro.replace(vocab_logprobs=any_token)
        else:
            logp, entropy = forest.logprobs(*self.scoring)
        loss_NT, metrics = check_loss(self.loss(logp, entropy, micro), logp, self.loss)
        loss = (loss_NT * weights_NT).sum()
        totals = {"loss": loss.detach()}
        if self.critic is not None:
            value_NT = value_loss(forest.values(self.critic), micro, self.value_clip)
            value = (value_NT * value_weights_NT).sum()
            totals["loss/value"] = value.detach()
            loss = loss + value
        loss.backward()
        for name, value_NT in {"entropy": entropy.detach(), **metrics}.items():
            totals[name] = torch.where(micro.mask, value_NT, 0.0).sum()
        gap_NT = (logp.detach() - micro.logprobs).abs()
        trained_NT = torch.where(micro.mask, gap_NT, 0.0)
        totals[f"{SAMPLING_GAP}/mean"] = trained_NT.sum()
        totals[f"{SAMPLING_GAP}/max"] = trained_NT.max() if gap_NT.numel() else trained_NT.sum()
        return totals, logp.detach(), torch.where(micro.mask, gap_NT, -1.0)

    def discard(self) -> None:
        """Clear the gradients of a step that is not taken."""
        for optimizer in (self.optimizer, self.critic_optimizer):
            if optimizer is not None:
                optimizer.clear()


def _read(reports: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """The sums from the device in one copy: the host waits here until the device is done."""
    if not reports:
        return []
    numbers = iter(torch.cat([torch.stack(list(r.values())) for r in reports]).tolist())
    return [{name: next(numbers) for name in report} for report in reports]


def _high(gaps: list[Tensor], count: int) -> float:
    """The gap that at most one of `count` trained tokens in a thousand exceeds; the rest are -1."""
    if not count:
        return 0.0
    gap = torch.cat(gaps)
    return float(gap.kthvalue(len(gap) - count // 1000).values)
