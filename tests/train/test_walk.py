"""docs/reading.md is the way of a token: a step executes every file that the page lists, and it lists few."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.algos.presets import PRESETS, algorithm_of
from graft.engine.native.engine import NativeEngine
from graft.envs.base import BaseEnv
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.train.rl import train_step
from graft.train.rollouts.step_rollouts import StepRollouts
from graft.types import Sampling, Task, Turn

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 25


class OneTurn(BaseEnv):
    """Longer answers earn more."""

    def pose(self) -> str:
        return "1+2="

    def respond(self, action: str) -> Turn:
        return Turn(reward=float(len(action)), terminated=True)


class Rollouts:
    """The source of a step that samples in this process, from the learner's own tensors."""

    def __init__(self, policy: Decoder, tokenizer: FastTokenizer) -> None:
        self.engine = NativeEngine(policy, tokenizer=tokenizer, kv_tokens=512)
        self.setup = RolloutSetup(
            engine=self.engine,
            chat=Chat(tokenizer),
            make_env=lambda task: OneTurn(),
            sampling=Sampling(max_tokens=4),
        )

    def take(self, step: int) -> StepRollouts:
        tasks = [Task(f"{step}:{number}", "one-turn", seed=number) for number in range(2)]
        return StepRollouts(collect(tasks, self.setup, independent(2)))

    def publish(self, version: int) -> float:
        self.engine.load(None, version)
        return 0.0


class Hooks:
    """Keeps the result of each step."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def on_collect(self, step: int) -> None: ...
    def on_learned(self, step: int) -> None: ...

    @contextmanager
    def learning(self, step: int, rollouts: StepRollouts) -> Iterator[None]:
        yield

    def on_published(self, step: int, rollouts: StepRollouts, result: Any) -> None:
        self.results.append(result)


@contextmanager
def executed_files() -> Iterator[set[str]]:
    """The files of graft/ in which a function is called inside the context, in any thread."""
    files: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    own = {Path(file) for file in files if Path(file).is_relative_to(ROOT / "graft")}
    files.clear()
    files |= {file.relative_to(ROOT).as_posix() for file in own}


@pytest.fixture(scope="module")
def walk() -> tuple[set[str], Any]:
    tokenizer = FastTokenizer.characters("0123456789+=")
    shape = ModelShape(
        family="qwen3", width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ff=64,
        max_positions=64, vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    policy = Decoder(shape).initialise(0)
    algo = algorithm_of(PRESETS["grpo"], independent(2))
    optimizer = Optimizer([policy], lr=1e-3, schedule=schedule("constant", 0, 1, 0.0))
    learner = Learner(policy, optimizer, algo.loss, algo.reduction, 256)
    rollouts, hooks = Rollouts(policy, tokenizer), Hooks()
    with executed_files() as files:
        train_step(1, rollouts, algo, learner, hooks)
    return files, hooks.results[0]


def listed() -> list[str]:
    core, _, _ = (ROOT / "docs" / "reading.md").read_text("utf-8").partition("## Around it")
    return re.findall(r"`(graft/[\w/]+\.py)` \[", core)


def test_a_step_needs_neither_a_recipe_nor_a_run(walk):
    files, result = walk
    assert result.batch.num_rows == 4 and result.metrics["optimizer_steps"] == 1
    assert result.metrics["num_trained_tokens"] == result.batch.num_tokens > 0
    assert not any(file.startswith(("graft/recipe", "graft/train/run_dir")) for file in files)


def test_the_page_lists_few_files_and_a_step_executes_each(walk):
    files, _ = walk
    page = listed()
    assert 15 < len(page) <= MAX_FILES and len(set(page)) == len(page)
    assert set(page) - files == set()
