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

_TABLE = """
# the model
model_name_or_path name_or_path pretrained_model_name_or_path model_name model.name model_id model_path
    pretrain -> model.path
torch_dtype model_dtype -> model.dtype
bf16 -> model.dtype auto is bfloat16 on a GPU
fp16 -> model.dtype auto, float32 or bfloat16; there is no float16
load_in_4bit load_in_8bit -> - weights are not quantized in training; lora.rank=16 trains with less memory
custom_chat_template tokenizer.chat_template -> model.chat_template
gradient_checkpointing enable_gradient_checkpointing -> train.recompute
use_peft -> lora.rank adapters are trained if lora.rank is more than 0
lora_r lora_rank lora.r -> lora.rank
lora_alpha -> lora.alpha
lora_target_modules target_modules -> lora.targets
# the optimizer
learning_rate actor_learning_rate optim.lr -> train.lr
critic.optim.lr critic_learning_rate -> algo.critic_lr
lr_scheduler_type lr_scheduler warmup_style -> train.schedule
warmup_steps lr_warmup_steps -> train.warmup
warmup_ratio lr_warmup_steps_ratio -> train.warmup in steps, not a share of them
min_lr_ratio -> train.min_lr
adam_beta1 adam_beta2 -> train.betas written as train.betas=[0.9,0.95]
adam_betas -> train.betas
grad_clip clip_grad gradient_clipping -> train.max_grad_norm
max_steps total_training_steps num_steps -> train.steps
num_train_epochs total_epochs num_episodes -> train.steps in steps: passes x rows of the data /
    rollout.tasks
teacher_model_name_or_path teacher_model teacher_model_server_url distillation.teacher_model.model_path
    -> distill.teacher
lmbda -> distill.on_policy
distillation_alpha distillation_loss.loss_mode -> distill.divergence forward, reverse or
    {js: {beta: 0.5}}; TRL's beta and alpha are beta
distillation_topk distillation_loss.topk -> distill.top_k
distillation_add_tail loss_add_tail -> distill.tail bucket, renormalise or ignore
distillation_loss.distillation_loss_coef distillation_loss_coef distillation_weight -> distill.coef
reprompt_template -> distill.context
iw_opd_gamma -> algo.credit written as algo.credit=[{teacher_kl: {early: 0.5}}]
ppo_epochs num_iterations -> train.epochs passes over each batch of rollouts
# the batch
train_batch_size rollout_batch_size batch_size -> rollout.tasks tasks per step, each with rollout.samples
    attempts
gen_batch_size -> rollout.tasks tasks per step; rollout.dynamic_rounds draws more of them
per_device_train_batch_size -> rollout.tasks TRL counts attempts: tasks = per_device_train_batch_size x
    processes x gradient_accumulation_steps / num_generations
generation_batch_size -> rollout.tasks in tasks: generation_batch_size / num_generations
ppo_mini_batch_size -> train.minibatches the number of them, not their size: train_batch_size /
    ppo_mini_batch_size
steps_per_generation -> train.minibatches optimizer steps per batch of rollouts
gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
    ppo_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu -> train.tokens_per_micro in tokens; it
    affects memory only, not results; 0: automatic
per_device_eval_batch_size -> rollout.concurrency tasks attempted at a time
sft.batch_size -> sft.batch
sft.warmup_ratio -> sft.warmup below 1 it is a share of the steps
sft.lr_scheduler_type -> sft.schedule
sft.cutoff_len sft.max_length sft.max_seq_length -> rollout.max_context together with sft.overlong=cut
sft.per_device_train_batch_size -> sft.batch examples per step, over all processes
# rollouts
num_generations rollout.n n_samples_per_prompt group_size num_samples -> rollout.samples
max_completion_length max_response_length response_length max_new_tokens generate_max_len ->
    rollout.max_tokens it counts the sampled tokens of one turn; rollout.max_context bounds the whole
    attempt
max_prompt_length prompt_length prompt_max_len max_model_len max_length max_seq_length
    vllm_max_model_length -> rollout.max_context it counts a whole attempt: the prompt, every turn and
    every observation
max_assistant_turns max_user_turns max_tool_calling_iterations -> rollout.max_turns
max_num_seqs -> rollout.concurrency in tasks, each with rollout.samples attempts
filter_groups.enable -> rollout.dynamic_rounds 4 draws up to four times; algo.name=dapo has it
filter_groups.max_num_gen_batches -> rollout.dynamic_rounds
top_p -> rollout.top_p the trained log-probs are those of the truncated distribution
top_k -> rollout.top_k 0 keeps every token, where others write -1
min_p -> rollout.min_p
freeze_base_model -> actions.freeze_base
starting_mode -> actions.start a tool of actions.file
earl_head_use_bias -> actions.bias
init_from_base -> actions.init_from_base
earl.training.tools -> rollout.branch written as rollout.branch={counterfactual: {tools: [swap]}}
tool_score_temperature tool_score_top_k tool_score_top_p -> rollout.branch written as
    rollout.branch={counterfactual: {temperature: 10, top_k: 10, top_p: 0.9}}
finetune_from_path -> model.path a run or a checkpoint of one
repetition_penalty -> eval.repetition_penalty for evaluation only: the learner does not know a penalised
    distribution
do_sample -> - training samples at rollout.temperature; held-out tasks are attempted greedily too
# the engine
use_vllm -> engine.name written as engine.name=vllm
vllm_mode -> engine.url of servers, together with engine.name=vllm; empty: in this process
vllm_server_base_url -> engine.url together with engine.name=vllm
vllm_server_host -> engine.url written as engine.url=[http://HOST:8000], together with engine.name=vllm
rollout.name -> engine.name
gpu_memory_utilization vllm_gpu_memory_utilization -> engine.args written as
    engine.args={gpu_memory_utilization: 0.5}
engine_kwargs -> engine.args
tensor_model_parallel_size tensor_parallel_size -> parallel.tp of the policy; an engine's own is
    engine.tp
pipeline_parallel_size inference.pipeline_parallel_size vllm_pipeline_parallel_size -> engine.url of a
    server that was started with it (vllm serve MODEL --pipeline-parallel-size 2), together with
    engine.name=vllm; inside the processes of a run layers are split with engine.tp
vllm_tensor_parallel_size rollout.tensor_model_parallel_size inference.tensor_parallel_size -> engine.tp
# the algorithm
adv_estimator advantage_estimator -> algo.name verl's gae is ppo here; grpo, rloo, opo, gpg, remax, gdpo,
    grpo_passk, reinforce_plus_plus, reinforce_plus_plus_baseline and optimal_token_baseline have their
    names, grpo_vectorized is grpo, rloo_vectorized rloo, tir_optimal_token_baseline
    optimal_token_baseline; gigpo of verl-agent is gigpo
gdpo_reward_keys -> task.reward a list of rewards, each one compared by itself with algo.name=gdpo
gdpo_reward_weights -> task.reward written as task.reward=[{f1: {}, weight: 1.0}, ...]
multi_objective_aggregation -> algo.name normalize_then_sum is algo.name=gdpo; sum_then_normalize is what
    the others do
calculate_sum_pi_squared -> algo.credit optimal_token_baseline computes what it needs
f_norm -> algo.credit written as algo.credit=[{gpg: {norm: 1.0}}]
step_advantage_w gigpo.mode -> algo.credit written as algo.credit=[{gigpo: {weight: 1.0, scale: false}}];
    mean_std_norm is scale true
use_role_baseline -> algo.name written as algo.name=spiral
role_baseline_ema_gamma -> algo.credit written as algo.credit=[{rae: {decay: 0.95}}]
algorithm algorithm.name algo.type -> algo.name
loss_type -> algo.name presets grpo, dr_grpo, dapo, cispo, sapo, luspo, vespo; algo.reduction sets the mean
    alone
rollout_correction.loss_type -> algo.loss reinforce with algo.weights=[{importance: {policy: current}}],
    ppo_clip is clip
tau_pos tau_neg sapo_temperature_pos sapo_temperature_neg -> algo.loss written as
    algo.loss={sapo: {tau_pos: 1.0, tau_neg: 1.05}}
vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg -> algo.loss written as
    algo.loss={vespo: {k_pos: 2.0, lambda_pos: 3.0, k_neg: 3.0, lambda_neg: 2.0}}
clip_cov_ratio clip_cov_lb clip_cov_ub -> algo.loss written as
    algo.loss={clip_cov: {share: 2e-4, low_cov: 1.0, high_cov: 5.0}}
kl_cov_ratio ppo_kl_coef -> algo.loss written as algo.loss={kl_cov: {share: 2e-3, coef: 1.0}}
dro_beta -> algo.loss written as algo.loss={dro: {beta: 0.1}}
divergence_type -> algo.loss written as algo.loss={dppo: {divergence: kl}}
bypass_mode -> algo.old_policy written as algo.old_policy=engine
loss_mode -> algo.loss vanilla is clip, geo_mean gmpo, gpg reinforce, dppo_tv dppo, dppo_kl
    {dppo: {divergence: kl}}; gspo, sapo, cispo, dro, clip_cov and kl_cov have their names
loss_agg_mode -> algo.reduction token-mean is token, seq-mean-token-mean is sequence
importance_sampling_level -> algo.loss sequence is algo.loss=gspo
scale_rewards -> algo.credit batch is algo.credit=[{grpo: {scale: batch, unbiased: true}}]; none, without
    the division by the standard deviation, is algo.name=dr_grpo
norm_adv_by_std_in_grpo -> algo.credit without the division: algo.name=dr_grpo
beta kl_loss_coef init_kl_coef -> algo.kl_coef
kl_ctrl.kl_coef -> algo.kl_coef together with algo.kl_in=reward
use_kl_loss -> algo.kl_coef more than 0
use_kl_in_reward -> algo.kl_in written as algo.kl_in=reward, with algo.kl_coef
kl_loss_type kl_penalty -> algo.kl_kind low_var_kl is k3, mse is k2, kl is k1; abs, k1+, k3+ and abs+ have
    their names
kl_ctrl.type target_kl kl_ctrl.horizon kl_target kl_horizon -> algo.kl_control written as
    algo.kl_control={target: 0.1, horizon: 10000}, with algo.kl_coef as the first value
use_bias_correction_kl -> algo.kl_corrected
sync_ref_model ref_model_sync_steps ref_model_mixup_alpha -> algo.reference_sync written as
    algo.reference_sync=[512, 0.6]
use_adaptive_entropy entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max ->
    algo.entropy_control written as algo.entropy_control={target: 0.2, delta: 0.005, least: 0, most: 1}
top_entropy_quantile -> algo.weights written as algo.weights=[{top_entropy: {share: 0.2}}]
off_policy_mask_threshold -> algo.weights written as algo.weights=[{off_policy_rows: {high: 0.5}}]
rollout_is -> algo.weights written as algo.weights=[{importance: {level: sequence, cap: 2.0}}]
rollout_is_batch_normalize -> algo.weights written as algo.weights=[{importance: {normalise: true}}]
rollout_rs rollout_rs_threshold -> algo.weights seq_mean_k3 is
    algo.weights=[{reject: {by: k3, level: sequence, of: mean, high: 0.01}}]
vllm_importance_sampling_mode vllm_importance_sampling_clip_min -> algo.weights sequence_mask is
    algo.weights=[{importance: {level: sequence, outside: mask, floor: 0.5, cap: 2.0}}]
world_model_coef echo_coef -> algo.observation_coef
kl_estimator -> algo.kl_kind
epsilon epsilon_high clip_ratio clip_ratio_low clip_ratio_high eps_clip cliprange -> algo.loss written as
    algo.loss={clip: {low: 0.2, high: 0.28}}
delta clip_ratio_c -> algo.loss written as algo.loss={clip: {dual: 3.0}}
entropy_coeff entropy_loss_coef -> algo.entropy_coef
gamma lam -> algo.credit written as algo.credit=[{gae: {gamma: 1.0, lam: 0.95}}, whiten]; without a
    critic as algo.credit=[{discounted: {gamma: 0.99, per: token}}, whiten]
mask_truncated_completions -> algo.mask_truncated
vllm_importance_sampling_cap vllm_importance_sampling_clip_max rollout_is_threshold -> algo.importance_cap
vllm_importance_sampling_correction -> algo.importance_cap 2 is on, 0 is off
overlong_buffer.len -> algo.overlong written as algo.overlong=[LENGTH,BUFFER]
# tasks and rewards
dataset dataset_name dataset_path data_path train_files prompt_data -> task.args written as
    task.env=prompts task.args.data=FILE, with task.env=earl:rows for EARL's files
val_files eval_dataset -> task.eval_args written as task.eval_args={data: FILE}, or {data: [FILE, FILE]}
val_kwargs.temperature eval_temperature valid_temperature -> eval.temperature
val_kwargs.top_p eval_top_p valid_top_p -> eval.top_p
val_kwargs.top_k valid_top_k -> eval.top_k 0 keeps every token, where others write -1
val_kwargs.n eval_n_samples_per_prompt n_samples_per_eval_prompt -> eval.samples
reward_funcs reward_fn reward_function -> task.reward
custom_reward_function.path custom_reward_function.name -> task.reward written as
    task.reward=my_module:compute_score
reward_weights -> task.reward written as task.reward=[{f1: {}, weight: 1.0}, ...]
environment env_name env_id -> task.env
tools multi_turn.tool_config_path -> task.wrappers
tool_config_path -> actions.file EARL's tool files as they are
# the run
output_dir default_local_dir save_path ckpt_path -> run.dir the folder of all runs; run.name names this
    one
run_name experiment_name project_name -> run.name
save_steps save_freq -> run.save_every
eval_steps test_freq -> run.eval_every
eval_strategy -> run.eval_every in steps
save_strategy -> run.save_every in steps
val_before_train -> run.eval_tasks 0 never evaluates
save_total_limit max_actor_ckpt_to_keep -> run.keep_last
resume_from_checkpoint resume_mode -> run.resume a run resumes from the newest checkpoint of its folder
logging_steps logging_strategy -> - every step is logged; run.log_episodes says how often episodes are
    written
log_completions -> run.log_episodes
report_to trainer.logger -> run.trackers
use_wandb wandb -> run.trackers written as run.trackers=[wandb]
# machines
deepspeed fsdp -> parallel.shard start the command under `torchrun --nproc-per-node N`, or give
    cluster.address
param_offload optimizer_offload -> parallel.offload
n_gpus_per_node num_gpus nnodes -> - start the command under `torchrun --nproc-per-node N`, or give
    cluster.address
"""
"""Their names -> graft's key, and what differs."""


def _read(table: str) -> dict[str, str]:
    """Each of their names -> graft's key and remark; an indented line continues the one before."""
    found: dict[str, str] = {}
    for line in table.strip().replace("\n    ", " ").splitlines():
        names, arrow, ours = line.partition(" -> ")
        if arrow:
            found |= dict.fromkeys(names.split(), ours)
    return found


PEER_KEYS = _read(_TABLE)

FIRST_KEYS = {
    "run": "run.name", "model": "model.path", "task": "task.env", "agent": "agent.seconds",
    "actions": "actions.file",
    "rollout": "rollout.samples", "eval": "eval.samples", "engine": "engine.name",
    "algo": "algo.name", "distill": "distill.teacher", "train": "train.steps", "sft": "sft.steps",
    "lora": "lora.rank",
    "parallel": "parallel.tp", "cluster": "cluster.address",
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


def leaves_of(key: str, value: Any) -> Iterator[str]:
    """Keys below an unknown section: {"optim": {"lr": 1}} has optim.lr."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves_of(f"{key}.{name}", below)
    else:
        yield key


def as_override(option: str, following: Iterable[str], known: Mapping[str, Any]) -> str:
    """The hint about `--key value`, `--key=value` or a bare `key`, which are not overrides.

    >>> as_override("--lr", ["1e-4"], {"train.lr": ""})
    "settings are written key=value, without dashes: train.lr=1e-4"
    """
    key, has_value, value = option.partition("=")
    key = plain(key)
    if not has_value:
        value = next((v for v in following if "=" not in v and not v.startswith("--")), "")
    if key in ("resume", "run.resume") and not value:
        return "the same command resumes a run; run.resume=false refuses a folder with a checkpoint"
    text = "settings are written key=value, without dashes"
    if key in known:
        return f"{text}: {key}={value or 'VALUE'}"
    entry = _same_section(key, translated(key), known)
    ends = [k for k in known if k.endswith(f".{key}")]
    ours, _, remark = (entry or next(iter(ends), "")).partition(" ")
    if ours and not remark:
        return f"{text}: {ours}={value or 'VALUE'}"
    return f"{text}, and {key!r} is not a key of graft; {meant(key, known)}"
