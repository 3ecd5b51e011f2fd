"""Named algorithms: combinations of shaping, credit, loss and reduction.

A part is a name of its table, "their.module:factory", or either with keywords:
("clip", {"high": 0.28}). Change one with `dataclasses.replace(PRESETS["grpo"], kl_coef=0.04)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from graft.algos.checked import ARGUMENTS, CHECKED, checked
from graft.algos.credit import CREDITS, Credit, chain
from graft.algos.losses import LOSSES, Loss, with_entropy, with_importance, with_kl
from graft.algos.reductions import REDUCTIONS, Reduction, turn_starts
from graft.algos.shaping import SHAPINGS, Shaping, shape_in_turn
from graft.registry import resolve
from graft.user_code import UserCodeError, UserObject, refusal, seen

Part = str | tuple[str, Mapping[str, Any]]
"""A name, or a name with keywords for the factory behind it."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm: branch x credit x loss x reduction, with the terms around the loss."""

    credit: tuple[Part, ...]
    loss: Part
    reduction: Part = "token"
    branch: Part = "independent"
    shaping: tuple[Part, ...] = ()

    importance_cap: float | None = None
    """Truncated importance weight for the gap between engine and learner; None: off."""
    kl_coef: float = 0.0
    """KL to a reference in the loss; 0: no reference model is needed."""
    kl_kind: str = "k3"
    entropy_coef: float = 0.0

    needs_critic: bool = False
    returns: Part | None = None
    """The credit that computes the critic's targets."""
    value_clip: float | None = None
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are discarded and replaced by new ones."""

    @property
    def value_reduction(self) -> Reduction | None:
        """Of the critic's loss; None: the policy's."""
        is_per_turn = isinstance(self.returns, tuple) and self.returns[1].get("per") == "turn"
        return turn_starts() if is_per_turn else None


PRESETS: dict[str, Preset] = {
    # one update per batch, no baseline: the simplest
    "reinforce": Preset(credit=("reinforce",), loss="reinforce"),
    # GEM: gamma 0.9 in games, 1 elsewhere; 2 epochs; importance cap 2; divided by 4096, the cap
    # of a turn
    "rebn": Preset(
        credit=(("discounted", {"gamma": 1.0}), "rebn"),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction=("constant", {"length": 4096}),
        importance_cap=2.0,
    ),
    # DeepSeekMath: mean over rows of token means; its 0.04 * k3 to the reference is left out,
    # because it doubles the models in memory; kl_coef=0.04 adds it
    "grpo": Preset(
        credit=("grpo",), loss=("clip", {"low": 0.2, "high": 0.2}), reduction="sequence"
    ),
    # no std, no length in any denominator; 3000 was the generation budget: set yours
    "dr_grpo": Preset(
        credit=("dr_grpo",),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction=("constant", {"length": 3000}),
    ),
    # published as a sum over tokens, mean over rows: the token mean has the same direction
    "rloo": Preset(credit=("rloo",), loss="reinforce"),
    # clip-higher, token mean, no KL, groups refilled; 16384 tokens without and 4096 more with a
    # rising penalty: set your own budget
    "dapo": Preset(
        credit=("grpo",),
        loss=("clip", {"low": 0.2, "high": 0.28}),
        shaping=(("overlong", {"max_length": 20480, "buffer": 4096, "penalty": 1.0}),),
        dynamic_sampling=True,
    ),
    # the ratio of a row moves far less than that of a token: hence the narrow range
    "gspo": Preset(
        credit=("grpo",), loss=("gspo", {"low": 3e-4, "high": 4e-4}), reduction="sequence"
    ),
    # MiniMax-M1: no lower bound, token mean over the batch, no KL; the upper bound was tuned and
    # not published; 5 is ScaleRL's choice
    "cispo": Preset(credit=("grpo",), loss=("cispo", {"low": 1.0, "high": 4.0})),
    # EARL: a group that failed as a whole is tried again with a call forced into each attempt;
    # 0.001 * k3 to the base model, on vocabulary tokens only
    "cpo": Preset(
        credit=("cpo",),
        loss=("clip", {"low": 0.2, "high": 0.2, "dual": 3.0}),
        branch="counterfactual",
        kl_coef=1e-3,
    ),
    # EARL's baseline: the same without counterfactual attempts
    "earl_grpo": Preset(
        credit=(("grpo", {"unbiased": True}),),
        loss=("clip", {"low": 0.2, "high": 0.2, "dual": 3.0}),
        kl_coef=1e-3,
    ),
    # ARPO: plain GRPO on a tree that forks where the agent became uncertain. A token that d attempts
    # share is trained d times, once with the advantage of each ("soft"); published with a KL of
    # weight 0, which is left out together with its reference
    "arpo": Preset(
        credit=(("grpo", {"unbiased": True}),),
        loss=("clip", {"low": 0.2, "high": 0.2, "dual": 3.0}),
        branch="arpo",
    ),
    # in ARPO's paper and not in its code: a shared token has the mean advantage of its attempts.
    # Counted d times it would equal "soft" (d * mean = sum), so here it counts once
    "arpo_hard": Preset(
        credit=(("grpo", {"unbiased": True}), "share_over_spans"),
        loss=("clip", {"low": 0.2, "high": 0.2, "dual": 3.0}),
        reduction="unique_tokens",
        branch="arpo",
    ),
    # AEPO: ARPO with a budget for roots, a penalty on consecutive forks, and these two parts;
    # the published code compares entropies within a micro-batch, and only where an entropy bonus
    # is on. graft always compares over the whole batch
    "aepo": Preset(
        credit=(("grpo", {"unbiased": True}), ("entropy_aware", {"weight": 0.2})),
        loss=("balanced_clip", {"low": 0.2, "high": 0.2, "dual": 3.0}),
        branch="aepo",
    ),
    # no discount within an answer, whitened advantages; a KL penalty is a shaping:
    # ("kl_in_reward", {"coef": 0.05}) with a reference
    "ppo": Preset(
        credit=(("gae", {"gamma": 1.0, "lam": 0.95}), "whiten"),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        needs_critic=True,
        returns=("gae_returns", {"gamma": 1.0, "lam": 0.95}),
        value_clip=0.5,
    ),
    # GEM's PPO: a turn is one decision, with the value of the state in which it begins; the other
    # settings are those of rebn, which it is without a critic
    "ppo_turn": Preset(
        credit=(("gae", {"gamma": 1.0, "lam": 1.0, "per": "turn"}), "rebn"),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction=("constant", {"length": 4096}),
        importance_cap=2.0,
        needs_critic=True,
        returns=("gae_returns", {"gamma": 1.0, "lam": 1.0, "per": "turn"}),
        value_clip=0.2,
    ),
}


def build(preset: Preset | str) -> tuple[Shaping, Credit, Loss, Reduction]:
    """The four functions of an algorithm.

    >>> shape, credit, loss, reduce = build("grpo")
    """
    if isinstance(preset, str):
        preset = resolve_preset(preset)
    shaping = shape_in_turn(*(make(part, SHAPINGS, "shaping") for part in preset.shaping))
    credit = chain(*(make(part, CREDITS, "credit") for part in preset.credit))
    loss: Loss = make(preset.loss, LOSSES, "loss")
    # innermost: it weights the policy term only
    loss = with_importance(loss, preset.importance_cap)
    if preset.kl_coef:
        loss = with_kl(loss, preset.kl_coef, preset.kl_kind)
    if preset.entropy_coef:
        loss = with_entropy(loss, preset.entropy_coef)
    return shaping, credit, loss, make(preset.reduction, REDUCTIONS, "reduction")


def resolve_preset(name: str) -> Preset:
    """From the table, or the user's own "module:PRESET"."""
    preset = resolve(name, PRESETS, "algorithm")
    if not isinstance(preset, Preset):
        raise UserCodeError(
            f"algorithm {name!r} is {seen(preset)}; it must be a Preset, as in "
            'dataclasses.replace(PRESETS["grpo"], kl_coef=0.04)'
        )
    return preset


def make(part: Part | Callable[..., Any], table: Mapping[str, Any], what: str) -> Any:
    """Find the factory and call it with its keywords; a function may be given instead of a name.

    >>> make(("clip", {"hihg": 0.28}), LOSSES, "loss")
    Traceback (most recent call last):
    ValueError: loss 'clip' cannot be made with (hihg=0.28): got an unexpected keyword argument
    'hihg'; it is clip(low=0.2, high=0.2, dual=None)
    """
    if isinstance(part, str) or callable(part):
        name, keywords = part, dict[str, Any]()
    else:
        name, keywords = part
    factory = resolve(name, table, what)
    if not callable(factory):
        raise UserCodeError(
            f"{what} {name!r} is {seen(factory)}; it must be a function that returns the {what}"
        )
    signature = inspect.signature(factory)
    try:
        signature.bind(**keywords)
    except TypeError as error:
        if name not in table and _takes(signature, [None] * len(ARGUMENTS[what]), keywords):
            return _finished(partial(factory, **keywords) if keywords else factory, what)
        given = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
        bare = (str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        if not isinstance(name, str):
            raise UserCodeError(
                f"{UserObject(factory, what)} takes ({', '.join(bare)}); it must take "
                f"({', '.join(ARGUMENTS[what])})"
            ) from error
        usage = f"{name}({', '.join(bare)})"
        raise ValueError(
            f"{what} {name!r} cannot be made with ({given}): {error}; it is {usage}"
        ) from error
    made = factory(**keywords)
    if not callable(made):
        raise refusal(UserObject(factory, what), made, f"the {what}, a function")
    return _finished(made, what)


def _takes(signature: inspect.Signature, args: list[Any], keywords: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return False
    return True


def _finished(made: Any, what: str) -> Any:
    return checked(made, what) if what in CHECKED else made
