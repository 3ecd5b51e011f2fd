"""`graft translate`: settings of TRL and verl become a recipe; the rest is named with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from graft.cli import app
from graft.config import check, keys
from graft_interop.recipes.peer_text import PeerSettings, read_settings, read_value
from graft_interop.recipes.peer_values import RULES
from graft_interop.recipes.translate import translate

VERL = r"""
set -x
MODEL=Qwen/Qwen3-8B
export OUT=here
train_files="['/data/a.parquet', '/data/b.parquet']"
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files=$NOT_SET/test.parquet \
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path=$MODEL \
    +actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.005 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.n=${N:-5} actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    custom_reward_function.path=rewards/mine.py custom_reward_function.name=score \
    trainer.logger='["console","wandb"]' trainer.experiment_name=first trainer.total_training_steps=40 \
    trainer.n_gpus_per_node=8 trainer.save_freq=-1 $@
"""
TRL = """
import os
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("this script was run")
name = "Qwen/Qwen3-0.6B"
rows = load_dataset("trl-lib/DeepMath-103K", split="train")
settings = GRPOConfig(
    output_dir="out/maths", learning_rate=2e-6, num_generations=16, per_device_train_batch_size=16,
    gradient_accumulation_steps=4, steps_per_generation=8, loss_type="dr_grpo", scale_rewards=False,
    max_completion_length=256, use_vllm=True, max_steps=200, beta=0.04, seed=int(os.environ["SEED"]),
)
GRPOTrainer(
    model=name, args=settings, train_dataset=rows, reward_funcs=[accuracy_reward, my_own],
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.1),
)
"""


def recipe_of(text: str, ending: str = "") -> tuple[dict, dict[str, str]]:
    made = translate(read_settings(text, ending), keys())
    return made.recipe, made.left


def test_a_script_of_verl_becomes_a_recipe_that_loads():
    recipe, left = recipe_of(VERL, ".sh")
    assert recipe["algo"] == {
        "name": "grpo",
        "credit": [{"grpo": {"scale": True, "unbiased": True}}],  # as verl computes it
        "loss": {"clip": {"low": 0.2, "high": 0.28, "dual": 3.0}},
        "reduction": "token",
        "kl_coef": 0.005,
        "kl_kind": "k3",
    }
    lengths = {"max_context": 1536, "max_tokens": 1024}
    assert recipe["rollout"] == {"tasks": 256, "samples": 5, **lengths}
    assert recipe["train"] == {
        "lr": 2e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "minibatches": 4, "steps": 40,
    }  # fmt: skip
    assert recipe["task"]["args"] == {"data": ["/data/a.parquet", "/data/b.parquet"]}
    assert recipe["task"]["reward"] == "mine:score" and recipe["model"] == {"path": "Qwen/Qwen3-8B"}
    assert recipe["run"]["trackers"] == ["wandb"] and recipe["run"]["save_every"] == 0
    check(recipe)
    reasons = {
        "data.val_files": "NOT_SET",
        "actor_rollout_ref.model.use_remove_padding": "packed",
        "actor_rollout_ref.rollout.name": "engine.name=vllm",
        "actor_rollout_ref.ref.fsdp_config.param_offload": "reference",
        "trainer.n_gpus_per_node": "torchrun",
    }
    for key, reason in reasons.items():
        assert reason in left[key]


def test_python_of_trl_is_read_and_not_run():
    recipe, left = recipe_of(TRL, ".py")
    assert recipe["rollout"]["tasks"] == 8 and recipe["rollout"]["samples"] == 16  # 16 x 8 / 16
    assert recipe["train"]["minibatches"] == 2  # 8 / 4
    assert recipe["algo"]["reduction"] == {"constant": {"length": 256}}
    assert recipe["algo"]["credit"] == [{"grpo": {"scale": False, "unbiased": True, "eps": 1e-4}}]
    assert recipe["algo"]["kl_coef"] == 0.04 and recipe["run"] == {"dir": "out", "name": "maths"}
    assert recipe["lora"] == {"rank": 8, "alpha": 16}
    assert recipe["task"] == {"env": "prompts", "args": {"data": "train@trl-lib/DeepMath-103K"}}
    check(recipe)
    assert "computed: int(os.environ" in left["seed"] and "my_own" in left["reward_funcs"]
    assert "dropout" in left["lora_dropout"] and "engine.name=vllm" in left["use_vllm"]


@pytest.mark.parametrize(
    ("text", "ending", "values"),
    [
        ("trl grpo --num_generations 4 --use-peft --beta=0.1", "",
         {"num_generations": 4, "use_peft": True, "beta": 0.1}),
        ("trl grpo --reward_funcs a.b c.d --seed 1", "", {"reward_funcs": ["a.b", "c.d"], "seed": 1}),
        ("learning_rate: 1e-6\nactor: {optim: {lr: 2}}\n", "",
         {"learning_rate": 1e-6, "actor.optim.lr": 2}),
        ("learning_rate: 1e-6\n", ".yaml", {"learning_rate": 1e-6}),
        ("num_generations=8", "", {"num_generations": 8}),
        ('p.add_argument("--beta", type=float, default=0.2)', "", {"beta": 0.2}),
        ('p.parse_args(["--beta", "0.2", "--use_vllm"])', "", {"beta": 0.2, "use_vllm": True}),
        ("TrainingArguments(max_steps=3)", "", {"max_steps": 3}),
    ],
)  # fmt: skip
def test_settings_are_read_from(text, ending, values):
    assert read_settings(text, ending) == PeerSettings(values)


@pytest.mark.parametrize(
    ("text", "value"),
    [("[console,wandb]", ["console", "wandb"]), ("False", False), ("0.5", 0.5), ("a/b", "a/b"),
     ("__import__('os').system('x')", "__import__('os').system('x')")],
)  # fmt: skip
def test_a_value_is_read_and_never_evaluated(text, value):
    assert read_value(text) == value


# 3 attempts are no 8 of one task
UNKNOWN = """
per_device_train_batch_size=3 lr_scheduler_type=polynomial loss_type=strange learning_rate_typo=3
report_to=mlflow warmup_ratio=0.1 num_generations=text
"""


@pytest.mark.parametrize("settings", UNKNOWN.split())
def test_what_cannot_be_translated_is_named_with_a_reason(settings):
    _, left = recipe_of(f"trl grpo --{settings}")
    key = settings.partition("=")[0]
    about = {"num_generations": "per_device_train_batch_size"}.get(key, key)
    assert about in left and len(left[about]) > 10


def test_the_command_prints_a_recipe_with_the_rest_as_comments(tmp_path: Path):
    (tmp_path / "run.sh").write_text(VERL)
    done = CliRunner().invoke(app, ["translate", str(tmp_path / "run.sh")])
    assert done.exit_code == 0, done.output
    check(yaml.safe_load(done.stdout))
    assert "# actor_rollout_ref.rollout.name: " in done.stdout
    flags = ["translate", "--json", "trl", "grpo", "--learning_rate", "1e-5"]
    done = CliRunner().invoke(app, flags)  # no model: said, and the recipe is there
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 1 and "model.path" in found["problem"]
    assert found["library"] == "TRL" and found["recipe"]["train"]["lr"] == 1e-5


@pytest.mark.parametrize("text", ["nothing-here.sh", "hello world", "x: [1", "{}"])
def test_text_without_settings_is_refused(text, monkeypatch, capsys):
    from graft.cli import main

    monkeypatch.setattr("sys.argv", ["graft", "translate", text])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_every_rule_is_about_a_setting_of_the_table():
    from graft.recipe.peer_keys import PEER_KEYS

    own = {"model", "overlong_buffer.enable", "actor.strategy"}
    assert {name for name in RULES if name not in PEER_KEYS} <= own
