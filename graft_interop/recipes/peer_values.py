"""Values of TRL's and verl's settings, as values of graft's keys.

A rule gets the value and all settings (with their library's defaults), and returns graft's keys. It raises
CannotTranslate with the reason otherwise. Settings without a rule are copied if their row of the table has
no remark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Given = Mapping[str, Any]
Keys = dict[str, Any]


class CannotTranslate(ValueError):
    """Why a setting has no place in a recipe."""


TRL_DEFAULTS: Keys = {
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "adam_beta1": 0.9, "adam_beta2": 0.999,
    "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "loss_type": "dapo",
    "scale_rewards": "group", "epsilon": 0.2, "beta": 0.0, "seed": 42,
}  # fmt: skip
VERL_DEFAULTS: Keys = {
    "algorithm.adv_estimator": "gae", "data.train_batch_size": 1024, "data.max_prompt_length": 512,
    "data.max_response_length": 512, "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01, "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.actor.optim.betas": [0.9, 0.999], "trainer.total_epochs": 30,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "algorithm.norm_adv_by_std_in_grpo": True,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2, "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0, "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean", "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}  # fmt: skip
"""What a run of theirs does without the setting, if graft would do something else."""


def _any_of(given: Given, *names: str, default: Any = None) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), default)


def _whole(value: float, what: str) -> int:
    if value < 1 or value != int(value):
        raise CannotTranslate(f"{what} is {value:g}, not a whole number")
    return int(value)


def _if_on(key: str, value: Any, off: Any = None) -> Callable[[Any, Given], Keys]:
    """{key: value} if theirs is true, else nothing, or `off`."""
    return lambda theirs, given: {key: value} if theirs else {} if off is None else {key: off}


def _renamed(key: str, names: Mapping[str, Any]) -> Callable[[Any, Given], Keys]:
    def rule(theirs: Any, given: Given) -> Keys:
        if str(theirs) not in names:
            known = ", ".join(names)
            raise CannotTranslate(f"{theirs!r} is not here; graft's {key} has an equal for {known}")
        return {key: names[str(theirs)]} if names[str(theirs)] is not None else {}

    return rule


def _trl_tasks(theirs: Any, given: Given) -> Keys:
    """8 attempts per device x 4 accumulated / 8 attempts per task -> 4 tasks, for one process."""
    rounds = _any_of(given, "steps_per_generation", "gradient_accumulation_steps", default=1)
    attempts = (
        _any_of(given, "generation_batch_size") or given["per_device_train_batch_size"] * rounds
    )
    samples = given["num_generations"]
    keys: Keys = {"rollout.tasks": _whole(attempts / samples, f"{attempts} attempts / {samples}")}
    updates = rounds / (given.get("gradient_accumulation_steps") or 1)
    if "steps_per_generation" in given and updates > 1:
        keys["train.minibatches"] = _whole(updates, "optimizer steps per batch")
    return keys


def _trl_betas(theirs: Any, given: Given) -> Keys:
    return {"train.betas": [given["adam_beta1"], given["adam_beta2"]]}


def _trl_loss(theirs: Any, given: Given) -> Keys:
    constant = {"constant": {"length": given["max_completion_length"]}}
    reductions = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": constant}
    if theirs in reductions:
        return {"algo.name": "grpo", "algo.reduction": reductions[theirs]}
    if theirs in ("cispo", "sapo", "luspo", "vespo"):
        return {"algo.name": theirs}
    raise CannotTranslate(f"graft has no loss {theirs!r}; `graft config --keys` lists algo.name")


def _trl_scale(theirs: Any, given: Given) -> Keys:
    scale = {"group": True, "true": True, "batch": "batch", "none": False, "false": False}
    return {
        "algo.credit": [
            {"grpo": {"scale": scale[str(theirs).lower()], "unbiased": True, "eps": 1e-4}}
        ]
    }


def _clip(theirs: Any, given: Given) -> Keys:
    loss = _any_of(given, "loss_type", "loss_mode", default="vanilla")
    if loss not in ("vanilla", "grpo", "dapo", "bnpo", "dr_grpo"):
        raise CannotTranslate(f"it belongs to the clipped loss, and {loss} has numbers of its own")
    low = _any_of(
        given, "epsilon", "clip_ratio_low", "clip_ratio", "eps_clip", "cliprange", default=0.2
    )
    high = _any_of(given, "epsilon_high", "clip_ratio_high", "clip_ratio", default=low)
    dual = _any_of(given, "delta", "clip_ratio_c")
    part = {"low": low, "high": high} | ({} if dual is None else {"dual": dual})
    if given.get("importance_sampling_level") == "sequence":
        return {"algo.loss": {"gspo": {"low": low, "high": high}}}
    return {"algo.loss": {"clip": part}}


def _verl_credit(theirs: Any, given: Given) -> Keys:
    """The preset, and grpo's division as verl computes it."""
    presets = {"gae": "ppo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo",
               "tir_optimal_token_baseline": "optimal_token_baseline"}  # fmt: skip
    name = presets.get(str(theirs), str(theirs))
    keys: Keys = {"algo.name": name}
    if name == "ppo":
        gae = {"gamma": given["gamma"], "lam": given["lam"]}
        keys["algo.credit"] = [{"gae": gae}, "whiten"]
    if name == "grpo":
        scale = bool(given["norm_adv_by_std_in_grpo"])
        keys["algo.credit"] = [{"grpo": {"scale": scale, "unbiased": True}}]
    return keys


def _verl_minibatches(theirs: Any, given: Given) -> Keys:
    tasks = given["train_batch_size"]
    return {"train.minibatches": _whole(tasks / theirs, f"train_batch_size / {theirs}")}


def _verl_reduction(theirs: Any, given: Given) -> Keys:
    constant = {"constant": {"length": given["max_response_length"]}}
    names = {"token-mean": "token", "seq-mean-token-mean": "sequence",
             "seq-mean-token-sum-norm": constant}  # fmt: skip
    return _renamed("algo.reduction", names)(theirs, given)


def _context(theirs: Any, given: Given) -> Keys:
    """Prompt and answer together; in several turns the answer of verl is the whole conversation."""
    answer = _any_of(
        given, "max_response_length", "max_completion_length", "response_length", default=0
    )
    return {"rollout.max_context": int(theirs) + int(answer)}


def _kl(theirs: Any, given: Given) -> Keys:
    if given.get("use_kl_loss") is True:
        return {"algo.kl_coef": given.get("kl_loss_coef", 0.001)}
    return {"algo.kl_coef": 0.0}


def _kl_in_reward(theirs: Any, given: Given) -> Keys:
    if given.get("use_kl_in_reward") is True:
        return {"algo.kl_coef": given.get("kl_ctrl.kl_coef", 0.001), "algo.kl_in": "reward"}
    return {}


def _steps(theirs: Any, given: Given) -> Keys:
    if _any_of(given, "max_steps", "total_training_steps", default=-1) > 0:
        return {}
    raise CannotTranslate(
        f"set train.steps (100 if left out): {theirs:g} passes are {theirs:g} x rows / rollout.tasks"
    )


def _positive(key: str) -> Callable[[Any, Given], Keys]:
    """-1 and 0 are off."""
    return lambda theirs, given: {key: theirs} if theirs and theirs > 0 else {}


def _every(key: str) -> Callable[[Any, Given], Keys]:
    return lambda theirs, given: {key: max(0, int(theirs or 0))}


def _warmup_share(theirs: Any, given: Given) -> Keys:
    if not theirs:
        return {}
    if (steps := _any_of(given, "max_steps", "total_training_steps", default=-1)) < 1:
        raise CannotTranslate(f"train.warmup is in steps: {theirs:g} x train.steps")
    return {"train.warmup": round(theirs * steps)}


def _rows(theirs: Any, given: Given) -> Keys:
    return {"task.env": "prompts", "task.args": {"data": _place(theirs, given, "train")}}


def _held_out_rows(theirs: Any, given: Given) -> Keys:
    return {"task.eval_args": {"data": _place(theirs, given, "test")}}


def _place(theirs: Any, given: Given, split: str) -> Any:
    if isinstance(theirs, list | tuple):
        return [_place(one, given, split) for one in theirs]
    is_hub = str(theirs).count("/") == 1 and not Path(str(theirs)).suffix and theirs[0] not in "./~"
    return f"{given.get('dataset_train_split') or split}@{theirs}" if is_hub else theirs


def _test_split(theirs: Any, given: Given) -> Keys:
    return (
        {"task.eval_args": {"data": f"{theirs}@{given['dataset_name']}"}}
        if "dataset_name" in given
        else {}
    )


def _reward(theirs: Any, given: Given) -> Keys:
    names = theirs if isinstance(theirs, list | tuple) else [theirs]
    made = []
    for name in names:
        if name == "accuracy_reward":
            made.append("math_answer")
        elif isinstance(name, str) and "." in name and "/" not in name:
            made.append(":".join(name.rsplit(".", 1)))
        else:
            raise CannotTranslate(
                f"write the function {name} into a file of its own and give task.reward=FILE:{name}; "
                "TRL's signature is taken as it is"
            )
    return {"task.reward": made[0] if len(made) == 1 else made}


def _verl_reward(theirs: Any, given: Given) -> Keys:
    path, name = given.get("custom_reward_function.path"), given.get("custom_reward_function.name")
    return {"task.reward": f"{Path(path).stem}:{name or 'compute_score'}"} if path else {}


def _trackers(theirs: Any, given: Given) -> Keys:
    names = theirs if isinstance(theirs, list | tuple) else [theirs]
    known = [name for name in names if name in ("tensorboard", "wandb")]
    others = [name for name in names if name not in (*known, "console", "none", "file", None)]
    if others:
        raise CannotTranslate(
            f"graft writes to tensorboard and wandb, not to {', '.join(map(str, others))}"
        )
    return {"run.trackers": known}


def _folder(theirs: Any, given: Given) -> Keys:
    path = Path(str(theirs))
    return {"run.dir": str(path.parent)} | (
        {} if given.get("run_name") else {"run.name": path.name}
    )


def _machines(theirs: Any, given: Given) -> Keys:
    if theirs and int(theirs) > 1:
        raise CannotTranslate(
            "start the recipe with `torchrun --nproc-per-node N -m graft train RECIPE`"
        )
    return {}


def _own_engine(theirs: Any, given: Given) -> Keys:
    if not theirs or theirs == "hf" or (theirs == 1 and theirs is not True):
        return {}
    raise CannotTranslate("graft samples with its own engine; engine.name=vllm takes vLLM instead")


def _schedule(theirs: Any, given: Given) -> Keys:
    names = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
    }
    return _renamed("train.schedule", names)(theirs, given)


def _dynamic(theirs: Any, given: Given) -> Keys:
    rounds = given.get("filter_groups.max_num_gen_batches") or 0
    return {"rollout.dynamic_rounds": rounds if rounds > 0 else 4} if theirs else {}


def _overlong(theirs: Any, given: Given) -> Keys:
    if given.get("overlong_buffer.enable") is False:
        return {}
    return {"algo.overlong": [given["max_response_length"], theirs]}


def _nothing(theirs: Any, given: Given) -> Keys:
    """It is part of another rule, or says what graft does."""
    return {}


_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}
_KL = {
    "low_var_kl": "k3",
    "k3": "k3",
    "mse": "k2",
    "k2": "k2",
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
}
_LOSSES = {"vanilla": None, "geo_mean": "gmpo", "gpg": "reinforce", "dppo_tv": "dppo", "gspo": "gspo",
           "dppo_kl": {"dppo": {"divergence": "kl"}}, "sapo": "sapo", "cispo": "cispo", "dro": "dro",
           "clip_cov": "clip_cov", "kl_cov": "kl_cov"}  # fmt: skip

RULES: dict[str, Callable[[Any, Given], Keys]] = {
    "model": lambda theirs, given: {"model.path": theirs} if isinstance(theirs, str) else {},
    "dtype": _renamed("model.dtype", _DTYPES), "torch_dtype": _renamed("model.dtype", _DTYPES),
    "bf16": _if_on("model.dtype", "bfloat16"),
    "use_peft": lambda theirs, given: {"lora.rank": given.get("lora_r", 16)} if theirs else {},
    "lora_rank": _positive("lora.rank"),
    "lora_target_modules": lambda theirs, given: (
        {} if theirs == "all-linear" else {"lora.targets": list(theirs)}
    ),
    "target_modules": lambda theirs, given: (
        {} if theirs == "all-linear" else {"lora.targets": list(theirs)}
    ),
    "gradient_checkpointing": _if_on("train.recompute", True),
    "enable_gradient_checkpointing": _if_on("train.recompute", True),
    "lr_scheduler_type": _schedule, "warmup_style": _schedule,
    "lr_warmup_steps": _positive("train.warmup"), "warmup_steps": _positive("train.warmup"),
    "warmup_ratio": _warmup_share, "lr_warmup_steps_ratio": _warmup_share,
    "adam_beta1": _trl_betas, "adam_beta2": _trl_betas,
    "max_steps": _positive("train.steps"), "total_training_steps": _positive("train.steps"),
    "num_train_epochs": _steps, "total_epochs": _steps,
    "num_iterations": _positive("train.epochs"), "ppo_epochs": _positive("train.epochs"),
    "train_batch_size": lambda theirs, given: {"rollout.tasks": theirs},
    "per_device_train_batch_size": _trl_tasks, "generation_batch_size": _trl_tasks,
    "steps_per_generation": _trl_tasks, "gradient_accumulation_steps": _nothing,
    "ppo_mini_batch_size": _verl_minibatches,
    "max_completion_length": lambda theirs, given: {"rollout.max_tokens": theirs},
    "max_response_length": lambda theirs, given: {"rollout.max_tokens": theirs},
    "max_prompt_length": _context,
    "vllm_max_model_length": lambda theirs, given: {"rollout.max_context": theirs},
    "top_p": lambda theirs, given: {"rollout.top_p": theirs},
    "top_k": lambda theirs, given: {"rollout.top_k": max(0, int(theirs or 0))},
    "val_kwargs.top_k": lambda theirs, given: {"eval.top_k": max(0, int(theirs or 0))},
    "filter_groups.enable": _dynamic, "filter_groups.max_num_gen_batches": _nothing,
    "use_vllm": _own_engine, "vllm_mode": _own_engine, "rollout.name": _own_engine,
    "gpu_memory_utilization": _own_engine, "vllm_gpu_memory_utilization": _own_engine,
    "vllm_tensor_parallel_size": _own_engine, "rollout.tensor_model_parallel_size": _own_engine,
    "adv_estimator": _verl_credit, "gamma": _nothing, "lam": _nothing,
    "norm_adv_by_std_in_grpo": _nothing,
    "loss_type": _trl_loss, "scale_rewards": _trl_scale, "importance_sampling_level": _clip,
    "loss_mode": _renamed("algo.loss", _LOSSES), "loss_agg_mode": _verl_reduction,
    "use_kl_loss": _kl, "kl_loss_coef": _kl, "use_kl_in_reward": _kl_in_reward,
    "kl_ctrl.kl_coef": _kl_in_reward, "kl_loss_type": _renamed("algo.kl_kind", _KL),
    "epsilon": _clip, "epsilon_high": _clip, "clip_ratio": _clip, "clip_ratio_low": _clip,
    "clip_ratio_high": _clip, "delta": _clip, "clip_ratio_c": _clip,
    "overlong_buffer.len": _overlong, "overlong_buffer.enable": _nothing,
    "dataset_name": _rows, "train_files": _rows, "val_files": _held_out_rows,
    "dataset_train_split": _nothing, "dataset_test_split": _test_split,
    "reward_funcs": _reward, "custom_reward_function.path": _verl_reward,
    "custom_reward_function.name": _nothing,
    "output_dir": _folder, "report_to": _trackers, "trainer.logger": _trackers,
    "save_freq": _every("run.save_every"), "save_steps": _every("run.save_every"),
    "test_freq": _every("run.eval_every"), "eval_steps": _every("run.eval_every"),
    "eval_strategy": _nothing, "save_strategy": _nothing,
    "log_completions": _if_on("run.log_episodes", 1),
    "val_before_train": _nothing, "n_gpus_per_node": _machines, "nnodes": _machines,
    "strategy": _nothing, "actor.strategy": _nothing, "multi_turn.enable": _nothing,
}  # fmt: skip
"""Their setting, as the table has it -> its rule."""
