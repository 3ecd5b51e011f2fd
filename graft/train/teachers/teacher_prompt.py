"""A prompt with privileged text, which the teacher reads and the policy does not (OPSD, SDPO, SDFT).

    policy's root     "2+3="                                                  then "6"
    teacher's root    "2+3=\\n\\nThe answer is 5. Solve it yourself."         then the same token "6"

distill.context is a template of the last user message. Its fields, and where their text comes from:

    {prompt}     the text of that message
    {answer}     the task's answer
    {feedback}   the environment's last info: its "feedback"
    {success}    what a successful attempt at the same task wrote, another than the row itself
    {KEY}        any key of the task's meta, such as {solution}

A row for which a field has no text has no teacher, and is not distilled; nor has one that is longer
behind this prompt than the teacher's positions. Instead of a template:
"your.module:function", (task, trajectory) -> the text of the message, or None.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graft.config import ConfigError
from graft.registry import resolve
from graft.text.chat import Chat
from graft.types import Author, Message, Span, Task, Trajectory
from graft.user_code import UserCodeError, UserObject, naming, refusal

FIELD = re.compile(r"\{(\w+)\}")
FUNCTION = re.compile(r"[\w.]+:\w+")
SUCCESS = 1.0
"""Least reward of an attempt that {success} quotes."""
Context = Callable[[Task, Trajectory], str | None]
"""The teacher's last user message for a row; None: the row has no teacher."""


@dataclass(slots=True)
class TeacherPrompt:
    """Rewrites the roots of rows."""

    context: Context
    chat: Chat
    prefill: Callable[[Task], str]
    positions: int = sys.maxsize
    """Tokens that every teacher can read."""

    def rewritten(self, rows: Sequence[Trajectory]) -> list[Trajectory | None]:
        """The rows behind the teacher's prompts; None: there is none."""
        roots: dict[tuple[int, str], Span] = {}
        copies: dict[
            tuple[int, int], Span
        ] = {}  # rows that share root and span share the computation
        found: list[Trajectory | None] = []
        for row in rows:
            root, *rest = row.spans
            given = self.context(row.task, row)
            if given is None:
                found.append(None)
                continue
            key = id(root), given
            if key not in roots:
                *earlier, last = self._messages(row, root)
                tokens = self._tokens([*earlier, {**last, "content": given}], row.task)
                roots[key] = Span(None, Author.TASK, tokens, text=given)
            own = roots[key]
            if len(own) + sum(map(len, rest)) > self.positions:
                found.append(None)
                continue
            spans = [copies.setdefault((id(own), id(one)), replace(one)) for one in rest]
            found.append(replace(row, spans=[own, *spans]))
        return found

    def _messages(self, row: Trajectory, root: Span) -> list[Message]:
        """The messages that the row's prompt was rendered from, the last of them a user's."""
        known: list[Sequence[Message]] = [row.task.prompt, [{"role": "user", "content": root.text}]]
        if "messages" in root.info:
            known.insert(0, root.info["messages"])
        for messages in known:
            is_asked = bool(messages) and messages[-1]["role"] == "user"
            if is_asked and self._tokens(messages, row.task) == root.tokens:
                return list(messages)
        raise UserCodeError(
            f"distill.context cannot rewrite the prompt of task {row.task.id!r}: it does not end with a "
            "user's message in the run's chat template, or the template also shows tools. Describe tools "
            "in the system message, or leave distill.context out"
        )

    def _tokens(self, messages: Sequence[Message], task: Task) -> list[int]:
        prefill = self.chat.due_prefill(messages, self.prefill(task))
        return self.chat.prefilled(self.chat.prompt(messages), prefill)


def read_context(text: str) -> Context:
    """distill.context: a template, or the user's function."""
    if "{prompt}" not in text:
        return _users(text)
    names = FIELD.findall(text)

    def context(task: Task, row: Trajectory) -> str | None:
        values = {name: _value(name, task, row) for name in names}
        if not all(values.values()):
            return None
        return FIELD.sub(lambda match: values[match[1]], text)

    return context


def _users(name: str) -> Context:
    if not FUNCTION.fullmatch(name):
        raise ConfigError(
            f"distill.context={name!r} has no {{prompt}}, so the teacher would not read the task; write a "
            'template such as "{prompt}\\n\\nA solution: {solution}", or "your.module:function"'
        )
    function = resolve(name, {}, "teacher's context")
    if not callable(function):
        raise ConfigError(f"distill.context={name!r} is no function (task, trajectory) -> text")
    who = UserObject(function, "teacher's context")

    def context(task: Task, row: Trajectory) -> str | None:
        with naming(function, "teacher's context"):
            given = function(task, row)
        if given is not None and not isinstance(given, str):
            raise refusal(who, given, "the text of the teacher's message, or None")
        return given or None

    return context


def _value(name: str, task: Task, row: Trajectory) -> str:
    if name == "prompt":
        return _last_text(row)
    if name == "success":
        return _success(row)
    known: Mapping[str, object] = {
        **task.meta,
        "answer": task.answer,
        "feedback": row.info.get("feedback"),
    }
    if name not in known:
        raise UserCodeError(
            f"distill.context has {{{name}}}, which task {task.id!r} does not; known: prompt, answer, "
            f"feedback, success{''.join(f', {key}' for key in task.meta)}"
        )
    value = known[name]
    return "" if value is None else str(value)


def _last_text(row: Trajectory) -> str:
    """The text of the last user's message of this row's prompt."""
    root, prompt = row.spans[0], row.task.prompt
    texts = "".join(str(message.get("content") or "") for message in prompt)
    if prompt and root.text == texts:
        return str(prompt[-1].get("content") or "")
    return root.text


def _success(row: Trajectory) -> str:
    """What the first successful attempt at the task wrote, the row's own aside."""
    for other in row.episode.trajectories():
        is_other = other.leaf_index != row.leaf_index and other.leaf.seat == row.leaf.seat
        if is_other and other.leaf.status.is_trainable and other.leaf.reward >= SUCCESS:
            return "".join(
                span.text for span in other.spans if span.author is not Author.TASK
            ).strip()
    return ""
