"""The grammar of a whole turn of which a text is structured: a thought before it, or calls in place of it.

    <think>two and two</think>

    {"value": 4}                     the text, under its schema
    <tool_call>{"name": "add", ...   or calls, which are free after their mark unless they are held to schemas

The marks are those of the chat template (`graft.text.call_syntax`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graft.structure import SPACING, Structure, StructureError, lark_text
from graft.text.call_opening import CallPieces
from graft.text.call_syntax import CallSyntax
from graft.text.chat import Chat
from graft.text.enforced_schema import enforced_schema
from graft.text.tokenizer import FastTokenizer
from graft.text.turn_borders import ASK

ANY = "REST: /(.|\\n)*/"
SLASH = re.compile(r"\\.|/", re.DOTALL)
"""A slash of an expression, or a character that is escaped already."""


def turn_structure(
    text: Structure,
    syntax: CallSyntax,
    tokenizer: FastTokenizer,
    *,
    may_think: bool,
    may_call: bool,
    held: Sequence[str] = (),
) -> Structure:
    """The structure of a turn whose text has the structure `text`.

    may_think  whether a thought may come before it; inside one that the prompt has begun it always ends first
    may_call   whether the turn may be calls instead
    held       rules of such calls (`call_rules`); without them they are free
    """
    if syntax.has_channels:
        raise StructureError(
            "the policy writes thoughts and texts in channels, in which a format is not enforced here; ask "
            "for it in the prompt"
        )
    is_thinking = syntax.is_thinking
    if not (may_think or is_thinking or may_call):
        return text
    rules = ["%llguidance {}", ANY, "BLANKS: /[ \\n]{1,4}/"]
    answer = "answer"
    if may_call:
        answer = "(answer | calls)"
        rules += _calls(syntax, tokenizer, held)
    if is_thinking or may_think:
        rules.append(f"thought_end{_mark_after_text(syntax.thought[1], tokenizer)}")
    if is_thinking:
        rules.append(f"start: thought_end BLANKS? {answer}")
    elif may_think:
        opening = _literal(syntax.thought[0], tokenizer)
        rules.append(f"start: ({opening} thought_end BLANKS?)? {answer}")
    else:
        rules.append(f"start: {answer}")
    return Structure.lark("\n".join([*rules, *_answer(text)]))


def call_rules(
    pieces: CallPieces, syntax: CallSyntax, tokenizer: FastTokenizer, schemas: Mapping[str, Any]
) -> list[str]:
    """The rule `behind`: a call behind its mark, of one of these tools, with arguments under its schema."""
    rules: list[str] = []
    before = pieces.before.removeprefix(syntax.open)
    after = _literal(pieces.after, tokenizer)
    for number, (name, schema) in enumerate(schemas.items()):
        head = _literal(before + name + pieces.between, tokenizer)
        rules += [
            f"call_{number}: {head} given_{number} {after}",
            *_json(f"given_{number}", schema),
        ]
    return ["behind: " + " | ".join(f"call_{number}" for number in range(len(schemas))), *rules]


def call_structure(held: Sequence[str], syntax: CallSyntax, tokenizer: FastTokenizer) -> Structure:
    """The structure of one call by these rules, from the token on in which its mark begins."""
    mark = f"mark: {_literal(syntax.open, tokenizer)} | spelled"
    spelled = f"spelled[lazy]: REST {lark_text(syntax.open)}"  # maybe behind the end of other text
    rules = ["%llguidance {}", ANY, mark, spelled, *held, "start: mark behind"]
    return replace(Structure.lark("\n".join(rules)), is_part=True)


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
        return _json("answer", json.loads(text.source))
    if text.kind == "regex":
        return ["answer: ANSWER", f"ANSWER: /{SLASH.sub(_escaped_slash, text.source)}/"]
    # a grammar within the grammar: its names are its own, `start` among them
    lines = text.source.splitlines()
    lines = [line for line in lines if not line.lstrip().startswith("%llguidance")]
    return ["answer: %lark {", *lines, "}"]


def _escaped_slash(piece: re.Match[str]) -> str:
    return "\\/" if piece[0] == "/" else piece[0]


def _json(rule: str, schema: Any) -> list[str]:
    schema = enforced_schema(schema)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": SPACING}
    return [f"{rule}: %json {json.dumps(schema, ensure_ascii=False)}"]


def _calls(syntax: CallSyntax, tokenizer: FastTokenizer, held: Sequence[str]) -> list[str]:
    """Calls are free behind the mark with which they begin, unless rules hold them."""
    if held:
        first, last = (
            f"{_literal(text, tokenizer)} BLANKS?" if text else "" for text in syntax.outer
        )
        call = f"{_literal(syntax.open, tokenizer)} behind BLANKS?"
        return [*held, f"call: {call}", f"calls: {first} call+ {last}"]
    opening = syntax.outer[0] or syntax.open
    if not opening:  # the whole turn is a call: an object with a name
        return ['calls: %json {"type": "object", "required": ["name"]}']
    texts = dict.fromkeys(filter(None, (syntax.open, syntax.close, *syntax.outer)))
    marks = [mark for mark in texts if mark in tokenizer.added_tokens]  # no part of any text
    others = f"(({' | '.join(_literal(mark, tokenizer) for mark in marks)}) REST)*" if marks else ""
    return [f"calls: {_literal(opening, tokenizer)} REST {others}"]


def _literal(text: str, tokenizer: FastTokenizer) -> str:
    """A text of a template in a grammar: added tokens by their numbers, which no other token may spell."""
    known = tokenizer.added_tokens
    at_tokens = f"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True))) or '(?!)'})"
    parts = filter(None, re.split(at_tokens, text))
    return " ".join(f"<[{known[part]}]>" if part in known else lark_text(part) for part in parts)


def _mark_after_text(mark: str, tokenizer: FastTokenizer) -> str:
    """The rest of a rule: any text up to and with the first such mark."""
    if mark in tokenizer.added_tokens:
        return f": REST {_literal(mark, tokenizer)}"
    return f"[lazy]: REST {lark_text(mark)}"
