"""The learner: a batch in, one or more optimizer steps out.

    N rows (trajectories), T tokens behind the prompt

Weights of the loss are computed once on the whole (mini-)batch, so neither loss nor gradient depends
on how rows fall into micro-batches. The batch stays on the CPU, and each micro-batch is sent to the
device in turn. Between the first and the last of a step nothing is read from the device, so a GPU
computes one micro-batch while the host prepares the next; metrics are read once, before the step.

A policy may have actions beyond the vocabulary; its reference has none. So the two are compared only
where a vocabulary token was chosen, and by the logits of such tokens (see `algos.losses.terms.with_kl`).

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
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.checked import check_loss
from graft.algos.losses.loss import Loss
from graft.algos.losses.terms import value_loss
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.layers.experts import describe_loads, take_loads
from graft.models.layers.router_losses import chosen_shares, router_losses, watch_routers
from graft.models.parallel.shards import is_sharded
from graft.models.tree.forest import Forest
from graft.models.truncation import Truncation
from graft.train.collisions import collisions
from graft.train.micro_batches import mini_batches, share_out
from graft.train.optimizer import NonFinite, Optimizer
from graft.train.processes import SINGLE, Processes
from graft.train.step_totals import (
    BALANCE_LOSS,
    IMPORTANCE,
    IS_EXACT,
    SAMPLING_GAP,
    Z_LOSS,
    step_totals,
)
from graft.transfer import transfer


class TeacherScores(Protocol):
    """What teachers add to a batch."""

    def annotate(self, learner: Learner, batch: Batch) -> dict[str, Tensor]:
        """Fields that they fill before an update."""
        ...

    def comparing(
        self, learner: Learner, forest: Forest, micro: Batch
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """`compare` of `Decoder.action_logprobs`, for `Batch.divergences`; None: not needed."""
        ...


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
    lora: Any = None
    """The adapters (`models.lora.training.Lora`), if they are trained."""
    rows: Any = None
    """The head rows of actions (`models.action_rows.ActionRows`), if nothing else is trained."""
    anchor: Mapping[str, Tensor] | None = None
    """Adapters of the reference, in place of a model of its own."""
    reference_sync: tuple[int, float] | None = None
    """Steps after which the reference follows the policy, and the policy's share in it; None: never."""
    reference_moved: bool = False
    """Whether it is no longer the model that RL started with, so that checkpoints hold it."""
    old_is_engine: bool = False
    """Whether ratios are measured to the engine's log-probs, which need no pass."""
    needs_old: bool = False
    """Whether old log-probs are computed for a single update too."""
    observation_coef: float = 0.0
    """Weight of the mean cross-entropy of the tokens that the environment wrote (ECHO)."""
    router_balance: float = 0.0
    """Weight of the loss that evens out the use of experts; see `models.layers.router_losses`."""
    router_z: float = 0.0
    """Weight of the loss that keeps the logits of routers small."""
    epochs: int = 1
    minibatches: int = 1
    seed: int = 0
    processes: Processes = SINGLE
    teachers: TeacherScores | None = None
    """Models that score the policy's tokens; see `train/teachers`."""
    users_parts: Sequence[str] = ()
    """The user's own functions in the loss, for the message where it is not finite."""
    with_collisions: bool = False
    """Whether `annotate` computes sums of p^2."""
    keeps_logprobs: bool = False
    """Whether `logprobs` is filled: the learner's own of the last batch, before any update, [N, T]."""
    logprobs: Tensor | None = None
    loads: Tensor | None = None
    """[L, E] rows of each expert in the last update, as multiples of its even share; None: no experts."""
    is_joint: bool = field(init=False)
    """Whether each process holds a part of the weights, so that all must compute together."""

    def __post_init__(self) -> None:
        shape = self.policy.shape
        self.is_joint = any(map(is_sharded, self.policy.parameters()))
        if self.processes.world > 1:  # chosen by free memory, which may differ between them
            most = self.processes.max_over_ranks(
                -self.tokens_per_micro, "the size of micro-batches"
            )
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
    def annotate(self, batch: Batch) -> Batch:
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
            with self.open_reference() as (reference, tokens):
                extras["ref_logprobs"] = self.over_micros(
                    batch.replace(mask=compared),  # it has no head row for other actions
                    lambda f: f.logprobs(reference, self.temperature, tokens)[0],
                )
        if (is_unknown := batch.mask & batch.logprobs.isnan()).any():
            own = self._own_logprobs(batch.replace(mask=is_unknown))
            extras["logprobs"] = torch.where(is_unknown, own, batch.logprobs)
        if self.old_is_engine:
            extras["old_logprobs"] = extras.get("logprobs", batch.logprobs)
        elif self.epochs * self.minibatches > 1 or self.needs_old:
            extras["old_logprobs"] = self._own_logprobs(batch)
        if self.with_collisions:
            extras["collisions"] = collisions(self, batch, extras.get("old_logprobs"))
        if self.critic is not None:
            critic = self.critic
            extras["values"] = self.over_micros(batch, lambda f: f.values(critic))
        if self.teachers is not None:
            extras |= self.teachers.annotate(self, batch.replace(**extras))
        return batch.replace(**extras) if extras else batch

    def _own_logprobs(self, batch: Batch) -> Tensor:
        return self.over_micros(batch, lambda f: f.logprobs(*self.scoring)[0])

    @property
    def scoring(self) -> tuple[Decoder, float, Tensor | None, Truncation | None]:
        """The policy, and of which distribution its log-probs are: the arguments of `Forest.logprobs`."""
        return self.policy, self.temperature, self.allowed, self.truncation

    @property
    def has_reference(self) -> bool:
        return self.reference is not None or self.anchor is not None

    @contextmanager
    def open_reference(self) -> Iterator[tuple[Decoder, Tensor | None]]:
        """The reference, and what it may choose: vocabulary tokens only."""
        if self.reference is not None:
            yield self.reference, self.allowed_tokens(self.reference)
        elif self.lora is not None and self.anchor is not None:
            with self.lora.using(self.anchor):
                yield self.policy, self.allowed_tokens(self.policy)

    def allowed_tokens(self, model: Any) -> Tensor | None:
        """[modes, rows of the model's head] bool: what the policy may choose, without actions beyond the
        vocabulary and without tokens that only the model has."""
        if self.allowed is None:
            return None
        tokens = self.allowed[:, : self.policy.shape.vocab_size]
        more = model.shape.head_rows - tokens.shape[1]
        return F.pad(tokens, (0, more)) if more > 0 else tokens[:, : model.shape.head_rows]

    def over_micros(self, batch: Batch, compute: Callable[[Forest], Tensor]) -> Tensor:
        """The grid of what `compute` returns for each micro-batch."""
        grid = batch.zeros()
        parts = self._micro_batches(batch)
        found: list[Tensor] = []
        for part, _ in parts:
            mask = batch.mask[torch.tensor(part)]
            forest = Forest([batch.trajectories[i] for i in part], mask, self.policy.device)
            with self._jointly("the log-probs of a micro-batch"):
                found.append(compute(forest))
        for (part, is_real), values in zip(parts, found, strict=True):
            if is_real:
                grid[torch.tensor(part)] = values.to(grid)
        self.complete(grid)
        return grid

    def _micro_batches(self, batch: Batch) -> list[tuple[list[int], bool]]:
        """The row numbers of each of this process's micro-batches, and whether they are its share.

        Where weights are split, all processes compute together: one that has fewer micro-batches than
        others computes the shortest row again, with weight 0.
        """
        processes, trajectories = self.processes, batch.trajectories
        if len(trajectories) != batch.num_rows:
            raise ValueError(
                f"the batch has {batch.num_rows} rows and {len(trajectories)} trajectories, and a model "
                "reads trajectories; make it with to_batch"
            )
        shares = share_out(trajectories, self.tokens_per_micro, processes.dp_size)
        own = [(part, True) for part in shares[processes.dp_rank]]
        if self.is_joint and trajectories:
            most = max(map(len, shares))
            shortest = min(range(len(trajectories)), key=lambda i: len(trajectories[i].tokens))
            own += [([shortest], False)] * (most - len(own))
        return own

    def own_rows(self, batch: Batch) -> list[int]:
        """The row numbers of this process's share."""
        parts = self._micro_batches(batch)
        return [number for part, is_real in parts if is_real for number in part]

    def _jointly(self, what: str) -> AbstractContextManager[None]:
        """Names a computation that all processes make together, for the message where one is late."""
        return self.processes.together(what) if self.is_joint else nullcontext()

    def complete(self, grid: Tensor) -> None:
        """Add the rows of the other processes to a grid that has this one's."""
        if self.processes.world > 1:
            if self.processes.tp_rank:
                grid.zero_()  # another process of the group has the same rows
            self.processes.add([grid], "the log-probs of the other processes' rows")

    def update(self, batch: Batch) -> dict[str, float]:
        """All optimizer steps on this batch; metrics averaged over them."""
        totals: dict[str, float] = {}
        seed = self.seed * 1000 + self.optimizer.steps
        steps = list(mini_batches(batch, self.epochs, self.minibatches, seed))
        seen = batch.zeros() if self.keeps_logprobs else None
        for number, index in enumerate(steps):
            # the index ascends: where it is complete, the batch need not be copied
            some = batch if len(index) == batch.num_rows else batch.rows(index)
            own = seen if number < len(steps) // self.epochs else None  # of the first pass
            step = self._step(some, own, index)
            for name, value in step.items():
                totals[name] = totals.get(name, 0.0) + value
        if seen is not None:
            self.complete(seen)
            self.logprobs = seen
        metrics = {name: value / max(len(steps), 1) for name, value in totals.items()}
        if (square := metrics.pop(f"{IMPORTANCE}/mean_square", 0.0)) > 0:
            metrics[f"{IMPORTANCE}/ess"] = metrics[f"{IMPORTANCE}/mean"] ** 2 / square
        metrics[IS_EXACT] = float(self._is_exact)
        self.loads = self._even_loads()
        metrics |= {} if self.loads is None else describe_loads(self.loads)
        return {**metrics, "optimizer_steps": float(len(steps))}

    def _even_loads(self) -> Tensor | None:
        load = take_loads(self.policy, self.policy.device)
        if load is None:
            return None
        # those of a tp group have the same rows, and the share is the same
        if self.processes.world > 1:
            self.processes.add([load], "the rows of experts")
        load = load.double().cpu()
        return load / load.mean(1, keepdim=True).clamp(min=1e-9)

    @property
    def _is_exact(self) -> bool:
        """Whether the native engine computes log-probs with the same bits."""
        # kernels of engine and learner find the threshold of a truncated distribution in different ways
        is_cut = self.truncation is not None and self.policy.device.type != "cpu"
        return getattr(self.policy, "order", None) is not None and not is_cut

    def _step(self, batch: Batch, seen: Tensor | None, index: Tensor) -> dict[str, float]:
        """One optimizer step; its log-probs are written to rows `index` of `seen`."""
        weights = self.reduction(batch)
        shares = {"policy": weights}
        if self.critic is not None and self.value_reduction is not None:
            shares["value"] = self.value_reduction(batch)
        observed = batch.observed if self.observation_coef else None
        if observed is not None:
            shares["observed"] = observed / observed.sum().clamp(min=1)
        parts = self._micro_batches(batch)
        chosen_E = None
        if self.router_balance or self.router_z:
            shares["routed"] = weights / weights.sum().clamp(min=1e-9)
            if self.router_balance and (len(parts) > 1 or self.processes.dp_size > 1):
                chosen_E = self._chosen_shares(batch, parts, shares["routed"])
        reports: list[dict[str, Tensor]] = []
        gaps: list[Tensor] = []
        for part, is_real in parts:
            number = torch.tensor(part)
            micro, device = batch.rows(number), self.policy.device
            wanted = micro.mask if observed is None else micro.mask | observed[number]
            forest = Forest(micro.trajectories, wanted, device)
            own = {name: share[number] * float(is_real) for name, share in shares.items()}
            moved = transfer(own, device)
            with self._jointly("the gradients of a micro-batch"):
                report, logp_NT, gap_NT = self._backward(forest, micro.to(device), moved, chosen_E)
            if is_real:
                reports.append(report)
                gaps.append(gap_NT.flatten())
                if seen is not None:
                    seen[index[number]] = logp_NT.to(seen)
            self.optimizer.collect()
            if self.critic_optimizer is not None:
                self.critic_optimizer.collect()
        totals = step_totals(reports, gaps, batch.num_tokens, self.processes)
        bad = [name for name, value in totals.items() if not math.isfinite(value)]
        if bad:
            self.discard()
            cause = f", by {' or '.join(self.users_parts)}" if self.users_parts else ""
            raise NonFinite(f"{', '.join(bad)} is not a finite number{cause}; no step was taken")
        totals |= self.optimizer.step()
        if (trained := self.lora or self.rows) is not None:
            trained.merge()
        if self.critic_optimizer is not None:
            stepped = self.critic_optimizer.step()
            totals |= {f"critic/{name}": value for name, value in stepped.items()}
        return totals

    @torch.no_grad()
    def _chosen_shares(
        self, batch: Batch, parts: Sequence[tuple[list[int], bool]], weights_NT: Tensor
    ) -> Tensor:
        """[E] how much of the step each expert was chosen for: a pass before those with gradients.

        Their gradient is that of the whole step only if each of them knows this, and then it does not
        depend on micro-batches and processes.
        """
        policy, experts = self.policy, self.policy.shape.experts
        assert experts is not None
        total_E = torch.zeros(experts.count, device=policy.device)
        for part, is_real in parts:
            rows = batch.rows(torch.tensor(part))
            forest = Forest(rows.trajectories, rows.mask, policy.device)
            weights = (weights_NT[torch.tensor(part)] * float(is_real)).to(policy.device)
            with self._jointly("the experts of a micro-batch"), watch_routers(policy):
                policy.states_before(forest)
                total_E += chosen_shares(policy, forest.before, forest.add_rows(weights))
        self.complete(total_E)
        return total_E

    def _backward(
        self,
        forest: Forest,
        micro: Batch,
        shares: Mapping[str, Tensor],
        chosen_E: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Gradients of one micro-batch; sums over its trained tokens, to be divided by the count.

        `shares` are the weights of tokens in the losses of policy, critic, observations and routers. Also
        the log-probs [N, T] and their distance from the engine's, -1 where nothing is trained.
        """
        is_routed = "routed" in shares
        with watch_routers(self.policy) if is_routed else nullcontext():
            logp, entropy, micro = self._scored(forest, micro)
            routed = self._router_losses(forest, shares["routed"], chosen_E) if is_routed else []
        loss_NT, metrics = check_loss(self.loss(logp, entropy, micro), logp, self.loss)
        loss = (loss_NT * shares["policy"]).sum()
        totals = {"loss": loss.detach()}
        for name, coefficient, term in routed:
            totals[name] = term.detach()
            loss = loss + coefficient * term
        if self.critic is not None:
            value_NT = value_loss(forest.values(self.critic), micro, self.value_clip)
            value = (value_NT * shares.get("value", shares["policy"])).sum()
            totals["loss/value"] = value.detach()
            loss = loss + value
        if "observed" in shares:
            surprise = -(logp * shares["observed"]).sum()
            totals["loss/observations"] = surprise.detach()
            loss = loss + self.observation_coef * surprise
        loss.backward()
        for name, value_NT in {"entropy": entropy.detach(), **metrics}.items():
            totals[name] = torch.where(micro.mask, value_NT, 0.0).sum()
        gap_NT = (logp.detach() - micro.logprobs).abs()
        trained_NT = torch.where(micro.mask, gap_NT, 0.0)
        totals[f"{SAMPLING_GAP}/mean"] = trained_NT.sum()
        totals[f"{SAMPLING_GAP}/max"] = trained_NT.max() if gap_NT.numel() else trained_NT.sum()
        return totals, logp.detach(), torch.where(micro.mask, gap_NT, -1.0)

    def _router_losses(
        self, forest: Forest, weights_NT: Tensor, chosen_E: Tensor | None
    ) -> list[tuple[str, float, Tensor]]:
        """Names, coefficients and values of the losses of routers in the pass just made."""
        tokens = self.policy, forest.before, forest.add_rows(weights_NT)
        balance, z = router_losses(
            *tokens, chosen_shares(*tokens) if chosen_E is None else chosen_E
        )
        terms = (BALANCE_LOSS, self.router_balance, balance), (Z_LOSS, self.router_z, z)
        return [term for term in terms if term[1]]

    def _scored(self, forest: Forest, micro: Batch) -> tuple[Tensor, Tensor, Batch]:
        """Log-probs and entropies, and the micro-batch with what else one forward pass gives."""
        is_compared = self.has_reference or self.teachers is not None
        vocab_size = (
            self.policy.shape.vocab_size if self.policy.shape.extra and is_compared else None
        )
        compare = None
        if self.teachers is not None:
            compare = self.teachers.comparing(self, forest, micro)
        if compare is not None:
            *scored, div_NT = forest.compared_logprobs(*self.scoring, compare, vocab_size)
            micro = micro.replace(divergences=div_NT)
        elif vocab_size is not None:
            scored = forest.vocab_logprobs(*self.scoring)
        else:
            scored = forest.logprobs(*self.scoring)
        logp, entropy, *any_token = scored
        return logp, entropy, micro.replace(vocab_logprobs=any_token[0]) if any_token else micro

    def discard(self) -> None:
        """Clear the gradients of a step that is not taken."""
        for optimizer in (self.optimizer, self.critic_optimizer):
            if optimizer is not None:
                optimizer.clear()
