"""The syntax in which a chat template writes calls, found by rendering some and looking at the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from graft.text.call_syntax import CallSyntax
from graft.text.calls import call_of, json_at
from graft.text.chat import Chat
from graft.text.template import TemplateError
from graft.text.turn_borders import ASK
from graft.types import Message

_CONTENT, _VALUES = "graft.content", ("graft.first", "graft.second")
_NAMES = ("graft_first", "graft_second")
_FOUND: WeakKeyDictionary[Chat, CallSyntax] = WeakKeyDictionary()


def syntax_of(chat: Chat) -> CallSyntax:
    """How the chat template writes calls and thoughts.

    >>> from graft.text.tokenizer import FastTokenizer
    >>> syntax = syntax_of(Chat(FastTokenizer.characters("a"), "chatml"))
    >>> syntax.name, syntax.open, syntax.close
    ('json', '<tool_call>', '</tool_call>')
    """
    if chat not in _FOUND:
        _FOUND[chat] = _find(chat)
    return _FOUND[chat]


def turn_behind(chat: Chat, message: Message, names: Sequence[str]) -> str:
    """What the template writes of an assistant's message behind the opening of its turn.

    names: of the tools that it is offered, which its calls may call.
    """
    tools, opened = _opened(chat, names)
    whole = chat.render([ASK, message], tools)
    # a template may write tools or a date elsewhere once the turn is there
    start = opened.rfind(ASK["content"])
    tail = whole.rpartition(opened[start:])[2] if start >= 0 else whole
    return tail if len(tail) < len(whole) else _text_after(opened, whole)


def probe_call(number: int, name: str, arguments: dict[str, str]) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _opened(chat: Chat, names: Sequence[str]) -> tuple[list[Message] | None, str]:
    """Tools with these names, and the text before a turn that is offered them."""
    tools = [_tool(name) for name in names]
    try:
        return tools, chat.render([ASK], tools, add_generation_prompt=True)
    except TemplateError:  # a template that refuses tools
        return None, chat.render([ASK], add_generation_prompt=True)


def _find(chat: Chat) -> CallSyntax:
    is_thinking = _opened(chat, _NAMES)[1].rstrip().endswith("<think>")
    for count in (2, 1):  # Llama 3 refuses several calls
        calls = [
            probe_call(number, _NAMES[number], {"graft": _VALUES[number]})
            for number in range(count)
        ]
        message: Message = {"role": "assistant", "content": _CONTENT, "tool_calls": calls}
        try:
            written = turn_behind(chat, message, _NAMES)
        except TemplateError:
            continue
        if _VALUES[0] in written and _VALUES[count - 1] in written:
            has_channels = "<|channel|>" in written and "<|message|>" in written
            found = _syntax(_cut(written, chat), count, has_channels)
            return replace(found, is_thinking=is_thinking, has_channels=has_channels)
    return CallSyntax(is_thinking=is_thinking, has_channels="<|channel|>" in _answer(chat))


def _syntax(written: str, count: int, has_channels: bool) -> CallSyntax:
    """The syntax of `count` calls, as they are written without the end of the turn."""
    head, has_content, rest = written.partition(_CONTENT)
    if has_content and _VALUES[0] in rest:
        written = rest
    elif has_content:
        written = head  # the content is behind the calls
    else:
        written = written.rpartition("</think>")[2]
    if has_channels:
        is_known = f"to=functions.{_NAMES[0]}" in written
        return CallSyntax("channels") if is_known else CallSyntax(unknown=written)
    opening = "<tool_call>"
    before = written.partition(opening)[0]
    if f"<function={_NAMES[0]}>" in written and opening in written:
        return CallSyntax("parameters", opening, "</tool_call>", before)
    if "<arg_key>" in written and opening in written:
        return CallSyntax("arg_keys", opening, "</tool_call>", before)
    if f"<|tool_call>call:{_NAMES[0]}{{" in written:
        thought = ("<|channel>thought\n", "<channel|>")
        before = written.partition("<|tool_call>")[0]
        return CallSyntax("gemma", "<|tool_call>call:", "<tool_call|>", before, thought=thought)
    if f"[{_NAMES[0]}(" in written:
        before, _, rest = written.partition(f"[{_NAMES[0]}(")
        close = rest.rpartition("]")[2].strip()
        is_quoted = f"'{_VALUES[0]}'" in written or f'"{_VALUES[0]}"' in written
        if bool(before.strip()) == bool(close) and is_quoted:
            return CallSyntax("python", before.strip(), close, _blanks(before))
    return _json(written, count) or _named(written, count) or CallSyntax(unknown=written)


def _json(written: str, count: int) -> CallSyntax | None:
    """Calls that are JSON objects with their name."""
    found = [_object(written, number) for number in range(count)]
    places = [place for place in found if place is not None]
    if len(places) < count:
        return None
    (start, end), (last_start, last_end) = places[0], places[-1]
    before, after = written[:start], written[last_end:].strip()
    between = written[end:last_start].strip() if count > 1 else None
    opening = before.strip()
    is_list = opening.endswith("[") and after.startswith("]") and between in (",", None)
    if is_list:
        opening, close = opening[:-1].rstrip(), after[1:].strip()
        return CallSyntax("json", opening, close, _blanks(before), is_list=True)
    if between is None or not opening:
        return CallSyntax("json", opening, after if opening else "", _blanks(before))
    is_each = between.endswith(opening) and between.startswith(after) and after
    return CallSyntax("json", opening, after, _blanks(before)) if is_each else None


def _object(written: str, number: int) -> tuple[int, int] | None:
    """The start and end of the object of a call."""
    wanted = (_NAMES[number], {"graft": _VALUES[number]}, "")
    at = written.find("{")
    while at >= 0:
        value, end = json_at(written, at)
        if value is not None and call_of(value) == wanted:
            return at, len(written[:end].rstrip())
        at = written.find("{", at + 1)
    return None


def _named(written: str, count: int) -> CallSyntax | None:
    """Calls that are a name and JSON arguments."""
    places: list[tuple[int, int, int]] = []  # of the name, of the arguments, of their end
    for number in range(count):
        at = written.find(_NAMES[number])
        brace = written.find("{", at)
        value, end = json_at(written, brace) if at >= 0 and brace >= 0 else (None, 0)
        if value != {"graft": _VALUES[number]}:
            return None
        places.append((at, brace, len(written[:end].rstrip())))
    (name, brace, end), (last, _, last_end) = places[0], places[-1]
    before, after = written[:name].strip(), written[last_end:].strip()
    middle = written[name + len(_NAMES[0]) : brace].strip()
    if not before or not middle:
        return None
    if count == 1:
        return CallSyntax("named", before, after, _blanks(written), middle=middle)
    between = written[end:last].strip()
    shared = _shared(before[::-1], between[::-1])
    opening = before[len(before) - shared :].strip()
    close = between.removesuffix(opening).strip()
    if not opening or not after.startswith(close):
        return None
    outer = (before.removesuffix(opening).strip(), after.removeprefix(close).strip())
    return CallSyntax("named", opening, close, _blanks(written), outer, middle)


def _cut(written: str, chat: Chat) -> str:
    """The turn without its end."""
    ends = [end for end in {chat.end_text, *chat.ends.values()} if end]
    found = [at for end in ends if (at := written.rfind(end)) > written.rfind(_VALUES[0])]
    return written[: min(found)] if found else written


def _answer(chat: Chat) -> str:
    """A turn without calls."""
    return chat.render([ASK, {"role": "assistant", "content": _CONTENT}])


def _text_after(opened: str, whole: str) -> str:
    """The text behind what both begin with; marks such as <|user|> and <|call|> are not cut apart."""
    shared = opened[: _shared(opened, whole)]
    return whole[max(shared.rfind(end) for end in (">", "]", "\n", " ")) + 1 :]


def _shared(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _blanks(text: str) -> str:
    """The blanks at the start of a text."""
    return text[: len(text) - len(text.lstrip())]


def _tool(name: str) -> Message:
    parameters = {"type": "object", "properties": {"graft": {"type": "string"}}}
    function = {"name": name, "description": "graft", "parameters": parameters}
    return {"type": "function", "function": function}
