"""The choice of the conversation that is the agent's: task.reward reads it, and its answers are `main`.

opencode asks for a title before its agent asks anything, so the first request is not the agent's:

    thread 0   system "You write titles", user "Title: What is 2+2?"       1 answer, no tools
    thread 1   system "You are opencode", user "What is 2+2?", tools       3 answers      <- main

A thread is one conversation with all that goes on from it: handoffs, compactions, rewritten histories. The
first of these that tells two apart decides: the patterns of agent.main, the task's prompt, tools, length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from graft.gateway.canonical import text_of
from graft.gateway.roots import MAIN, SUB_AGENT, USER, Conversation
from graft.types import Task

REASONS = (
    "it fits agent.main",
    "the other one plays its user",
    "it has the task's prompt",
    "it has tools",
    "it is the longest",
    "its agent asked first",
    "it began last",
)
"""Why a thread is chosen, in the order in which they count."""
FIELDS = ("model", "system", "tools")
"""The keys of agent.main."""
MAX_SHOWN, MAX_NAMES = 60, 5
"""Characters of a text and names of tools in a message."""
NUM_CLEAR = 4
"""The first of them say what the agent is; threads that differ in the others alone are easily mistaken."""


@dataclass(frozen=True, slots=True)
class MainPattern:
    """Shell patterns of agent.main; "" fits everything."""

    model: str = ""
    system: str = ""
    """Fits a part of the system prompt."""
    tools: str = ""
    """Fits the name of one of the tools."""

    def __bool__(self) -> bool:
        return bool(self.model or self.system or self.tools)

    def fits(self, said: Conversation) -> bool:
        system = "\n".join(said.system)
        return (
            (not self.model or fnmatchcase(said.request.model, self.model))
            and (not self.system or fnmatchcase(system, f"*{self.system}*"))
            and (not self.tools or any(fnmatchcase(n, self.tools) for n in said.tool_names))
        )


@dataclass(slots=True)
class Thread:
    """One conversation of an attempt: its answered requests, in order."""

    number: int
    said: list[Conversation] = field(default_factory=list[Conversation])

    @property
    def has_tools(self) -> bool:
        return any(said.request.tools for said in self.said)

    @property
    def speakers(self) -> set[tuple[str, tuple[str, ...]]]:
        """The agents of it, by name and system prompt."""
        return {(said.agent, said.system) for said in self.said}

    def has_prompt(self, texts: Sequence[str]) -> bool:
        """Whether its first request has all of these texts."""
        request = self.said[0].request
        whole = _plain(text_of(told) for told in request.messages if told["role"] != "assistant")
        return bool(texts) and all(text in whole for text in texts)

    def plays_user_of(self, other: Thread) -> bool:
        """Whether its bare answers are what the other reads from its user, after the first message."""
        answers = {text_of(said.answer).strip() for said in self.said}
        messages = max((said.request.messages for said in other.said), key=len)
        asked = [text_of(told).strip() for told in messages if told["role"] == "user"]
        return not self.has_tools and len(asked) > 1 and set(asked[1:]) <= answers


class MainChoice(NamedTuple):
    """The thread that is the agent's, and what the others are."""

    thread: int | None = None
    """None: there is none, or none fits agent.main."""
    why: str = ""
    rivals: tuple[int, ...] = ()
    """Threads that could be the agent's as well."""
    threads: tuple[Thread, ...] = ()
    roles: dict[int, str] = {}
    """Thread -> main, sub-agent, user."""


def choose_main(
    known: Sequence[Conversation], task: Task, pattern: MainPattern = MainPattern()
) -> MainChoice:
    """Choose the agent's conversation of an attempt among all of its answered requests."""
    threads = _threads_of(known)
    if not threads:
        return MainChoice()
    texts = _texts_of(task)
    ranks = {
        thread.number: (
            any(map(pattern.fits, thread.said)),
            not any(other.has_tools and thread.plays_user_of(other) for other in threads),
            thread.has_prompt(texts),
            thread.has_tools,
            len(thread.said),
            bool(thread.speakers & threads[0].speakers),
            thread.number,
        )
        for thread in threads
    }
    first, *others = sorted(ranks, key=lambda number: ranks[number], reverse=True)
    if pattern and not ranks[first][0]:
        roles = {thread.number: SUB_AGENT for thread in threads}
        return MainChoice(None, "", (), threads, roles)
    rivals = [number for number in others if ranks[number][:NUM_CLEAR] == ranks[first][:NUM_CLEAR]]
    why = "it is the only one"
    if others:
        pairs = zip(REASONS, ranks[first], ranks[others[0]], strict=True)
        why = next(reason for reason, ours, theirs in pairs if ours != theirs)
    chosen = next(thread for thread in threads if thread.number == first)
    roles = {thread.number: _role_of(thread, chosen) for thread in threads}
    return MainChoice(first, why, tuple(rivals), threads, roles)


def explain_no_main(choice: MainChoice, pattern: MainPattern) -> str:
    """Say that no conversation of an attempt fits agent.main, and which there were."""
    asked = ", ".join(f"{n}: {v!r}" for n in FIELDS if (v := getattr(pattern, n)))
    had = "; ".join(describe_thread(thread) for thread in choice.threads) or "none"
    return (
        f"no conversation of the attempt fits agent.main={{{asked}}}, so task.reward has none to read; "
        f"it had: {had}"
    )


def describe_thread(thread: Thread) -> str:
    """Describe a thread in a line: its model, system prompt, tools and answers."""
    first = thread.said[0]
    system = " ".join(" ".join(first.system).split())
    names = list(dict.fromkeys(name for said in thread.said for name in said.tool_names))
    more = f" and {len(names) - MAX_NAMES} more" * (len(names) > MAX_NAMES)
    parts = [
        f"model {first.request.model[:MAX_SHOWN]!r}" * bool(first.request.model),
        f"system {system[:MAX_SHOWN]!r}" if system else "no system prompt",
        f"tools {', '.join(names[:MAX_NAMES])}{more}" if names else "no tools",
        f"{len(thread.said)} answer{'s' * (len(thread.said) != 1)}",
    ]
    return ", ".join(filter(None, parts))


def _role_of(thread: Thread, chosen: Thread) -> str:
    """The role of a thread beside the agent's own; conversations of the same agent are its own too."""
    if thread is chosen:
        return MAIN
    if thread.plays_user_of(chosen):
        return USER
    return MAIN if thread.speakers & chosen.speakers else SUB_AGENT


def _threads_of(known: Sequence[Conversation]) -> tuple[Thread, ...]:
    made: dict[int, Thread] = {}
    for said in known:
        made.setdefault(said.thread, Thread(said.thread)).said.append(said)
    return tuple(made[number] for number in sorted(made))


def _texts_of(task: Task) -> list[str]:
    """What a task's prompt asks: its user's texts, with single blanks."""
    asked = [_plain([text_of(told)]) for told in task.prompt if told["role"] == "user"]
    return [text for text in asked if text]


def _plain(texts: Iterable[str]) -> str:
    return " ".join(word for text in texts for word in text.split())
