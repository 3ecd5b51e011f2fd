"""Whole runs with keys and values in eight bits: the gap stays 0, and who cannot keep it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import graft
from graft.config import ConfigError, check
from graft.engine.native.kv.pages import kv_bytes
from graft.models.decoder import Decoder
from graft.models.io.model_card import read_origin
from graft.models.order_probe import find_order
from graft.models.shape import ModelShape
from graft.train.errors import RunStopped
from graft.train.memory.device_memory import DeviceMemory
from graft.train.memory.plan import plan_memory
from graft.train.rollouts.rollout_engine import refuse_external, round_kv
from graft.train.run_dir.checkpoint import checkpoints
from tests.training import metrics_of, train_recipe

SIZES = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32}
GAP = "sampling/sampling_logp_difference"


def recipe(folder: Path, **sections: dict[str, Any]) -> Any:
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "dir": str(folder), "eval_tasks": 2, "trackers": [], "save_every": 2},
        "model": {"shape": SIZES, "device": "cpu"},
        "task": {"env": "calculator"},
        "rollout": {"tasks": 3, "samples": 4, "max_tokens": 8, "max_turns": 2, "max_context": 64},
        "train": {"steps": 2, "lr": 1e-2},
        "engine": {"kv": "fp8"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return check(values)


@pytest.fixture
def has_order() -> None:
    decoder = Decoder(ModelShape(vocab_size=256, **SIZES)).initialise(0)  # type: ignore[arg-type]
    if find_order(decoder) is None:
        pytest.skip("no order holds with this machine's library")


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 2}}, {"rollout": {"staleness": 1}}])
def test_a_run_trains_what_it_samples(tmp_path, has_order, sections: dict[str, Any]) -> None:
    """The reference of the KL term and old log-probs of a second epoch too."""
    more = {"algo": {"kl_coef": 0.1}, **sections}
    if "lora" in sections:
        base = graft.load(shape={**SIZES, "max_positions": 96}, alphabet="bytes").save(
            tmp_path / "m"
        )
        more["model"] = {"shape": {}, "path": str(base)}
    summary = train_recipe(recipe(tmp_path, **more))
    steps = metrics_of(tmp_path / "r", "rl")
    assert len(steps) == 2 and summary["kv"] == "fp8"
    for step in steps:
        assert step[f"{GAP}/max"] == step[f"{GAP}/mean"] == 0 and step["sampling/exact"] == 1
    assert steps[0]["kl"] == 0  # of the policy to itself, rounded alike


def test_what_a_run_leaves_says_so_and_keeps_it(tmp_path, has_order) -> None:
    train_recipe(recipe(tmp_path))
    run = tmp_path / "r"
    checkpoint = checkpoints(run / "checkpoints")[-1].path
    assert read_origin(checkpoint).rounds_kv
    assert json.loads((run / "summary.json").read_text())["kv"] == "fp8"
    policy = graft.load(run, device="cpu")
    assert policy.model.rounds_kv
    with graft.Engine(policy) as engine:
        assert engine.sampler._tree.pages.pool.dtype == torch.uint8  # type: ignore[attr-defined]
    with pytest.raises(RunStopped, match=r"engine\.kv"):  # of a run that is resumed
        train_recipe(recipe(tmp_path, engine={"kv": "model"}, train={"steps": 3}))


def test_an_engine_from_python_rounds_for_its_learner_too(has_order) -> None:
    policy = graft.load(shape={**SIZES, "max_positions": 64}, alphabet="abc?", device="cpu")
    plain = graft.Engine(policy)
    with pytest.raises(ConfigError, match="kv='fp8'"):
        graft.Engine(policy, kv="fp8")
    plain.close()
    with graft.Engine(policy, kv="fp8") as engine:
        learner = graft.Learner(policy, lr=1e-2)
        for _ in range(2):
            episodes = graft.collect(
                engine,
                tasks=["?"],
                samples=6,
                reward=lambda task, row: len(set(row.tokens)),
                max_tokens=9,
            )
            metrics = learner.step(episodes)
            assert metrics[f"{GAP}/max"] == 0 and metrics["sampling/exact"] == 1
        with pytest.raises(ConfigError, match="kv='model'"):
            graft.Engine(policy, kv="model")
    with pytest.raises(ConfigError, match="int4"):
        graft.Engine(policy, kv="int4")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"model": {"exact": False}}, r"engine\.kv=fp8.*model\.exact is false"),
        ({"engine": {"tp": 2}}, "engine.tp=2"),
    ],
)
def test_without_an_order_it_is_refused(tmp_path, sections, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        train_recipe(recipe(tmp_path, **sections))
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_other_dtypes_and_engines_are_refused(tmp_path) -> None:
    decoder = Decoder(ModelShape(**SIZES)).to(torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engine\.kv=fp8.*float32.*bfloat16"):
        round_kv(recipe(tmp_path), decoder)
    assert not decoder.rounds_kv
    elsewhere = Decoder(ModelShape(**SIZES)).to("meta")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engine\.kv=fp8.*GPU.*CPUs only"):
        round_kv(recipe(tmp_path), elsewhere)
    assert not elsewhere.rounds_kv
    for name in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=rf"engine\.kv=fp8: {name}"):
            refuse_external(recipe(tmp_path, engine={"name": name}), "independent")


def test_the_plan_has_a_pool_of_twice_the_tokens(tmp_path) -> None:
    shape = ModelShape(layers=28, heads=16, kv_heads=8, head_dim=128, width=1024, ff=3072)
    device = DeviceMemory(
        torch.device("cuda"), available=150 * 10**9, total=150 * 10**9, fused=True
    )
    long = {"rollout": {"tasks": 64, "samples": 64, "max_tokens": 8192, "max_context": 16384}}
    tokens = {
        kv: plan_memory(
            recipe(tmp_path, **long, engine={"kv": kv}), shape, torch.bfloat16, device
        ).kv_tokens
        for kv in ("model", "fp8")
    }
    assert tokens["model"] == int(0.4 * 150e9) // kv_bytes(shape, torch.bfloat16)
    assert tokens["fp8"] == int(0.4 * 150e9) // (2 * 28 * 8 * 130)
    assert 1.96 < tokens["fp8"] / tokens["model"] < 2
