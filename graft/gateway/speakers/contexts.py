"""The contexts of an attempt, and whose each of them is once the attempt has ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graft.gateway.changes import PromptChange
from graft.gateway.history import Answered
from graft.gateway.roots import SUMMARY, Conversation
from graft.gateway.speakers.main_choice import MainChoice


@dataclass(slots=True)
class ContextRecord:
    """One context of an attempt: why it began (`roots`), whose it is, and after which answer it began."""

    reason: str
    role: str
    agent: str
    after: str
    change: PromptChange | None = None
    thread: int = 0
    """The number of its conversation: contexts that go on from each other have the same one."""
    answers: list[str] = field(default_factory=list[str])


def settle_roles(
    main: MainChoice, contexts: Sequence[ContextRecord], answers: Iterable[Answered]
) -> None:
    """Write into contexts and answers whose they are, now that all conversations are known."""
    for record in contexts:
        record.role = main.roles.get(record.thread, record.role)
    for done in answers:
        if done.role != SUMMARY:
            done.role = contexts[done.context].role


def settle_beginnings(
    thread: int,
    contexts: Sequence[ContextRecord],
    known: Sequence[Conversation],
    num_known: Sequence[int],
) -> None:
    """Correct why contexts began and after which answer: the agent is the one with this `thread`.

    num_known   the number of conversations that were `known` when each context began
    """
    asked = next(record for record in contexts if record.thread == thread)
    if asked is not contexts[0] and asked.reason == "sub-agent":  # another one asked before it
        first = contexts[0]
        asked.reason, first.reason = first.reason, asked.reason
        asked.after, asked.change = "", None
    for record, count in zip(contexts, num_known, strict=True):
        if record.reason == "sub-agent":
            ours = [said.id for said in known[:count] if said.thread == thread]
            record.after = next(reversed(ours), "")
