"""How a chat template begins a turn that is a tool call, so that a policy can be made to go on with one.

chatml   '<tool_call>\\n{"name": "add", "arguments":'     of a tool
         '<tool_call>\\n{"name":'                         of any tool
"""

from __future__ import annotations

import re

from graft.text.chat import Chat
from graft.text.syntax_probe import probe_call, turn_behind
from graft.text.template import TemplateError
from graft.types import Message

_NAME = re.compile(r"[\w.-]+")
_TOOL, _KEY, _VALUE = "graft_tool", "graft.key", "graft.value"
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
    if tool and not _NAME.fullmatch(tool):  # a template may escape or refuse it
        return ""
    calls = [probe_call(0, _TOOL, {_KEY: _VALUE})]
    message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        written = turn_behind(chat, message, [_TOOL])
    except TemplateError:
        return ""
    before, found, after = written.partition(_TOOL)
    between, has_key, _ = after.partition(_KEY)
    if not found or not has_key or _KEY in before:  # no calls, or arguments before the name
        return ""
    return before + tool + _ARGUMENTS.sub("", between) if tool else before.rstrip("\"' \n")
