"""AdamW with warm-up and schedules, on fp32 master weights.

A model in fp32 is its own master. A model in bf16 gets fp32 copies that collect the gradients of all
micro-batches and take the step; the bf16 weights are then rewritten in place, so the engine, which
holds the same tensors, has the new weights at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from graft.models.device import has_kernels
from graft.models.functions import GRAD_SUM

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


class NonFinite(RuntimeError):
    """A loss or gradient that is not a number; the weights were not touched."""


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
    ) -> None:
        named = {id(p): p for m in modules for p in m.parameters() if p.requires_grad}
        self.weights = list(named.values())
        self.masters = [
            p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for p in self.weights
        ]
        pairs = zip(self.weights, self.masters, strict=True)
        self._copied = [
            (w, m) for w, m in pairs if m is not w
        ]  # weights with a master of their own
        for weight, master in self._copied:
            if weight.ndim == 2 and has_kernels(weight.device):
                # products of ours add a matrix's gradients up right here, in fp32
                master.grad = torch.zeros_like(master)
                setattr(weight, GRAD_SUM, master.grad)
        self.lr, self.schedule, self.max_grad_norm = lr, schedule, max_grad_norm
        self.steps = 0
        groups = [
            {"params": [m for m in self.masters if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)

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
        norm = self._clip()
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient's norm is {norm}; no step was taken")
        factor = self.schedule(self.steps)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor
        self.adam.step()
        self.clear()
        self.steps += 1
        if self._copied:
            weights, masters = zip(*self._copied, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)  # pyright: ignore[reportPrivateImportUsage]
        return {"grad_norm": norm, "learning_rate": self.lr * factor}

    def clear(self) -> None:
        """Forget all gradients; the sums that products write to stay where they are."""
        for weight in (*self.weights, *self.masters):
            weight.grad = None
        for weight, master in self._copied:
            if (total := getattr(weight, GRAD_SUM, None)) is not None:
                master.grad = total.zero_()

    def _clip(self) -> float:
        grads = [m.grad for m in self.masters if m.grad is not None]
        if not grads:
            return 0.0
        norm = torch.nn.utils.get_total_norm(grads)
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.max_grad_norm, norm)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        masters: list[Tensor] = [master.detach() for _, master in self._copied]
        return {"adam": self.adam.state_dict(), "masters": masters, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.steps = state["steps"]
        with torch.no_grad():
            for (_, mine), saved in zip(self._copied, state["masters"], strict=True):
                mine.copy_(saved)
