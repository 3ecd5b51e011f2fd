"""The layouts of files with tasks and chats: which columns they have, and how a row is read.

{"prompt": [{role, content}], "reward_model": {"ground_truth": "7"}}       verl
{"prompt": [{role, content}], "ground_truth": "7"}                         easyrl
{"question": "3 + 4?", "answer": "7"}                                      plain
{"conversations": [{"from": "human", "value": "3 + 4?"}, ...]}             sharegpt

A layout reads a row as a task (a prompt, and an answer to grade by), as a chat to imitate, or as either.
The layout of a file is detected from the columns that its first rows fill. verl's rows often carry the
columns that they were made from, so a layout may outrank another; where two match and neither outranks
the other, the user chooses: layout=.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal

from graft.data import readers
from graft.data.errors import DataError
from graft.data.fields import Row, first_of
from graft.data.readers import ANSWERS, NUMBERS, QUESTIONS, ChatRow, TaskRow

SAMPLE_ROWS = 20  # rows from which a layout is detected

Purpose = Literal["task", "chat", "any"]
KEYED = "\nor name the columns of other rows: prompt_key=COLUMN answer_key=COLUMN (task.args in a recipe)"


@dataclass(frozen=True)
class RowLayout:
    """The meaning of a file's columns."""

    name: str
    columns: str
    """The columns, for messages."""
    matches: Callable[[Row], bool]
    prompt_columns: tuple[str, ...] = ("prompt",)
    """The first of these that is filled holds the prompt."""
    task: Callable[[Row], TaskRow] | None = None
    chat: Callable[[Row], ChatRow] | None = None
    outranks: tuple[str, ...] = ()

    def serves(self, purpose: str) -> bool:
        readers = {"task": self.task, "chat": self.chat, "any": self.task or self.chat}
        return readers[purpose] is not None


def filled(*names: str) -> Callable[[Row], bool]:
    """Rows in which none of these columns is None, which parquet writes for an absent value."""
    return lambda row: all(row.get(name) is not None for name in names)


GRADED = "reward_model.ground_truth"

LAYOUTS: dict[str, RowLayout] = {
    layout.name: layout
    for layout in (
        RowLayout(
            "verl",
            "prompt, reward_model.ground_truth; data_source, ability, extra_info",
            lambda row: filled("prompt", "reward_model")(row) or filled("prompt", GRADED)(row),
            task=readers.keyed_task("prompt", GRADED),
            outranks=("trl-prompt", "rl-grpo", "plain"),
        ),
        RowLayout(
            "arpo",
            "verl's columns and metadata, as ARPO's reinforcement learning data has them",
            lambda row: filled("prompt", "reward_model")(row) and "metadata" in row,
            task=readers.keyed_task("prompt", GRADED),
            outranks=("verl", "trl-prompt", "rl-grpo", "plain"),
        ),
        RowLayout(
            "earl-sorting",
            "verl's columns and extra_info.interaction_kwargs, as EARL's sorting data has them",
            readers.is_sorting,
            task=readers.sorting_task,
            outranks=("verl", "arpo", "trl-prompt", "rl-grpo", "plain"),
        ),
        RowLayout(
            "easyrl",
            "prompt, ground_truth; extra_info {data_source, pass@k}",
            filled("prompt", "ground_truth"),
            task=readers.keyed_task("prompt", "ground_truth"),
            outranks=("trl-prompt", "plain"),
        ),
        RowLayout(
            "skyrl",
            "prompt, reward_spec.ground_truth; env_class",
            filled("prompt", "reward_spec"),
            task=readers.keyed_task("prompt", "reward_spec.ground_truth"),
            outranks=("trl-prompt", "plain"),
        ),
        RowLayout(
            "trl-prompt",
            "prompt (a text or messages); an answer if there is one; the rest goes to rewards",
            filled("prompt"),
            task=readers.prompt_task,
            outranks=("plain",),
        ),
        RowLayout(
            "trl-completion",
            "prompt and completion (texts or messages)",
            filled("prompt", "completion"),
            task=readers.prompt_task,
            chat=readers.completion_chat,
            outranks=("trl-prompt", "plain"),
        ),
        RowLayout(
            "openai",
            "messages of {role, content, tool_calls}; tools (TRL's chats too)",
            filled("messages"),
            ("messages",),
            task=readers.messages_task,
            chat=readers.conversation_chat,
        ),
        RowLayout(
            "spans",
            "messages of the prompt, spans of {author, text} behind it",
            filled("messages", "spans"),
            ("messages",),
            chat=readers.spans_chat,
            outranks=("openai",),
        ),
        RowLayout(
            "sharegpt",
            "conversations of {from, value}; system, tools (ARPO's supervised data too)",
            filled("conversations"),
            ("conversations",),
            chat=readers.conversation_chat,
        ),
        RowLayout(
            "alpaca",
            "instruction, output; input, system",
            filled("instruction", "output"),
            ("instruction", "input"),
            chat=readers.conversation_chat,
        ),
        RowLayout(
            "rl-grpo",
            "nums (or numbers) and target; messages or prompt",
            lambda row: bool(first_of(row, NUMBERS) and first_of(row, ["target"])),
            ("messages", "prompt", *NUMBERS),
            task=readers.countdown_task,
            outranks=("openai", "trl-prompt"),
        ),
        RowLayout(
            "plain",
            "question (or problem) and answer (or solution)",
            lambda row: bool(first_of(row, QUESTIONS) and first_of(row, ANSWERS[:2])),
            QUESTIONS,
            task=readers.question_task,
            chat=readers.question_chat,
        ),
    )
}


@lru_cache(maxsize=64)
def by_keys(prompt_key: str, answer_key: str) -> RowLayout:
    """The layout of a file whose prompt and answer columns the user names."""
    return RowLayout(
        "keys",
        f"{prompt_key}, {answer_key}",
        filled(prompt_key),
        (prompt_key,),
        task=readers.keyed_task(prompt_key, answer_key),
    )


def mixed_chat(row: Row) -> ChatRow:
    """A chat of a file whose rows have several layouts."""
    layout = only_layout(matching_layouts(row, "chat"), "the row")
    if layout is None or layout.chat is None:
        raise ValueError(f"no layout matches it (found: {', '.join(map(str, row))})")
    return layout.chat(row)


MIXED = RowLayout("mixed", "each row has its own layout", lambda row: True, (), chat=mixed_chat)


def matching_layouts(row: Row, purpose: Purpose = "any") -> list[RowLayout]:
    """The layouts that match a row, without those that another match outranks."""
    found = [layout for layout in LAYOUTS.values() if layout.matches(row)]
    outranked = {name for layout in found for name in layout.outranks}
    return [one for one in found if one.name not in outranked and one.serves(purpose)]


def detect_layout(
    rows: Iterable[Row | DataError], where: str, layout: str = "auto", purpose: Purpose = "any"
) -> RowLayout:
    """The layout that the first rows of a file match, or the one named `layout`. DataError if none is clear.

    Rows that cannot be read are skipped; where no row can be read, the first one's error is raised.
    """
    first = list(islice(rows, SAMPLE_ROWS))
    if not first:
        raise DataError(f"{where} has no rows: it is empty; give a file with one row or more")
    if layout != "auto":
        return _named(layout, where, purpose)
    sample = [row for row in first if not isinstance(row, DataError)]
    if not sample and isinstance(first[0], DataError):
        raise first[0]
    names: dict[str, RowLayout] = {}
    for row in sample:
        # a row that matches no layout may be a bad row of the layout that the others have
        if (found := only_layout(matching_layouts(row, purpose), where)) is not None:
            names[found.name] = found
    # a row of verl's that lacks its answer matches TRL's layout; the others outrank it
    outranked = {name for one in names.values() for name in one.outranks}
    names = {name: one for name, one in names.items() if name not in outranked}
    if len(names) == 1:
        return next(iter(names.values()))
    if names:
        if purpose != "task" and all(one.chat is not None for one in names.values()):
            return MIXED
        raise DataError(
            f"{where}: its rows have several layouts ({', '.join(names)}); put each into its own file"
        )
    columns = ", ".join(dict.fromkeys(str(key) for row in sample for key in row)) or "nothing"
    known = [one for one in LAYOUTS.values() if one.serves(purpose)]
    listing = "\n".join(f"    {one.name:<15} {one.columns}" for one in known)
    other = only_layout(matching_layouts(sample[0]), where) if purpose != "any" else None
    hint = f" It is read as {other.name}, which {_lacks(purpose)}." if other else ""
    raise DataError(
        f"{where}: no layout matches its columns (found: {columns}).{hint} Rename columns to those of one:\n"
        f"{listing}{KEYED if purpose != 'chat' else ''}"
    )


def only_layout(found: Sequence[RowLayout], where: str) -> RowLayout | None:
    if len(found) > 1:
        names = " or ".join(one.name for one in found)
        means = "; ".join(f"{one.name} is {one.columns}" for one in found)
        raise DataError(
            f"{where} can be read as {names} ({means}); choose one: "
            f"layout={found[0].name}, or remove the columns of the other"
        )
    return found[0] if found else None


def _named(layout: str, where: str, purpose: Purpose) -> RowLayout:
    known = ", ".join(name for name, one in LAYOUTS.items() if one.serves(purpose))
    if layout not in LAYOUTS:
        raise DataError(f"{where}: unknown layout {layout!r}; known: auto, {known}")
    if not LAYOUTS[layout].serves(purpose):
        raise DataError(f"{where}: layout={layout} {_lacks(purpose)}; those that have: {known}")
    return LAYOUTS[layout]


def _lacks(purpose: Purpose) -> str:
    return "has no tasks" if purpose == "task" else "has no chats to imitate"
