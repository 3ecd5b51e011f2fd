"""One row as a task or as a chat: the readers that the layouts are made of.

{"question": "3 + 4?", "answer": "7"}    TaskRow([{"role": "user", "content": "3 + 4?"}], "7")
                                         ChatRow([{"role": "user", ...}, {"role": "assistant", ...}])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from graft.data import conversations, fields
from graft.data.conversations import describe_value, unwrapped
from graft.data.errors import BadField
from graft.data.fields import Row, first_of, plain, read_prompt, read_tools
from graft.data.pictures import refuse_pictures
from graft.types import Message

QUESTIONS = ("question", "problem")
ANSWERS = ("answer", "solution", "ground_truth")
NUMBERS = ("nums", "numbers")


class TaskRow(NamedTuple):
    """A row as a task for the policy."""

    messages: list[Message]
    answer: Any = None
    """A text, a number, a list of them, {"numbers": [...], "target": n}; None where none is given."""
    data_source: str = ""
    meta: Mapping[str, Any] = {}
    """The other columns, for rewards."""
    tools: list[dict[str, Any]] | None = None


class ChatRow(NamedTuple):
    """A row as a chat to imitate."""

    messages: list[Message]
    """With an assistant turn; with `spans` only the prompt."""
    tools: list[dict[str, Any]] | None = None
    spans: list[dict[str, Any]] | None = None
    """[{"author": "policy", "text": "2+3"}, {"author": "env", "text": "=5"}, ...] behind the prompt."""


def source_of(row: Row) -> str:
    found = row.get("data_source") or fields.value_at(row, "extra_info.data_source")
    # a label that is never trained on, so a lone surrogate in it becomes "?"
    return str(found or "").encode(errors="replace").decode()


def keyed_task(prompt: str, answer: str) -> Callable[[Row], TaskRow]:
    """A reader of verl's rows and the like: prompt and answer in these columns, the rest in `extra_info`."""

    def task(row: Row) -> TaskRow:
        messages = read_prompt(row, prompt)
        golds = fields.read_golds(row, answer)
        meta = _extra_info(row)
        return TaskRow(messages, golds, source_of(row), meta, read_tools(row))

    return task


def sorting_task(row: Row) -> TaskRow:
    """EARL's rows of hidden items to sort, whose `interaction_kwargs` describe them.

    {"task": "sort", "items": [1, 0], "symbols": ["A", "B"], "reverse": false, "tools": ["compare", "swap"]}
    """
    task = keyed_task("prompt", "reward_model.ground_truth")(row)
    given = fields.as_object(task.meta.get("interaction_kwargs"))
    given = fields.without_none(given) if isinstance(given, Mapping) else {}
    for key, kind in (("items", int), ("symbols", str), ("tools", str)):
        value = given.get(key)
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
            raise BadField(
                "extra_info",
                f"'interaction_kwargs.{key}' holds {describe_value(value)}, not a list",
            )
    items, symbols = given["items"], given["symbols"]
    if not 2 <= len(items) == len(symbols) == len(set(items)) == len(set(symbols)):
        raise BadField(
            "extra_info",
            f"'interaction_kwargs' has the items {items} and the symbols {symbols}; there must be as many "
            "symbols as items, two or more, and none twice",
        )
    if given.get("task") not in ("sort", "order", "compare"):
        raise BadField(
            "extra_info",
            f"'interaction_kwargs.task' is {describe_value(given.get('task'))}, not sort, order or compare",
        )
    return task._replace(meta={**task.meta, "interaction_kwargs": given})


def is_sorting(row: Row) -> bool:
    """Whether a row is one of EARL's sorting tasks."""
    extra = fields.as_object(row.get("extra_info"))
    return (
        source_of(row) == "sorting"
        and isinstance(extra, Mapping)
        and bool(extra.get("interaction_kwargs"))
    )


def prompt_task(row: Row) -> TaskRow:
    """The prompt; an answer if one of the answer columns is filled; the other columns for rewards."""
    answer = first_of(row, ANSWERS)
    return _task(row, read_prompt(row, "prompt"), answer, "prompt", "completion")


def messages_task(row: Row) -> TaskRow:
    """The messages before the assistant's last turn, which may be there to imitate."""
    messages = read_prompt(row, "messages")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return _task(row, messages, first_of(row, ANSWERS), "messages")


def question_task(row: Row) -> TaskRow:
    question = first_of(row, QUESTIONS) or QUESTIONS[0]
    answer = first_of(row, ANSWERS[:2]) or ANSWERS[0]
    return _task(row, read_prompt(row, question), answer, question)


def countdown_task(row: Row) -> TaskRow:
    """Numbers and a target, with the row's prompt, or with the text below."""
    key = first_of(row, NUMBERS) or NUMBERS[0]
    answer = fields.read_countdown(row.get(key), row.get("target"), key)
    prompt = first_of(row, ("messages", "prompt"))
    numbers = ", ".join(map(str, answer["numbers"]))
    text = (
        f"Combine the numbers {numbers} into {answer['target']}. Use each number exactly once, with "
        "+, -, *, / and parentheses. Write the expression like this: <answer>(1 + 2) / 3</answer>"
    )
    messages = read_prompt(row, prompt) if prompt else [{"role": "user", "content": text}]
    meta = _other_columns(row, key, "target", prompt)
    return TaskRow(messages, answer, source_of(row), meta, read_tools(row))


def completion_chat(row: Row) -> ChatRow:
    """The prompt, then the completion: a text, or the messages that follow."""
    completion = row.get("completion")
    try:
        if isinstance(completion, str):
            turn = {"role": "assistant", "content": completion}
            completion = conversations.messages_in(completion) or [turn]
        prompt = read_prompt(row, "prompt")
        found = unwrapped(completion)
        if not isinstance(found, list):
            raise ValueError(
                f"holds {describe_value(completion)}, not a text or a list of messages"
            )
        # checked behind a user message: alone the completion would start with the assistant
        turns = conversations.read_messages([{"role": "user", "content": "?"}, *found])[1:]
        messages = fields.with_parsed_calls(conversations.read_messages([*prompt, *turns]))
        return ChatRow(conversations.with_turns(messages), read_tools(row))
    except BadField:
        raise
    except ValueError as error:
        raise BadField("completion", f"'completion': {error}") from error


def conversation_chat(row: Row) -> ChatRow:
    """`messages`, `conversations` or `instruction`: the forms of `chat_of`."""
    refuse_pictures(row)
    return ChatRow(fields.with_parsed_calls(conversations.chat_of(row)), read_tools(row))


def question_chat(row: Row) -> ChatRow:
    """The question, and the solution if there is one, since it shows the steps; else the answer."""
    question = first_of(row, QUESTIONS) or QUESTIONS[0]
    answer = first_of(row, ANSWERS[1::-1]) or ANSWERS[0]
    messages = read_prompt(row, question)
    if not isinstance(row.get(answer), str) or not row[answer].strip():
        raise BadField(
            answer, f"{answer!r} holds {describe_value(row.get(answer))}, not text to imitate"
        )
    fields.refuse_surrogates_in(row[answer], answer)
    turn = {"role": "assistant", "content": row[answer]}
    return ChatRow(conversations.with_turns([*messages, turn]), read_tools(row))


def spans_chat(row: Row) -> ChatRow:
    """A prompt, and what the policy and its environment wrote behind it."""
    messages = read_prompt(row, "messages")
    given = unwrapped(fields.from_json(row["spans"], "spans"))
    if not isinstance(given, list) or not given:
        raise BadField(
            "spans", f"'spans' holds {describe_value(given)}, not a list of {{author, text}}"
        )
    spans: list[dict[str, Any]] = []
    for number, one in enumerate(map(plain, given), 1):
        one = fields.without_none(one) if isinstance(one, dict) else one
        is_span = isinstance(one, dict) and one.get("author") in ("policy", "env")
        if not is_span or not (isinstance(one.get("text"), str) or "call" in one):
            raise BadField(
                "spans",
                f"'spans': span {number} is {describe_value(one)}; a span is "
                f"{{author: policy or env, text}}, "
                "or {author: policy, call: {tool, arguments}}",
            )
        fields.refuse_surrogates_in(one, "spans")
        spans.append(one)
    if not any(span["author"] == "policy" for span in spans):
        raise BadField("spans", "'spans': none is the policy's, so there is nothing to learn")
    return ChatRow(messages, read_tools(row), spans)


def _task(row: Row, messages: list[Message], answer: str | None, *used: str) -> TaskRow:
    """A task whose answer is in the column `answer`; columns that are not `used` go to the meta."""
    golds = fields.read_golds(row, answer) if answer else None
    meta = _other_columns(row, *used, answer)
    return TaskRow(messages, golds, source_of(row), meta, read_tools(row))


def _extra_info(row: Row) -> dict[str, Any]:
    """`ability` and the fields of `extra_info` in one dict: what verl passes to a reward.

    And `expr`, a column in which EARL's rows have their solution.
    """
    extra = fields.as_object(row.get("extra_info"))
    named = extra if isinstance(extra, Mapping) else fields.without_none({"extra_info": extra})
    columns = fields.without_none({key: row.get(key) for key in ("ability", "expr")})
    return _with_attempts(plain({**columns, **_tool_names(row), **named}))


def _with_attempts(meta: dict[str, Any]) -> dict[str, Any]:
    """EasyRL's "pass@k", the attempts at a row in an evaluation, as a whole number; without it: unchanged.

    pandas turns whole numbers into floats where another row has none: 8.0 is 8.
    """
    wanted = meta.pop("pass@k", None)
    if wanted is None:
        return meta
    if not isinstance(wanted, int | float) or wanted != int(wanted) or wanted < 1:
        raise BadField(
            "extra_info",
            f"'extra_info': 'pass@k' is {describe_value(wanted)}; it is the number of attempts "
            "at this row in an "
            "evaluation, a whole number from 1",
        )
    return {**meta, "pass@k": int(wanted)}


def _other_columns(row: Row, *used: str | None) -> dict[str, Any]:
    """The columns that were not used: TRL passes them to rewards by name."""
    rest = {k: v for k, v in row.items() if k not in (*used, "tools", "data_source")}
    return plain({**rest, **_tool_names(row)})


def _tool_names(row: Row) -> dict[str, Any]:
    """Tools that are named without a schema, for rewards."""
    names = fields.named_tools(row)
    return {"tools": names} if names else {}
