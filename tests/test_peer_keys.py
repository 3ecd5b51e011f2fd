"""Settings as users of TRL, verl and transformers write them: the error names the key of ours."""

from __future__ import annotations

import dataclasses
import warnings
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from graft.config import ConfigError, keys, load_config
from graft.recipe.peer_keys import (
    FIRST_KEYS,
    PEER_KEYS,
    as_override,
    leaves_of,
    meant,
    translated,
)
from graft_interop.recipes.peer_values import TRL_DEFAULTS, VERL_DEFAULTS


def test_every_entry_names_a_key_that_exists_and_none_that_is_ours():
    known = keys()
    for theirs, entry in PEER_KEYS.items():
        ours, _, remark = entry.partition(" ")
        assert ours in known or (ours == "-" and remark), theirs
        assert theirs not in known
        assert theirs == theirs.lower() and "-" not in theirs
    assert set(FIRST_KEYS.values()) <= set(known)
    assert set(FIRST_KEYS) == {key.partition(".")[0] for key in known}


ANSWERS = {
    "train.lr": (
        "train.learning_rate=1e-4 learning_rate=1e-4 lr=1e-4 train.learning_rat=1 "
        "actor_rollout_ref.actor.optim.lr=1e-6 +actor_rollout_ref.actor.optim.lr=1e-6"
    ),
    "sft.lr": "sft.learning_rate=1e-4",
    "algo.critic_lr": "critic.optim.lr=1e-5",
    "rollout.tasks": "data.train_batch_size=1024 per_device_train_batch_size=8",
    "rollout.max_tokens": "data.max_response_length=1024 max_completion_length=512",
    "task.args": "data.train_files=gsm8k.parquet",
    "algo.name": "algorithm.adv_estimator=grpo algo=grpo",
    "algo.kl_coef": "algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.actor.kl_loss_coef=0.001 beta=0.04",
    "rollout.samples": "actor_rollout_ref.rollout.n=8 num_generations=8 rollout.n=8 rollot.samples=4",
    "engine.name": "actor_rollout_ref.rollout.name=vllm",
    "engine.tp": (
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
        "actor.inference.tensor_parallel_size=2"
    ),
    "model.path": (
        "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B trainer.finetune_from_path=runs/order-earl "
        "model.name_or_path=Qwen/Qwen3-0.6B model_name_or_path=Qwen/Qwen3-0.6B "
        "model=Qwen/Qwen3-0.6B"
    ),
    "train.minibatches": "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "algo.loss": (
        "actor_rollout_ref.actor.clip_ratio_high=0.28 "
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=2e-4 epsilon=0.2"
    ),
    "algo.kl_control": "algorithm.kl_ctrl.target_kl=0.1",
    "algo.weights": "algorithm.rollout_correction.rollout_rs=seq_mean_k3 top_entropy_quantile=0.2",
    "algo.old_policy": "algorithm.rollout_correction.bypass_mode=true",
    "algo.reference_sync": "ref_model_mixup_alpha=0.6",
    "algo.entropy_control": "entropy_target=0.2",
    "algo.kl_corrected": "use_bias_correction_kl=true",
    "train.steps": "trainer.total_epochs=15 max_steps=100 num_train_epochs=1 steps=10",
    "run.save_every": "trainer.save_freq=10",
    "run.name": "trainer.experiment_name=x",
    "actions.file": "tool_config_path=tool_configs/sorting.yaml",
    "task.wrappers": "actor_rollout_ref.rollout.multi_turn.tool_config_path=a.yaml",
    "rollout.branch": "actor_rollout_ref.earl.training.tools=[swap]",
    "run.dir": "output_dir=out",
    "train.tokens_per_micro": "gradient_accumulation_steps=4",
    "lora.rank": "lora_r=16",
    "task.env": "env=calculator",
    "eval.samples": "actor_rollout_ref.rollout.val_kwargs.n=8",
    "eval.top_p": "actor.inference.valid_top_p=0.95",
}  # fmt: skip
"""Our key -> how others write it."""


def test_a_key_of_another_library_is_answered_with_ours():
    known = keys()
    for ours, theirs in ANSWERS.items():
        for override in theirs.split():
            key = override.partition("=")[0].removeprefix("+")
            assert f"did you mean '{ours}'?" in meant(key, known), override
    with pytest.raises(ConfigError, match=r"did you mean 'train.lr'\?"):
        load_config("quickstart", ["+actor_rollout_ref.actor.optim.lr=1e-6"])


def test_a_difference_in_meaning_is_in_the_message():
    with pytest.raises(
        ConfigError, match=r"'rollout.tasks'\? \(TRL counts attempts: tasks = per_de"
    ):
        load_config("quickstart", ["per_device_train_batch_size=8"])
    with pytest.raises(ConfigError, match=r"'eval.repetition_penalty'\? \(for evaluation only"):
        load_config("quickstart", ["rollout.repetition_penalty=1.1"])


def test_every_key_of_a_foreign_section_is_answered_on_a_line_of_its_own():
    overrides = ["optim.lr=1", "fsdp_config.param_offload=true"]
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [f"actor_rollout_ref.actor.{each}" for each in overrides])
    first, *lines = str(error.value).splitlines()
    assert first.endswith("2 problems") and len(lines) == 2
    assert "'train.lr'" in lines[0] and "'parallel.offload'" in lines[1]


def test_keys_with_an_answer_come_first_and_the_rest_is_counted():
    """Important ones are never hidden behind those of which graft knows nothing."""
    overrides = [f"verl.key{number}=1" for number in range(60)]
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [*overrides, "zz.optim.lr=1e-6", "zz.rollout.n=8"])
    _, *lines = str(error.value).splitlines()
    assert ["train.lr" in lines[0], "rollout.samples" in lines[1]] == [True, True]
    assert "22 more unknown keys" in lines[-2] and "graft translate" in lines[-1]
    assert max(map(len, lines)) < 400


NOT_NEEDED = """
actor_rollout_ref.model.use_remove_padding actor_rollout_ref.actor.use_dynamic_bsz trainer.balance_batch
actor_rollout_ref.rollout.free_cache_engine use_liger_kernel
""".split()  # noqa: SIM905
OTHER = """
global_profiler.steps actor_rollout_ref.actor.checkpoint.strict transfer_queue.metrics.port trainer.v1.sync
reward.custom.zzz strange_setting
""".split()  # noqa: SIM905
"""Some are below a section that is named in the table."""


def test_what_graft_does_anyway_is_said_and_nothing_is_guessed_for_what_means_something_else():
    for key in NOT_NEEDED:
        assert meant(key, keys()).startswith("graft has no such key: not needed"), key
    assert [key for key in OTHER if "did you mean" in meant(key, keys())] == []


@pytest.mark.parametrize(
    ("option", "following", "hint"),
    [
        ("--learning_rate", ["1e-4"], "without dashes: train.lr=1e-4"),
        ("--lr", ["1e-4"], "without dashes: train.lr=1e-4"),
        ("-lr", ["1e-4"], "without dashes: train.lr=1e-4"),
        ("--train.lr=1e-4", [], "without dashes: train.lr=1e-4"),
        ("--num-generations=4", [], "without dashes: rollout.samples=4"),
        ("train.lr", ["1e-4"], "without dashes: train.lr=1e-4"),
        ("train.lr", ["run.name=x"], "without dashes: train.lr=VALUE"),
        ("--per-device-train-batch-size", ["4"], "did you mean 'rollout.tasks'? (TRL counts"),
        ("--resume", [], "the same command resumes a run"),
        ("--foo", ["4"], "'foo' is not a key of graft; see `graft config --keys`"),
    ],
)
def test_an_option_is_answered_with_the_setting(option, following, hint):
    assert hint in as_override(option, following, keys())


def test_the_command_line_answers_an_option_with_the_setting(monkeypatch, capsys):
    from graft.cli import main

    monkeypatch.setattr("sys.argv", ["graft", "train", "quickstart", "--learning_rate", "1e-4"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert (
        "settings are written key=value, without dashes: train.lr=1e-4" in capsys.readouterr().err
    )


def trl_settings() -> dict[str, Any]:
    """TRL's settings with their defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = pytest.importorskip("trl").GRPOConfig
    return {field.name: field.default for field in dataclasses.fields(config)}


def verl_settings() -> dict[str, Any]:
    verl = pytest.importorskip("verl")
    page = Path(str(verl.__file__)).parent / "trainer/config/_generated_ppo_trainer.yaml"
    return yaml.safe_load(page.read_text())


@pytest.mark.peer
def test_entries_for_trl_are_names_that_trl_has():
    """And of the settings that people change first, every one has an entry or is spelled like ours."""
    names = set(trl_settings())
    first = {
        "learning_rate", "num_generations", "per_device_train_batch_size", "max_completion_length",
        "beta", "epsilon", "epsilon_high", "delta", "max_steps", "num_train_epochs", "output_dir",
        "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation", "loss_type",
        "num_iterations", "scale_rewards", "importance_sampling_level", "reward_weights", "bf16",
        "mask_truncated_completions", "use_vllm", "vllm_mode", "vllm_server_base_url", "save_steps",
        "eval_steps", "logging_steps", "report_to", "lr_scheduler_type", "warmup_steps", "run_name",
        "gradient_checkpointing", "adam_beta1", "adam_beta2", "save_total_limit", "log_completions",
        "vllm_importance_sampling_clip_max", "top_p", "top_k", "min_p", "fsdp", "deepspeed",
    }  # fmt: skip
    assert first <= names
    assert first <= set(PEER_KEYS)
    for spelled_alike in ("temperature", "seed", "weight_decay", "max_grad_norm", "entropy_coef"):
        assert spelled_alike in names
        assert meant(spelled_alike, keys()).endswith(f".{spelled_alike}'?")


@pytest.mark.peer
def test_keys_of_verl_are_answered_from_the_table_or_not_at_all():
    """Of verl's 900 keys none is answered by its spelling; those of its examples have an answer."""
    known = keys()
    theirs = [key for name, value in verl_settings().items() for key in leaves_of(name, value)]
    guesses = [
        key for key in theirs if "did you mean" in meant(key, known) and not translated(key, known)
    ]
    assert len(theirs) > 800 and guesses == []
    first = {
        "algorithm.adv_estimator", "data.train_files", "data.val_files", "data.train_batch_size",
        "data.max_prompt_length", "data.max_response_length", "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef",
        "actor_rollout_ref.actor.kl_loss_type", "actor_rollout_ref.actor.entropy_coeff",
        "actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.model.enable_gradient_checkpointing", "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.temperature",
        "algorithm.use_kl_in_reward", "trainer.logger", "trainer.project_name", "trainer.save_freq",
        "trainer.experiment_name", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.test_freq",
        "trainer.total_epochs", "trainer.critic_warmup", "data.filter_overlong_prompts",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "data.truncation",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "data.shuffle",
        "actor_rollout_ref.ref.fsdp_config.param_offload", "actor_rollout_ref.actor.clip_ratio_high",
    }  # fmt: skip
    assert first <= set(theirs)
    assert [key for key in first if not translated(key, known)] == []


@pytest.mark.peer
def test_the_defaults_are_those_of_the_libraries():
    fields, theirs = trl_settings(), verl_settings()
    assert {name: fields[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS
    for key, value in VERL_DEFAULTS.items():
        assert reduce(dict.__getitem__, key.split("."), theirs) == value, key
