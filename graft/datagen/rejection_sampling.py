"""Good attempts of a model as rows for supervised training: `graft data sample`.

    graft data sample runs/quickstart calculator --n 100 --samples 4 --keep "reward>0" --out good.jsonl

    100 tasks, 4 attempts each     good.attempts.jsonl, each as it ends
    those that pass --keep         good.jsonl, in the order of the tasks, without duplicates

With --resume attempts in the first file are not sampled again: a killed command continues, --n may grow, and
--keep may change. With --endpoint a server samples; behind a chat API the tokenizer is unknown, so rows are
messages without spans.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.datagen.attempt_log import AttemptLog
from graft.datagen.model_recipe import config_for
from graft.datagen.row_file import check_place, new_rows
from graft.evaluate.candidates import check_readable, fingerprint
from graft.evaluate.eval_spec import EndpointSpec
from graft.evaluate.evaluator import (
    DOWN_AFTER,
    chat_with,
    is_servers_fault,
    refuse_broken_in,
    setup_behind,
    temperature_of,
)
from graft.evaluate.run import read_endpoint
from graft.masking import masked
from graft.rollout.branches.branch import independent
from graft.rollout.collect import build_episode
from graft.rollout.failure import concurrently
from graft.rollout.filters import Condition, read_condition
from graft.rollout.recorded import (
    NotRecordable,
    outcome_of,
    prompt_of_context,
    spans_of_attempt,
)
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.train.build import build_run, env_factory, is_chatty
from graft.train.model import sampling_only
from graft.train.run_dir.checkpoint import latest_model, located
from graft.train.run_dir.folder import RunStopped
from graft.train.step_metrics import is_dead
from graft.train.tasks import TRAIN_SEEDS, TaskStream
from graft.types import Author, Episode, Finish, Message, Status, Trajectory

ENOUGH_FAILURES = 64
"""Attempts after which a tool or environment counts as broken if none ended."""
SECONDS_BETWEEN_NEWS = 10.0

Row = dict[str, Any]


@dataclass(slots=True)
class RejectionSampling:
    """The result of sampling rows."""

    out: str
    attempts_file: str
    tasks: int = 0
    attempts: int = 0
    rows: int = 0
    rejected: int = 0
    duplicates: int = 0
    failed: int = 0
    """Attempts that failed through no fault of the policy; never kept."""
    unwritable: int = 0
    """Attempts that cannot be written as text."""
    reward: float = 0.0
    """Mean over the attempts that did not fail."""
    errors: Counter[str] = field(default_factory=Counter[str])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        named = ("rejected", "duplicates", "failed", "unwritable")
        rest = [f"{getattr(self, name):,} {name}" for name in named if getattr(self, name)]
        return (
            f"{self.rows:,} rows in {self.out} out of {self.attempts:,} attempts at {self.tasks:,} "
            f"tasks, mean reward {self.reward:.3f}" + "".join(f", {text}" for text in rest)
        )


def sample_rows(
    model: str,
    env: str,
    out: str,
    *,
    tasks: int,
    samples: int,
    keep: str = "reward>0",
    recipe: str = "",
    overrides: Sequence[str] = (),
    temperature: float | None = None,
    seed: int | None = None,
    resume: bool = False,
    endpoint: str | Sequence[str] = "",
    served: str = "",
    api: str = "",
    say: Callable[[str], None] = print,
) -> RejectionSampling:
    """Attempt `tasks` training tasks `samples` times each; write what `keep` allows to `out`.

    model        a run, a checkpoint or a model; may be "" with an `endpoint`
    recipe       limits and arguments; empty: those of the run that the model is of, or the defaults
    temperature  None: the recipe's; 0 is greedy
    seed         of tasks and draws; None: the recipe's
    endpoint     a server with OpenAI's API that serves `served`; `api` is completions or chat
    """
    path, condition = Path(out), read_condition(keep)
    check_place(path)
    model = model and str(located(model))
    server = read_endpoint(model, endpoint, served, api)
    config = config_for(model, env, recipe, overrides)
    temperature = temperature_of(config.rollout.temperature, temperature, samples, "--samples 1")
    seed = config.run.seed if seed is None else seed
    weights = latest_model(model) if model else None
    if weights is not None:
        check_readable(weights)
    if server is None:
        assert weights is not None, "no model and no server was refused above"
        config, whose = sampling_only(config, weights), {"weights": fingerprint(weights)}
    elif config.actions.file:
        raise ConfigError(
            f"actions.file={config.actions.file} makes calls that no server can; add actions.file="
        )
    else:
        whose = {"served": server.model, "api": server.api}  # all that is known of its weights
    attempts_path = path.with_name(f"{path.stem}.attempts.jsonl")
    for file in (attempts_path, path):
        if file.exists() and not resume:
            raise ConfigError(
                f"{file} exists; --resume continues it, another --out leaves it alone"
            )
    chat = chat_with(config, server, weights)
    tools = {one.task.label: pose_one(one, chat, seed, server) for one in config.of_each_env()}
    log = AttemptLog(attempts_path, {**whose, **settings_of(config, samples, temperature, seed)})
    try:
        todo = [number for number in range(tasks) if not log.is_done(number)]
        if len(todo) < tasks:
            say(f"{tasks - len(todo):,} of {tasks:,} tasks are in {attempts_path} already")
        if todo:
            if server is None:
                setup = build_run(config, weights=weights).setup
            else:
                env_of = env_factory(config, chat.tokenizer)
                setup = setup_behind(server, config, chat, env_of)
            try:
                work = SampleWork(config, setup, log, tools, tasks, say, server)
                work.sample(todo, samples, temperature, seed)
            except KeyboardInterrupt:
                say(
                    f"interrupted; finished attempts are in {attempts_path}, --resume makes the rest"
                )
                raise
            finally:
                setup.engine.close()
        return gather(log, condition, RejectionSampling(out, str(attempts_path), tasks), keep)
    finally:
        log.close()


def pose_one(config: Config, chat: Chat, seed: int, server: EndpointSpec | None = None) -> Any:
    """Pose the first task before weights are read; the schemas of the tools in its prompt."""
    first = next(TaskStream(config.task.envs, seed))
    env_of = env_factory(config, chat.tokenizer)
    label = config.task.label
    try:
        env = env_of(first)
        try:
            _, info = env.reset(first.seed)
        finally:
            env.close()
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(
            f"{label} with {config.task.args} cannot be posed: {error}. Change its arguments "
            "with task.args.key=value, all of them with task.args={...}"
        ) from error
    if env.observe_as == "raw":
        raise ConfigError(
            f"a wrapper of {label} puts the prompt through the chat template, so there are no "
            "messages to write; leave it out: task.wrappers=[]"
        )
    if server is not None and server.api == "chat":
        refuse_broken_in(label, env, config.rollout.max_turns, "rollout.max_turns=1")
    if server is not None and is_chatty(config, env_of):
        chat.history_note()  # raises where the template cannot hold a conversation
    return info.get("tools")


def settings_of(config: Config, samples: int, temperature: float, seed: int) -> dict[str, Any]:
    """Everything that the attempts depend on, apart from the weights."""
    limits = {"max_tokens", "max_turns", "max_context"}
    return masked(
        {
            "samples": samples,
            "temperature": temperature,
            "seed": seed,
            "task": config.task.model_dump(mode="json", exclude={"eval_args"}),
            "actions": config.actions.model_dump(mode="json"),
            "rollout": config.rollout.model_dump(mode="json", include=limits),
            "model": config.model.model_dump(
                mode="json", include={"chat_template", "template_args", "history", "dtype"}
            ),
        }
    )


class SampleWork:
    """Samples what is missing, and records each task when its attempts have ended."""

    def __init__(
        self,
        config: Config,
        setup: RolloutSetup,
        log: AttemptLog,
        tools: Mapping[str, Any],
        tasks: int,
        say: Callable[[str], None],
        server: EndpointSpec | None = None,
    ) -> None:
        self.config, self.setup, self.server = config, setup, server
        self.log, self.tools, self.tasks, self.say = log, tools, tasks, say
        self.lost_in_a_row = 0
        self.statuses, self.errors = Counter[str](), Counter[str]()
        self.news = time.monotonic() + SECONDS_BETWEEN_NEWS

    def sample(self, todo: Sequence[int], samples: int, temperature: float, seed: int) -> None:
        config, branch = self.config, independent(samples)
        sampling = replace(self.setup.sampling, temperature=temperature)
        # step 0, which no run has: separate draws
        setup = replace(self.setup, sampling=sampling, salt=seed * TRAIN_SEEDS, self_play=False)
        at_a_time = config.rollout.concurrency
        if self.server is not None:  # each attempt is a request
            at_a_time = max(1, at_a_time // samples)

        async def one(number: int) -> None:
            task = next(TaskStream(config.task.envs, seed, cursor=number))
            self.note(number, await build_episode(task, setup, branch))

        asyncio.run(concurrently(one, todo, at_a_time))

    def note(self, number: int, episode: Episode) -> None:
        """Record the attempts at a task."""
        attempts = self._attempts(episode)
        task = episode.task
        known = self.tools.get(task.env)
        tools = {"tools": known} if known else {}
        about = {"seed": task.seed, "data_source": task.data_source or task.env}
        prompt = {"messages": list(task.prompt), **tools}
        self.log.append(number, {**about, **prompt, "attempts": attempts})
        self.statuses.update(attempt["status"] for attempt in attempts)
        self.errors.update(attempt["error"] for attempt in attempts if "error" in attempt)
        if self.server is not None:
            self._stop_if_down(attempts)
        if self.statuses.total() >= ENOUGH_FAILURES and is_dead(self.statuses.elements()):
            raise RunStopped(_why_dead(self.errors))
        if time.monotonic() > self.news:
            self.say(f"{len(self.log.places):,} of {self.tasks:,} tasks")
            self.news = time.monotonic() + SECONDS_BETWEEN_NEWS

    def _stop_if_down(self, attempts: Iterable[Row]) -> None:
        for attempt in attempts:
            error = attempt.get("error", "")
            is_lost = is_servers_fault(attempt["status"], error)
            self.lost_in_a_row = self.lost_in_a_row + 1 if is_lost else 0
            if self.lost_in_a_row >= DOWN_AFTER:
                raise RunStopped(
                    f"{DOWN_AFTER} attempts in a row were lost, the last to: {error}. Once the server "
                    "is back, the same command with --resume completes the rest"
                )

    def _attempts(self, episode: Episode) -> list[Row]:
        found: list[Row] = []
        for number, leaf in enumerate(episode.leaves):
            rows = [row for row in episode.trajectories() if row.leaf_index == number]
            attempt: Row = {"sample": number, **outcome_of(rows, leaf)}
            if not leaf.status.is_trainable:
                attempt["error"] = str(episode.spans[leaf.tips[-1]].info.get("error", leaf.status))
                found.append(attempt)
                continue
            try:
                attempt["contexts"] = [
                    self._context(row)
                    for row in rows
                    if any(span.author is Author.POLICY for span in row.spans)
                ]
            except NotRecordable as error:
                attempt["unwritable"] = str(error)
            found.append(attempt)
        return found

    def _context(self, row: Trajectory) -> Row:
        chat, actions = self.setup.chat, self.setup.actions
        if self.server is not None and self.server.api == "chat":
            return {"messages": conversation_of(row, chat)}
        own_prompt = {"messages": prompt_of_context(row)} if row.context else {}
        return {**own_prompt, "spans": spans_of_attempt(row, chat, actions)}


def conversation_of(row: Trajectory, chat: Chat) -> list[Message]:
    """Prompt and answers as messages. A truncated answer cannot be expressed as a message."""
    if any(span.info.get("finish") == Finish.LENGTH for span in row.spans):
        raise NotRecordable("it was truncated, and as a message it would train an early end")
    messages = prompt_of_context(row)
    for span in spans_of_attempt(row, chat):
        role = "assistant" if span["author"] == "policy" else span.get("role", "user")
        messages.append({"role": role, "content": span["text"]})
    return messages


def gather(
    log: AttemptLog, condition: Condition, sampled: RejectionSampling, keep: str
) -> RejectionSampling:
    """Write the attempts that pass, without duplicates."""
    seen: set[bytes] = set()
    statuses, rewards = Counter[str](), 0.0
    with new_rows(Path(sampled.out)) as file:
        for task, line in log.tasks(sampled.tasks):
            for attempt in line["attempts"]:
                sampled.attempts += 1
                statuses[attempt["status"]] += 1
                if not Status(attempt["status"]).is_trainable:
                    sampled.failed += 1
                    sampled.errors[attempt["error"]] += 1
                    continue
                rewards += attempt["reward"]
                if not condition(attempt):
                    sampled.rejected += 1
                elif "unwritable" in attempt:
                    sampled.unwritable += 1
                else:
                    fresh = [row for row in _rows(line, attempt) if _is_new(row, seen)]
                    sampled.duplicates += not fresh
                    for row in fresh:
                        row["extra_info"]["index"] = task
                        file.append(row)
                    sampled.rows += len(fresh)
        sampled.reward = rewards / max(sampled.attempts - sampled.failed, 1)
        if is_dead(statuses.elements()):
            raise RunStopped(_why_dead(sampled.errors))
        if not sampled.rows:
            raise RunStopped(_why_nothing(sampled, keep))
    return sampled


def _rows(line: Row, attempt: Row) -> Iterable[Row]:
    names = ("sample", "reward", "turns", "tool_calls", "length", "status")
    for context in attempt["contexts"]:
        yield {
            "messages": context.get("messages", line["messages"]),
            **({"spans": context["spans"]} if "spans" in context else {}),
            **({"tools": line["tools"]} if "tools" in line else {}),
            "data_source": line["data_source"],
            "extra_info": {
                "index": 0,
                "seed": line["seed"],
                "split": "train",
                **{name: attempt[name] for name in names},
            },
        }


def _is_new(row: Row, seen: set[bytes]) -> bool:
    text = json.dumps([row["messages"], row.get("spans")], ensure_ascii=False)
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def _why_dead(errors: Counter[str]) -> str:
    [(commonest, _)] = errors.most_common(1)
    return (
        f"no attempt ended; most frequent reason: {commonest}. Repair the environment or tool and run the "
        "same command with --resume"
    )


def _why_nothing(sampled: RejectionSampling, keep: str) -> str:
    if sampled.unwritable:
        return (
            f"{sampled.unwritable:,} of {sampled.attempts:,} attempts pass {keep!r}, and none can be "
            f"written, so {sampled.out} is not; {sampled.attempts_file} says why (unwritable)"
        )
    return (
        f"none of {sampled.attempts:,} attempts passes {keep!r} (mean reward {sampled.reward:.3f}), so "
        f"{sampled.out} is not written. They are in {sampled.attempts_file}: with --resume another "
        "--keep reads them again, and a larger --n adds to them"
    )
