"""Experts: many gated MLPs, of which a router chooses a few for each token.

    T tokens, D width, E experts of width F, k chosen for each token

    router   [T, E] -> k experts of each token and their weights, in fp32
    experts  the T*k rows are sorted by expert; each expert multiplies its rows
    sum      the k results of a token are added slot by slot, in the router's order

A row's bits then depend on nothing beside it: neither on how many tokens share its experts nor on the
expert numbers of its neighbours. Engine and learner therefore choose the same experts.

The matrices of all experts are stored row-concatenated, [E * 2F, D] and [E * D, F]: Hugging Face's tensors
of one expert are plain slices of them. Experts without a gate are down(relu(up(x))²), and what is called
gate_up is then up alone, [E * F, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graft.models.device import has_kernels
from graft.models.layers.sublayer import Sublayer
from graft.models.ops import (
    clamped_gate,
    elementwise,
    gate_product,
    gather_rows,
    linear,
    router_logits,
)
from graft.models.shape import Experts, ModelShape


class ExpertMLP(Sublayer):
    """A router and its experts, in place of the MLP."""

    def __init__(self, shape: ModelShape, experts: Experts) -> None:
        super().__init__(shape)
        self.experts = experts
        self.is_gated = shape.is_gated
        has_bias, halves = experts.biased, 1 + shape.is_gated
        self.router = nn.Linear(shape.width, experts.count, bias=has_bias)
        self.gate_up = nn.Linear(shape.width, experts.count * halves * experts.ff, bias=has_bias)
        self.down = nn.Linear(experts.ff, experts.count * shape.width, bias=has_bias)
        if experts.has_correction:
            self.correction = nn.Parameter(torch.zeros(experts.count), requires_grad=False)
        if experts.shared_ff:
            self.shared_gate_up = nn.Linear(shape.width, halves * experts.shared_ff, bias=False)
            self.shared_down = nn.Linear(experts.shared_ff, shape.width, bias=False)
        if experts.shared_gate:
            self.shared_gate = nn.Linear(shape.width, 1, bias=False)
        self.load: Tensor | None = None
        """[E] rows of each expert in training, since `take_loads`."""
        self.is_watched = False
        """Whether `choice` is kept; see `router_losses.watch_routers`."""
        self.choice: tuple[Tensor, Tensor] | None = None
        """Logits [T, E] and chosen experts [T, k] of the last pass."""

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition."""
        x, normed = self.norm(x, delta)
        correction = self.correction.float() if self.experts.has_correction else None
        logits_TE = router_logits(normed, self.router.weight, self.order)
        if self.router.bias is not None:
            logits_TE = logits_TE + self.router.bias.float()
        weights_Tk, chosen_Tk = route(logits_TE, self.experts, correction)
        if self.is_watched:
            self.choice = logits_TE, chosen_Tk
        return x, self.finish(self.combine(normed, weights_Tk, chosen_Tk))

    def combine(self, x: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Tensor:
        """The weighted sum of each token's experts, and the shared one, [T, D]."""
        if not len(x) and not torch.is_grad_enabled():
            return x
        if not len(x):  # every weight still gets a gradient, of zeros, as in other layers
            used = [self.gate_up, self.down]
            used += [self.shared_gate_up, self.shared_down] if self.experts.shared_ff else []
            used += [self.shared_gate] if self.experts.shared_gate else []
            weights = [weight for layer in used for weight in (layer.weight, layer.bias)]
            sums = (weight.sum() for weight in weights if weight is not None)
            return x + sum(sums, weights_Tk.sum()) * 0.0
        mix = self._mix_in_kernels if has_kernels(x.device) else self._mix
        mixed = mix(x, weights_Tk, chosen_Tk)
        if self.experts.shared_ff:
            inner, gate = linear(x, self.shared_gate_up.weight, order=self.order), "silu"
            if not self.is_gated:
                inner, gate = inner.relu().square(), ""
            shared = linear(inner, self.shared_down.weight, gate=gate, order=self.order)
            if self.experts.shared_gate:
                # no product: with one column a library adds by the number of rows
                share = (x.float() * self.shared_gate.weight[0].float()).sum(1, keepdim=True)
                shared = shared * elementwise(torch.sigmoid, share).to(shared.dtype)
            mixed = mixed + shared
        return mixed

    def _count(self, load_E: Tensor) -> None:
        self.load = load_E if self.load is None else self.load.to(load_E.device) + load_E

    def _mix_in_kernels(self, x: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Tensor:
        from graft.models.kernels.experts import mix_experts
        from graft.models.kernels.gate import Clamp
        from graft.models.kernels.routing import group_rows, rows_apart

        learns, count = torch.is_grad_enabled(), self.experts.count
        is_small = not learns and 4 * chosen_Tk.numel() <= count  # two rows of one expert are rare
        groups = (rows_apart if is_small else group_rows)(chosen_Tk, count)
        if learns and groups.starts is not None:
            self._count(groups.starts.diff())
        first, last = self.gate_up, self.down
        how = first.bias, last.bias, Clamp(self.experts.swiglu_limit, self.experts.swiglu_alpha)
        return mix_experts(x, first.weight, last.weight, weights_Tk, groups, *how)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(x, weight) if self.order is None else self.order.product(x, weight)
        return out if bias is None else out + bias

    def _gate(self, gate_up: Tensor) -> Tensor:
        """[R, 2F] -> [R, F]"""
        limit = self.experts.swiglu_limit
        if not self.is_gated:
            return gate_up.relu().square()
        if not limit:
            return gate_product(gate_up)
        return clamped_gate(gate_up, self.experts.swiglu_alpha, limit)

    def _per_expert(self, layer: nn.Linear) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each expert."""
        count, bias = self.experts.count, layer.bias
        # unbind, not an index each: its gradient is one tensor, not one as large as all for each expert
        weights = layer.weight.view(count, -1, layer.weight.shape[1]).unbind()
        biases = [None] * count if bias is None else bias.view(count, -1).unbind()
        return list(zip(weights, biases, strict=True))

    def _mix(self, x: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [T, D]."""
        flat, k = chosen_Tk.flatten(), self.experts.top_k
        by_expert = flat.argsort(stable=True)
        counts_E = flat.bincount(minlength=self.experts.count)
        if torch.is_grad_enabled():
            self._count(counts_E)
        inputs = gather_rows(x, by_expert // k).split(counts_E.tolist())
        gate_up, down = self._per_expert(self.gate_up), self._per_expert(self.down)
        parts = [
            self._product(self._gate(self._product(rows, *gate_up[e])), *down[e])
            for e, rows in enumerate(inputs)
            if len(rows)
        ]
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(back), device=back.device)
        outputs = gather_rows(torch.cat(parts), back).unflatten(0, (-1, k)).unbind(1)
        return sum_slots(outputs, weights_Tk.to(x.dtype))


def take_loads(model: nn.Module, device: torch.device) -> Tensor | None:
    """[L, E] rows of each expert in training since the last call; None: no layer has experts."""
    layers = [layer for layer in model.modules() if isinstance(layer, ExpertMLP)]
    if not layers:
        return None
    unused = torch.zeros(layers[0].experts.count, dtype=torch.int64, device=device)
    loads = [unused if layer.load is None else layer.load for layer in layers]
    for layer in layers:
        layer.load = None
    return torch.stack(loads)


def describe_loads(even_LE: Tensor) -> dict[str, float]:
    """How evenly experts were used; `even_LE` are multiples of their even share.

    With 3, 1, 0, 0 of four experts (6, 2, 0, 0 rows): max_load 3, that of the busiest, and unused .5.
    """
    return {
        "experts/max_load": float(even_LE.amax(1).mean()),
        "experts/unused": float((even_LE == 0).float().mean()),
    }


def route(
    logits_TE: Tensor, experts: Experts, correction_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and numbers [T, k] of the experts of each token, the likeliest first.

    Logits 2, 0, 1 with k = 2: probabilities .67, .09, .24, so experts 0 and 2 with weights .67 and .24,
    or .73 and .27 where they are renormalised.
    """
    is_usual = experts.sum_eps == 1e-20 and experts.has_correction == (experts.router == "sigmoid")
    if has_kernels(logits_TE.device) and experts.groups == 1 and is_usual:
        return _RouteInKernel.apply(logits_TE, experts, correction_E)
    scores_TE = _scores(logits_TE, experts)
    rated_TE = scores_TE.detach()
    if correction_E is not None:
        rated_TE = rated_TE + correction_E
    if experts.groups > 1:
        rated_TE = _keep_best_groups(rated_TE, experts)
    chosen_Tk = rated_TE.topk(experts.top_k).indices
    return _weigh(scores_TE, chosen_Tk, experts), chosen_Tk


def _scores(logits_TE: Tensor, experts: Experts) -> Tensor:
    is_sigmoid = experts.router == "sigmoid"
    return elementwise(torch.sigmoid, logits_TE) if is_sigmoid else logits_TE.softmax(-1)


def _weigh(scores_TE: Tensor, chosen_Tk: Tensor, experts: Experts) -> Tensor:
    """The weights [T, k] of the chosen experts."""
    scores_Tk = scores_TE.gather(1, chosen_Tk)
    if experts.renormalise:
        scores_Tk = scores_Tk / (_sum_in_order(scores_Tk) + experts.sum_eps)
    return scores_Tk if experts.scaling == 1 else scores_Tk * experts.scaling


class _RouteInKernel(torch.autograd.Function):
    """`route` in one launch; its gradient is that of the plain form."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits_TE: Tensor, experts: Experts, correction_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from graft.models.kernels.routing import choose_and_weigh

        how = experts.top_k, experts.renormalise, experts.scaling
        weights_Tk, chosen_Tk = choose_and_weigh(logits_TE, correction_E, *how)
        ctx.save_for_backward(logits_TE, chosen_Tk)
        ctx.experts = experts
        ctx.mark_non_differentiable(chosen_Tk)
        return weights_Tk, chosen_Tk

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits_TE, chosen_Tk = ctx.saved_tensors
        with torch.enable_grad():
            logits_TE = logits_TE.detach().requires_grad_()
            weights_Tk = _weigh(_scores(logits_TE, ctx.experts), chosen_Tk.long(), ctx.experts)
        return *torch.autograd.grad(weights_Tk, logits_TE, grads[0]), None, None


def _keep_best_groups(rated_TE: Tensor, experts: Experts) -> Tensor:
    """-inf for experts outside the best groups; a group is as good as its two best experts together."""
    by_group = rated_TE.unflatten(1, (experts.groups, -1))
    best_two = by_group.topk(2, dim=-1).values
    best = (best_two[..., 0] + best_two[..., 1]).topk(experts.top_groups).indices
    is_kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=rated_TE.device)
    is_kept.scatter_(1, best, True)
    return by_group.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)


def _sum_in_order(x_Tk: Tensor) -> Tensor:
    """[T, 1]: column after column, an order that does not depend on T."""
    first, *others = x_Tk.split(1, dim=1)
    for column in others:
        first = first + column
    return first


def sum_slots(outputs: tuple[Tensor, ...], weights_Tk: Tensor) -> Tensor:
    """[T, D]: the weighted sum of k outputs [T, D], from the first slot to the last."""
    total = outputs[0] * weights_Tk[:, :1]
    for slot, output in enumerate(outputs[1:], start=1):
        total = total + output * weights_Tk[:, slot : slot + 1]
    return total
