"""Settings under their names in TRL, verl, OpenRLHF and transformers.

A recipe with one of these is refused, and the error names graft's key. A dotted name stands for every
key that ends with it, the longest first: "optim.lr" is `actor_rollout_ref.actor.optim.lr`. The first
word of an entry is graft's key, the rest explains the difference; "-": graft has no such key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from graft.registry import nearest

_PER_TURN = "it counts the sampled tokens of one turn; rollout.max_context bounds the whole attempt"
_WHOLE = "it counts a whole attempt: the prompt, every turn and every observation"
_EPOCHS = "in steps: passes x rows of the data / rollout.tasks"
_MEMORY = "in tokens; it affects memory only, not results; 0: automatic"
_CLIP = "written as algo.loss={clip: {low: 0.2, high: 0.28}}"
_DATA = "written as task.env=prompts task.args.data=FILE"
_SAMPLED = (
    "every token is drawn from the policy's own distribution, which is what the loss assumes; "
    "rollout.temperature changes both"
)
_TORCHRUN = "start the command under `torchrun --nproc-per-node N`, or give cluster.address"
_LORA = "adapters are trained if lora.rank is more than 0"
_LOGGED = "every step is logged"
_VLLM_SERVER = "together with engine.name=vllm"

PEER_KEYS: dict[str, str] = {
    # the model
    "model_name_or_path": "model.path",
    "name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "model_name": "model.path",
    "model.name": "model.path",
    "model_id": "model.path",
    "model_path": "model.path",
    "pretrain": "model.path",
    "torch_dtype": "model.dtype",
    "model_dtype": "model.dtype",
    "bf16": "model.dtype auto is bfloat16 on a GPU",
    "fp16": "model.dtype auto, float32 or bfloat16; there is no float16",
    "load_in_4bit": "- weights are not quantized in training; lora.rank=16 trains with less memory",
    "load_in_8bit": "- weights are not quantized in training; lora.rank=16 trains with less memory",
    "custom_chat_template": "model.chat_template",
    "tokenizer.chat_template": "model.chat_template",
    "gradient_checkpointing": "train.recompute",
    "enable_gradient_checkpointing": "train.recompute",
    "use_peft": f"lora.rank {_LORA}",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora.r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
    # the optimizer
    "learning_rate": "train.lr",
    "actor_learning_rate": "train.lr",
    "optim.lr": "train.lr",
    "critic.optim.lr": "algo.critic_lr",
    "critic_learning_rate": "algo.critic_lr",
    "lr_scheduler_type": "train.schedule",
    "lr_scheduler": "train.schedule",
    "warmup_style": "train.schedule",
    "warmup_steps": "train.warmup",
    "lr_warmup_steps": "train.warmup",
    "warmup_ratio": "train.warmup in steps, not a share of them",
    "lr_warmup_steps_ratio": "train.warmup in steps, not a share of them",
    "min_lr_ratio": "train.min_lr",
    "adam_beta1": "train.betas written as train.betas=[0.9,0.95]",
    "adam_beta2": "train.betas written as train.betas=[0.9,0.95]",
    "adam_betas": "train.betas",
    "grad_clip": "train.max_grad_norm",
    "clip_grad": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "max_steps": "train.steps",
    "total_training_steps": "train.steps",
    "num_steps": "train.steps",
    "num_train_epochs": f"train.steps {_EPOCHS}",
    "total_epochs": f"train.steps {_EPOCHS}",
    "num_episodes": f"train.steps {_EPOCHS}",
    "ppo_epochs": "train.epochs passes over each batch of rollouts",
    "num_iterations": "train.epochs passes over each batch of rollouts",
    # the batch
    "train_batch_size": "rollout.tasks tasks per step, each with rollout.samples attempts",
    "rollout_batch_size": "rollout.tasks tasks per step, each with rollout.samples attempts",
    "gen_batch_size": "rollout.tasks tasks per step; rollout.dynamic_rounds draws more of them",
    "batch_size": "rollout.tasks tasks per step, each with rollout.samples attempts",
    "per_device_train_batch_size": (
        "rollout.tasks TRL counts attempts: tasks = per_device_train_batch_size x processes x "
        "gradient_accumulation_steps / num_generations"
    ),
    "generation_batch_size": "rollout.tasks in tasks: generation_batch_size / num_generations",
    "ppo_mini_batch_size": (
        "train.minibatches the number of them, not their size: train_batch_size / ppo_mini_batch_size"
    ),
    "steps_per_generation": "train.minibatches optimizer steps per batch of rollouts",
    "gradient_accumulation_steps": f"train.tokens_per_micro {_MEMORY}",
    "micro_train_batch_size": f"train.tokens_per_micro {_MEMORY}",
    "ppo_micro_batch_size": f"train.tokens_per_micro {_MEMORY}",
    "ppo_micro_batch_size_per_gpu": f"train.tokens_per_micro {_MEMORY}",
    "ppo_max_token_len_per_gpu": f"train.tokens_per_micro {_MEMORY}",
    "log_prob_micro_batch_size_per_gpu": f"train.tokens_per_micro {_MEMORY}",
    "per_device_eval_batch_size": "rollout.concurrency tasks attempted at a time",
    "sft.batch_size": "sft.batch",
    "sft.per_device_train_batch_size": "sft.batch examples per step, over all processes",
    # rollouts
    "num_generations": "rollout.samples",
    "rollout.n": "rollout.samples",
    "n_samples_per_prompt": "rollout.samples",
    "group_size": "rollout.samples",
    "num_samples": "rollout.samples",
    "max_completion_length": f"rollout.max_tokens {_PER_TURN}",
    "max_response_length": f"rollout.max_tokens {_PER_TURN}",
    "response_length": f"rollout.max_tokens {_PER_TURN}",
    "max_new_tokens": f"rollout.max_tokens {_PER_TURN}",
    "generate_max_len": f"rollout.max_tokens {_PER_TURN}",
    "max_prompt_length": f"rollout.max_context {_WHOLE}",
    "prompt_length": f"rollout.max_context {_WHOLE}",
    "prompt_max_len": f"rollout.max_context {_WHOLE}",
    "max_model_len": f"rollout.max_context {_WHOLE}",
    "max_length": f"rollout.max_context {_WHOLE}",
    "max_seq_length": f"rollout.max_context {_WHOLE}",
    "vllm_max_model_length": f"rollout.max_context {_WHOLE}",
    "max_assistant_turns": "rollout.max_turns",
    "max_user_turns": "rollout.max_turns",
    "max_tool_calling_iterations": "rollout.max_turns",
    "max_num_seqs": "rollout.concurrency in tasks, each with rollout.samples attempts",
    "filter_groups.enable": "rollout.dynamic_rounds 4 draws up to four times; algo.name=dapo has it",
    "filter_groups.max_num_gen_batches": "rollout.dynamic_rounds",
    "top_p": f"- {_SAMPLED}",
    "top_k": f"- {_SAMPLED}",
    "min_p": f"- {_SAMPLED}",
    "repetition_penalty": f"- {_SAMPLED}",
    "do_sample": f"- {_SAMPLED}",
    # the engine
    "use_vllm": "engine.name written as engine.name=vllm",
    "vllm_mode": f"engine.url of servers, {_VLLM_SERVER}; empty: in this process",
    "vllm_server_base_url": f"engine.url {_VLLM_SERVER}",
    "vllm_server_host": f"engine.url written as engine.url=[http://HOST:8000], {_VLLM_SERVER}",
    "rollout.name": "engine.name",
    "gpu_memory_utilization": "engine.args written as engine.args={gpu_memory_utilization: 0.5}",
    "vllm_gpu_memory_utilization": "engine.args written as engine.args={gpu_memory_utilization: 0.5}",
    "engine_kwargs": "engine.args",
    "tensor_model_parallel_size": "parallel.tp of the policy; an engine's own is in engine.args",
    "tensor_parallel_size": "parallel.tp of the policy; an engine's own is in engine.args",
    "vllm_tensor_parallel_size": "engine.args written as engine.args={tensor_parallel_size: 2}",
    # the algorithm
    "adv_estimator": "algo.name verl's gae is ppo here, reinforce_plus_plus is rebn",
    "advantage_estimator": "algo.name verl's gae is ppo here, reinforce_plus_plus is rebn",
    "algorithm": "algo.name",
    "algorithm.name": "algo.name",
    "algo.type": "algo.name",
    "loss_type": "algo.name presets grpo, dr_grpo, dapo, cispo; algo.reduction sets the mean alone",
    "loss_mode": "algo.loss",
    "loss_agg_mode": "algo.reduction token-mean is token, seq-mean-token-mean is sequence",
    "importance_sampling_level": "algo.loss sequence is algo.loss=gspo",
    "scale_rewards": "algo.credit without the division by the standard deviation: algo.name=dr_grpo",
    "norm_adv_by_std_in_grpo": "algo.credit without the division: algo.name=dr_grpo",
    "beta": "algo.kl_coef",
    "kl_loss_coef": "algo.kl_coef",
    "kl_ctrl.kl_coef": "algo.kl_coef together with algo.kl_in=reward",
    "init_kl_coef": "algo.kl_coef",
    "use_kl_loss": "algo.kl_coef more than 0",
    "use_kl_in_reward": "algo.kl_in written as algo.kl_in=reward, with algo.kl_coef",
    "kl_loss_type": "algo.kl_kind low_var_kl is k3, mse is k2, kl is k1",
    "kl_penalty": "algo.kl_kind low_var_kl is k3, mse is k2, kl is k1",
    "kl_estimator": "algo.kl_kind",
    "epsilon": f"algo.loss {_CLIP}",
    "epsilon_high": f"algo.loss {_CLIP}",
    "clip_ratio": f"algo.loss {_CLIP}",
    "clip_ratio_low": f"algo.loss {_CLIP}",
    "clip_ratio_high": f"algo.loss {_CLIP}",
    "eps_clip": f"algo.loss {_CLIP}",
    "cliprange": f"algo.loss {_CLIP}",
    "delta": "algo.loss written as algo.loss={clip: {dual: 3.0}}",
    "clip_ratio_c": "algo.loss written as algo.loss={clip: {dual: 3.0}}",
    "entropy_coeff": "algo.entropy_coef",
    "entropy_loss_coef": "algo.entropy_coef",
    "gamma": "algo.credit written as algo.credit=[{gae: {gamma: 1.0, lam: 0.95}}, whiten]",
    "lam": "algo.credit written as algo.credit=[{gae: {gamma: 1.0, lam: 0.95}}, whiten]",
    "mask_truncated_completions": "algo.mask_truncated",
    "vllm_importance_sampling_cap": "algo.importance_cap",
    "vllm_importance_sampling_clip_max": "algo.importance_cap",
    "vllm_importance_sampling_correction": "algo.importance_cap 2 is on, 0 is off",
    "rollout_is_threshold": "algo.importance_cap",
    "overlong_buffer.len": "algo.overlong written as algo.overlong=[LENGTH,BUFFER]",
    # tasks and rewards
    "dataset": f"task.args {_DATA}",
    "dataset_name": f"task.args {_DATA}",
    "dataset_path": f"task.args {_DATA}",
    "data_path": f"task.args {_DATA}",
    "train_files": f"task.args {_DATA}",
    "prompt_data": f"task.args {_DATA}",
    "val_files": "task.eval_args written as task.eval_args={data: FILE}",
    "eval_dataset": "task.eval_args written as task.eval_args={data: FILE}",
    "reward_funcs": "task.reward",
    "reward_fn": "task.reward",
    "reward_function": "task.reward",
    "custom_reward_function.path": "task.reward written as task.reward=my_module:compute_score",
    "custom_reward_function.name": "task.reward written as task.reward=my_module:compute_score",
    "reward_weights": "task.reward written as task.reward=[{f1: {}, weight: 1.0}, ...]",
    "environment": "task.env",
    "env_name": "task.env",
    "env_id": "task.env",
    "tool_config_path": "task.wrappers",
    "tools": "task.wrappers",
    # the run
    "output_dir": "run.dir the folder of all runs; run.name names this one",
    "default_local_dir": "run.dir the folder of all runs; run.name names this one",
    "save_path": "run.dir the folder of all runs; run.name names this one",
    "ckpt_path": "run.dir the folder of all runs; run.name names this one",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "project_name": "run.name",
    "save_steps": "run.save_every",
    "save_freq": "run.save_every",
    "eval_steps": "run.eval_every",
    "test_freq": "run.eval_every",
    "eval_strategy": "run.eval_every in steps",
    "save_strategy": "run.save_every in steps",
    "val_before_train": "run.eval_tasks 0 never evaluates",
    "save_total_limit": "run.keep_last",
    "max_actor_ckpt_to_keep": "run.keep_last",
    "resume_from_checkpoint": "run.resume a run resumes from the newest checkpoint of its folder",
    "resume_mode": "run.resume a run resumes from the newest checkpoint of its folder",
    "logging_steps": f"- {_LOGGED}; run.log_episodes says how often episodes are written",
    "logging_strategy": f"- {_LOGGED}; run.log_episodes says how often episodes are written",
    "log_completions": "run.log_episodes",
    "report_to": "run.trackers",
    "trainer.logger": "run.trackers",
    "use_wandb": "run.trackers written as run.trackers=[wandb]",
    "wandb": "run.trackers written as run.trackers=[wandb]",
    # machines
    "deepspeed": f"parallel.shard {_TORCHRUN}",
    "fsdp": f"parallel.shard {_TORCHRUN}",
    "param_offload": "parallel.offload",
    "optimizer_offload": "parallel.offload",
    "n_gpus_per_node": f"- {_TORCHRUN}",
    "num_gpus": f"- {_TORCHRUN}",
    "nnodes": f"- {_TORCHRUN}",
}
"""Their key -> graft's key, and what differs."""

FIRST_KEYS = {
    "run": "run.name", "model": "model.path", "task": "task.env", "actions": "actions.file",
    "rollout": "rollout.samples", "engine": "engine.name", "algo": "algo.name", "train": "train.steps",
    "sft": "sft.steps", "lora": "lora.rank", "parallel": "parallel.tp", "cluster": "cluster.address",
}  # fmt: skip
"""Section -> the key that a value given to the whole section is probably meant for."""


def meant(key: str, known: Mapping[str, Any]) -> str:
    """The hint about an unknown key: graft's key that it probably stands for.

    >>> meant("train.learning_rate", {"train.lr": ""})
    "did you mean 'train.lr'?"
    """
    name = plain(key)
    found = _same_section(name, translated(name) or _nearest(name, known), known)
    if not found:
        return "see `graft config --keys`"
    ours, _, remark = found.partition(" ")
    if ours == "-":
        return f"graft has no such key: {remark}"
    return f"did you mean {ours!r}?{f' ({remark})' if remark else ''}"


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    """The entry, or graft's key, that is spelled most like `name`; "" if none is."""
    last = name.split(".")[-1]
    ends: dict[str, str] = {}
    for ours in known:  # the first of keys with the same end: lr is train.lr, not sft.lr
        ends.setdefault(ours.split(".")[-1], ours)
    pools = [(name, {ours: ours for ours in known}), (last, PEER_KEYS | ends)]
    best = [(near, typed, pool) for typed, pool in pools if (near := nearest(typed, pool))]
    if not best:
        return ""
    near, _, pool = max(best, key=lambda one: SequenceMatcher(None, one[1], one[0]).ratio())
    return pool[near]


def plain(key: str) -> str:
    """
    >>> plain("--per-device-train-batch-size"), plain("+actor_rollout_ref.rollout.n")
    ('per_device_train_batch_size', 'actor_rollout_ref.rollout.n')
    """
    return key.lstrip("-+~").replace("-", "_").rstrip(":").lower()


def translated(name: str) -> str:
    """The entry of the longest end of a dotted name; "" where there is none."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((PEER_KEYS[end] for end in ends if end in PEER_KEYS), "")


def _same_section(name: str, entry: str, known: Mapping[str, Any]) -> str:
    """sft.learning_rate is sft.lr, although learning_rate alone is train.lr."""
    section, _, rest = name.partition(".")
    ours, _, remark = entry.partition(" ")
    here = f"{section}.{ours.partition('.')[2]}"
    return here if rest and here != ours and here in known and not remark else entry


def leaves_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values below an unknown section: {"optim": {"lr": 1}} has optim.lr."""
    if isinstance(value, Mapping) and value:
        inside: Mapping[Any, Any] = value
        for name, below in inside.items():
            yield from leaves_of(f"{key}.{name}", below)
    else:
        yield key, value


def as_override(option: str, following: Iterable[str], known: Mapping[str, Any]) -> str:
    """The hint about `--key value`, `--key=value` or a bare `key`, which are not overrides.

    >>> as_override("--lr", ["1e-4"], {"train.lr": ""})
    "settings are written key=value, without dashes: train.lr=1e-4"
    """
    key, has_value, value = option.partition("=")
    key = plain(key)
    if not has_value:
        value = next((v for v in following if "=" not in v and not v.startswith("--")), "")
    text = "settings are written key=value, without dashes"
    if key in known:
        return f"{text}: {key}={value or 'VALUE'}"
    entry = _same_section(key, translated(key), known)
    ends = [k for k in known if k.endswith(f".{key}")]
    ours, _, remark = (entry or next(iter(ends), "")).partition(" ")
    if ours and not remark:
        return f"{text}: {ours}={value or 'VALUE'}"
    return f"{text}, and {key!r} is not a key of graft; {meant(key, known)}"
