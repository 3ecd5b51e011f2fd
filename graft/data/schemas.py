"""What the columns of a file mean: the layouts in which people keep tasks and chats.

{"prompt": [{role, content}], "reward_model": {"ground_truth": "7"}}       verl
{"prompt": [{role, content}], "ground_truth": "7"}                         easyrl
{"question": "3 + 4?", "answer": "7"}                                      plain
{"conversations": [{"from": "human", "value": "3 + 4?"}, ...]}             sharegpt

A layout turns a row into a task (a prompt, and an answer to grade by) or into a chat to imitate, or
into either. Which one a file has is seen in its first rows: by the columns they fill. verl's rows often
carry the columns that they were made from, so a layout may outrank another; where two fit and neither
does, somebody has to say which: layout=.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

from graft.data.conversations import (
    chat_of,
    listed,
    messages_in,
    read_messages,
    shown,
    with_turns,
)
from graft.data.errors import BadField, DataError
from graft.data.fields import (
    Row,
    as_object,
    filled_in,
    first_of,
    found_at,
    from_json,
    named_tools,
    plain,
    read_countdown,
    read_golds,
    read_prompt,
    read_tools,
    whole_characters,
    with_opened_calls,
)
from graft.data.pictures import refuse_pictures
from graft.types import Message

LOOKED_AT = 20  # rows in which a layout is looked for

ASKED = ("question", "problem")
RIGHT = ("answer", "solution", "ground_truth")
NUMBERS = ("nums", "numbers")


class TaskRow(NamedTuple):
    """A row to be tried."""

    messages: list[Message]
    answer: Any = None
    """A text, a number, a list of them, {"numbers": [...], "target": n}; None where none is given."""
    data_source: str = ""
    meta: Mapping[str, Any] = {}
    """What else the row says, for rewards."""
    tools: list[dict[str, Any]] | None = None


class ChatRow(NamedTuple):
    """A row to be imitated."""

    messages: list[Message]
    """With an assistant turn; with `spans` only the prompt."""
    tools: list[dict[str, Any]] | None = None
    spans: list[dict[str, Any]] | None = None
    """[{"author": "policy", "text": "2+3"}, {"author": "env", "text": "=5"}, ...] behind the prompt."""


@dataclass(frozen=True)
class RowLayout:
    """One meaning of columns."""

    name: str
    says: str
    """The columns, for people."""
    fits: Callable[[Row], bool]
    asks: tuple[str, ...]
    """The columns of which the first that is there holds what is asked."""
    task: Callable[[Row], TaskRow] | None = None
    chat: Callable[[Row], ChatRow] | None = None
    outranks: tuple[str, ...] = ()

    def can(self, purpose: str) -> bool:
        return (purpose != "chat" and self.task is not None) or (
            purpose != "task" and self.chat is not None
        )


Purpose = Literal["task", "chat", "any"]


def filled(*names: str) -> Callable[[Row], bool]:
    """Rows in which all of these columns hold something; a parquet file has None where nothing is."""
    return lambda row: all(row.get(name) is not None for name in names)


def source_of(row: Row) -> str:
    found = row.get("data_source") or found_at(row, "extra_info.data_source")
    # a label, which nobody trains: half of a character in it becomes "?"
    return str(found or "").encode(errors="replace").decode()


def meta_of(row: Row) -> dict[str, Any]:
    """`ability` and what is in `extra_info`, side by side: what verl hands to a reward."""
    extra = as_object(row.get("extra_info"))
    named = extra if isinstance(extra, Mapping) else filled_in({"extra_info": extra})
    return plain({**filled_in({"ability": row.get("ability")}), **tool_names(row), **named})


def rest_of(row: Row, *used: str | None) -> dict[str, Any]:
    """The columns that have not been used: TRL hands them to rewards by their names."""
    rest = {k: v for k, v in row.items() if k not in (*used, "tools", "data_source")}
    return plain({**rest, **tool_names(row)})


def tool_names(row: Row) -> dict[str, Any]:
    """Tools that are named without a schema, for rewards: the run has them, or not."""
    names = named_tools(row)
    return {"tools": names} if names else {}


def keyed(prompt: str, answer: str) -> Callable[[Row], TaskRow]:
    """A task whose prompt and answer stand in these places."""

    def task(row: Row) -> TaskRow:
        messages = read_prompt(row, prompt)
        golds = read_golds(row, answer)
        meta = meta_of(row)
        if source_of(row) == "sorting" and isinstance(meta.get("interaction_kwargs"), Mapping):
            raise BadField("data_source", SORTED)
        return TaskRow(messages, golds, source_of(row), meta, read_tools(row))

    return task


SORTED = (
    "'data_source' is EARL's 'sorting', whose rows are graded by the order that their tools have brought "
    "about, not by a text; the environments earl:sort, earl:order and earl:compare pose the same tasks with "
    "the tools"
)


def trl_task(row: Row) -> TaskRow:
    """The prompt; an answer where there is a column of that name; the rest is for rewards."""
    messages, right = read_prompt(row, "prompt"), first_of(row, RIGHT)
    golds = read_golds(row, right) if right else None
    meta = rest_of(row, "prompt", "completion", right)
    return TaskRow(messages, golds, source_of(row), meta, read_tools(row))


def completed(row: Row) -> ChatRow:
    """The prompt, then the completion: a text, or the messages that follow."""
    said = row.get("completion")
    try:
        if isinstance(said, str):
            said = messages_in(said) or [{"role": "assistant", "content": said}]
        prompt = read_prompt(row, "prompt")
        # alone they would start with the assistant
        messages = read_messages([*prompt, *read_messages([_ANYTHING, *_list(said)])[1:]])
        return ChatRow(with_turns(with_opened_calls(messages)), read_tools(row))
    except BadField:
        raise
    except ValueError as error:
        raise BadField("completion", f"'completion': {error}") from error


_ANYTHING = {"role": "user", "content": "?"}


def _list(value: Any) -> list[Any]:
    found = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(found, list):
        raise ValueError(
            f"holds {shown(value)}, not a text or a list of messages {{role, content}}"
        )
    return found


def listed_task(row: Row) -> TaskRow:
    """What comes before the last answer, which may be there to be imitated."""
    messages = read_prompt(row, "messages")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    right = first_of(row, RIGHT)
    golds = read_golds(row, right) if right else None
    meta = rest_of(row, "messages", right)
    return TaskRow(messages, golds, source_of(row), meta, read_tools(row))


def talked(row: Row) -> ChatRow:
    """`messages`, `conversations` or `instruction`: whatever `chat_of` knows."""
    refuse_pictures(row)
    return ChatRow(with_opened_calls(chat_of(row)), read_tools(row))


def spanned(row: Row) -> ChatRow:
    """A prompt, and what the policy and its environment wrote behind it."""
    messages = read_prompt(row, "messages")
    given = listed(from_json(row["spans"], "spans"))
    if not isinstance(given, list) or not given:
        raise BadField("spans", f"'spans' holds {shown(given)}, not a list of {{author, text}}")
    spans: list[dict[str, Any]] = []
    for number, one in enumerate(map(plain, given), 1):
        one = filled_in(one) if isinstance(one, dict) else one
        is_span = isinstance(one, dict) and one.get("author") in ("policy", "env")
        if not is_span or not (isinstance(one.get("text"), str) or "call" in one):
            raise BadField(
                "spans",
                f"'spans': span {number} is {shown(one)}; a span is {{author: policy or env, text}}, "
                "or {author: policy, call: {tool, arguments}}",
            )
        whole_characters(one, "spans")
        spans.append(one)
    if not any(span["author"] == "policy" for span in spans):
        raise BadField("spans", "'spans': none is the policy's, so there is nothing to learn")
    return ChatRow(messages, read_tools(row), spans)


def has_countdown(row: Row) -> bool:
    return first_of(row, NUMBERS) is not None and row.get("target") is not None


def countdown_task(row: Row) -> TaskRow:
    """Numbers and a target, with a prompt about them, or with the one that is written here."""
    key = first_of(row, NUMBERS) or NUMBERS[0]
    answer = read_countdown(row.get(key), row.get("target"), key)
    told = first_of(row, ("messages", "prompt"))
    listed = ", ".join(map(str, answer["numbers"]))
    words = (
        f"Combine the numbers {listed} into {answer['target']}. Use each number exactly once, with "
        "+, -, *, / and parentheses. Write the expression like this: <answer>(1 + 2) / 3</answer>"
    )
    messages = read_prompt(row, told) if told else [{"role": "user", "content": words}]
    meta = rest_of(row, key, "target", told)
    return TaskRow(messages, answer, source_of(row), meta, read_tools(row))


def has_question(row: Row) -> bool:
    return first_of(row, ASKED) is not None and first_of(row, RIGHT[:2]) is not None


def plain_task(row: Row) -> TaskRow:
    asked, right = first_of(row, ASKED) or ASKED[0], first_of(row, RIGHT[:2]) or RIGHT[0]
    messages, golds = read_prompt(row, asked), read_golds(row, right)
    return TaskRow(messages, golds, source_of(row), rest_of(row, asked, right), read_tools(row))


def plain_chat(row: Row) -> ChatRow:
    """The question, and the solution where there is one beside the answer: it shows the way."""
    asked, said = first_of(row, ASKED) or ASKED[0], first_of(row, RIGHT[1::-1]) or RIGHT[0]
    messages = read_prompt(row, asked)
    if not isinstance(row.get(said), str) or not row[said].strip():
        raise BadField(said, f"{said!r} holds {shown(row.get(said))}, not text to imitate")
    whole_characters(row[said], said)
    answer = {"role": "assistant", "content": row[said]}
    return ChatRow(with_turns([*messages, answer]), read_tools(row))


GRADED = "reward_model.ground_truth"

LAYOUTS: dict[str, RowLayout] = {
    layout.name: layout
    for layout in (
        RowLayout(
            "verl",
            "prompt, reward_model.ground_truth; data_source, ability, extra_info",
            lambda row: (
                row.get("prompt") is not None
                and (row.get("reward_model") is not None or row.get(GRADED) is not None)
            ),
            ("prompt",),
            task=keyed("prompt", GRADED),
            outranks=("trl-prompt", "rl-grpo", "plain"),
        ),
        RowLayout(
            "arpo",
            "verl's columns and metadata, as ARPO's reinforcement learning data has them",
            lambda row: filled("prompt", "reward_model")(row) and "metadata" in row,
            ("prompt",),
            task=keyed("prompt", GRADED),
            outranks=("verl", "trl-prompt", "rl-grpo", "plain"),
        ),
        RowLayout(
            "easyrl",
            "prompt, ground_truth; extra_info {data_source, pass@k}",
            filled("prompt", "ground_truth"),
            ("prompt",),
            task=keyed("prompt", "ground_truth"),
            outranks=("trl-prompt", "plain"),
        ),
        RowLayout(
            "skyrl",
            "prompt, reward_spec.ground_truth; env_class",
            filled("prompt", "reward_spec"),
            ("prompt",),
            task=keyed("prompt", "reward_spec.ground_truth"),
            outranks=("trl-prompt", "plain"),
        ),
        RowLayout(
            "trl-prompt",
            "prompt (a text or messages); an answer if there is one; the rest goes to rewards",
            filled("prompt"),
            ("prompt",),
            task=trl_task,
            outranks=("plain",),
        ),
        RowLayout(
            "trl-completion",
            "prompt and completion (texts or messages)",
            filled("prompt", "completion"),
            ("prompt",),
            task=trl_task,
            chat=completed,
            outranks=("trl-prompt", "plain"),
        ),
        RowLayout(
            "openai",
            "messages of {role, content, tool_calls}; tools (TRL's chats too)",
            filled("messages"),
            ("messages",),
            task=listed_task,
            chat=talked,
        ),
        RowLayout(
            "spans",
            "messages of the prompt, spans of {author, text} behind it",
            filled("messages", "spans"),
            ("messages",),
            chat=spanned,
            outranks=("openai",),
        ),
        RowLayout(
            "sharegpt",
            "conversations of {from, value}; system, tools (ARPO's supervised data too)",
            filled("conversations"),
            ("conversations",),
            chat=talked,
        ),
        RowLayout(
            "alpaca",
            "instruction, output; input, system",
            filled("instruction", "output"),
            ("instruction", "input"),
            chat=talked,
        ),
        RowLayout(
            "rl-grpo",
            "nums (or numbers) and target; messages or prompt",
            has_countdown,
            ("messages", "prompt", *NUMBERS),
            task=countdown_task,
            outranks=("openai", "trl-prompt"),
        ),
        RowLayout(
            "plain",
            "question (or problem) and answer (or solution)",
            has_question,
            ASKED,
            task=plain_task,
            chat=plain_chat,
        ),
    )
}


@lru_cache(maxsize=64)
def by_keys(prompt_key: str, answer_key: str) -> RowLayout:
    """The layout of a file whose columns somebody has named."""
    return RowLayout(
        "keys",
        f"{prompt_key}, {answer_key}",
        filled(prompt_key),
        (prompt_key,),
        task=keyed(prompt_key, answer_key),
    )


def each_its_own(row: Row) -> ChatRow:
    """A chat of a file whose rows have several layouts."""
    layout = the_only(fitting(row, "chat"), "the row")
    if layout is None or layout.chat is None:
        raise ValueError(f"no layout fits it (found: {', '.join(map(str, row))})")
    return layout.chat(row)


MIXED = RowLayout(
    "mixed", "each row has a layout of its own", lambda row: True, (), chat=each_its_own
)


def fitting(row: Row, purpose: Purpose = "any") -> list[RowLayout]:
    """The layouts of a row; those that are outranked by another one are left out."""
    found = [layout for layout in LAYOUTS.values() if layout.fits(row)]
    outranked = {name for layout in found for name in layout.outranks}
    return [one for one in found if one.name not in outranked and one.can(purpose)]


def recognise(
    rows: Iterable[Row | DataError], where: str, layout: str = "auto", purpose: Purpose = "any"
) -> RowLayout:
    """The layout of a file by its first rows; `layout` may name it. DataError says what is not clear.

    Rows that cannot be read are passed over; where no row can be read, the first one's error is raised.
    """
    first = list(islice(rows, LOOKED_AT))
    if not first:
        raise DataError(f"{where} has no rows")
    if layout != "auto":
        return _named(layout, where, purpose)
    sample = [row for row in first if not isinstance(row, DataError)]
    if not sample and isinstance(first[0], DataError):
        raise first[0]
    names: dict[str, RowLayout] = {}
    for row in sample:
        # a row that fits nowhere may be a bad one of the layout that the others have
        if (found := the_only(fitting(row, purpose), where)) is not None:
            names[found.name] = found
    # verl's rows of which one lacks its answer are verl's, and not TRL's too
    outranked = {name for one in names.values() for name in one.outranks}
    names = {name: one for name, one in names.items() if name not in outranked}
    if len(names) == 1:
        return next(iter(names.values()))
    if names:
        if purpose != "task" and all(one.chat is not None for one in names.values()):
            return MIXED
        raise DataError(
            f"{where}: its rows have several layouts ({', '.join(names)}); put each into a file of its own"
        )
    columns = ", ".join(dict.fromkeys(str(key) for row in sample for key in row)) or "nothing"
    known = [one for one in LAYOUTS.values() if one.can(purpose)]
    listing = "\n".join(f"    {one.name:<15} {one.says}" for one in known)
    other = the_only(fitting(sample[0]), where) if purpose != "any" else None
    hint = f" It is read as {other.name}, which {_lacks(purpose)}." if other else ""
    raise DataError(
        f"{where}: no layout fits its columns (found: {columns}).{hint} Rename columns to those of one:\n"
        f"{listing}"
    )


def the_only(found: Sequence[RowLayout], where: str) -> RowLayout | None:
    if len(found) > 1:
        names = " or ".join(one.name for one in found)
        means = "; ".join(f"{one.name} is {one.says}" for one in found)
        raise DataError(
            f"{where} can be read as {names} ({means}); say which: layout={found[0].name}, "
            f"or take the columns of the other out"
        )
    return found[0] if found else None


def _named(layout: str, where: str, purpose: Purpose) -> RowLayout:
    known = ", ".join(name for name, one in LAYOUTS.items() if one.can(purpose))
    if layout not in LAYOUTS:
        raise DataError(f"{where}: unknown layout {layout!r}; known: auto, {known}")
    if not LAYOUTS[layout].can(purpose):
        raise DataError(f"{where}: layout={layout} {_lacks(purpose)}; those that have: {known}")
    return LAYOUTS[layout]


def _lacks(purpose: Purpose) -> str:
    return "has no prompt to try" if purpose == "task" else "has nothing to imitate"
