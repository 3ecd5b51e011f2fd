"""Runs that train adapters: what moves, what is held in memory, what a checkpoint needs to go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graft.config import ConfigError, check
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.lora.files import ADAPTER
from graft.models.lora.training import ALL, num_trained
from graft.models.shape import ModelShape
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.build import build_run
from graft.train.errors import RunStopped
from graft.train.learner_build import make_learner, sft_learner
from graft.train.memory.device_memory import DeviceMemory
from graft.train.memory.plan import plan_memory
from graft.train.model import load_tokenizer, new_shape
from graft.train.rollouts.engine_check import check_served
from graft.train.run_dir.checkpoint import ADAPTER_FOLDER, checkpoints
from graft.types import Task, Trajectory
from tests.training import metrics_of as metrics
from tests.training import train_recipe
from tests.trees import random_tree

SIZES = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model to adapt, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "base"
    config = check({"model": {"shape": {**SIZES, "tied": False}}, "task": {"env": "calculator"}})
    tokenizer = load_tokenizer(config, None)
    save_model(Decoder(new_shape(config, tokenizer)).initialise(2), folder)
    tokenizer.save(folder)
    return folder


def low_tokens(task: Task, row: Trajectory) -> float:
    """Something that random weights earn now and then."""
    return float(sum(token < 9 for token in row.tokens) / len(row.tokens))


def recipe(base: Path, folder: Path, **sections: dict[str, Any]):
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "name": "run", "save_every": 2, "eval_tasks": 4, "keep_last": 9,
                "trackers": [], "seed": 3},
        "model": {"path": str(base)},
        "task": {"env": "calculator", "reward": "tests.train.test_lora_run:low_tokens"},
        "rollout": {"tasks": 3, "samples": 4, "max_tokens": 8, "max_turns": 2, "max_context": 64},
        "algo": {"name": "grpo", "kl_coef": 0.1},
        "train": {"steps": 4, "lr": 3e-2},
        "sft": {"steps": 3, "batch": 8, "lr": 1e-2, "warmup": 0},
        "lora": {"rank": 2, "alpha": 8},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return check(values)


def bits(checkpoint: Path) -> dict[str, list[float]]:
    """Every number of weights, adapters and rows of actions."""
    return {
        f"{file.name} {name}": tensor.flatten().tolist()
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.slow
def test_a_run_that_was_cut_in_either_phase_ends_with_the_same_bits(base, tmp_path):
    train_recipe(recipe(base, tmp_path / "whole"))
    whole = tmp_path / "whole" / "run"
    for kept in ("sft-000002", "sft-000003", "rl-000000", "rl-000002"):
        broken = tmp_path / kept / "run"
        shutil.copytree(whole, broken)
        found = checkpoints(broken / "checkpoints")
        names = [checkpoint.path.name for checkpoint in found]
        for later in found[names.index(kept) + 1 :]:
            shutil.rmtree(later.path)
        train_recipe(recipe(base, tmp_path / kept))
        assert metrics(broken) == metrics(whole)
        last = "checkpoints/rl-000004"
        assert bits(broken / last) == bits(whole / last)
    # the reference is the policy that RL started from, after the warm-up
    kl = [line["kl"] for line in metrics(whole) if line["phase"] == "rl"]
    assert kl[0] == pytest.approx(0.0, abs=1e-9) and kl[-1] > 1e-6


def test_a_checkpoint_is_the_merged_model_and_its_adapter(base, tmp_path):
    train_recipe(recipe(base, tmp_path, train={"steps": 2}, sft={"steps": 0}))
    checkpoint = checkpoints(tmp_path / "run" / "checkpoints")[-1].path
    config = json.loads((checkpoint / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 8)
    assert config["base_model_name_or_path"] == str(base)
    assert not (checkpoint / "adapter_config.json").exists()
    merged, before = hf_names(load_model(checkpoint)), hf_names(load_model(base))
    stored = load_file(checkpoint / ADAPTER_FOLDER / ADAPTER)
    moved = 0
    for name, weight in merged.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in stored:
            down, up = stored[f"{module}.lora_A.weight"], stored[f"{module}.lora_B.weight"]
            assert down.shape == (2, weight.shape[1]) and up.shape == (weight.shape[0], 2)
            torch.testing.assert_close(weight, before[name] + 4.0 * up @ down)
            moved += not torch.equal(weight, before[name])
        else:
            assert torch.equal(weight, before[name]), name
    assert moved == 14


def test_the_optimizer_holds_the_adapters_alone(base, tmp_path):
    components = build_run(recipe(base, tmp_path))
    learner = sft_learner(components, 3)
    shape, count = components.policy.shape, num_trained(components.policy.shape, 2, [ALL])
    # q 32x32, k and v 16x32, o 32x32, gate, up and down 32x32; two layers
    assert count == 2 * 2 * (64 + 48 + 48 + 64 + 64 + 64 + 64)
    place = [p.data_ptr() for p in components.policy.parameters()]
    rows = trajectories_of([random_tree(seed, vocab=12) for seed in range(3)])
    learner.update(to_batch(rows))
    state = learner.optimizer.adam.state.values()
    assert sum(mean.numel() + square.numel() for _, mean, square in state) == 2 * count
    assert sum(m.numel() for m in learner.optimizer.masters) == count
    assert all(p.grad is None for p in components.policy.parameters())
    assert [p.data_ptr() for p in components.policy.parameters()] == place
    assert components.engine.decoder is components.policy
    room = DeviceMemory(torch.device("cpu"), 1 << 40)
    found = {
        i.name: i.bytes for i in plan_memory(components.config, shape, torch.float32, room).items
    }
    assert (found["adapters"], found["AdamW moments"]) == (4 * count, 8 * count)
    assert found["base"] == 4 * sum(t.base.numel() for t in components.lora.targets)
    assert "reference" not in found and "fp32 masters" not in found
    # both phases train the same adapters; the reference is a snapshot of them, not a model
    held = components.config.algo.model_copy(update={"kl_coef": 0.1})
    components.config = components.config.model_copy(update={"algo": held})
    both = make_learner(components, None)
    assert both.lora is learner.lora and both.reference is None
    assert sum(value.numel() for value in both.anchor.values()) == count


def test_an_engine_that_serves_other_weights_stops_the_run(base, tmp_path):
    components = build_run(recipe(base, tmp_path))
    learner = sft_learner(
        components, 3
    )  # checked inside: the engine holds the learner's own tensors
    weights = {name: p.detach().clone() for name, p in components.policy.named_parameters()}
    other = NativeEngine(load_model(base), kv_tokens=1024)  # the base, without the adapters
    with pytest.raises(RunStopped, match="does not serve the weights that are trained"):
        check_served(learner, other)
    for name, weight in components.policy.named_parameters():
        assert torch.equal(weight, weights[name])


def test_rank_0_is_a_run_without_adapters(base, tmp_path):
    for name, lora in (("off", {"rank": 0, "alpha": 4}), ("none", {"rank": 0})):
        sections = {"train": {"steps": 1, "lr": 1e-3}, "sft": {"steps": 1}, "lora": lora}
        train_recipe(recipe(base, tmp_path / name, **sections))
    assert metrics(tmp_path / "off" / "run") == metrics(tmp_path / "none" / "run")
    checkpoint = tmp_path / "off" / "run" / "checkpoints" / "rl-000001"
    assert not (checkpoint / ADAPTER_FOLDER).exists()
    components = build_run(recipe(base, tmp_path, lora={"rank": 0}))
    learner = sft_learner(components, 3)
    assert learner.lora is None and all(p.requires_grad for p in components.policy.parameters())


def test_actions_beyond_the_vocabulary_learn_beside_adapters(base, tmp_path):
    sections = {
        "task": {"args": {"syntax": "actions"}},
        "actions": {"file": "compact"},
        "train": {"steps": 2},
        "sft": {"steps": 2},
    }
    train_recipe(recipe(base, tmp_path / "whole", **sections))
    whole, broken = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "rl-000002")
    shutil.rmtree(broken / "checkpoints" / "rl-000000")
    train_recipe(recipe(base, tmp_path / "broken", **sections))
    last = "checkpoints/rl-000002"
    assert bits(broken / last) == bits(whole / last)
    first, final = bits(whole / "checkpoints/sft-000002"), bits(whole / last)
    assert first["actions.safetensors rows"] != final["actions.safetensors rows"]
    assert len(final["actions.safetensors rows"]) == 15 * 32


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "", "shape": SIZES}}, "adapts a trained model"),
        ({"algo": {"name": "ppo"}}, "trains a critic"),
        ({"lora": {"rank": 2, "targets": ["qproj"]}}, "lora.targets"),
        ({"lora": {"rank": 2, "targets": []}}, "lora.targets"),
        ({"lora": {"rank": -1}}, "lora.rank"),
    ],
)
def test_recipes_that_cannot_work_are_refused(base, tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        build_run(recipe(base, tmp_path, **sections))


def test_a_base_that_is_gone_or_has_changed_is_named(base, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(base, mine)
    train_recipe(recipe(mine, tmp_path, train={"steps": 0}, sft={"steps": 2}))
    checkpoint = tmp_path / "run" / "checkpoints" / "sft-000002"
    config = recipe(mine, tmp_path)
    other = Decoder(load_model(mine).shape).initialise(99)
    save_model(other, mine)
    with pytest.raises(ValueError, match="trained on other weights"):
        sft_learner(build_run(config, checkpoint), 3)
    small = ModelShape(**{**SIZES, "layers": 1}, vocab_size=other.shape.vocab_size)
    save_model(Decoder(small).initialise(0), mine)
    with pytest.raises(ConfigError, match="other sizes"):
        sft_learner(build_run(config, checkpoint), 3)
    shutil.rmtree(mine)
    components = build_run(config, checkpoint)  # to sample from it nothing else is needed
    with pytest.raises(ConfigError, match="which does not exist"):
        sft_learner(components, 3)
