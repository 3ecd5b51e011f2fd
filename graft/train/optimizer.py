"""AdamW with warm-up and schedules, on fp32 master weights.

A model in fp32 is its own master. One in bf16 gets fp32 copies that collect gradients and take the step, and
is then overwritten in place, so the engine has the new weights at once. Processes that hold all weights add
up their gradients before the step. Where weights are split, gradients arrive added up, and each process steps
its own part: AdamW is elementwise, and only the norm is common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from graft.models.device import has_kernels
from graft.models.parallel.shards import is_sharded, local, num_replicas
from graft.row_sums import GRAD_SUM, grad_sum_of
from graft.train.processes import SINGLE, Processes

Schedule = Callable[[int], float]
"""(step, counted from 0) -> factor on the learning rate"""


def schedule(kind: str, warmup: int, total: int, floor: float) -> Schedule:
    """Linear warm-up over `warmup` steps, then constant, or linear or cosine down to `floor`.

    schedule("linear", 2, 6, 0.0): 0.5, 1.0, 1.0, 0.75, 0.5, 0.25
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(total - warmup, 1), 1.0)
        if kind == "constant":
            return 1.0
        left = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return floor + (1.0 - floor) * left

    return factor


def _master(weight: Tensor) -> Tensor:
    """The tensor that AdamW steps: the fp32 weight, this process's part of it, or an fp32 copy."""
    if is_sharded(weight):
        return local(weight).float()  # the same memory, if it is fp32 already
    if weight.dtype == torch.float32:
        return weight
    return weight.detach().float().requires_grad_()


class NonFinite(RuntimeError):
    """A loss or gradient that is not finite; the weights were not changed."""


class Moments(NamedTuple):
    """What AdamW holds of a tensor."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """The fused step of torch's AdamW; torch's own class imports the compiler, for seconds."""

    def __init__(self, masters: list[Tensor], decay: float, betas: tuple[float, float]) -> None:
        matrices = [master for master in masters if master.ndim >= 2]
        self.groups = [(matrices, decay), ([m for m in masters if m.ndim < 2], 0.0)]
        self.betas, self.eps, self.state = betas, 1e-8, dict[Tensor, Moments]()

    def moments(self, master: Tensor) -> Moments:
        if master not in self.state:
            mean, square = torch.zeros_like(master), torch.zeros_like(master)
            self.state[master] = Moments(master.new_zeros(()), mean, square)
        return self.state[master]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Step the tensors that have a gradient."""
        for masters, decay in self.groups:
            stepped = [(m, m.grad, *self.moments(m)) for m in masters if m.grad is not None]
            if stepped:
                weights, grads, steps, means, squares = map(list, zip(*stepped, strict=True))
                torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
                torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                    weights, grads, means, squares, [], steps, lr=lr, weight_decay=decay, eps=self.eps,
                    beta1=self.betas[0], beta2=self.betas[1], amsgrad=False, maximize=False,
                )  # fmt: skip


class Optimizer:
    """AdamW over the trainable parameters of some modules; decay on matrices only."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        lr: float,
        schedule: Schedule,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float = 1.0,
        processes: Processes = SINGLE,
    ) -> None:
        named = {
            id(p): (name, p) for m in modules for name, p in m.named_parameters() if p.requires_grad
        }
        self.names = [name for name, _ in named.values()]
        self.weights = [weight for _, weight in named.values()]
        self.processes = processes
        self.masters = [_master(weight) for weight in self.weights]
        pairs = list(zip(self.weights, self.masters, strict=True))
        self._split = [(w, m) for w, m in pairs if is_sharded(w)]  # a master is this process's part
        self._copied = [(w, m) for w, m in pairs if m is not w and not is_sharded(w)]
        for weight, master in self._copied:
            if weight.ndim == 2 and has_kernels(weight.device):
                # our kernels add a matrix's gradients up here, in fp32
                master.grad = torch.zeros_like(master)
                setattr(weight, GRAD_SUM, master.grad)
        self.lr, self.schedule, self.max_grad_norm = lr, schedule, max_grad_norm
        self.steps = 0
        self.adam = AdamW(self.masters, weight_decay, betas)

    def collect(self) -> None:
        """Add a micro-batch's gradients to the masters' (nothing to do where they are the same)."""
        sums: list[Tensor] = []
        grads: list[Tensor] = []
        for weight, master in self._copied:
            grad, weight.grad = weight.grad, None
            if grad is None:
                continue
            if master.grad is None:
                master.grad = grad.float()
            else:
                sums.append(master.grad)
                grads.append(grad)
        if sums:
            torch._foreach_add_(sums, grads)  # pyright: ignore[reportPrivateImportUsage]

    def step(self) -> dict[str, float]:
        """One update; gradients are clipped to a global norm and cleared."""
        for weight, master in self._split:
            master.grad = None if weight.grad is None else local(weight.grad).to(master.dtype)
        if self.processes.world > 1 and not self._split:
            self._add_up()
        norm = self._clip()
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient's norm is {norm}; no step was taken")
        factor = self.schedule(self.steps)
        self.adam.step(self.lr * factor)
        self.clear()
        self.steps += 1
        self._publish()
        return {"grad_norm": norm, "learning_rate": self.lr * factor}

    def _publish(self) -> None:
        """Round the masters to the weights of the model."""
        if self._copied:
            weights, masters = zip(*self._copied, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)  # pyright: ignore[reportPrivateImportUsage]
        for weight, master in self._split:
            if weight.dtype != master.dtype:
                local(weight).copy_(master)

    def clear(self) -> None:
        """Clear all gradients; the buffers that kernels write to stay allocated."""
        for weight in (*self.weights, *self.masters):
            weight.grad = None
        sums = [(m, total) for w, m in self._copied if (total := grad_sum_of(w)) is not None]
        if sums:
            torch._foreach_zero_([total for _, total in sums])  # pyright: ignore[reportPrivateImportUsage]
        for master, total in sums:
            master.grad = total

    def _add_up(self) -> None:
        """The gradients of all processes; one without a row for a weight adds 0."""
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        grads = [master.grad for master in self.masters if master.grad is not None]
        self.processes.add(grads, "the gradients of the other processes")

    def _clip(self) -> float:
        grads = [m.grad for m in self.masters if m.grad is not None]
        if not grads and not self._split:
            return 0.0
        norm = self._norm(grads)
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.max_grad_norm, norm)
        return float(norm)

    def _norm(self, grads: list[Tensor]) -> Tensor:
        if not self._split:
            return torch.nn.utils.get_total_norm(grads)
        # a part that several processes hold is counted once
        shares = [
            m.grad.float().square().sum() / num_replicas(w)
            for w, m in self._split
            if m.grad is not None
        ]
        square = torch.stack(shares).sum() if shares else self.masters[0].new_zeros(())
        self.processes.add([square], "the norm of the gradients")
        return square.sqrt()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's two averages by parameter name, made if there are none yet, and fp32 masters.

        These are the tensors in use: a checkpoint is loaded by writing into them. A part of a split
        parameter is returned as such.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            _, mean, square = self.adam.moments(master)
            found[name] = {"exp_avg": mean, "exp_avg_sq": square}
            if master is not weight:
                found[name]["master"] = master.detach()
        return found

    def resume(self, steps: int) -> None:
        """Moments and masters were loaded: continue after `steps` steps."""
        self.steps = steps
        for master in self.masters:
            self.adam.moments(master).step.fill_(steps)
        self._publish()
