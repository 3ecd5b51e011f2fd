"""The grammar of a whole turn of which a text is structured: a thought before it, or calls in place of it.

    <think>two and two</think>

    {"value": 4}                     the text, under its schema
    <tool_call>{"name": "add", ...   or calls, which are free after their mark

The marks are those of the chat template (`graft.text.call_syntax`).
"""

from __future__ import annotations

import json

from graft.structure import SPACING, Structure, StructureError, lark_text
from graft.text.call_syntax import CallSyntax
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.text.turn_borders import ASK


def turn_structure(
    text: Structure,
    syntax: CallSyntax,
    tokenizer: FastTokenizer,
    *,
    may_think: bool,
    may_call: bool,
) -> Structure:
    """The structure of a turn whose text has the structure `text`.

    may_think  whether a thought may come before it; inside one that the prompt has begun it always ends first
    may_call   whether the turn may be calls instead
    """
    if syntax.has_channels:
        raise StructureError(
            "the policy writes thoughts and texts in channels, in which a format is not enforced here; ask "
            "for it in the prompt"
        )
    is_thinking = syntax.is_thinking
    if not (may_think or is_thinking or may_call):
        return text
    rules = ["%llguidance {}", "REST: /(.|\\n)*/", "BLANKS: /[ \\n]{1,4}/"]
    answer = "answer"
    if may_call:
        answer = "(answer | calls)"
        rules += _calls(syntax, tokenizer)
    if is_thinking or may_think:
        rules.append(f"thought_end{_mark_after_text(syntax.thought[1], tokenizer)}")
    if is_thinking:
        rules.append(f"start: thought_end BLANKS? {answer}")
    elif may_think:
        opening = _mark(syntax.thought[0], tokenizer)
        rules.append(f"start: ({opening} thought_end BLANKS?)? {answer}")
    else:
        rules.append(f"start: {answer}")
    return Structure.lark("\n".join([*rules, *_answer(text)]))


def may_think(chat: Chat, syntax: CallSyntax) -> bool:
    """Whether a turn may begin with a thought: vocabulary and template know its marks, and the prompt has no
    closed one."""
    is_known = chat.tokenizer.token_id(syntax.thought[0]) is not None
    if not is_known or syntax.thought[1] not in (chat.template or ""):
        return False
    prompt = chat.render([ASK], add_generation_prompt=True)
    return not prompt.rstrip().endswith(syntax.thought[1])


def _answer(text: Structure) -> list[str]:
    if text.kind == "json":
        schema = json.loads(text.source)
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": SPACING}
        return [f"answer: %json {json.dumps(schema, ensure_ascii=False)}"]
    if text.kind == "regex":
        return ["answer: ANSWER", f"ANSWER: /{text.source.replace('/', chr(92) + '/')}/"]
    head = "start:"
    lines = text.source.splitlines()
    if not any(line.lstrip().startswith(head) for line in lines):
        raise StructureError(f"the grammar {text.source[:200]!r} has no rule 'start'")
    return [
        line.replace(head, "answer:", 1) if line.lstrip().startswith(head) else line
        for line in lines
        if not line.lstrip().startswith("%llguidance")
    ]


def _calls(syntax: CallSyntax, tokenizer: FastTokenizer) -> list[str]:
    """Calls are free behind the mark with which they begin."""
    opening = syntax.outer[0] or syntax.open
    if not opening:  # the whole turn is a call: an object with a name
        return ['calls: %json {"type": "object", "required": ["name"]}']
    return [f"calls: {_mark(opening, tokenizer)} REST"]


def _mark(mark: str, tokenizer: FastTokenizer) -> str:
    """A mark in a grammar: a special token by its number, any other as text."""
    token = tokenizer.token_id(mark)
    return f"<[{token}]>" if token in tokenizer.special_ids else lark_text(mark)


def _mark_after_text(mark: str, tokenizer: FastTokenizer) -> str:
    """The rest of a rule: any text up to and with the first such mark."""
    token = tokenizer.token_id(mark)
    if token in tokenizer.special_ids:
        return f": REST <[{token}]>"
    return f"[lazy]: REST {lark_text(mark)}"
