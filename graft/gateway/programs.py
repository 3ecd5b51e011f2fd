"""Agents that exist already, as programs that attempt one task: a command line, or a Python function.

    "python agent.py --url {base_url} {task.prompt}"     a process; its reward is in $GRAFT_REWARD_FILE
    "my_module:agent"                                    async def agent(task, client): ... return 1.0

Each placeholder becomes a part of one argument; no shell is involved unless the command names one. A process
also finds the address and the key in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
ANTHROPIC_API_KEY, which most clients read. What it prints is never a reward: most programs print what the
policy wrote.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from graft.config import ConfigError
from graft.gateway.client import AgentClient
from graft.gateway.process import run_process, selected
from graft.gateway.request import RefusedRequest
from graft.protocols import AgentHost
from graft.registry import load_named
from graft.rollout.failure import RolloutFailure
from graft.rollout.user_calls import in_thread
from graft.trust import check_program
from graft.types import Status, Task
from graft.user_code import UserCodeError, UserObject, as_reward, refusal
from graft.user_tasks import containing_tasks

PLACEHOLDER = re.compile(r"\{(base_url|openai_base_url|api_key|folder|task(?:\.[\w-]+)+)\}")
GRADING = ("answer", "meta", "seed")
"""Fields of a task that grade it, or from which its answer can be made again: task.json has none of them."""
TASK_FIELDS = ("id", "prompt", "messages", "answer", "env", "data_source", "seed")
MEANT = {"task": "task.prompt", "question": "task.prompt", "url": "base_url", "key": "api_key"}
"""What is meant by placeholders that do not exist."""
BARE = re.compile(rf"(?<!\$)\{{({'|'.join((*TASK_FIELDS, *MEANT))})\}}")
REWARD_KEY = re.compile(r"""^\s*\{.*["']reward["']\s*:""")
log = logging.getLogger("graft")
LONGEST_COMMAND, LONGEST_LINE = 80, 240
"""Characters of a command, and of a line of its output, in messages."""
MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class AgentCrash(RolloutFailure):
    """The program ended with an error; `trace` is the end of what it wrote."""


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


def make_program(
    given: str | Sequence[str] | Callable[..., Any], variables: Sequence[str] = ()
) -> AgentProgram:
    """The program that `task.agent` describes: a command, "module:function", or a function itself.

    variables: of the run, that a command gets besides the usual ones.
    """
    if isinstance(given, str) and MODULE.fullmatch(given.strip()):
        given = load_named(given.strip(), "agent")
    if callable(given):
        return getattr(given, "program", None) or FunctionAgent(given)
    text = given if isinstance(given, str) else shlex.join(given)
    check_program(f"the program {text!r}", text)
    return CommandAgent(given, variables)


class CommandAgent:
    """A process per attempt."""

    concurrency = 64

    def __init__(self, command: str | Sequence[str], variables: Sequence[str] = ()) -> None:
        """variables: names of those of the run that it gets besides the usual ones."""
        self.variables = tuple(variables)
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

        def arguments(folder: str) -> list[str]:
            known, are_options_over = values | {"folder": folder}, False
            made: list[str] = []
            for word in self.words:
                text = PLACEHOLDER.sub(
                    lambda found: known.get(found[1]) or _field(task, found[1]), word
                )
                if text.startswith("-") and not word.startswith("-") and not are_options_over:
                    text = f" {text}"  # a task's text is no option of the program
                are_options_over = are_options_over or word == "--"
                made.append(text)
            return made

        if client.host is not None:
            return await self._run_inside(client.host, arguments("."), client)
        shown = {name: value for name, value in task.to_json().items() if name not in GRADING}
        ended = await run_process(arguments, environment(client), shown, self.variables)
        info = self._info(ended.code, ended.output)
        is_rewarded = ended.reward is not None or client.attempt.is_rewarded
        if not is_rewarded and REWARD_KEY.search(_last_line(ended.output)):
            client.attempt.counts["printed_rewards"] += 1
            _note_printed(str(self))
        return read_outcome(self._reward(ended.reward), str(self), info)

    async def _run_inside(
        self, host: AgentHost, words: Sequence[str], client: AgentClient
    ) -> Outcome:
        """Run on the machine of an environment, whose variables are its own."""
        variables = {**selected(self.variables), **environment(client)}
        code, output = await in_thread(host.run_agent, words, variables, client.base_url)
        return Outcome(None, self._info(code, output))

    def _info(self, code: int, output: str) -> dict[str, Any]:
        """What the leaf keeps of a command that ended; AgentCrash if it failed."""
        if code:
            end = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
            last = _last_line(output)
            said = f", and last wrote {shortened(last)!r}" if last else ""
            raise AgentCrash(Status.ENV_ERROR, f"{self} {end}{said}", output)
        return {"exit_code": code, "output": output}

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

    def _reward(self, text: str | None) -> Any:
        """What the file of the reward says: a number, or an object with more; None without a file."""
        if text is None:
            return None
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RolloutFailure(
                Status.ENV_ERROR,
                f"{self} wrote {shortened(text)!r} into $GRAFT_REWARD_FILE, which is not JSON ({error}); "
                'write a number, or {"reward": number}',
            ) from error
        if isinstance(read, bool | int | float) or (isinstance(read, dict) and "reward" in read):
            return read
        raise RolloutFailure(
            Status.ENV_ERROR,
            f"{self} wrote {shortened(text)!r} into $GRAFT_REWARD_FILE; write a number, or "
            '{"reward": number}',
        )


class FunctionAgent:
    """A Python function: (task) or (task, client); async, or blocking on a thread of its own."""

    concurrency = 512

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.owner = UserObject(function, "agent")
        self.options: dict[str, Any] = {}
        """Of AgentAttempts, where the function was decorated with them."""
        self.is_async = any(
            inspect.iscoroutinefunction(one)
            for one in (function, inspect.unwrap(function), type(function).__call__)
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
            with containing_tasks():
                value = await self.function(*(task, client)[: self.num_arguments])
        else:
            blocking = client.blocking()
            value = await in_thread(self.function, *(task, blocking)[: self.num_arguments])
            if inspect.iscoroutine(value):
                value.close()
                raise refusal(
                    self.owner,
                    value,
                    "a number. It is called on a thread and awaited only if it is `async def` itself",
                )
        return read_outcome(value, self.owner, {})


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or [""])[-1]


def is_crash(failure: RolloutFailure) -> bool:
    """Whether the agent's own code failed: not a deadline, a refused request, or a result of a wrong kind."""
    cause = failure.__cause__
    is_raised = cause is not None and not isinstance(cause, UserCodeError | RefusedRequest)
    return isinstance(failure, AgentCrash) or (failure.status is Status.ENV_ERROR and is_raised)


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
    """The variables of its session, which a process gets."""
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


@lru_cache(maxsize=64)  # each program once
def _note_printed(program: str) -> None:
    log.warning(
        "%s printed a reward as its last line, which is not read: the policy may have written it. Write it "
        "into the file $GRAFT_REWARD_FILE",
        program,
    )


def shortened(text: str, most: int = LONGEST_LINE) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
