"""Named algorithms: combinations of shaping, credit, loss and reduction.

A part is a name of its table, "their.module:factory", or either with keywords:
("clip", {"high": 0.28}). Change one with `dataclasses.replace(PRESETS["grpo"], kl_coef=0.04)`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from graft.algos.algorithm import Algorithm
from graft.algos.batch import Batch
from graft.algos.coefficients import Coefficient, Controller, EntropyController, KlController
from graft.algos.credits.credit import Chain, chain
from graft.algos.credits.table import CREDITS
from graft.algos.distillation import DIVERGENCES, with_distillation
from graft.algos.losses.covariance import SelectiveLoss
from graft.algos.losses.loss import Loss
from graft.algos.losses.table import LOSSES
from graft.algos.losses.terms import with_entropy, with_kl, with_weights
from graft.algos.parts import make
from graft.algos.preset import Part, Preset, kl_in_reward_of
from graft.algos.reductions import REDUCTIONS, Reduction
from graft.algos.shaping import SHAPINGS, Shaping, shape_in_turn
from graft.algos.weights import WEIGHTS, BatchWeight, Weight, whole_batch
from graft.registry import resolve
from graft.user_code import UserCodeError, describe_value, is_users_own, named

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
    # a soft gate per token in place of the clip
    "sapo": Preset(
        credit=("grpo",), loss=("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}), reduction="sequence"
    ),
    # the geometric mean of ratios that are clipped token by token, to e^-0.4 ... e^0.4
    "gmpo": Preset(
        credit=("grpo",), loss=("gmpo", {"low": 0.4, "high": 0.4}), reduction="sequence"
    ),
    # GSPO without the division by the length of a row
    "luspo": Preset(
        credit=("grpo",), loss=("luspo", {"low": 2e-3, "high": 2.5e-3}), reduction="sequence"
    ),
    # a smooth weight of the row's product of ratios to the policy that sampled, for stale data
    "vespo": Preset(credit=("grpo",), loss="vespo", old_policy="engine"),
    # the bound is on the change of a probability, measured to the engine; 0.05 with divergence kl
    "dppo": Preset(
        credit=("dr_grpo",),
        loss=("dppo", {"divergence": "tv", "low": 0.15, "high": 0.15}),
        old_policy="engine",
    ),
    # the few tokens that cost most entropy get no gradient, or a KL to the old policy
    "clip_cov": Preset(credit=("grpo",), loss=("clip_cov", {"share": 2e-4, "high": 0.2})),
    "kl_cov": Preset(credit=("grpo",), loss=("kl_cov", {"share": 2e-3, "coef": 1.0})),
    # DAPO on the fifth of the tokens with the highest entropy
    "top_entropy": Preset(
        credit=("grpo",),
        loss=("clip", {"low": 0.2, "high": 0.28}),
        shaping=(("overlong", {"max_length": 20480, "buffer": 4096, "penalty": 1.0}),),
        weights=(("top_entropy", {"share": 0.2}),),
        dynamic_sampling=True,
    ),
    # IcePop: tokens whose probability differs too much between engine and learner are left out
    "icepop": Preset(
        credit=("grpo",),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        weights=(("importance", {"floor": 0.5, "cap": 5.0, "outside": "mask"}),),
    ),
    # DeepSeek-V3.2: rows with a negative advantage that the policy has left behind are left out, and the KL
    # is that of the present policy; threshold and coefficient were not published
    "deepseek_v32": Preset(
        credit=("dr_grpo",),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction="sequence",
        weights=(("off_policy_rows", {"high": 0.5}),),
        kl_coef=1e-3,
        kl_corrected=True,
    ),
    # ECHO: GRPO, and the policy learns to predict what the environment answers
    "echo": Preset(
        credit=("grpo",),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction="sequence",
        observation_coef=0.05,
    ),
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
    # on-policy distillation (Thinking Machines): each token's advantage is the teacher's log-prob minus
    # the student's; no reward, no discount
    "opd": Preset(credit=("teacher_kl",), loss=("clip", {"low": 0.2, "high": 0.2})),
    # IW-OPD: the first tokens that the teacher would not have written count more
    "iw_opd": Preset(
        credit=(("teacher_kl", {"early": 0.5}),), loss=("clip", {"low": 0.2, "high": 0.2})
    ),
    # MOPD (MiMo-V2): a teacher per domain, and the advantage of the reward beside it
    "mopd": Preset(credit=("grpo", "teacher_kl"), loss=("clip", {"low": 0.2, "high": 0.2})),
    # GKD: the whole distributions, halfway between forward and reverse KL; rewards are not read
    "gkd": Preset(credit=(), loss="distillation", divergence=("js", {"beta": 0.5})),
    # SDPO, OPSD: the same with the policy as its own teacher, which reads more than the policy
    # (distill.context); a row counts as much as any other
    "sdpo": Preset(
        credit=(), loss="distillation", divergence=("js", {"beta": 0.5}), reduction="sequence"
    ),
    # REINFORCE++: returns per token, compared over the whole batch; its KL penalty is a shaping:
    # algo.kl_in=reward with kl_kind k1
    "reinforce_plus_plus": Preset(
        credit=(("discounted", {"gamma": 1.0, "per": "token"}), ("whiten", {"unbiased": True})),
        loss=("clip", {"low": 0.2, "high": 0.2}),
    ),
    # the same with the mean of the group as a baseline, for several attempts per task
    "reinforce_plus_plus_baseline": Preset(
        credit=("dr_grpo", ("whiten", {"unbiased": True})),
        loss=("clip", {"low": 0.2, "high": 0.2}),
    ),
    # one greedy attempt per task more, which is only a baseline
    "remax": Preset(credit=("remax",), loss="reinforce", branch="greedy_baseline"),
    # strictly on policy: one update per batch, neither KL nor entropy term
    "opo": Preset(credit=("opo",), loss="reinforce"),
    # no clipping, no reference; groups of equal rewards are made up for by alpha
    "gpg": Preset(credit=("gpg",), loss="reinforce"),
    # as GRPO, divided by the mean reward
    "maxrl": Preset(credit=("maxrl",), loss=("clip", {"low": 0.2, "high": 0.2})),
    # Chen et al.: the best of k = 4 attempts, over all sets of 4; wants groups of more than 4
    "pass_at_k": Preset(
        credit=(("pass_at_k", {"k": 4}),), loss=("clip", {"low": 0.2, "high": 0.2})
    ),
    # the best of the whole group: only the best attempt is trained
    "grpo_passk": Preset(credit=("grpo_passk",), loss=("clip", {"low": 0.2, "high": 0.2})),
    # each reward of task.reward by itself, then over all attempts of the batch
    "gdpo": Preset(
        credit=(("gdpo", {"unbiased": True}), ("whiten", {"per": "leaf", "unbiased": True})),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction="sequence",
    ),
    # GiGPO's scripts: gamma 0.95 from turn to turn, both parts only centred, both of weight 1; their
    # 0.01 * k3 to the reference is left out, as in grpo
    "gigpo": Preset(
        credit=(("gigpo", {"gamma": 0.95, "weight": 1.0, "scale": False}),),
        loss=("clip", {"low": 0.2, "high": 0.2}),
    ),
    # published on trees with n forks at every step; here on those of arpo. A shared token counts once
    "treerpo": Preset(
        credit=("treerpo",),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction="unique_tokens",
        branch="arpo",
    ),
    # SPIRAL, self-play: a running mean per game and seat with decay 0.95; no length in a denominator
    "spiral": Preset(
        credit=(("rae", {"decay": 0.95}),),
        loss=("clip", {"low": 0.2, "high": 0.2}),
        reduction=("constant", {"length": 4096}),
    ),
    # a baseline for each token, weighted by the gradient so far
    "optimal_token_baseline": Preset(
        credit=("optimal_token_baseline",), loss=("clip", {"low": 0.2, "high": 0.2})
    ),
}


def algorithm_of(preset: Preset, branch: Callable[[Any], Awaitable[None]]) -> Algorithm:
    """The algorithm of a preset, on the trees of this branch."""
    controllers = controllers_of(preset)
    shape, credit, loss, reduction = build(preset, controllers)
    returns = None if preset.returns is None else make(preset.returns, CREDITS, "credit")
    prepare = prepare_of(preset)
    return Algorithm(preset, branch, shape, credit, returns, loss, reduction, prepare, controllers)


def controllers_of(preset: Preset) -> dict[str, Controller]:
    """Coefficients with a target."""
    found: dict[str, Controller] = {}
    if preset.kl_control is not None:
        coef = preset.kl_coef or kl_in_reward_of(preset).get("coef", 0.0)
        found["kl"] = KlController.of(coef, preset.kl_control)
    if preset.entropy_control is not None:
        found["entropy"] = EntropyController.of(preset.entropy_coef, preset.entropy_control)
    return found


def build(
    preset: Preset | str, coefficients: Mapping[str, Coefficient] | None = None
) -> tuple[Shaping, Chain, Loss, Reduction]:
    """The four functions of an algorithm; `coefficients` replace those of "kl" and "entropy".

    >>> shape, credit, loss, reduce = build("grpo")
    """
    if isinstance(preset, str):
        preset = resolve_preset(preset)
    moving = coefficients or {}
    parts = [_with_coef(part, moving) for part in preset.shaping]
    shaping = shape_in_turn(*(make(part, SHAPINGS, "shaping") for part in parts))
    credit = chain(*(make(part, CREDITS, "credit") for part in preset.credit))
    loss: Loss = make(preset.loss, LOSSES, "loss")
    # innermost: they weigh the policy term only
    loss = with_weights(loss, weights_of(preset))
    if preset.kl_coef:
        coef = moving.get("kl", preset.kl_coef)
        loss = with_kl(loss, coef, preset.kl_kind, preset.kl_corrected)
    if preset.entropy_coef or "entropy" in moving:
        loss = with_entropy(loss, moving.get("entropy", preset.entropy_coef))
    if preset.distill_coef:
        loss = with_distillation(loss, preset.distill_coef)
    return shaping, credit, loss, make(preset.reduction, REDUCTIONS, "reduction")


def weights_of(preset: Preset) -> tuple[Weight, ...]:
    cap: tuple[Part, ...] = ()
    if preset.importance_cap:
        cap = (("importance", {"cap": preset.importance_cap}),)
    return tuple(make(part, WEIGHTS, "weight") for part in (*cap, *preset.weights))


def prepare_of(preset: Preset) -> Callable[[Batch], Batch]:
    """What loss and weights need of the whole batch, before it is cut into micro-batches."""
    loss, weigh = make(preset.loss, LOSSES, "loss"), whole_batch(weights_of(preset))

    def prepare(batch: Batch) -> Batch:
        if isinstance(loss, SelectiveLoss):
            batch = batch.replace(selected=loss.select(batch))
        return weigh(batch)

    return prepare


def users_parts(preset: Preset) -> list[str]:
    """The user's own functions that a token's loss is made of, as messages name them."""
    made = [("loss", make(preset.loss, LOSSES, "loss"))]
    made += [("weight", weight) for weight in weights_of(preset)]
    if preset.divergence is not None:
        made.append(("divergence", make(preset.divergence, DIVERGENCES, "divergence")))
    plain = [(kind, getattr(one, "weigh", one)) for kind, one in made]
    return [named(one, kind) for kind, one in plain if is_users_own(one)]


def needs_old_logprobs(preset: Preset) -> bool:
    """Whether a weight needs the learner's log-probs of the whole batch before the update."""
    return any(isinstance(one, BatchWeight) and one.needs_old for one in weights_of(preset))


def _with_coef(part: Part, coefficients: Mapping[str, Coefficient]) -> Part:
    if part[0] != "kl_in_reward" or "kl" not in coefficients:
        return part
    return "kl_in_reward", {**dict(part[1]), "coef": coefficients["kl"]}  # type: ignore[arg-type]


def resolve_preset(name: str) -> Preset:
    """Take a preset from the table, or the user's own "module:PRESET"."""
    preset = resolve(name, PRESETS, "algorithm")
    if not isinstance(preset, Preset):
        raise UserCodeError(
            f"algorithm {name!r} is {describe_value(preset)}; it must be a Preset, as in "
            'dataclasses.replace(PRESETS["grpo"], kl_coef=0.04)'
        )
    return preset
