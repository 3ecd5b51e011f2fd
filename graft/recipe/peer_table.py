"""Settings of TRL, verl, OpenRLHF, EARL and others, and graft's key for each.

    THEIRS OF TRL | OF VERL | OF OTHERS -> KEY REMARK

A dotted name stands for every key that ends with it, the longest first: "optim.lr" is
`actor_rollout_ref.actor.optim.lr`; "profiler.*" is every key below a section of that name. The first word
after the arrow is graft's key, the rest explains the difference; "-": graft has no such key. Indented lines
continue the one before. `docs/from-trl.md` and `docs/from-verl.md` are made from this table.
"""

from __future__ import annotations

from typing import NamedTuple

TABLE = """
# the model
dtype | fsdp_config.dtype rollout.dtype -> model.dtype
chat_template_path -> model.chat_template
chat_template_kwargs | apply_chat_template_kwargs -> model.template_args
model_init_kwargs | override_config -> - model.dtype, model.device and model.template_args are what can
    be set
trust_remote_code | trust_remote_code -> - code of a model's folder is never run
lora_dropout -> - adapters are trained without dropout
use_liger_kernel attn_implementation torch_compile tf32 use_cache | use_liger use_fused_kernels
    use_torch_compile attn_implementation -> - not needed: the decoder has its own kernels
padding_free packing | use_remove_padding pad_to_length use_prefix_grouper -> - not needed: rows are
    always packed without padding, and a shared prefix is computed once
disable_dropout -> - not needed: there is no dropout in RL
gradient_checkpointing_kwargs | enable_activation_offload entropy_checkpointing
    entropy_from_logits_with_chunking calculate_entropy -> - not needed: train.recompute decides, and
    logits are never held for a whole batch
model_name_or_path | | name_or_path pretrained_model_name_or_path model_name model.name model_id
    pretrain model_path -> model.path
torch_dtype | model_dtype -> model.dtype
bf16 -> model.dtype auto is bfloat16 on a GPU
fp16 -> model.dtype auto, float32 or bfloat16; there is no float16
load_in_4bit load_in_8bit -> - weights are not quantized in training; lora.rank=16 trains with less
    memory
| custom_chat_template | tokenizer.chat_template -> model.chat_template
gradient_checkpointing | enable_gradient_checkpointing -> train.recompute
use_peft -> lora.rank adapters are trained if lora.rank is more than 0
lora_r | lora_rank | lora.r -> lora.rank
lora_alpha | lora_alpha -> lora.alpha
lora_target_modules | target_modules -> lora.targets
# the optimizer
weight_decay | optim.weight_decay -> train.weight_decay
max_grad_norm -> train.max_grad_norm
| optim.betas -> train.betas
optim adam_epsilon optim_args | optim.optimizer optimizer_impl -> - AdamW with eps 1e-8 is the only
    optimizer
learning_rate | optim.lr | actor_learning_rate -> train.lr
| critic.optim.lr | critic_learning_rate -> algo.critic_lr
lr_scheduler_type | lr_scheduler_type warmup_style | lr_scheduler -> train.schedule
warmup_steps | lr_warmup_steps -> train.warmup
warmup_ratio | lr_warmup_steps_ratio -> train.warmup in steps, not a share of them
| min_lr_ratio -> train.min_lr
adam_beta1 adam_beta2 -> train.betas written as train.betas=[0.9,0.95]
| | adam_betas -> train.betas
| grad_clip | gradient_clipping clip_grad -> train.max_grad_norm
max_steps | total_training_steps | num_steps -> train.steps
num_train_epochs | total_epochs | num_episodes -> train.steps in steps: passes x rows of the data /
    rollout.tasks
teacher_model_name_or_path | teacher_model | teacher_model_server_url
    distillation.teacher_model.model_path -> distill.teacher
| distillation.teacher_key -> distill.by
| | lmbda -> distill.on_policy
| distillation_loss.loss_mode | distillation_alpha -> distill.divergence forward, reverse or {js: {beta:
    0.5}}; TRL's beta and alpha are beta
| distillation_loss.topk | distillation_topk -> distill.top_k
| | distillation_add_tail loss_add_tail -> distill.tail bucket, renormalise or ignore
| distillation_loss.distillation_loss_coef distillation_loss_coef | distillation_weight -> distill.coef
| | reprompt_template -> distill.context
| | iw_opd_gamma -> algo.credit written as algo.credit=[{teacher_kl: {early: 0.5}}]
num_iterations | ppo_epochs -> train.epochs passes over each batch of rollouts
# the batch
dataloader_num_workers dataloader_pin_memory dataloader_drop_last remove_unused_columns |
    dataloader_num_workers return_raw_chat return_raw_input_ids -> - not needed: rows are read from the
    file as they are asked for, with all columns
| use_dynamic_bsz log_prob_use_dynamic_bsz balance_batch -> - not needed: micro-batches are always
    filled by tokens (train.tokens_per_micro)
| ppo_infer_max_token_len_per_gpu log_prob_max_token_len_per_gpu log_prob_micro_batch_size
    forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu
    ppo_infer_micro_batch_size_per_gpu -> train.tokens_per_micro in tokens; it affects memory only, not
    results; 0: automatic
shuffle_dataset | data.shuffle -> - tasks are always drawn in an order that run.seed decides
| train_batch_size | rollout_batch_size batch_size -> rollout.tasks tasks per step, each with
    rollout.samples attempts
| gen_batch_size -> rollout.tasks tasks per step; rollout.dynamic_rounds draws more of them
per_device_train_batch_size -> rollout.tasks TRL counts attempts: tasks = per_device_train_batch_size x
    processes x gradient_accumulation_steps / num_generations
generation_batch_size -> rollout.tasks in tasks: generation_batch_size / num_generations
| ppo_mini_batch_size -> train.minibatches the number of them, not their size: train_batch_size /
    ppo_mini_batch_size
steps_per_generation -> train.minibatches optimizer steps per batch of rollouts
gradient_accumulation_steps | ppo_micro_batch_size ppo_micro_batch_size_per_gpu
    ppo_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu | micro_train_batch_size ->
    train.tokens_per_micro in tokens; it affects memory only, not results; 0: automatic
per_device_eval_batch_size -> rollout.concurrency tasks attempted at a time
| | sft.batch_size -> sft.batch
| | sft.warmup_ratio -> sft.warmup below 1 it is a share of the steps
| | sft.lr_scheduler_type -> sft.schedule
| | sft.cutoff_len sft.max_length sft.max_seq_length -> rollout.max_context together with
    sft.overlong=cut
| | sft.per_device_train_batch_size -> sft.batch examples per step, over all processes
# rollouts
temperature | temperature -> rollout.temperature
| multi_turn.enable -> rollout.max_turns 1 is a single turn
| filter_overlong_prompts data.truncation -> - not needed: an attempt ends at rollout.max_context, and a
    step without a sampled token stops the run
| rollout.mode agent.num_workers -> - not needed: attempts are always asynchronous; rollout.concurrency
    bounds them
num_generations | rollout.n | n_samples_per_prompt num_samples group_size -> rollout.samples
max_completion_length | max_response_length response_length | max_new_tokens generate_max_len ->
    rollout.max_tokens it counts the sampled tokens of one turn; rollout.max_context bounds the whole
    attempt
max_length vllm_max_model_length max_prompt_length | max_prompt_length prompt_length max_model_len |
    prompt_max_len max_seq_length -> rollout.max_context it counts a whole attempt: the prompt, every
    turn and every observation
max_tool_calling_iterations | max_assistant_turns max_user_turns -> rollout.max_turns
| max_num_seqs -> rollout.concurrency in tasks, each with rollout.samples attempts
| filter_groups.enable -> rollout.dynamic_rounds 4 draws up to four times; algo.name=dapo has it
| filter_groups.max_num_gen_batches -> rollout.dynamic_rounds
top_p | top_p -> rollout.top_p the trained log-probs are those of the truncated distribution
top_k | top_k -> rollout.top_k 0 keeps every token, where others write -1
min_p -> rollout.min_p
| | freeze_base_model -> actions.freeze_base
| | starting_mode -> actions.start a tool of actions.file
| | earl_head_use_bias -> actions.bias
| | init_from_base -> actions.init_from_base
| | earl.training.tools -> rollout.branch written as rollout.branch={counterfactual: {tools: [swap]}}
| | tool_score_temperature tool_score_top_k tool_score_top_p -> rollout.branch written as
    rollout.branch={counterfactual: {temperature: 10, top_k: 10, top_p: 0.9}}
| | finetune_from_path -> model.path a run or a checkpoint of one
repetition_penalty -> eval.repetition_penalty for evaluation only: the learner does not know a penalised
    distribution
| do_sample -> - training samples at rollout.temperature; held-out tasks are attempted greedily too
# the engine
vllm_enable_sleep_mode use_transformers_paged ds3_gather_for_generation | enforce_eager
    free_cache_engine enable_chunked_prefill enable_prefix_caching max_num_batched_tokens load_format
    disable_log_stats layered_summon -> - not needed with graft's own engine; arguments of vLLM go into
    engine.args
use_vllm -> engine.name written as engine.name=vllm
vllm_mode -> engine.url of servers, together with engine.name=vllm; empty: in this process
vllm_server_base_url -> engine.url together with engine.name=vllm
vllm_server_host -> engine.url written as engine.url=[http://HOST:8000], together with engine.name=vllm
| rollout.name -> engine.name
vllm_gpu_memory_utilization | gpu_memory_utilization -> engine.args written as
    engine.args={gpu_memory_utilization: 0.5}
| engine_kwargs -> engine.args
| tensor_model_parallel_size tensor_parallel_size -> parallel.tp of the policy; an engine's own is
    engine.tp
| pipeline_parallel_size pipeline_model_parallel_size | inference.pipeline_parallel_size -> engine.url of a
    server that was started with it (vllm serve MODEL --pipeline-parallel-size 2), together with
    engine.name=vllm; inside the processes of a run layers are split with engine.tp
vllm_tensor_parallel_size | rollout.tensor_model_parallel_size | inference.tensor_parallel_size ->
    engine.tp
# the algorithm
entropy_coef -> algo.entropy_coef
| critic_warmup -> - policy and critic learn from the first step
| critic.* -> - the critic has the policy's shape; algo.critic_lr is its learning rate
| adv_estimator | advantage_estimator -> algo.name verl's gae is ppo here; grpo, rloo, opo, gpg, remax,
    gdpo, grpo_passk, reinforce_plus_plus, reinforce_plus_plus_baseline and optimal_token_baseline have
    their names, grpo_vectorized is grpo, rloo_vectorized rloo, tir_optimal_token_baseline
    optimal_token_baseline; gigpo of verl-agent is gigpo
| | gdpo_reward_keys -> task.reward a list of rewards, each one compared by itself with algo.name=gdpo
| | gdpo_reward_weights -> task.reward written as task.reward=[{f1: {}, weight: 1.0}, ...]
multi_objective_aggregation -> algo.name normalize_then_sum is algo.name=gdpo; sum_then_normalize is
    what the others do
| calculate_sum_pi_squared -> algo.credit optimal_token_baseline computes what it needs
| | f_norm -> algo.credit written as algo.credit=[{gpg: {norm: 1.0}}]
| | step_advantage_w gigpo.mode -> algo.credit written as algo.credit=[{gigpo: {weight: 1.0, scale:
    false}}]; mean_std_norm is scale true
| | use_role_baseline -> algo.name written as algo.name=spiral
| | role_baseline_ema_gamma -> algo.credit written as algo.credit=[{rae: {decay: 0.95}}]
| | algorithm.name algo.type algorithm -> algo.name
loss_type -> algo.name presets grpo, dr_grpo, dapo, cispo, sapo, luspo, vespo; algo.reduction sets the
    mean alone
| rollout_correction.loss_type -> algo.loss reinforce with algo.weights=[{importance: {policy:
    current}}], ppo_clip is clip
sapo_temperature_pos sapo_temperature_neg | tau_pos tau_neg -> algo.loss written as algo.loss={sapo:
    {tau_pos: 1.0, tau_neg: 1.05}}
vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg -> algo.loss written as algo.loss={vespo:
    {k_pos: 2.0, lambda_pos: 3.0, k_neg: 3.0, lambda_neg: 2.0}}
| clip_cov_ratio clip_cov_lb clip_cov_ub -> algo.loss written as algo.loss={clip_cov: {share: 2e-4,
    low_cov: 1.0, high_cov: 5.0}}
| kl_cov_ratio ppo_kl_coef -> algo.loss written as algo.loss={kl_cov: {share: 2e-3, coef: 1.0}}
| dro_beta -> algo.loss written as algo.loss={dro: {beta: 0.1}}
| | divergence_type -> algo.loss written as algo.loss={dppo: {divergence: kl}}
| bypass_mode -> algo.old_policy written as algo.old_policy=engine
| loss_mode -> algo.loss vanilla is clip, geo_mean gmpo, gpg reinforce, dppo_tv dppo, dppo_kl {dppo:
    {divergence: kl}}; gspo, sapo, cispo, dro, clip_cov and kl_cov have their names
| loss_agg_mode -> algo.reduction token-mean is token, seq-mean-token-mean is sequence
importance_sampling_level -> algo.loss sequence is algo.loss=gspo
scale_rewards -> algo.credit batch is algo.credit=[{grpo: {scale: batch, unbiased: true}}]; none,
    without the division by the standard deviation, is algo.name=dr_grpo
| norm_adv_by_std_in_grpo -> algo.credit without the division: algo.name=dr_grpo
beta | kl_loss_coef | init_kl_coef -> algo.kl_coef
| kl_ctrl.kl_coef -> algo.kl_coef together with algo.kl_in=reward
| use_kl_loss -> algo.kl_coef more than 0
| use_kl_in_reward -> algo.kl_in written as algo.kl_in=reward, with algo.kl_coef
| kl_loss_type kl_penalty -> algo.kl_kind low_var_kl is k3, mse is k2, kl is k1; abs, k1+, k3+ and abs+
    have their names
| kl_ctrl.type target_kl kl_ctrl.horizon | kl_target kl_horizon -> algo.kl_control written as
    algo.kl_control={target: 0.1, horizon: 10000}, with algo.kl_coef as the first value
use_bias_correction_kl -> algo.kl_corrected
sync_ref_model ref_model_sync_steps ref_model_mixup_alpha -> algo.reference_sync written as
    algo.reference_sync=[512, 0.6]
use_adaptive_entropy entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max ->
    algo.entropy_control written as algo.entropy_control={target: 0.2, delta: 0.005, least: 0, most: 1}
top_entropy_quantile -> algo.weights written as algo.weights=[{top_entropy: {share: 0.2}}]
off_policy_mask_threshold -> algo.weights written as algo.weights=[{off_policy_rows: {high: 0.5}}]
| rollout_is -> algo.weights written as algo.weights=[{importance: {level: sequence, cap: 2.0}}]
| rollout_is_batch_normalize -> algo.weights written as algo.weights=[{importance: {normalise: true}}]
| rollout_rs rollout_rs_threshold -> algo.weights seq_mean_k3 is algo.weights=[{reject: {by: k3, level:
    sequence, of: mean, high: 0.01}}]
vllm_importance_sampling_mode vllm_importance_sampling_clip_min -> algo.weights sequence_mask is
    algo.weights=[{importance: {level: sequence, outside: mask, floor: 0.5, cap: 2.0}}]
| | world_model_coef echo_coef -> algo.observation_coef
| | kl_estimator -> algo.kl_kind
epsilon epsilon_high | clip_ratio clip_ratio_low clip_ratio_high | eps_clip cliprange -> algo.loss
    written as algo.loss={clip: {low: 0.2, high: 0.28}}
delta | clip_ratio_c -> algo.loss written as algo.loss={clip: {dual: 3.0}}
| entropy_coeff | entropy_loss_coef -> algo.entropy_coef
| gamma lam -> algo.credit written as algo.credit=[{gae: {gamma: 1.0, lam: 0.95}}, whiten]; without a
    critic as algo.credit=[{discounted: {gamma: 0.99, per: token}}, whiten]
mask_truncated_completions -> algo.mask_truncated
vllm_importance_sampling_cap vllm_importance_sampling_clip_max | rollout_is_threshold ->
    algo.importance_cap
vllm_importance_sampling_correction -> algo.importance_cap 2 is on, 0 is off
| | overlong_buffer.len -> algo.overlong written as algo.overlong=[LENGTH,BUFFER]
# tasks and rewards
dataset_config -> task.args written as task.args={data: train@OWNER/NAME}; a dataset with several
    configurations is downloaded first
dataset_train_split dataset_test_split -> task.args written before the name, as in task.args={data:
    test@OWNER/NAME}
num_generations_eval -> eval.samples
| prompt_key -> task.args written as task.args={data: FILE, prompt_key: COLUMN}
| reward_manager reward_model.enable -> task.reward functions in verl's signature are taken as they are;
    `judge` asks a model
| sandbox_fusion.* -> - not needed: code runs in graft's own sandbox
dataset_name | train_files | dataset dataset_path data_path prompt_data -> task.args written as
    task.env=prompts task.args.data=FILE, with task.env=earl:rows for EARL's files
eval_dataset | val_files -> task.eval_args written as task.eval_args={data: FILE}, or {data: [FILE,
    FILE]}
| val_kwargs.temperature | eval_temperature valid_temperature -> eval.temperature
| val_kwargs.top_p | eval_top_p valid_top_p -> eval.top_p
| val_kwargs.top_k | valid_top_k -> eval.top_k 0 keeps every token, where others write -1
| val_kwargs.n | eval_n_samples_per_prompt n_samples_per_eval_prompt -> eval.samples
reward_funcs | | reward_fn reward_function -> task.reward
| custom_reward_function.path custom_reward_function.name -> task.reward written as
    task.reward=my_module:compute_score
reward_weights -> task.reward written as task.reward=[{f1: {}, weight: 1.0}, ...]
| | environment env_name env_id -> task.env
| multi_turn.tool_config_path | tools -> task.wrappers
| tool_config_path -> actions.file EARL's tool files as they are
# the run
seed data_seed | data.seed fsdp_config.seed -> run.seed
| trainer.device -> model.device
| rollout_data_dir validation_data_dir log_val_generations -> run.log_episodes every n-th step's
    episodes are written as trees
push_to_hub hub_model_id hub_token hub_strategy hub_private_repo -> - `graft export` writes a folder
    that the hub takes
load_best_model_at_end metric_for_best_model -> - the best checkpoint is always kept
do_train do_eval disable_tqdm log_level local_rank ddp_timeout -> - not needed: graft train does both,
    and torchrun tells each process its place
eval_on_start -> - held-out tasks are always attempted before and after
| val_only -> - `graft eval` measures a run or a model
| profiler.* global_profiler.* -> - the seconds of each phase of a step are in metrics.jsonl
output_dir | default_local_dir save_path | ckpt_path -> run.dir the folder of all runs; run.name names
    this one
run_name | experiment_name -> run.name
project | project_name -> - a tracker's own; runs are folders below run.dir
save_steps | save_freq -> run.save_every
eval_steps | test_freq -> run.eval_every
eval_strategy -> run.eval_every in steps
save_strategy -> run.save_every in steps
| val_before_train -> run.eval_tasks 0 never evaluates
save_total_limit | max_actor_ckpt_to_keep -> run.keep_last
resume_from_checkpoint | resume_mode -> run.resume a run resumes from the newest checkpoint of its
    folder
logging_steps logging_strategy -> - every step is logged; run.log_episodes says how often episodes are
    written
log_completions -> run.log_episodes
report_to | trainer.logger -> run.trackers
| | use_wandb wandb -> run.trackers written as run.trackers=[wandb]
# machines
| actor.strategy strategy fsdp_size reshard_after_forward -> parallel.shard FSDP2 is the only way to
    split the state
| ulysses_sequence_parallel_size -> - sequences are not split over processes; parallel.tp splits layers
| ray_kwargs.* -> cluster.address of a Ray cluster; empty: this machine, without Ray
| megatron.* transfer_queue.* -> - there is no such backend; parallel.tp and parallel.shard split the
    model
deepspeed fsdp -> parallel.shard start the command under `torchrun --nproc-per-node N`, or give
    cluster.address
| param_offload optimizer_offload -> parallel.offload
| n_gpus_per_node nnodes | num_gpus -> - start the command under `torchrun --nproc-per-node N`, or give
    cluster.address
"""


class PeerRow(NamedTuple):
    """One line of the table."""

    section: str
    """What the keys are about, such as "the optimizer"."""
    trl: tuple[str, ...]
    verl: tuple[str, ...]
    others: tuple[str, ...]
    key: str
    """graft's key, or "-"."""
    remark: str

    @property
    def entry(self) -> str:
        return f"{self.key} {self.remark}".strip()


def read_table(table: str = TABLE) -> list[PeerRow]:
    rows: list[PeerRow] = []
    section = ""
    for line in table.strip().replace("\n    ", " ").splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
            continue
        names, _, entry = line.partition(" -> ")
        trl, verl, others = (tuple(part.split()) for part in f"{names} | | ".split("|")[:3])
        key, _, remark = entry.partition(" ")
        rows.append(PeerRow(section, trl, verl, others, key, remark))
    return rows
