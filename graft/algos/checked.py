"""Checks of what the user's losses, credits, shapings and reductions return.

    N rows, T tokens

A loss that returns one number would be broadcast over all tokens, and the gradient would be as many times
too large as the batch has tokens; a credit of shape [N] fits a batch with N = T. Both are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.user_code import NotFinite, UserCodeError, UserObject, naming, refusal


def check_loss(result: Any, logp_NT: Tensor, loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What a loss returns: one number per token, with gradient, and metrics."""
    who, want = UserObject(loss, "loss"), list(logp_NT.shape)
    wanted = f"(loss, metrics): a tensor of shape {want}, one number per token, and a dict"
    values: Any = result
    if not isinstance(result, tuple) or len(values) != 2:
        raise refusal(who, result, wanted)
    loss_NT, metrics = values
    _check_grid(loss_NT, logp_NT.shape, who, "not reduced: algo.reduction takes the mean")
    if logp_NT.requires_grad and not loss_NT.requires_grad:
        raise UserCodeError(
            f"{who} returned a loss that does not depend on logp, so nothing would be learned; compute it "
            "from logp or entropy, without detach(), item() or no_grad()"
        )
    if not isinstance(metrics, dict):
        raise refusal(who, metrics, "a dict of name -> tensor, as in {}", "gave as metrics")
    listed = cast("dict[Any, Any]", metrics)
    return loss_NT, {name: _metric(name, value, logp_NT, who) for name, value in listed.items()}


def _metric(name: Any, value: Any, logp_NT: Tensor, who: UserObject) -> Tensor:
    wanted = f"a number, or a tensor of shape {list(logp_NT.shape)}"
    if not isinstance(name, str):
        raise UserCodeError(f"{who} has a metric called {name!r}; names must be texts")
    if isinstance(value, bool | int | float):
        value = torch.tensor(float(value), device=logp_NT.device)
    if not isinstance(value, Tensor) or value.shape not in ((), logp_NT.shape):
        raise refusal(who, value, wanted, f"gave as metric {name!r}")
    return value.detach()


def _check_grid(value: Any, shape: torch.Size, who: UserObject, note: str) -> None:
    wanted = f"a tensor of shape {list(shape)} with one number per token, {note}"
    if not isinstance(value, Tensor) or value.shape != shape:
        raise refusal(who, value, wanted)
    if not value.is_floating_point():
        raise UserCodeError(f"{who} returned a tensor of {value.dtype}; it must be of a float type")


def checked(function: Any, what: str) -> Any:
    """`function` with its results checked; `what` is "loss", "credit", "shaping" or "reduction"."""
    return CHECKED[what](function)


@contextmanager
def _untouched(batch: Batch, function: Any, what: str) -> Generator[None]:
    """Refuse a function that writes into the batch: later functions would read changed numbers."""
    tensors = {
        one.name: value
        for one in fields(batch)
        if isinstance(value := getattr(batch, one.name), Tensor)
    }
    before = {name: value._version for name, value in tensors.items()}
    yield
    if changed := [name for name, value in tensors.items() if value._version != before[name]]:
        raise UserCodeError(
            f"{UserObject(function, what)} changed batch.{changed[0]} in place; it must leave the "
            f"batch as it is: write x = batch.{changed[0]} * 2, not batch.{changed[0]} *= 2"
        )


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        before = (logp_NT._version, entropy_NT._version)
        with naming(function, "loss"), _untouched(batch, function, "loss"):
            found = function(logp_NT, entropy_NT, batch)
        if (logp_NT._version, entropy_NT._version) != before:
            raise UserCodeError(
                f"{UserObject(function, 'loss')} changed its log-probs or entropies in place; it must leave "
                "them as they are: write x = logp * 2, not logp *= 2"
            )
        return check_loss(found, logp_NT, function)  # not whether it is finite: the host would wait

    return loss


def _credit(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        who = UserObject(function, "credit")
        with naming(function, "credit"), _untouched(batch, function, "credit"):
            found = function(adv_NT, batch)
        _check_grid(found, batch.mask.shape, who, "as in reward[:, None] * batch.mask")
        if not (fine := found[batch.mask].isfinite()).all():
            raise NotFinite(
                f"{who} returned NaN or inf for {int((~fine).sum())} trained tokens; {FINITE}"
            )
        return found

    return credit


FINITE = "every advantage must be a finite number. A std of 0 in a denominator is the usual cause"


def _shaping(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def shape(batch: Batch) -> Batch:
        with naming(function, "shaping"), _untouched(batch, function, "shaping"):
            found = function(batch)
        if not isinstance(found, Batch):
            raise refusal(
                UserObject(function, "shaping"), found, "a Batch: batch.replace(reward=...)"
            )
        return found

    return shape


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def weigh(batch: Batch) -> Tensor:
        who = UserObject(function, "reduction")
        with naming(function, "reduction"), _untouched(batch, function, "reduction"):
            found = function(batch)
        _check_grid(found, batch.mask.shape, who, "the weight of its loss")
        weights = found[batch.mask]
        if not weights.isfinite().all():
            raise NotFinite(f"{who} returned NaN or inf; every weight must be a finite number")
        if len(weights) and not weights.any():
            raise UserCodeError(
                f"{who} weighs every trained token with 0, so nothing would be learned"
            )
        return found

    return weigh


CHECKED = {"loss": _loss, "credit": _credit, "shaping": _shaping, "reduction": _reduction}

ARGUMENTS = {
    "loss": ("logp", "entropy", "batch"),
    "credit": ("advantages", "batch"),
    "shaping": ("batch",),
    "reduction": ("batch",),
    "branch": ("builder",),
}
"""The arguments of a function of each kind."""
