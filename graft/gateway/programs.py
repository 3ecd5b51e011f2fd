"""Agents that exist already, as programs that attempt one task: a command line, or a Python function.

    "python agent.py --url {base_url} {task.prompt}"     a process; its last line may be {"reward": 1.0}
    "my_module:agent"                                    async def agent(task, client): ... return 1.0

Each placeholder becomes a part of one argument; no shell is involved unless the command names one. A process
also finds the address and the key in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
ANTHROPIC_API_KEY, which most clients read.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graft.config import ConfigError
from graft.gateway.client import AgentClient
from graft.gateway.process import run_process
from graft.registry import load_named
from graft.rollout.failure import RolloutFailure
from graft.rollout.user_calls import in_thread
from graft.trust import check_program
from graft.types import Status, Task
from graft.user_code import UserObject, as_reward, refusal

PLACEHOLDER = re.compile(r"\{(base_url|openai_base_url|api_key|folder|task(?:\.[\w-]+)+)\}")
TASK_FIELDS = ("id", "prompt", "messages", "answer", "env", "data_source", "seed")
MEANT = {"task": "task.prompt", "question": "task.prompt", "url": "base_url", "key": "api_key"}
"""What is meant by placeholders that do not exist."""
BARE = re.compile(rf"(?<!\$)\{{({'|'.join((*TASK_FIELDS, *MEANT))})\}}")
REWARD_KEY = re.compile(r"""["']reward["']\s*:""")
LONGEST_COMMAND, LONGEST_LINE = 80, 240
"""Characters of a command, and of a line of its output, in messages."""
MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(slots=True)
class Outcome:
    """What a program says about its attempt."""

    reward: float | None = None
    """None: it gave none."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])


class AgentProgram(Protocol):
    """Attempts one task against the gateway; a failure is raised. `concurrency`: attempts at a time."""

    concurrency: int

    async def __call__(self, task: Task, client: AgentClient) -> Outcome: ...


def make_program(given: str | Sequence[str] | Callable[..., Any]) -> AgentProgram:
    """The program that `task.agent` describes: a command, "module:function", or a function itself."""
    if callable(given):
        return getattr(given, "program", None) or FunctionAgent(given)
    if isinstance(given, str) and MODULE.fullmatch(given.strip()):
        return FunctionAgent(load_named(given.strip(), "agent"))
    text = given if isinstance(given, str) else shlex.join(given)
    check_program(f"the program {text!r}", text)
    return CommandAgent(given)


class CommandAgent:
    """A process per attempt."""

    concurrency = 64

    def __init__(self, command: str | Sequence[str]) -> None:
        try:
            self.words = shlex.split(command) if isinstance(command, str) else list(command)
        except ValueError as error:
            raise ConfigError(f"task.agent={command!r} is not a command: {error}") from error
        if not self.words:
            raise ConfigError("task.agent is an empty command")
        for word in self.words:
            for name in PLACEHOLDER.findall(word):
                _check_placeholder(name)
            if (bare := BARE.search(word)) is not None:
                meant = MEANT.get(bare[1], f"task.{bare[1]}")
                raise ConfigError(
                    f"task.agent names {bare[0]}, which nothing replaces; did you mean {{{meant}}}?"
                )

    async def __call__(self, task: Task, client: AgentClient) -> Outcome:
        values = {
            "base_url": client.anthropic_base_url,
            "openai_base_url": client.base_url,
            "api_key": client.api_key,
        }

        def argument(word: str, folder: str) -> str:
            return PLACEHOLDER.sub(
                lambda found: (values | {"folder": folder}).get(found[1]) or _field(task, found[1]),
                word,
            )

        ended = await run_process(
            lambda folder: [argument(word, folder) for word in self.words],
            environment(client),
            {name: value for name, value in task.to_json().items() if name != "answer"},
        )
        info: dict[str, Any] = {"exit_code": ended.code, "output": ended.output}
        last = (ended.output.strip().splitlines() or [""])[-1]
        if ended.code:
            end = (
                f"was killed by {_signal(-ended.code)}"
                if ended.code < 0
                else f"ended with exit code {ended.code}"
            )
            said = f", and last wrote {shortened(last)!r}" if last else ""
            raise RolloutFailure(Status.ENV_ERROR, f"{self} {end}{said}", ended.output)
        if client.attempt.has_written(last):  # the policy's own text, which must not reward itself
            client.attempt.counts["echoed_rewards"] += bool(REWARD_KEY.search(last))
            return Outcome(None, info)
        return read_outcome(self._reward_line(last), str(self), info)

    def check(self) -> None:
        """Refuse a program that is not there, before the run begins."""
        name = self.words[0]
        if not PLACEHOLDER.search(name) and shutil.which(name) is None:
            raise ConfigError(
                f"task.agent: {name!r} is no program that can be run; give its path, or the interpreter "
                "before it (python agent.py ...)"
            )

    def __str__(self) -> str:
        return f"the agent {shortened(' '.join(self.words), LONGEST_COMMAND)!r}"

    def _reward_line(self, last: str) -> Any:
        """The last line of the output, where it is a JSON object with a reward; else None."""
        if not last.lstrip().startswith("{"):
            return None
        try:
            read = json.loads(last)
        except ValueError as error:
            if not REWARD_KEY.search(last):
                return None
            raise RolloutFailure(
                Status.ENV_ERROR,
                f"the last line of {self}, {shortened(last)!r}, is not JSON ({error}), so the reward cannot "
                'be read; write print(json.dumps({"reward": x}))',
            ) from error
        return read if isinstance(read, dict) and "reward" in read else None


class FunctionAgent:
    """A Python function: (task) or (task, client); async, or blocking on a thread of its own."""

    concurrency = 512

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.owner = UserObject(function, "agent")
        self.is_async = any(
            inspect.iscoroutinefunction(one) for one in (function, type(function).__call__)
        )
        parameters = [
            one
            for one in inspect.signature(function).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
        ]
        takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
        self.num_arguments = 2 if takes_any else min(len(parameters), 2)
        if not self.num_arguments:
            raise ConfigError(f"{self.owner} takes no argument; write agent(task, client)")
        needed = [one.name for one in parameters if one.default is one.empty][2:]
        if needed and not takes_any:
            raise ConfigError(
                f"{self.owner} needs the argument {needed[0]!r}; an agent gets a task and a client"
            )

    async def __call__(self, task: Task, client: AgentClient) -> Outcome:
        if self.is_async:
            value = await self.function(*(task, client)[: self.num_arguments])
        else:
            blocking = client.blocking()
            value = await in_thread(self.function, *(task, blocking)[: self.num_arguments])
            if inspect.iscoroutine(value):
                value.close()
                raise refusal(
                    self.owner, value, "a number: write `async def`, so that it is awaited"
                )
        return read_outcome(value, self.owner, {})


def read_outcome(value: Any, owner: UserObject | str, info: dict[str, Any]) -> Outcome:
    """A number, None, or a mapping with a "reward" and more that is kept in the leaf's info."""
    if isinstance(value, Outcome):
        return value
    if value is None:
        return Outcome(None, info)
    if isinstance(value, Mapping):
        rest = {str(name): one for name, one in value.items() if name != "reward"}
        reward = value.get("reward")
        number = None if reward is None else as_reward(reward, owner, "a finite reward")
        return Outcome(number, {**rest, **info})
    if isinstance(value, str | bytes | Sequence):
        raise refusal(owner, value, 'a number, None, or {"reward": number}')
    return Outcome(as_reward(value, owner, 'a number, None, or {"reward": number}'), info)


def environment(client: AgentClient) -> dict[str, str]:
    """What a process gets besides the environment of the run."""
    return {
        "OPENAI_BASE_URL": client.base_url,
        "OPENAI_API_BASE": client.base_url,
        "OPENAI_API_KEY": client.api_key,
        "ANTHROPIC_BASE_URL": client.anthropic_base_url,
        "ANTHROPIC_API_KEY": client.api_key,
        "GRAFT_BASE_URL": client.anthropic_base_url,
        "GRAFT_API_KEY": client.api_key,
        "GRAFT_SESSION": client.session,
    }


def prompt_text(task: Task) -> str:
    """The texts of the prompt's messages, with an empty line between two."""
    return "\n\n".join(str(message.get("content") or "") for message in task.prompt)


def _field(task: Task, name: str) -> str:
    """The value of "task.prompt" or "task.meta.level" as a text."""
    _, first, *rest = name.split(".")
    if first == "prompt":
        return prompt_text(task)
    if first == "messages":
        return json.dumps(list(task.prompt), ensure_ascii=False)
    value: Any = task.meta if first == "meta" else getattr(task, first)
    for key in rest:
        if not isinstance(value, Mapping) or key not in value:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else "none"
            raise RolloutFailure(
                Status.ENV_ERROR,
                f"task.agent names {{{name}}}, and task {task.id!r} has no {key!r} there; it has: {known}",
            )
        value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_placeholder(name: str) -> None:
    _, *rest = name.split(".")
    is_field = len(rest) == 1 and rest[0] in TASK_FIELDS
    if rest and not is_field and not (rest[0] in ("meta", "answer") and len(rest) > 1):
        known = ", ".join(f"{{task.{one}}}" for one in TASK_FIELDS)
        raise ConfigError(f"task.agent names {{{name}}}; a task has {known} and {{task.meta.KEY}}")


def shortened(text: str, most: int = LONGEST_LINE) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
