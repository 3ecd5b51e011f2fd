"""Auxiliary losses of routers, over the tokens of a step and all layers with experts.

    U trained tokens, E experts of which a token chooses k, weights w_U that add up to 1 over the step

    balance   E * sum over e of f_e P_e    f: the weight of the tokens that chose e; P: its mean chance
    z         the mean of logsumexp(logits)^2

f and P are means over the layers too, as in transformers: even use of the experts gives k, its minimum
where probabilities are those of the choice. f has no gradient, so that of a step is the sum over its
micro-batches once f, which is of the whole step, is known.

What a router decided for a trained token is read at the token before it, whose state predicts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.layers.experts import ExpertMLP
from graft.models.ops import gather_rows


@contextmanager
def watch_routers(model: Decoder) -> Iterator[None]:
    """Keep what the routers of a model decide in its last pass, for `router_losses` and `chosen_shares`."""
    layers = [layer for layer in model.modules() if isinstance(layer, ExpertMLP)]
    try:
        for layer in layers:
            layer.is_watched = True
        yield
    finally:
        for layer in layers:
            layer.is_watched, layer.choice = False, None


def _choices(model: Decoder, before_U: Tensor) -> Iterator[tuple[ExpertMLP, Tensor, Tensor]]:
    """Each layer with experts, its logits [U, E] and its choice [U, k] for the trained tokens."""
    for block in model.blocks:
        layer = next((part for part in block.modules() if isinstance(part, ExpertMLP)), None)
        if layer is None or layer.choice is None:
            continue
        logits, chosen = layer.choice
        if block is model.blocks[-1]:  # it computes these tokens alone, perhaps with padding
            yield layer, logits[: len(before_U)], chosen[: len(before_U)]
        else:
            yield layer, gather_rows(logits, before_U), chosen[before_U]


@torch.no_grad()
def chosen_shares(model: Decoder, before_U: Tensor, weights_U: Tensor) -> Tensor:
    """f_E of the tokens of the last pass: their weights, added up for each of the experts they chose."""
    shares: list[Tensor] = []
    for layer, _, chosen_Uk in _choices(model, before_U):
        is_chosen_UE = torch.zeros(len(before_U), layer.experts.count, device=weights_U.device)
        shares.append(weights_U @ is_chosen_UE.scatter_(1, chosen_Uk.long(), 1.0))
    return torch.stack(shares).mean(0)


def router_losses(
    model: Decoder, before_U: Tensor, weights_U: Tensor, shares_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Balance and z loss of the tokens of the last pass; `shares_E` is f of the whole step."""
    chances: list[Tensor] = []
    squares: list[Tensor] = []
    for layer, logits_UE, _ in _choices(model, before_U):
        if layer.experts.router == "softmax":
            chance_UE = logits_UE.softmax(-1)
        else:
            scores_UE = logits_UE.sigmoid()
            chance_UE = scores_UE / scores_UE.sum(-1, keepdim=True)
        chances.append(weights_U @ chance_UE)
        squares.append(weights_U @ logits_UE.logsumexp(-1).square())
    balance = len(shares_E) * (torch.stack(chances).mean(0) @ shares_E)
    return balance, torch.stack(squares).mean()
