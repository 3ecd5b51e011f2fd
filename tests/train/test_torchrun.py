"""Sharded training end to end: several processes learn what one process learns.

First single steps of a learner, in processes that are kept; then whole runs, started with torchrun as
users start them. The numbers of one process, in this one, are what all others are held against.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graft.algos.presets import build
from graft.config import ConfigError, check
from graft.models.critic import Critic
from graft.models.decoder import Decoder, causal
from graft.models.extra_actions import extend, load_rows
from graft.models.io.load import load_model
from graft.models.io.tensor_names import ACTION_ROWS, hf_names, weights_of, whole_views
from graft.models.lora.training import ALL, Lora
from graft.models.parallel.critic import sharded_critic
from graft.models.parallel.decoder import shard
from graft.models.shape import Experts
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.build import refuse_layout
from graft.train.distributed.process_group import ALONE
from graft.train.distributed.process_group import ProcessGroup as Run
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.train.rollouts.rollout_engine import engine_tp, refuse_engine_group
from graft.train.run_dir.checkpoint import Checkpoint
from graft.train.sft import held_out_scores
from graft.train.step_totals import IS_EXACT, SAMPLING_GAP
from graft.types import Task, Trajectory
from tests.processes import Processes
from tests.train.test_learner_actions import SHAPE, call_rows, table
from tests.training import metrics_of, train_recipe
from tests.trees import random_tree

NEAR = 1e-5
LR, EPS = 2e-3, 1e-3
"""AdamW divides a gradient by its own size, and with the usual eps of 1e-8 one that is all rounding error
takes a whole step. With this one a gradient that is 1e-7 off moves a weight by 1e-7 lr / eps = 2e-7 at
most, far below what is compared, and a gradient that is too large by half by more than a tenth of lr."""

# steps of a learner


@dataclass(frozen=True)
class Case:
    """What is learned."""

    algo: str = "grpo"
    tied: bool = True
    actions: bool = False
    has_reference: bool = False
    epochs: int = 1
    minibatches: int = 1
    budget: int = 40
    updates: int = 2
    lora: bool = False
    experts: bool = False
    """With the losses of routers."""


CASES = {
    "grpo, tied": Case(),
    "grpo with a reference, untied": Case(tied=False, has_reference=True),
    "ppo: a critic, 2 epochs of 2 minibatches": Case(
        "ppo", has_reference=True, epochs=2, minibatches=2
    ),
    "ppo, untied": Case("ppo", tied=False),
    "actions beyond the vocabulary, tied": Case(actions=True, has_reference=True),
    "actions beyond the vocabulary, untied": Case(actions=True, tied=False),
    "one large micro-batch: most have nothing of their own": Case(budget=10_000),
    "more processes than micro-batches": Case(actions=True, budget=10_000),
    "experts and the losses of routers": Case(tied=False, experts=True, budget=60),
}
LAYOUTS = {"fsdp": 1, "tp": 2, "replicas": 0, "2x2": 2}
"""Processes that split a layer; 0: each holds all."""

LOADS = ("experts/max_load", "experts/unused")

STARTED: list[Run] = []


def processes_at(port: int) -> Run:
    """In a child: this process among the others, as torchrun would have made it."""
    if not STARTED:
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        STARTED.append(Run.start(100.0, "cpu"))
    return STARTED[0]


def learner_for(
    processes: Run, tp: int | None, case: Case, checkpoint: Checkpoint | None = None
) -> Learner:
    """A learner in this layout: new, or as a checkpoint of any layout left it."""
    shape = replace(SHAPE, tied=case.tied)
    if case.experts:
        experts = Experts(4, 2, 16, router="sigmoid", scaling=2.0, shared_ff=16)
        shape = replace(shape, family="glm4_moe", experts=experts, dense_layers=(0,))
    mesh = processes.mesh(tp or 1) if processes.world > 1 else None

    def laid_out(decoder: Decoder) -> Any:
        if not tp:
            return decoder
        assert mesh is not None
        return shard(decoder.shape, mesh, weights_of(decoder).get, dtype=torch.float32)

    def optimizer(module: Any) -> Optimizer:
        plan = schedule("constant", 0, 1, 0.0)
        made = Optimizer([module], lr=LR, schedule=plan, weight_decay=0.1, processes=processes)
        made.adam.eps = EPS
        return made

    plain = Decoder(shape).initialise(1) if checkpoint is None else load_model(checkpoint.path)
    if case.actions:
        extended = load_rows(plain, checkpoint.path) if checkpoint else extend(plain, [9, None, 12])
        assert extended is not None
        plain = extended
    policy = laid_out(plain)
    lora = None
    if case.lora:
        lora = Lora(policy, rank=2, alpha=4, targets=[ALL], origin="")
    reference = None
    if case.has_reference:
        reference = laid_out(Decoder(shape).initialise(9)).requires_grad_(False)
    critic: Any = None
    if case.algo == "ppo":
        critic = sharded_critic(policy) if tp else Critic(policy)
    _, _, loss, reduction = build(case.algo)
    learner = Learner(
        policy,
        optimizer(lora or policy),
        loss,
        reduction,
        case.budget,
        temperature=0.8,
        allowed=table() if case.actions else None,
        critic=critic,
        critic_optimizer=None if critic is None else optimizer(critic),
        reference=reference,
        lora=lora,
        epochs=case.epochs,
        minibatches=case.minibatches,
        router_balance=0.1 * case.experts,
        router_z=0.01 * case.experts,
        processes=processes,
        keeps_logprobs=True,
    )
    if checkpoint is not None:
        checkpoint.restore(learner)
    return learner


def update(learner: Learner, case: Case, times: int) -> list[dict[str, float]]:
    """So many updates on a fixed batch: what each reported."""
    _, credit, _, _ = build(case.algo)
    rows = (
        call_rows() if case.actions else trajectories_of([random_tree(seed) for seed in range(6)])
    )
    reports = []
    for _ in range(times):
        batch = learner.annotate(to_batch(rows))
        batch = batch.replace(advantages=credit(batch.zeros(), batch))
        if learner.critic is not None:
            batch = batch.replace(returns=batch.reward[:, None].expand_as(batch.logprobs).clone())
        reports.append(learner.update(batch))
    return reports


def numbers_of(learner: Learner) -> dict[str, Tensor]:
    """All weights, by names that any layout has, and the log-probs of the last batch."""
    found = {name: tensor.clone() for name, tensor in weights_of(learner.policy).items()}
    critic: Any = learner.critic
    if critic is not None:
        own = dict(critic.body.named_parameters())
        is_whole = critic.body.is_whole
        body = whole_views(critic.body.shape, own) if is_whole else critic.body.hf_weights()
        found |= {f"critic {name}": body[name].clone() for name in body if name != ACTION_ROWS}
    assert learner.logprobs is not None
    return {**found, "log-probs": learner.logprobs}


Learnt = tuple[list[dict[str, float]], dict[str, Tensor]]


def learn(processes: Run, tp: int | None, case: Case) -> Learnt:
    learner = learner_for(processes, tp, case)
    return update(learner, case, case.updates), numbers_of(learner)


def learn_in_a_child(port: int, layout: str, case: Case) -> Learnt:
    return learn(processes_at(port), LAYOUTS[layout], case)


ALONE_LEARNED: dict[Case, Any] = {}


def learnt_alone(case: Case) -> Learnt:
    if case not in ALONE_LEARNED:
        ALONE_LEARNED[case] = learn(ALONE, None, case)
    return ALONE_LEARNED[case]


def assert_same(ours: Learnt, theirs: Learnt, whose: str) -> None:
    (reports, weights), (their_reports, their_weights) = ours, theirs
    for own, found in zip(reports, their_reports, strict=True):
        # loads are of what is computed, and a prefix that is split is computed twice
        own, found = ({n: v for n, v in r.items() if n not in LOADS} for r in (own, found))
        assert found == pytest.approx(own, abs=NEAR, rel=NEAR), whose
    assert their_weights.keys() == weights.keys()
    for name, weight in weights.items():
        gap = float((their_weights[name] - weight).abs().max())
        assert gap < NEAR, f"{whose}: {name} is {gap:.1e} away"


def assert_learns_the_same(children: Processes, port: int, layout: str, case: Case) -> None:
    ours = learnt_alone(case)
    assert sum(report["grad_norm"] for report in ours[0]) > 0.1
    for rank, theirs in enumerate(children.run(learn_in_a_child, port, layout, case)):
        assert_same(ours, theirs, f"rank {rank}")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # each case and each layout once in the quick tests
        pytest.param(name, layout, marks=[] if (place + number) % 3 == 0 else pytest.mark.slow)
        for number, name in enumerate(CASES)
        for place, layout in enumerate(("fsdp", "tp", "replicas"))
    ],
)
def test_two_processes_take_the_step_of_one(pair, layout: str, name: str):
    assert_learns_the_same(*pair, layout, CASES[name])


def test_two_processes_train_the_adapters_of_one(pair):
    assert_learns_the_same(*pair, "replicas", Case(tied=False, lora=True))


def held_out(processes: Run, tp: int | None) -> dict[str, float]:
    episodes = [random_tree(seed) for seed in range(6)]
    return held_out_scores(learner_for(processes, tp, Case()), [episodes[:4], episodes[4:]])


def held_out_in_a_child(port: int, layout: str) -> dict[str, float]:
    return held_out(processes_at(port), LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["fsdp", "tp", "replicas"])
def test_held_out_rows_are_scored_by_all_alike(pair, layout: str):
    children, port = pair
    for found in children.run(held_out_in_a_child, port, layout):
        assert found == pytest.approx(held_out(ALONE, None), abs=NEAR)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("2x2", name) for name in CASES),
        *((one, "more processes than micro-batches") for one in ("fsdp", "replicas")),
    ],
)
def test_four_processes_take_the_step_of_one(four, layout: str, name: str):
    assert_learns_the_same(*four, layout, CASES[name])


# whole runs

RECIPE = """
run: {{dir: "{folder}", name: run, save_every: 4, eval_tasks: 6, keep_last: 9, trackers: [], seed: 3}}
model:
  shape: {{width: 32, layers: 2, heads: 4, kv_heads: 2, head_dim: 8, ff: 32, tied: false, max_positions: 96}}
task: {{env: calculator, reward: "tests.train.test_torchrun:low_tokens"}}
rollout: {{tasks: 5, samples: 4, max_tokens: 8, max_turns: 2, max_context: 64}}
algo: {{name: grpo, kl_coef: 0.05}}
train: {{steps: 12, lr: 1.0e-3, warmup: 2, tokens_per_micro: 120}}
sft: {{steps: 8, batch: 8, lr: 3.0e-3, warmup: 2}}
"""
SUMS = ("loss", "grad_norm", "kl", "entropy", "sampling/")
"""Metrics that are added up in another order by more processes."""
SAMPLED = "sampling/"
"""Distances of two roundings from each other: what is left of a number when it is taken from itself. One
process has none; sharded ones have some units in the last place, the maximum over a step about ten."""


def low_tokens(task: Task, row: Trajectory) -> float:
    """Something that an untrained model earns now and then, and can learn."""
    return float(sum(token < 9 for token in row.tokens) / len(row.tokens))


def recipe_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


def patience(seconds: float) -> list[str]:
    """Before torchrun kills what does not end; torch 2.11 has no such option."""
    is_old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
    return [] if is_old else ["--shutdown-timeout", str(seconds)]


def start(
    count: int, folder: Path, *overrides: str, limit: int | None = None, grace: int = 60
) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node count -m graft train`; no file may grow beyond `limit` bytes."""

    def small_files() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # & in a shell has it ignored
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(count), *patience(grace)),
            *("-m", "graft", "train", str(recipe_in(folder)), "parallel.deadline=100", *overrides),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path.cwd()),
            # bytecode that is cut off would break every later process
            **({} if limit is None else {"PYTHONDONTWRITEBYTECODE": "1"}),
        },
        text=True,
        preexec_fn=small_files,
    )


def torchrun(count: int, folder: Path, *overrides: str, **how: Any) -> tuple[int, str]:
    """Exit code and screen."""
    process = start(count, folder, *overrides, **how)
    try:
        screen, _ = process.communicate(timeout=200)
    finally:
        end(process)
    return process.returncode, screen


def end(process: subprocess.Popen[str]) -> None:
    """Nothing that we started outlives its test."""
    if process.poll() is None:
        children = child_pids(process.pid)
        process.kill()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def child_pids(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alone(folder: Path, *overrides: str) -> None:
    train_recipe(str(recipe_in(folder)), *overrides)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return metrics_of(folder / "run")


def assert_same_curve(ours: Path, theirs: Path, near: float, steps: int = 12) -> None:
    """Rewards and whatever else is counted are equal; what is added up is near."""
    one, other = metrics(ours), metrics(theirs)
    assert len(one) == len(other) == 8 + steps
    for own, found in zip(one, other, strict=True):
        assert own.keys() == found.keys()
        where = f"{own['phase']} step {own['step']}"
        for name, value in own.items():
            if name == IS_EXACT:
                continue
            if not isinstance(value, float):
                assert found[name] == value, f"{where}: {name}"
                continue
            is_sum = name.startswith(SUMS)
            is_rounding = name.startswith(SAMPLED)
            relative = 0.0 if is_rounding else near if is_sum else 1e-6
            absolute = max(near, NEAR) if is_rounding else near if is_sum else 1e-6
            allowed = pytest.approx(value, rel=relative, abs=absolute)
            assert found[name] == allowed, f"{where}: {name}"


def weights(folder: Path, name: str = "rl-000012") -> dict[str, Tensor]:
    return hf_names(load_model(folder / "run" / "checkpoints" / name))


def assert_same_weights(ours: Path, theirs: Path, near: float) -> None:
    found = weights(theirs)
    for name, weight in weights(ours).items():
        gap = float((found[name] - weight).abs().max())
        assert gap < near, f"{name} is {gap:.1e} away"


def cut_after(run: Path, folder: Path, name: str) -> Path:
    """A copy of a run that stopped behind a checkpoint."""
    shutil.copytree(run, folder)
    kept = folder / "run" / "checkpoints"
    assert (kept / name).is_dir()
    for checkpoint in kept.iterdir():
        if checkpoint.name > name and checkpoint.name[:2] == "rl":
            shutil.rmtree(checkpoint)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, in this one."""
    folder = tmp_path_factory.mktemp("single") / "run_of_one"
    alone(folder)
    rewards = [line["reward"] for line in metrics(folder) if line["phase"] == "rl"]
    assert len(set(rewards)) > 8  # enough to distinguish curves
    return folder


LAYOUTS_OF_RUNS = {
    "fsdp": (2, []),
    "tp": (2, ["parallel.tp=2", "run.save_later=true"]),
    "replicas": (2, ["parallel.shard=false"]),
    "2x2": (4, ["parallel.tp=2"]),
    "a split engine": (2, ["engine.tp=2"]),
    "2x2, split engines": (4, ["parallel.tp=2", "engine.tp=2"]),
    "replicas, a split engine": (2, ["parallel.shard=false", "engine.tp=2"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run in other layouts."""
    found: dict[str, Path] = {}
    for name, (count, overrides) in LAYOUTS_OF_RUNS.items():
        found[name] = tmp_path_factory.mktemp(name) / "run_of_many"
        code, screen = torchrun(count, found[name], *overrides)
        assert code == 0, screen
        assert "Traceback" not in screen and "Warning" not in screen, screen
    return found


with_runs = pytest.mark.timeout(900)
"""The first test that asks for `runs` waits until all of them are done."""


@pytest.mark.slow
@with_runs
@pytest.mark.parametrize("layout", LAYOUTS_OF_RUNS)
def test_warm_up_and_12_steps_of_grpo_have_the_same_curve(single, runs, layout: str):
    assert_same_curve(single, runs[layout], near=1e-4)
    assert_same_weights(single, runs[layout], near=1e-4)
    # 0 where no order holds with this machine's library
    may_be_exact = {line[IS_EXACT] for line in metrics(single) if IS_EXACT in line}
    # a matrix of which each process computes a part, in the learner or in the engine, is added in
    # another order; FSDP alone gathers it before it is used
    is_whole = layout in ("replicas", "fsdp")
    lines = [line for line in metrics(runs[layout]) if IS_EXACT in line]
    assert {line[IS_EXACT] for line in lines} == (may_be_exact if is_whole else {0.0})
    if is_whole and may_be_exact == {1.0}:
        assert {line[f"{SAMPLING_GAP}/max"] for line in lines} == {0.0}


@pytest.mark.slow
@with_runs
@pytest.mark.parametrize("layout", ["fsdp", "tp", "replicas", "2x2"])
def test_transformers_opens_a_checkpoint_of_any_layout(runs, layout: str):
    transformers = pytest.importorskip("transformers")
    folder = runs[layout] / "run" / "checkpoints" / "rl-000012"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours, tokens = load_model(folder), torch.arange(1, 12)
    with torch.no_grad():
        want = ours.logits(ours(tokens, torch.arange(11), causal))
        torch.testing.assert_close(theirs(tokens[None]).logits[0], want, atol=1e-4, rtol=0)


@pytest.mark.slow
@with_runs
def test_four_processes_resumed_by_one(single, runs, tmp_path):
    folder = cut_after(runs["2x2"], tmp_path / "cut", "rl-000004")
    alone(folder)
    assert_same_curve(single, folder, near=1e-6)
    assert_same_weights(single, folder, near=NEAR)


@pytest.mark.slow
@with_runs
@pytest.mark.parametrize(
    ("before", "count", "overrides"),
    [("single", 4, ["parallel.tp=2"]), ("replicas", 2, [])],
    ids=["one process by 2x2", "replicas by fsdp"],
)
def test_runs_go_on_in_another_layout(single, runs, tmp_path, before, count, overrides):
    folder = cut_after({**runs, "single": single}[before], tmp_path / "cut", "rl-000004")
    code, screen = torchrun(count, folder, *overrides)
    assert code == 0, screen
    assert_same_curve(single, folder, near=1e-6)
    assert_same_weights(single, folder, near=NEAR)


EXPA = ("task.args={syntax: actions}", "actions.file=compact", "algo.name=cpo", "algo.kl_coef=0.0")
"""Actions beyond the vocabulary, and a branch that learns from each step where to fork in the next."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_extra_actions_and_a_branch_with_a_memory_have_the_same_curve(tmp_path):
    alone(tmp_path / "one", *EXPA, "train.steps=3")
    code, screen = torchrun(2, tmp_path / "two", *EXPA, "train.steps=3")
    assert code == 0, screen
    assert_same_curve(tmp_path / "one", tmp_path / "two", near=1e-4, steps=3)
    alone(tmp_path / "one", *EXPA, "train.steps=5")
    split = ("parallel.tp=2", "engine.tp=2")  # forced calls are scored by both processes together
    code, screen = torchrun(2, tmp_path / "two", *EXPA, "train.steps=5", *split)
    assert code == 0, screen
    assert_same_curve(tmp_path / "one", tmp_path / "two", near=1e-4, steps=5)


# what goes wrong


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    log, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 150
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def assert_goes_on(folder: Path, single: Path) -> None:
    """One process takes the run a step further, to where the undisturbed one has been."""
    done = metrics(folder)[-1]["step"]
    if done < 12:
        alone(folder, f"train.steps={done + 1}", "run.save_every=4")
        for own, found in zip(metrics(single), metrics(folder), strict=False):
            assert found["reward"] == pytest.approx(own["reward"]) if "reward" in own else True
            assert found["loss"] == pytest.approx(own["loss"], abs=NEAR)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9_of_one_rank_ends_the_others_with_its_name(single, tmp_path, victim: int):
    process = start(2, tmp_path, "train.schedule=constant", "train.steps=20")
    try:
        wait_for_steps(process, tmp_path, 11)
        os.kill(child_pids(process.pid)[victim], signal.SIGKILL)
        begin = time.monotonic()
        screen, _ = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == 1
    assert time.monotonic() - begin < 30
    cause = next(line for line in screen.splitlines() if line.startswith("graft: "))
    assert f"rank {victim} of 2 on {socket.gethostname()} is gone" in cause
    assert not list((tmp_path / "run" / "checkpoints").glob("rl-*/*.partial"))
    assert_goes_on(tmp_path, single)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_saves_at_the_end_of_a_step(single, tmp_path):
    process = start(2, tmp_path, "run.save_every=0", "train.steps=20")
    try:
        wait_for_steps(process, tmp_path, 11)
        process.send_signal(signal.SIGINT)
        screen, _ = process.communicate(timeout=100)
    finally:
        end(process)
    assert process.returncode != 0
    assert screen.count("interrupted; the progress is saved in") == 1, screen
    done = metrics(tmp_path)[-1]["step"]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("rl-*"))
    assert saved[-1] == f"rl-{done:06d}"
    assert_goes_on(tmp_path, single)


TP = "tensor_parallel_size"


@pytest.mark.slow
@with_runs
@pytest.mark.parametrize("limit", [40_000, 80_000], ids=["the model", "the state of all ranks"])
def test_a_disk_that_takes_no_more_ends_all_with_the_cause_first(runs, tmp_path, limit: int):
    """The model's file has 58 kB, each of two parts of the optimizer's state 99."""
    folder = cut_after(runs["fsdp"], tmp_path / "cut", "rl-000008")
    (folder / "run" / "metrics.jsonl").write_text("")
    code, screen = torchrun(2, folder, limit=limit)
    assert code == 1
    lines = [line for line in screen.splitlines() if line.startswith("graft: ")]
    assert " of 2 on " in lines[0] and "failed: cannot write to" in lines[0], screen
    assert "Complete checkpoints are intact" in lines[0]
    # the other one may have failed as well
    assert re.search("stops, because rank|failed too: cannot write to", lines[1]), screen
    names = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert names[-1] == "sft-000008" and "rl-000012" not in names
    assert not [name for name in names if name.startswith(".") and limit < 58_000]


@pytest.mark.parametrize(
    ("sections", "world", "key"),
    [
        ({"lora": {"rank": 4}, "parallel": {"shard": True}}, 2, "lora.rank=4"),
        ({"lora": {"rank": 4}, "parallel": {"shard": False, "tp": 2}}, 2, "lora.rank=4"),
        ({"lora": {"rank": 4}, "parallel": {"shard": False}}, 2, ""),
        ({"lora": {"rank": 4}, "parallel": {"shard": True}}, 1, ""),
        # each group would hold all of a split model
        ({"parallel": {"shard": False, "tp": 2}}, 4, "parallel.tp=2"),
        ({"parallel": {"shard": False, "tp": 2}}, 2, ""),
        ({"engine": {"tp": 2}}, 1, "a multiple of 2 processes, and there is 1"),
        ({"engine": {"tp": 4}}, 6, "a multiple of 4 processes, and there are 6"),
        ({"engine": {"tp": 2}, "rollout": {"staleness": 1}}, 2, "rollout.staleness=1"),
        ({"engine": {"tp": 2}, "cluster": {"address": "local"}}, 2, "Ray worker"),
        ({"engine": {"tp": 2, "name": "vllm", "url": ["http://a:1"]}}, 2, "engine.url"),
        ({"engine": {"tp": 2, "name": "vllm", "args": {TP: 4}}}, 4, f"{TP}=4"),
        ({"engine": {"name": "vllm", "args": {TP: "all"}}}, 4, f"{TP}=all"),
        ({"engine": {"name": "vllm", "args": {TP: 4}}}, 6, "multiple of 4"),
        ({"engine": {"name": "vllm", "args": {TP: 2}}}, 4, ""),
    ],
)
def test_layouts_that_processes_cannot_hold_together_are_refused(sections, world: int, key: str):
    """With the key and the value; without a key the layout is possible."""
    config = check({"task": {"env": "calculator"}, "model": {"path": "x"}, **sections})
    processes = Run(1.0, torch.device("cpu"))
    processes.world = world
    with nullcontext() if not key else pytest.raises(ConfigError, match=re.escape(key)):
        refuse_layout(config, processes)
        refuse_engine_group(config, processes, with_engine=True)
    if sections == {"engine": {"name": "vllm", "args": {TP: 2}}}:
        assert engine_tp(config) == 2  # vLLM's own name
