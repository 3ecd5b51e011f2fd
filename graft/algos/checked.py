"""Checks of what the user's losses, weights, credits, shapings, reductions and divergences return.

    N rows, T tokens

A loss that returns one number would be broadcast over all tokens, and the gradient would be as many times
too large as the batch has tokens; a credit of shape [N] fits a batch with N = T. Both are refused.
"""

from __future__ import annotations

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
    if name in LEARNERS_OWN:
        raise UserCodeError(
            f"{who} has a metric called {name!r}, which graft writes itself; give it another name, such as "
            f"'my/{name}'"
        )
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
        raise UserCodeError(
            f"{who} returned a tensor of {value.dtype}; it must be of a float type: end it with .float()"
        )


LEARNERS_OWN = (
    "loss",
    "loss/value",
    "loss/observations",
    "grad_norm",
    "learning_rate",
    "step",
    "phase",
)
"""Metrics of a step that a function's own would replace."""

ARGUMENTS = {
    "loss": ("logp", "entropy", "batch"),
    "weight": ("logp", "batch"),
    "credit": ("advantages", "batch"),
    "shaping": ("batch",),
    "reduction": ("batch",),
    "branch": ("builder",),
    "divergence": ("student", "teacher"),
}
"""The arguments of a function of each kind."""


def checked(function: Any, what: str) -> Any:
    """`function` with its results checked; `what` is a key of `CHECKED`."""
    who, check = UserObject(function, what), CHECKED[what]

    @wraps(function)
    def call(*args: Any) -> Any:
        tensors: dict[str, Any] = dict(zip(ARGUMENTS[what], args, strict=True))
        if isinstance(batch := tensors.pop("batch", None), Batch):
            tensors |= {f"batch.{name}": tensor for name, tensor in batch.tensors().items()}
        tensors.pop("advantages", None)  # a sum that a credit may add to
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        before = {name: tensor._version for name, tensor in tensors.items()}
        try:
            with naming(function, what):
                found = function(*args)
        except UserCodeError as error:
            if not isinstance(batch, Batch) or "NoneType" not in str(error):
                raise
            raise UserCodeError(f"{error}. {_describe_empty(batch)}") from error.__cause__
        # later functions would read changed numbers
        if changed := [name for name, tensor in tensors.items() if tensor._version != before[name]]:
            raise UserCodeError(
                f"{who} changed {changed[0]} in place; it must leave the batch and its log-probs as they "
                f"are: write x = {changed[0]} * 2, not {changed[0]} *= 2"
            )
        return check(found, args, who)

    return call


def _describe_empty(batch: Batch) -> str:
    empty = [one.name for one in fields(batch) if getattr(batch, one.name) is None]
    hint = (
        ""
        if batch.old_logprobs is not None
        else (
            "; without old_logprobs there is one update per batch, and log_ratio(logp, batch) of "
            "graft.algos.losses.loss is right with and without them"
        )
    )
    return f"None in this batch: {', '.join(empty)} (docs/loop.md says when){hint}"


def _loss(found: Any, args: tuple[Any, ...], who: UserObject) -> tuple[Tensor, dict[str, Tensor]]:
    return check_loss(found, args[0], who.thing)  # not whether it is finite: the host would wait


def _weight(found: Any, args: tuple[Any, ...], who: UserObject) -> tuple[Tensor, dict[str, Tensor]]:
    logp_NT: Tensor = args[0]
    # metrics may be left out
    values = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found, {}))
    wanted = f"a weight or (weight, metrics): a tensor of shape {list(logp_NT.shape)}, and a dict"
    if len(values) != 2 or not isinstance(values[1], dict):
        raise refusal(who, found, wanted)
    weight_NT: Any = values[0]
    if isinstance(weight_NT, Tensor) and weight_NT.dtype == torch.bool:
        weight_NT = weight_NT.float()  # a mask
    _check_grid(weight_NT, logp_NT.shape, who, "as in (gap < 1).float()")
    listed = cast("dict[Any, Any]", values[1])
    named = {name: _metric(name, value, logp_NT, who) for name, value in listed.items()}
    return weight_NT.detach(), named


def _credit(found: Any, args: tuple[Any, ...], who: UserObject) -> Tensor:
    mask_NT = args[-1].mask
    _check_grid(found, mask_NT.shape, who, "as in reward[:, None] * batch.mask")
    if not (is_finite := found[mask_NT].isfinite()).all():
        raise NotFinite(
            f"{who} returned NaN or inf for {int((~is_finite).sum())} trained tokens; every advantage "
            "must be a finite number. A std of 0 in a denominator is the usual cause"
        )
    return found.detach().float()


def _shaping(found: Any, args: tuple[Any, ...], who: UserObject) -> Batch:
    if not isinstance(found, Batch):
        raise refusal(who, found, "a Batch: batch.replace(reward=...)")
    return found


def _reduction(found: Any, args: tuple[Any, ...], who: UserObject) -> Tensor:
    mask_NT = args[-1].mask
    _check_grid(found, mask_NT.shape, who, "the weight of its loss")
    weights = found[mask_NT]
    if not weights.isfinite().all():
        raise NotFinite(f"{who} returned NaN or inf; every weight must be a finite number")
    if len(weights) and not weights.any():
        raise UserCodeError(f"{who} weighs every trained token with 0, so nothing would be learned")
    return found


def _divergence(found: Any, args: tuple[Any, ...], who: UserObject) -> Tensor:
    student: Tensor = args[0]
    _check_grid(found, student.shape[:-1], who, "the sum over the last axis")
    if student.requires_grad and not found.requires_grad:
        raise UserCodeError(
            f"{who} returned a divergence that does not depend on the student, so nothing would be learned; "
            "compute it from student, without detach(), item() or no_grad()"
        )
    return found


CHECKED = {
    "divergence": _divergence,
    "loss": _loss,
    "weight": _weight,
    "credit": _credit,
    "shaping": _shaping,
    "reduction": _reduction,
}
