"""How a chat template writes a tool call: how it begins, so that a policy can be made to go on with one, and
what stands around its name and arguments.

chatml   '<tool_call>\\n{"name": "add", "arguments":'     begins a call of a tool
         '<tool_call>\\n{"name":'                         of any tool
"""

from __future__ import annotations

import re
from typing import NamedTuple

from graft.text.call_syntax import CallSyntax
from graft.text.calls import json_at
from graft.text.chat import Chat
from graft.text.syntax_probe import probe_call, turn_behind
from graft.text.template import TemplateError
from graft.types import Message

NAME = re.compile(r"[\w.-]+")
_TOOL, _KEY, _VALUE = "graft_tool", "graft.key", "graft.value"
_ID = probe_call(0, _TOOL, {})["id"]
_ARGUMENTS = re.compile(r'(\s*\{\s*"?|<parameter=|<arg_key>)$')
"""How arguments begin. An opening ends before it and before blanks and quotes: tokenizers join these with
the text behind them, and a policy has learnt the tokens of the whole."""


def call_opening(chat: Chat, tool: str = "") -> str:
    """The start of a call of this tool, or of any; "" where the template has none to go on from.

    >>> from graft.text.tokenizer import FastTokenizer
    >>> chat = Chat(FastTokenizer.characters("a"), "chatml")
    >>> call_opening(chat, "add"), call_opening(chat)
    ('<tool_call>\\n{"name": "add", "arguments":', '<tool_call>\\n{"name":')
    """
    if tool and not NAME.fullmatch(tool):  # a template may escape or refuse it
        return ""
    written = _written(chat)
    before, found, after = written.partition(_TOOL)
    between, has_key, _ = after.partition(_KEY)
    if not found or not has_key or _KEY in before:  # no calls, or arguments before the name
        return ""
    return before + tool + _ARGUMENTS.sub("", between) if tool else before.rstrip("\"' \n")


class CallPieces(NamedTuple):
    """What a template writes around the name and the arguments of a call.

    chatml   before '<tool_call>\\n{"name": "', between '", "arguments": ', after '}\\n</tool_call>'
    """

    before: str
    between: str
    after: str


def call_pieces(chat: Chat, syntax: CallSyntax) -> CallPieces | None:
    """Find the pieces of one call; None if it has no mark, or arguments that are not one JSON object."""
    if syntax.name not in ("json", "named") or not syntax.open or syntax.is_list:
        return None
    written = _written(chat)
    before, _, after = written[written.find(syntax.open) :].partition(_TOOL)
    brace = after.rfind("{", 0, max(after.find(_KEY), 0))
    value, end = json_at(after, brace) if brace >= 0 else (None, 0)
    close = after.find(syntax.close, end)
    if not before.startswith(syntax.open) or value != {_KEY: _VALUE} or close < 0:
        return None
    pieces = CallPieces(
        before, after[:brace], after[len(after[:end].rstrip()) : close + len(syntax.close)]
    )
    return None if any(_ID in piece for piece in pieces) else pieces


def _written(chat: Chat) -> str:
    """A turn that is a call of _TOOL; "" where the template has none."""
    calls = [probe_call(0, _TOOL, {_KEY: _VALUE})]
    message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        return turn_behind(chat, message, [_TOOL])
    except TemplateError:
        return ""
