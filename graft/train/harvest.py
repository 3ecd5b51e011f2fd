"""Attempts of a model that went well, as examples to learn from: what `graft data sample` does.

    graft data sample runs/quickstart calculator --n 100 --samples 4 --keep "reward>0" --out good.jsonl

    100 tasks, 4 attempts each     good.attempts.jsonl, as they end: nobody waits for anybody
    those with a reward            good.jsonl, in the order of the tasks, the same text once

With --resume the first file is read before anything is sampled: what is there is not sampled again. So
a killed command goes on, --n may grow, and --keep may change.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError, check, load_config
from graft.envs import find
from graft.registry import load
from graft.rollout.branch import independent
from graft.rollout.collect import grow
from graft.rollout.episode import Setting
from graft.rollout.keep import Condition, read_condition
from graft.rollout.recorded import (
    CannotBeWritten,
    outcome_of,
    prompt_of_context,
    spans_of_attempt,
)
from graft.train.attempt_log import AttemptLog
from graft.train.candidates import check_readable, fingerprint, run_behind
from graft.train.checkpoint import latest_model
from graft.train.folder import RunStopped
from graft.train.model import by_itself, load_tokenizer
from graft.train.rl import TRAIN_SEEDS, TaskStream
from graft.train.row_file import check_place, new_rows
from graft.train.setup import Parts, assemble, env_factory
from graft.types import Author, Episode, Status, Task

ENOUGH_FAILURES = 64
"""Attempts after which it is clear that a tool or environment is broken."""
SECONDS_BETWEEN_NEWS = 10.0

Row = dict[str, Any]


@dataclass(slots=True)
class Harvest:
    """What came of it."""

    out: str
    attempts_file: str
    tasks: int = 0
    attempts: int = 0
    rows: int = 0
    rejected: int = 0
    duplicates: int = 0
    failed: int = 0
    """Attempts that broke, through no fault of the policy; never kept."""
    unwritable: int = 0
    """Attempts that no text stands for."""
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
    say: Callable[[str], None] = print,
) -> Harvest:
    """Attempt `tasks` training tasks `samples` times each; write what `keep` allows to `out`.

    recipe       limits and arguments; empty: those of the run that the model is of, or the defaults
    temperature  None: the recipe's; 0 is greedy
    seed         of tasks and draws; None: the recipe's
    """
    path, condition = Path(out), read_condition(keep)
    check_place(path)
    config = config_for(model, env, recipe, overrides)
    if temperature is None:
        temperature = config.rollout.temperature
    if not temperature and samples > 1:
        raise ConfigError(
            f"{samples} greedy attempts at a task are {samples} times the same; give a temperature, "
            "or --samples 1"
        )
    seed = config.run.seed if seed is None else seed
    weights = latest_model(model)
    check_readable(weights)
    config = by_itself(config, weights)
    journal = path.with_name(f"{path.stem}.attempts.jsonl")
    for file in (journal, path):
        if file.exists() and not resume:
            raise ConfigError(
                f"{file} is there already; --resume goes on with it, another --out leaves it alone"
            )
    tools = pose_one(config, weights, seed)
    log = AttemptLog(journal, settings_of(config, weights, samples, temperature, seed))
    try:
        todo = [number for number in range(tasks) if not log.is_done(number)]
        if len(todo) < tasks:
            say(f"{tasks - len(todo):,} of {tasks:,} tasks are in {journal} already")
        if todo:
            parts = assemble(config, weights=weights)
            try:
                work = Work(parts, log, tools, tasks, say)
                work.sample(todo, samples, temperature, seed)
            except KeyboardInterrupt:
                say(f"interrupted; what was finished is in {journal}, --resume does the rest")
                raise
            finally:
                parts.engine.close()
        return gather(log, condition, Harvest(out, str(journal), tasks), keep)
    finally:
        log.close()


def config_for(model: str, env: str, recipe: str, overrides: Sequence[str]) -> Config:
    """The recipe of the model's run, or the one that was named, with this environment in it."""
    run = run_behind(Path(model))
    if not recipe and run is not None and (run / "config.yaml").is_file():
        recipe = str(run / "config.yaml")
    if recipe:
        config = load_config(recipe, overrides)
    else:
        config = _bare_config(model, env, overrides)
    if config.task.env == env:
        return config
    said = [text.partition("=")[0] for text in overrides]
    args = {
        key: value
        for key, value in config.task.args.items()
        if "task.args" in said or f"task.args.{key}" in said or _fits(env, key)
    }
    task = config.task.model_copy(update={"env": env, "args": args})
    return config.model_copy(update={"task": task})


def _bare_config(model: str, env: str, overrides: Sequence[str]) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    base = {"model": {"path": model}, "task": {"env": env}}
    try:
        values = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
        return check(OmegaConf.to_container(values), where="overrides")
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {' '.join(overrides)}: {error}") from error


def _fits(env: str, key: str) -> bool:
    """Whether an argument of another environment means something to this one, and is not fixed."""
    entry = find(env)
    build = load(entry.build, "env") if isinstance(entry.build, str) else entry.build
    return key in inspect.signature(build).parameters and key not in entry.args


def pose_one(config: Config, weights: Path, seed: int) -> Any:
    """Pose the first task, before a weight is read; the schemas of the tools its prompt shows."""
    tokenizer = load_tokenizer(config, weights)
    first = next(TaskStream(config.task.env, seed))
    try:
        env = env_factory(config, config.task.args, tokenizer)(first)
        try:
            _, info = env.reset(first.seed)
        finally:
            env.close()
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(
            f"{config.task.env} with {config.task.args} cannot be posed: {error}. Change its arguments "
            "with task.args.key=value, all of them with task.args={...}"
        ) from error
    if env.observe_as == "raw":
        raise ConfigError(
            f"a wrapper of {config.task.env} puts the prompt through the chat template, so there are no "
            "messages to write; leave it out: task.wrappers=[]"
        )
    return info.get("tools")


def settings_of(
    config: Config, weights: Path, samples: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Everything that the attempts depend on."""
    limits = {"max_tokens", "max_turns", "max_context"}
    return {
        "weights": fingerprint(weights),
        "samples": samples,
        "temperature": temperature,
        "seed": seed,
        "task": config.task.model_dump(mode="json", exclude={"eval_args"}),
        "actions": config.actions.model_dump(mode="json"),
        "rollout": config.rollout.model_dump(mode="json", include=limits),
        "model": config.model.model_dump(mode="json", include={"chat_template", "dtype"}),
    }


class Work:
    """Samples what is missing, and writes down each task as its attempts have ended."""

    def __init__(
        self, parts: Parts, log: AttemptLog, tools: Any, tasks: int, say: Callable[[str], None]
    ) -> None:
        self.parts, self.log, self.tools = parts, log, tools
        self.tasks, self.say = tasks, say
        self.statuses, self.errors = Counter[str](), Counter[str]()
        self.news = time.monotonic() + SECONDS_BETWEEN_NEWS

    def sample(self, todo: Sequence[int], samples: int, temperature: float, seed: int) -> None:
        config, setting = self.parts.config, self.parts.setting
        sampling = replace(setting.sampling, temperature=temperature)
        salt = seed * TRAIN_SEEDS  # of step 0, which no run has: draws of its own
        asyncio.run(
            self._everyone(
                todo, replace(setting, sampling=sampling, salt=salt), samples, config.task.env, seed
            )
        )

    async def _everyone(
        self, todo: Sequence[int], setting: Setting, samples: int, env: str, seed: int
    ) -> None:
        branch, waiting = independent(samples), iter(todo)  # whoever is free takes the next

        async def worker(waiting: Iterable[int]) -> None:
            for number in waiting:
                task = next(TaskStream(env, seed, cursor=number))
                self.note(number, await grow(task, setting, branch))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.parts.config.rollout.concurrency, len(todo))):
                    group.create_task(worker(waiting))
        except* Exception as broken:  # the first cause is the one worth reading
            raise broken.exceptions[0] from None

    def note(self, number: int, episode: Episode) -> None:
        """Write down the attempts at a task."""
        attempts = self._attempts(episode)
        shared: Row = {"messages": list(episode.task.prompt)}
        if self.tools:
            shared["tools"] = self.tools
        about = {"seed": episode.task.seed, "data_source": _source(episode.task)}
        self.log.append(number, {**about, **shared, "attempts": attempts})
        self.statuses.update(attempt["status"] for attempt in attempts)
        self.errors.update(attempt["error"] for attempt in attempts if "error" in attempt)
        if self.statuses.total() >= ENOUGH_FAILURES and is_down(self.statuses):
            raise RunStopped(_why_dead(self.errors))
        if time.monotonic() > self.news:
            self.say(f"{len(self.log.places):,} of {self.tasks:,} tasks")
            self.news = time.monotonic() + SECONDS_BETWEEN_NEWS

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
                    {
                        **({"messages": prompt_of_context(row)} if row.context else {}),
                        "spans": spans_of_attempt(row, self.parts.chat, self.parts.actions),
                    }
                    for row in rows
                    if any(span.author is Author.POLICY for span in row.spans)
                ]
            except CannotBeWritten as error:
                attempt["unwritable"] = str(error)
            found.append(attempt)
        return found


def gather(log: AttemptLog, condition: Condition, harvest: Harvest, keep: str) -> Harvest:
    """Write the attempts that pass; the same prompt with the same text once."""
    seen: set[bytes] = set()
    statuses, rewards = Counter[str](), 0.0
    with new_rows(Path(harvest.out)) as file:
        for task, line in log.tasks(harvest.tasks):
            for attempt in line["attempts"]:
                harvest.attempts += 1
                statuses[attempt["status"]] += 1
                if not Status(attempt["status"]).is_trainable:
                    harvest.failed += 1
                    harvest.errors[attempt["error"]] += 1
                    continue
                rewards += attempt["reward"]
                if not condition(attempt):
                    harvest.rejected += 1
                elif "unwritable" in attempt:
                    harvest.unwritable += 1
                else:
                    fresh = [row for row in _rows(line, attempt) if _is_new(row, seen)]
                    harvest.duplicates += not fresh
                    for row in fresh:
                        row["extra_info"]["index"] = task
                        file.append(row)
                    harvest.rows += len(fresh)
        harvest.reward = rewards / max(harvest.attempts - harvest.failed, 1)
        if is_down(statuses):
            raise RunStopped(_why_dead(harvest.errors))
        if not harvest.rows:
            raise RunStopped(_why_nothing(harvest, keep))
    return harvest


def is_down(statuses: Counter[str]) -> bool:
    """Whether many attempts failed and not one came to its end: a tool or environment is broken."""
    failed = sum(number for name, number in statuses.items() if not Status(name).is_trainable)
    return statuses[Status.DONE] == 0 and failed > 0 and failed * 4 >= statuses.total()


def _rows(line: Row, attempt: Row) -> Iterable[Row]:
    shared = {key: line[key] for key in ("tools",) if key in line}
    names = ("sample", "reward", "turns", "tool_calls", "length", "status")
    for context in attempt["contexts"]:
        yield {
            "messages": context.get("messages", line["messages"]),
            "spans": context["spans"],
            **shared,
            "data_source": line["data_source"],
            "extra_info": {
                "index": 0,
                "seed": line["seed"],
                "split": "train",
                **{name: attempt[name] for name in names},
            },
        }


def _is_new(row: Row, seen: set[bytes]) -> bool:
    text = json.dumps([row["messages"], row["spans"]], ensure_ascii=False)
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def _source(task: Task) -> str:
    return task.data_source or task.env


def _why_dead(errors: Counter[str]) -> str:
    [(commonest, _)] = errors.most_common(1)
    return (
        f"no attempt came to its end, mostly: {commonest}. Repair the environment or tool and run the "
        "same command with --resume"
    )


def _why_nothing(harvest: Harvest, keep: str) -> str:
    return (
        f"none of {harvest.attempts:,} attempts passes {keep!r} (mean reward {harvest.reward:.3f}), so "
        f"{harvest.out} is not written. They are in {harvest.attempts_file}: with --resume another "
        "--keep reads them again, and a larger --n adds to them"
    )
