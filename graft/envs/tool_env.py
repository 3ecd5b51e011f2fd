"""Any env with tools: the policy calls one in the middle of its text and reads the result.

    policy  "I need 34*5. <calculator>34*5</calculator>"      ends at a close string: a call
    env     "<result>170</result>"                           appended inline, never trained
    policy  "<answer>170</answer>"                            no call: goes to the inner env

That is the format "tags": a turn is a call if it ends with a close string. The call is what stands
after the last open string; a close string without an open one is a malformed call. Everything else
goes to the inner env, half-written calls included. The other formats are in `graft.tools.formats`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

from graft.data.corpus import without_surrogates
from graft.envs.base import Wrapper, as_messages, forking, inner_envs, limit_turns
from graft.envs.call_rewards import MAX_TOOL_REWARD, CallRewards
from graft.envs.checked import as_reset, as_turn, check_action
from graft.protocols import Env, Observation
from graft.registry import resolve
from graft.text.calls import ToolCall
from graft.tools import ERROR, has_state, is_error, make_tools
from graft.tools.calling import shorten
from graft.tools.formats import FORMATS, CallFormat, CallStyle, instructions_for
from graft.tools.rebind import check_tools
from graft.tools.schema import schema
from graft.tools.state import call_unchanged, check_state, forked, is_rebound
from graft.types import Task, Turn
from graft.user_code import UserObject, named

MAX_RESULT = 10_000
WHOLE_RESULT = 1_000_000
"""Characters kept of a result with `max_result=None`. More fits into no context, and encoding 10 MB
blocks the rollouts for half a minute."""
MAX_CALLS = 16
"""Calls of one message that are carried out; one error stands for the rest."""
PLACES = ("start", "end")
"""Where instructions stand in a prompt."""
UNKNOWN = "unknown"
"""The name in info of a tool that does not exist: what the policy wrote could be anything."""


class ToolAnswer(NamedTuple):
    """The outcome of one call."""

    tool: str
    text: str
    is_ok: bool
    reward: float = 0.0
    seconds: float | None = None
    is_refusal: bool = False
    """The limit of calls was reached, so no tool ran."""


class ToolEnv(Wrapper):
    """`env` with `tools`: anything `make_tools` takes. Calls do not use up turns of the inner env.

    Calls beyond `max_uses` are counted and answered with the style's `spent` text, and the episode
    goes on, so that the policy can still answer. Beyond the inner env's turns, the uses and one
    such refusal the episode is truncated: `max_turns` = inner max_turns + max_uses + 1.
    `max_uses=None` sets no limit, then only the caller's budget ends a policy that never answers.

    A call earns `tool_reward`, and `tool_success_reward` on top if it succeeds. Where
    `tool_error_reward` is not 0, it is all that a failed call earns. Refused calls earn nothing, and all
    calls of an episode together at most `max_tool_reward`: where idle calls earn more than a right answer
    (usually 1.0), the policy learns to make calls.

    A task may list its tools by name (`info["tool_names"]` of its reset, such as a row's `tools`): then
    only these are described and carried out.

    `instructions` begin the prompt, after a system message: all tasks then share their tokens, which
    engine and learner compute once. `instructions_at="end"` puts them after the task, before a board.
    None writes them from the tools' descriptions. Each fork of the env has its own copy of a tool with
    state, and the env resets and closes it. Other tools are shared, and their creator closes them.

    Each Turn's info has "tool_uses" (calls so far), and for a call also "tool" and "tool_ok" (in a
    message with several: the first one's name, whether all succeeded, "tool_calls", "tool_failures"
    and "tool_results"), "tool_seconds" if the tool is `blocking`, and "parsed_action" where what
    follows the call is ignored. "observe_as" is set where an observation of the inner env enters the
    context another way. `counters` adds the episode's totals so far to every turn:
    "tools/NAME/calls", "/failures" and "/seconds", and once they occur "tools/refused" (calls beyond
    `max_uses`), "tools/malformed" (a close string without an open one, JSON that cannot be read) and
    "tools/invented" (result openings written by the policy). Also GEM's keys (`tool_use_counter`,
    `tool_success_counter`, `use_tool`, `tool_type`, `prev_ep_*`).
    """

    shared = ("tools", "styles", "format", "rewards")
    saved = (
        "turns",
        "tool_uses",
        "tool_earned",
        "is_over",
        "prompt",
        "allowed",
        "counts",
        "faults",
        "previous",
    )

    def __init__(
        self,
        env: Env,
        tools: Any,
        *,
        format: str = "tags",
        styles: Mapping[str, CallStyle] | None = None,
        max_uses: int | None = 10,
        instructions: str | None = "",
        instructions_at: str = "start",
        tool_reward: float = 0.0,
        tool_success_reward: float = 0.0,
        tool_error_reward: float = 0.0,
        max_tool_reward: float | None = MAX_TOOL_REWARD,
        max_result: int | None = MAX_RESULT,
        counters: bool = False,
    ) -> None:
        super().__init__(env)
        made = make_tools(tools)
        self.tools: dict[str, Any] = {tool.name: tool for tool in made}
        if len(self.tools) != len(made):
            twice = next(tool for tool in reversed(made) if self.tools[tool.name] is not tool)
            raise ValueError(
                f"{named(twice, 'tool')} has the name of another tool; calls choose a tool by its name: "
                "rename one, as in graft.tool(name=...)"
            )
        for tool in made:
            check_state(tool)
        if max_uses is not None and max_uses < 0:
            raise ValueError(f"max_uses={max_uses}: must be 0 or more, or None for no limit")
        self.format: CallFormat = resolve(format, FORMATS, "call format")
        if max_result is not None and max_result < 1:
            raise ValueError(
                f"max_result={max_result}: must be 1 or more, or None for whole results"
            )
        if env.observe_as in ("prompt", "raw"):
            raise ValueError(
                "tools go inside a wrapper that rewrites the history, or it would never show their "
                "results: name them before it, as in python_tool,concat"
            )
        if instructions_at not in PLACES:
            raise ValueError(
                f"instructions_at={instructions_at!r}: must be one of {', '.join(PLACES)}"
            )
        given = styles or {}
        if strange := [name for name in given if name not in self.tools]:
            raise ValueError(
                f"styles name {strange[0]!r}, which is not one of the tools {list(self.tools)}"
            )
        self.styles = {name: given.get(name) or self.format.style(name) for name in self.tools}
        self.max_uses = max_uses
        self.allowed: list[str] | None = None
        """The tools that the current task lists; None: it lists none, so all are offered."""
        self._given_instructions = instructions
        self.instructions_at = instructions_at
        self.rewards = CallRewards(
            tool_reward, tool_success_reward, tool_error_reward, max_tool_reward
        )
        self.rewards.check(max_uses)
        self.max_result = max_result
        self.counters = counters
        closes = [style.close for style in self.styles.values()] if self.format.stops else []
        self.stop = tuple(dict.fromkeys((*env.stop, *closes)))
        self.observe_as = self.format.observe_as
        self.blocking = env.blocking or any(getattr(tool, "blocking", False) for tool in made)
        self.forkable = env.forkable and all(getattr(tool, "forkable", True) for tool in made)
        self.turns = 0
        self.tool_uses = 0
        self.tool_earned = 0.0
        self.is_over = True
        self.is_checked = False
        self.prompt: Observation = ""
        self.counts: dict[str, dict[str, float]] = {}
        self.faults: dict[str, int] = {}
        """Badly written or refused calls, by kind, whichever tool was meant."""
        self.previous: dict[str, int] = {}

    @property
    def action_tools(self) -> tuple[str, ...] | None:
        """Tools that are called by actions; None: calls are found in the text."""
        return tuple(self.tools) if self.format is FORMATS["actions"] else None

    @property
    def offered(self) -> dict[str, Any]:
        """The tools of the current task."""
        names = self.tools if self.allowed is None else self.allowed
        return {name: tool for name, tool in self.tools.items() if name in names}

    @property
    def instructions(self) -> str:
        """Those of the current task; written from its tools if none were given."""
        given = self._given_instructions
        if given is not None:
            return given
        return instructions_for(self.offered, self.format, self.styles, self.max_uses)

    @property
    def max_turns(self) -> int | None:
        inner: int | None = getattr(self.env, "max_turns", None)  # some draw it with the instance
        return None if self.max_uses is None or inner is None else inner + self.max_uses + 1

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        if not self.is_checked:
            own = {name: tool for name, tool in self.tools.items() if is_rebound(tool)}
            check_tools(own, [self, *inner_envs(self)])
            self.is_checked = True
        self.previous = self._counters()
        reset: Any = as_reset(self.env.reset(seed, **options), UserObject(self.env, "env", "reset"))
        observation, info = reset
        for tool in self._stateful():
            tool.reset()
        self.turns = self.tool_uses = 0
        self.tool_earned = 0.0
        self.counts, self.faults = {}, {}
        self.is_over = False
        self.allowed = info.get("tool_names")
        suffix = info.get("suffix", "")
        self.prompt = with_instructions(
            observation, self.instructions, suffix, self.instructions_at
        )
        info = {**info, "tool_uses": 0}
        if self.format.in_prompt and self.offered:
            info["tools"] = [schema(tool) for tool in self.offered.values()]
        if self.counters:
            before = {f"prev_ep_{name}": count for name, count in self.previous.items()}
            info.update(self._counters(), **before, use_tool=False)
        return self.prompt, info

    def step(self, action: str) -> Turn:
        if self.is_over:
            raise RuntimeError("no episode is running; call reset() first")
        check_action(action)
        calls = self.format.find(action, self.styles)
        self._count_fault("invented", sum(map(action.count, self._openings())))
        turn = self._answer(action, calls) if calls else self._inner_step(action)
        self.turns += 1
        turn = limit_turns(turn, self.turns, self.max_turns)
        self.is_over = turn.is_over
        if self.counters:
            # on every turn: an attempt that is truncated or fails has no last one
            turn.info.update(self._counters(), use_tool="tool" in turn.info, **self._totals())
        return turn

    def task(self) -> Task:
        task: Task = self.env.task()
        return replace(task, prompt=as_messages(self.prompt)) if self.prompt else task

    def fork(self) -> Self:
        with forking() as memo:
            twin = super().fork()
            twin.tools = {name: forked(tool, memo) for name, tool in self.tools.items()}
            return twin

    def get_state(self) -> dict[str, Any]:
        return {
            **super().get_state(),
            "tools": {tool.name: tool.get_state() for tool in self._stateful()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        for name, of_tool in state["tools"].items():
            self.tools[name].set_state(of_tool)

    def close(self) -> None:
        self.env.close()
        for tool in self._stateful():
            tool.close()

    def _stateful(self) -> list[Any]:
        return [tool for tool in self.tools.values() if has_state(tool)]

    def _inner_step(self, action: str) -> Turn:
        turn = as_turn(self.env.step(action), UserObject(self.env, "env", "step"))
        info = {**turn.info, "tool_uses": self._uses()}
        if self.env.observe_as != self.observe_as and not turn.is_over:
            info.setdefault("observe_as", self.env.observe_as)
        return turn._replace(info=info)

    def _answer(self, action: str, calls: list[ToolCall]) -> Turn:
        answers = [self._use(call) for call in calls[:MAX_CALLS]]
        texts = [answer.text for answer in answers]
        if len(calls) > MAX_CALLS:
            texts.append(f"{ERROR}{len(calls) - MAX_CALLS} calls were left out: too many at once")
        info: dict[str, Any] = {
            "tool": answers[0].tool,
            "tool_ok": all(answer.is_ok for answer in answers),
            "tool_uses": self._uses(),
        }
        if refusals := sum(answer.is_refusal for answer in answers):
            info["tool_refusals"] = refusals
        if len(answers) > 1:
            failures = sum(not answer.is_ok for answer in answers)
            info.update(tool_calls=len(answers), tool_failures=failures, tool_results=texts)
        if waited := [answer.seconds for answer in answers if answer.seconds is not None]:
            info["tool_seconds"] = sum(waited)
        kept = action[: calls[-1].end]
        if kept != action or self.counters:
            info["parsed_action"] = kept
        if self.counters:
            info["tool_type"] = answers[0].tool
        return Turn("\n".join(texts), sum(answer.reward for answer in answers), info=info)

    def _use(self, call: ToolCall) -> ToolAnswer:
        name = call.name if call.name in self.offered else UNKNOWN
        style = self.styles.get(name) or self.format.style(name)
        self.tool_uses += 1
        if self.max_uses is not None and self.tool_uses > self.max_uses:
            self._count_fault("refused")
            return ToolAnswer(name, style.spent, is_ok=False, is_refusal=True)
        waits = not call.error and getattr(self.tools.get(name), "blocking", False)
        started = time.perf_counter()
        result = self._result(call)
        # only of blocking tools: elsewhere a clock would make equal episodes differ
        seconds = time.perf_counter() - started if waits else None
        is_ok = not is_error(result)
        # a tokenizer refuses the surrogates that broken UTF-8 can leave behind
        text = style.render(without_surrogates(shorten(result, self.max_result or WHOLE_RESULT)))
        if self.tool_uses == self.max_uses:
            text += style.last
        self._count_call(name, is_ok, seconds)
        reward = self.rewards.reward(is_ok, self.tool_earned)
        self.tool_earned += max(0.0, reward)
        return ToolAnswer(name, text, is_ok, reward, seconds)

    def _result(self, call: ToolCall) -> str:
        if call.error:
            self._count_fault("malformed")
            return f"{ERROR}{call.error}"
        if call.name not in self.offered:
            known = ", ".join(self.allowed or self.tools)  # those of a task may be in other layers
            return f"{ERROR}there is no tool {call.name[:40]!r}; known: {known}"
        tool = self.tools[call.name]
        if self.format.is_json:
            return call_unchanged(tool, call.arguments)
        parameters: Mapping[str, Any] = getattr(tool, "parameters", None) or {}
        if not call.content.strip() and (needed := parameters.get("required")):
            return f"{ERROR}empty {needed[0]}; write it inside the call"
        return call_unchanged(tool, call.content)

    def _count_call(self, name: str, is_ok: bool, seconds: float | None) -> None:
        counts = self.counts.setdefault(name, {"calls": 0, "failures": 0})
        counts["calls"] += 1
        counts["failures"] += not is_ok
        if seconds is not None:
            counts["seconds"] = counts.get("seconds", 0.0) + seconds

    def _count_fault(self, fault: str, times: int = 1) -> None:
        if times:
            self.faults[fault] = self.faults.get(fault, 0) + times

    def _openings(self) -> set[str]:
        """How results begin, such as "<result>", of all layers: this one reads the whole text."""
        styles = [style for layer in self._layers() for style in layer.styles.values()]
        return {style.result.partition("{}")[0].strip() for style in styles} - {""}

    def _layers(self) -> list[ToolEnv]:
        """This env and the ToolEnvs inside it; "python_tool,search_tool" nests two."""
        return [self, *(env for env in inner_envs(self) if isinstance(env, ToolEnv))]

    def _uses(self) -> int:
        return sum(layer.tool_uses for layer in self._layers())

    def _counters(self) -> dict[str, int]:
        """GEM's two: calls that were carried out, and those that succeeded."""
        calls = failures = 0
        for layer in self._layers():
            for count in layer.counts.values():
                calls, failures = calls + int(count["calls"]), failures + int(count["failures"])
        return {"tool_use_counter": calls, "tool_success_counter": calls - failures}

    def _totals(self) -> dict[str, float]:
        """{"tools/python/calls": 2, "tools/python/failures": 1, ...}, also of tools never called, and
        {"tools/refused": 1, ...} of the faults that occurred."""
        by_tool: dict[str, dict[str, float]] = {}
        faults: Counter[str] = Counter()
        for layer in reversed(self._layers()):
            by_tool |= {name: {"calls": 0, "failures": 0} for name in layer.tools}
            by_tool |= layer.counts
            faults.update(layer.faults)
        if "invented" in self.faults:  # inner layers have counted a text that was passed on to them
            faults["invented"] = self.faults["invented"]
        of_tools = {
            f"tools/{name}/{what}": number
            for name, counts in by_tool.items()
            for what, number in counts.items()
        }
        return {**of_tools, **{f"tools/{fault}": number for fault, number in faults.items()}}


def with_instructions(
    observation: Observation, instructions: str, suffix: str = "", at: str = "start"
) -> Observation:
    """`instructions` before the task, or at="end" as separate lines after it, before its `suffix`.

    "rules\\nboard" with the suffix "board" -> "instructions\\n\\nrules\\nboard", or
    "rules\\ninstructions\\nboard"
    """
    if not instructions:
        return observation
    if isinstance(observation, str):
        if at == "start":
            return f"{instructions}\n\n{observation}" if observation else instructions
        before = observation.removesuffix(suffix)
        gap = "" if not before or before.endswith("\n") else "\n"
        return f"{before}{gap}{instructions}" + (f"\n{suffix}" if suffix else "")
    messages = list(observation)
    asked = [place for place, one in enumerate(messages) if one["role"] != "system"]
    place = asked[0] if at == "start" and asked else len(messages) - 1
    content = messages[place]["content"]
    if isinstance(content, str):
        content = with_instructions(content, instructions, suffix, at)
    else:  # in parts
        is_first = at == "start"
        text = {"type": "text", "text": f"{instructions}\n\n" if is_first else f"\n{instructions}"}
        content = [text, *content] if is_first else [*content, text]
    messages[place] = {**messages[place], "content": content}
    return messages
