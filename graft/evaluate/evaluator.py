"""Measure models: load one, then sample every set, attempt by attempt.

    evaluator.mount(model)           its weights replace those of the previous model, in place
    evaluator.measure(model, set)    sample what the sample file lacks; the result of all samples

An attempt is in its file as soon as it ends. An evaluation may be killed at any time; the next one makes
what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graft.config import Config, ConfigError
from graft.engine.remote.openai import CONVERSATION, OpenAIEngine
from graft.envs.dataset.prompts import PromptsEnv
from graft.evaluate.attempts import Todo, make_attempts
from graft.evaluate.candidates import Candidate, is_gone
from graft.evaluate.eval_spec import EvalSpec
from graft.evaluate.model_source import EndpointSpec
from graft.evaluate.results import EvalResult
from graft.evaluate.samples import SampleFile, StoredSample, file_name
from graft.evaluate.task_set import TaskSet
from graft.evaluate.task_sets import pose_one
from graft.evaluate.trained_rows import not_held_out
from graft.models.decoder import Decoder
from graft.models.io.load import ModelFileError
from graft.protocols import Env
from graft.rewards import make_reward
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import with_actions
from graft.train.build import build_run, make_setup
from graft.train.components import RunComponents
from graft.train.model import load_policy, load_reference, load_tokenizer, make_chat
from graft.train.run_dir.folder import RunStopped, out_of_disk
from graft.train.step_metrics import is_dead
from graft.train.tasks import held_out_tasks
from graft.types import Status, Task

DEFAULT_TASKS = 200
"""Used where the recipe itself never evaluates (run.eval_tasks=0)."""
DOWN_AFTER = 16
"""Consecutive attempts that a server lost, each after all retries, after which it counts as down."""
WITHOUT_LIMIT = 1 << 40
"""Limit of a context in bytes, where only the server can count tokens."""


class ServerDown(Exception):
    """The server no longer answers."""


@dataclass(frozen=True, slots=True)
class TaskList:
    """A set with its list of tasks."""

    tasks: TaskSet
    list: list[Task]
    attempts: Mapping[str, int]
    """The number of attempts at each task, by id."""
    settings: dict[str, Any]
    draws: dict[str, Any]
    not_held_out: str = ""
    """Why its tasks are not all held out; see `graft.evaluate.trained_rows`."""


def trained_sets(task_lists: Sequence[TaskList]) -> dict[str, str]:
    """The sets whose tasks are not all held out, and why."""
    return {one.tasks.label: one.not_held_out for one in task_lists if one.not_held_out}


def pose(spec: EvalSpec, chat: Chat) -> list[TaskList]:
    """The sets with their tasks; a set that cannot be used is refused before anything is sampled."""
    posed = [_pose(spec, tasks, chat) for tasks in spec.sets]
    sets = [(one.tasks, env, [task.seed or 0 for task in one.list]) for one, env in posed]
    trained = not_held_out(spec.config, sets)
    return [replace(one, not_held_out=trained.get(one.tasks.label, "")) for one, _ in posed]


def _pose(spec: EvalSpec, tasks: TaskSet, chat: Chat) -> tuple[TaskList, Env]:
    if tasks.reward:
        make_reward(tasks.reward)  # a judge without an address is refused here
    config, options = spec.config, spec.options
    [first] = held_out_tasks(tasks.env, 1)
    env, rows = pose_one(tasks, first, chat, config.rollout.max_turns)
    if spec.endpoint is not None and spec.endpoint.api == "chat":
        refuse_broken_in(f"set {tasks.label!r}", env, config.rollout.max_turns, "--no-tools")
    wanted = options.tasks or config.run.eval_tasks or DEFAULT_TASKS
    if rows is not None and tasks.is_whole and not options.tasks:
        wanted = rows
    if rows is None:
        listed = held_out_tasks(tasks.env, wanted)
    else:  # a seed is a row, and no row is used twice
        seeds = range(min(wanted, rows))
        name = tasks.label if tasks.is_whole else tasks.env  # a benchmark keeps its own name
        listed = [Task(f"{name}:test:{seed}", tasks.env, seed=seed) for seed in seeds]
    counts = [options.samples or 1] * len(listed)
    inner = getattr(env, "unwrapped", env)
    # greedy attempts are all the same
    if options.samples is None and spec.sampling.temperature and isinstance(inner, PromptsEnv):
        counts = [inner.attempts_at(task.seed) for task in listed]
    attempts = {task.id: count for task, count in zip(listed, counts, strict=True)}
    settings, draws = spec.settings(tasks, counts), spec.draws(tasks)
    return TaskList(tasks, listed, attempts, settings, draws), env


def chat_with(config: Config, endpoint: EndpointSpec | None, model: Path | None) -> Chat:
    """How prompts are written; a server that takes messages needs no tokenizer."""
    if endpoint is not None and endpoint.api == "chat":
        if config.model.template_args:
            raise ConfigError(
                f"model.template_args={config.model.template_args}: behind --api chat the server "
                "renders with its own template and its own variables; use --api completions, or set "
                "them on the server"
            )
        return Chat(FastTokenizer.bytes(), CONVERSATION)
    return make_chat(config, load_tokenizer(config, model))


def refuse_broken_in(what: str, env: Env, turns: int, otherwise: str) -> None:
    """Refuse an environment that writes inside the policy's answers, which --api chat cannot express."""
    if env.observe_as == "raw" or (env.observe_as == "inline" and turns > 1):
        raise ConfigError(
            f"{what} goes on in the middle of an answer (its tools answer there), and --api chat "
            "takes whole messages only; use --api completions with the model's tokenizer (a model "
            f"folder as first argument), or {otherwise}"
        )


def setup_behind(
    endpoint: EndpointSpec, config: Config, chat: Chat, env: Callable[[Task], Env]
) -> RolloutSetup:
    """The rollout setup for a model behind a server; one request finds what it serves."""
    if config.task.agent:
        raise ConfigError(
            "task.agent: agents call the policy that graft samples from, and --endpoint is a server of its "
            "own; point the agent at it yourself, or evaluate the run without --endpoint"
        )
    engine = OpenAIEngine(
        endpoint.urls,
        endpoint.model,
        tokenizer=chat.tokenizer,
        api=endpoint.api,
        deadline=config.rollout.deadline,
        api_key_env=config.engine.api_key_env,
    )
    asyncio.run(engine.inspect())
    setup = make_setup(config, engine, chat, env)
    max_context = WITHOUT_LIMIT if endpoint.api == "chat" else setup.max_context
    # the engine's own message comes first, and has more detail
    return replace(setup, max_context=max_context, deadline=setup.deadline * 1.1 + 1)


def is_servers_fault(status: str, error: str) -> bool:
    """Whether a server lost an attempt, which says nothing about the model."""
    is_timeout = status == Status.TIMEOUT and "for completion" in error
    return status == Status.ENGINE_ERROR or is_timeout


class Evaluator:
    """Holds one model at a time; the next one's weights replace it in place.

    setup      of a model that is loaded already; None: `mount` makes it
    on_sample  called with each attempt that has ended
    """

    def __init__(
        self,
        spec: EvalSpec,
        setup: RolloutSetup | None = None,
        on_sample: Callable[[StoredSample], None] | None = None,
    ) -> None:
        self.spec, self.setup, self.on_sample = spec, setup, on_sample
        self.components: RunComponents | None = None
        self.mounted = 0
        self._rewards: dict[str, Any] = {}

    def mount(self, model: Candidate) -> bool:
        """Load this model, or connect to the server that has it; False if it no longer exists."""
        config, endpoint = self.spec.config, self.spec.endpoint
        if endpoint is not None:  # only the tokenizer, if any, is local
            chat = chat_with(config, endpoint, model.path)
            self.setup = replace(
                setup_behind(endpoint, config, chat, no_env), reward=None, by_env={}
            )
            return True
        try:
            if self.components is None:
                self.components = build_run(config, weights=model.path)
                self.setup = self.components.held_out
                return True
            components = self.components
            if isinstance(components.policy, Decoder):
                policy = load_policy(config, model.path, components.tokenizer)
            else:
                policy = load_reference(model.path, components.policy)
            if components.actions is not None:
                policy = with_actions(policy, components.actions, model.path, config.actions)
        except (ModelFileError, OSError):
            if is_gone(model.path):
                return False
            raise
        with torch.no_grad():
            components.policy.load_state_dict(policy.state_dict())
        self.mounted += 1
        components.engine.load(components.weights_to_publish(), version=self.mounted)
        return True

    def at_a_time(self) -> int:
        """Concurrent attempts. On a server each is a connection; here those at one task share its prompt, so
        tasks are counted."""
        concurrency = self.spec.config.rollout.concurrency
        return (
            concurrency * (self.spec.options.samples or 1)
            if self.spec.endpoint is None
            else concurrency
        )

    def is_lost(self, sample: StoredSample) -> bool:
        """Whether the server failed, not the model: the attempt does not count and is made again."""
        return self.spec.endpoint is not None and is_servers_fault(sample.status, sample.error)

    def measure(
        self, model: Candidate, task_list: TaskList, folder: Path, say: Callable[[str], None]
    ) -> EvalResult:
        """The result of a model on a set; an error if no attempt ended, since that is no score."""
        spec, tasks = self.spec, task_list.tasks
        where = f"{model.name} on {tasks.label}"
        started = time.perf_counter()
        of = {"checkpoint": model.name, "set": tasks.label, "weights": model.weights}
        name = file_name(model.name, tasks.label, {**task_list.draws, "weights": model.weights})
        with out_of_disk(folder):
            file = SampleFile(folder / name, {**of, "settings": task_list.draws})
        try:
            if file.unreadable:
                say(f"{file.path} has {file.unreadable} unreadable line(s), which are left out")
            todo = missing(task_list.list, task_list.attempts, file)
            made = sum(len(numbers) for _, numbers in todo)
            if kept := sum(task_list.attempts.values()) - made:
                say(f"{where}: {kept} attempts are stored already, {made} are missing")
            self._sample(todo, tasks, file, say)
        finally:
            with out_of_disk(folder):
                file.close()
        samples = {
            key: sample
            for key, sample in file.kept.items()
            if key[1] < task_list.attempts.get(key[0], 0)
        }
        counted = {key: sample for key, sample in samples.items() if not self.is_lost(sample)}
        self._refuse_the_dead(where, list(counted.values()))
        result = EvalResult.of(
            counted,
            task_list.attempts,
            settings=task_list.settings,
            seconds=round(time.perf_counter() - started, 2),
            **of,
        )
        if result.failed:
            say(f"{where}: {result.failed:.0%} failed, mostly: {commonest(counted.values())}")
        if result.overlong:
            say(
                f"{where}: {result.overlong} prompts leave no space for an answer in "
                f"rollout.max_context={spec.config.rollout.max_context} or the model's window; "
                "they count as reward 0"
            )
        if result.missing:
            say(f"{where}: {result.missing} attempts are missing: {commonest(samples.values())}")
        return result

    def _sample(
        self, todo: list[Todo], tasks: TaskSet, file: SampleFile, say: Callable[[str], None]
    ) -> None:
        spec, setup = self.spec, self.setup
        assert setup is not None, "call mount() first"
        if tasks.reward and tasks.label not in self._rewards:
            self._rewards[tasks.label] = make_reward(tasks.reward)
        setup = replace(
            setup,
            make_env=tasks.factory(setup.chat.tokenizer),
            reward=self._rewards.get(tasks.label),
            prefill=tasks.prefill,
            by_env={},
            sampling=spec.sampling,
        )
        lost_in_a_row = 0

        def keep(sample: StoredSample) -> None:
            nonlocal lost_in_a_row
            file.append(sample)
            if self.on_sample is not None:
                self.on_sample(sample)
            lost_in_a_row = lost_in_a_row + 1 if self.is_lost(sample) else 0
            if lost_in_a_row >= DOWN_AFTER:
                raise ServerDown

        try:
            with out_of_disk(file.path.parent):
                make_attempts(todo, setup, keep, at_a_time=self.at_a_time())
        except ServerDown:
            say(f"{DOWN_AFTER} attempts in a row were lost; no more are made")

    def _refuse_the_dead(self, where: str, samples: list[StoredSample]) -> None:
        if is_dead(sample.status for sample in samples):
            failed = sum(sample.has_failed for sample in samples)
            raise RunStopped(
                f"{where}: no attempt came to its end, and {failed / len(samples):.0%} failed, mostly: "
                f"{commonest(samples)}. Repair the environment, tool or agent and run the same command "
                "again; what was finished is kept"
            )

    def close(self) -> None:
        for reward in self._rewards.values():
            getattr(reward, "close", lambda: None)()
        if self.components is not None:
            self.components.engine.close()


def no_env(task: Task) -> Any:
    raise AssertionError("the set brings the environment")


def missing(tasks: list[Task], attempts: Mapping[str, int], file: SampleFile) -> list[Todo]:
    """The attempts to sample: those that are not stored, and those that failed."""
    todo: list[Todo] = []
    for task in tasks:
        stored = (file.kept.get((task.id, number)) for number in range(attempts[task.id]))
        lacking = [n for n, sample in enumerate(stored) if sample is None or sample.has_failed]
        if lacking:
            todo.append((task, lacking))
    return todo


def commonest(samples: Any) -> str:
    """The most frequent reason of failed attempts."""
    reasons = Counter(sample.error for sample in samples if sample.error)
    return reasons.most_common(1)[0][0] if reasons else "no reason was recorded"
