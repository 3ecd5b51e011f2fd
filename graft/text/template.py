"""Chat templates: messages to text, as transformers' `apply_chat_template` writes it.

A template is Jinja text that comes with a tokenizer. Some are bundled and have names: `plain` writes
contents one after another, `chatml` marks every turn, GEM's are in `gem_templates`; all only append.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser

from graft.spelling import nearest
from graft.text.gem_templates import GEM_TEMPLATES
from graft.text.template_limits import LimitedEnvironment, TemplateLimit, check_source
from graft.trust import check_program
from graft.trust.bounds import read_text
from graft.types import Message

PLAIN = """\
{#- Contents one after another, without role marks; an assistant turn ends with the eos token. -#}
{%- if tools %}{{ raise_exception("template 'plain' cannot show tools; use chatml") }}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- raise_exception("template 'plain' has no form for tool_calls; use chatml") }}
    {%- endif %}
    {{- message.content }}
    {%- if message.role == "assistant" %}{{ eos_token }}{% endif %}
{%- endfor %}
"""

CHATML = """\
{#- ChatML that only appends: no earlier turn is ever dropped, trimmed or rewritten. Tools, calls
    and results are JSON in the tags that Hermes and Qwen models know. -#}
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content %}
        {%- for part in content %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- set has_system = messages and messages[0].role == "system" %}
{%- if tools %}
    {{- "<|im_start|>system\\n" }}
    {%- if has_system %}{{ text(messages[0].content) + "\\n\\n" }}{% endif %}
    {{- "# Tools\\n\\nThese functions are at your service, one JSON schema per line:\\n<tools>" }}
    {%- for tool in tools %}{{ "\\n" + tool | tojson }}{% endfor %}
    {{- "\\n</tools>\\n\\nTo call one, write a JSON object with its name and its arguments:\\n" }}
    {{- '<tool_call>\\n{"name": <function name>, "arguments": <JSON object>}\\n</tool_call>\\n' }}
    {{- "Write one such block per call; the results come back in <tool_response> tags." }}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if tools and has_system and loop.first %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
        {{- "\\n<tool_response>\\n" + text(message.content) + "\\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" }}
        {%- if message.reasoning_content %}
            {{- "<think>\\n" + message.reasoning_content + "\\n</think>\\n\\n" }}
        {%- endif %}
        {{- text(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{ "\\n" }}{% endif %}
            {%- set function = call.function or call %}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role in ["system", "user"] %}
        {{- "<|im_start|>" + message.role + "\\n" + text(message.content) + "<|im_end|>\\n" }}
    {%- else %}
        {{- raise_exception("unknown role '" + message.role ~ "'") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""

TEMPLATES = {"chatml": CHATML, "plain": PLAIN, **GEM_TEMPLATES}
"""The bundled templates by name."""

Tools = Sequence[Any] | str
"""Tool schemas in OpenAI's form; the list or its entries may be JSON strings."""

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_SPECIAL = {f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}

MAX_INDENT = 100
"""Of JSON in a template."""

_CONTINUES_HERE = "GRAFT_CONTINUES_HERE "  # the space at the end shows whether a template trims


class TemplateError(ValueError):
    """A template that does not compile, or that refuses the messages."""


def find_template(which: str, named: Mapping[str, str] | None = None) -> str:
    """Jinja text from a bundled name, a name in `named` (the tokenizer's), a path, or itself."""
    known = {**(named or {}), **TEMPLATES}
    if which in known:
        return known[which]
    if "{{" in which or "{%" in which:
        return which
    if Path(which).is_file():
        # a template ends up in exports: it must not be a private file of the reader's
        check_program(f"the chat template in the file {which!r}", which)
        try:
            return read_text(Path(which))
        except (OSError, ValueError) as error:
            raise TemplateError(
                f"chat template {which!r} cannot be read ({error}); save it as UTF-8"
            ) from error
    hint = nearest(which, known)
    meant = f" did you mean {hint!r}?" if hint else ""
    raise TemplateError(
        f"chat template {which!r} is no known name, no file and no Jinja text;{meant} "
        f"known: {', '.join(sorted(known))}. Your own: the path of a .jinja file"
    )


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Write `messages` as text; `variables` are the special tokens and others that the template reads.

    >>> render(CHATML, [{"role": "user", "content": "hi"}], add_generation_prompt=True)
    '<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n'
    >>> render(PLAIN, [{"role": "user", "content": "2+3="},
    ...                {"role": "assistant", "content": "5"}], eos_token="<eos>")
    '2+3=5<eos>'
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt and continue_final_message exclude each other")
    _refuse_pictures(messages)
    conversation = [_with_objects(message) for message in messages]
    schemas = None if tools is None else _tool_schemas(tools)
    if continue_final_message:
        conversation[-1:] = [_marked(conversation[-1])]
    variables |= {"tools": schemas, "documents": None}
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        try:
            text = _written(template, conversation, variables)
        except TypeError:  # DeepSeek's template takes arguments as text only
            as_texts = [_with_texts(message) for message in conversation]
            if as_texts == conversation:
                raise
            text = _written(template, as_texts, variables)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template refuses these messages: {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:  # such as text + None
        raise TemplateError(f"the chat template cannot write these messages: {error}") from error
    return _cut_at_mark(text) if continue_final_message else text


def _written(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    compiled = _compile(template)
    return _environment().limited(lambda: compiled.render(messages=messages, **variables))


def _refuse_pictures(messages: Sequence[Message]) -> None:
    """Raise for pictures: a template would drop them, or write a mark without the picture."""
    for number, message in enumerate(messages, 1):
        parts = message.get("content")
        for part in parts if isinstance(parts, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in (None, "text"):
                raise TemplateError(
                    f"message {number} ({message.get('role')}) has a part of type {kind!r}, and the model "
                    "reads text only: it would answer without seeing it. Leave such tasks out, or let the "
                    "environment describe the content in text"
                )


def _marked(message: Message) -> Message:
    """The message with a mark where its continuation begins: at the end of its last text."""
    message = copy.deepcopy(message)
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUES_HERE
        return message
    texts = [part for part in content or [] if isinstance(part, dict) and "text" in part]
    if not texts:
        raise TemplateError(f"the final message has no text to continue: content={content!r}")
    texts[-1]["text"] += _CONTINUES_HERE
    return message


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUES_HERE.strip())
    if at < 0:
        raise TemplateError("the chat template drops the final message, so it cannot be continued")
    # a template that trims contents removed the mark's space, and would remove the text's too
    return text[:at] if text.startswith(_CONTINUES_HERE, at) else text[:at].rstrip()


def _with_objects(message: Message) -> Message:
    """The message with tool-call arguments as objects; in OpenAI's form they are JSON strings."""
    return _with_arguments(message, _as_object)


def _with_texts(message: Message) -> Message:
    """The message with tool-call arguments as JSON strings."""
    return _with_arguments(
        message, lambda given: given if isinstance(given, str) else _to_json(given)
    )


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if not message.get("tool_calls"):
        return message
    message = copy.deepcopy(message)
    for call in message["tool_calls"]:
        function = call.get("function") or call
        if "arguments" in function:
            function["arguments"] = change(function["arguments"])
    return message


def _tool_schemas(tools: Tools) -> list[dict[str, Any]]:
    """Schemas as objects; the whole list or each of them may be a JSON string (old datasets)."""
    try:
        listed = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise TemplateError(
            f"tools={tools[:80]!r} is not a JSON list of schemas: {error}"
        ) from error
    schemas = [_as_object(tool) for tool in listed]
    for tool in schemas:
        if not isinstance(tool, dict):
            raise TemplateError(
                f"a tool must be a schema such as {{'type': 'function', 'function': {{...}}}}; "
                f"got {type(tool).__name__} {str(tool)[:80]!r}"
            )
    return schemas


def _as_object(value: Any) -> Any:
    """Parsed JSON; text that is not a JSON object stays, for the template to show."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's text; it has no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes <, > and & for HTML; models were trained on the plain characters
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise jinja2.TemplateError(f"tojson(indent={indent}): at most {MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    try:
        check_source(template)
        compiled = _environment().from_string(template)
        # every rendering copies them, and of a ChainMap that takes a third of a short prompt's time
        compiled.globals = dict(compiled.globals)
        return compiled
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template does not compile: {error.message} (line {error.lineno})"
        ) from error
    except (TemplateLimit, RecursionError, MemoryError, SyntaxError) as error:
        raise TemplateError(f"the chat template does not compile: {error}") from error


@lru_cache(maxsize=64)
def variables_of(template: str) -> frozenset[str]:
    """The variables of a template that a user may set, such as enable_thinking."""
    _compile(template)
    environment = _environment()
    tree = environment.parse(template)
    read = jinja2.meta.find_undeclared_variables(tree) - set(environment.globals)
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    tested = {  # {% if date is not defined %}{% set date = ... %}: the template's own only by default
        test.node.name
        for test in tree.find_all(nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
    }
    return frozenset(read - (own - tested) - _GIVEN - _SPECIAL)


def check_variables(template: str, given: Mapping[str, Any]) -> None:
    """Raise TemplateError for variables that the template never reads, or that are not the user's."""
    known = variables_of(template)
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    listed = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
    hints = [
        f"{name!r}: did you mean {hint!r}?" for name in unknown if (hint := nearest(name, [*known]))
    ]
    set_by_graft = [name for name in unknown if name in _GIVEN | _SPECIAL]
    reason = (
        f"{', '.join(set_by_graft)} come from the conversation and the tokenizer"
        if set_by_graft
        else f"the chat template never reads {', '.join(unknown)}; {listed}"
    )
    raise TemplateError(". ".join([f"model.template_args: {reason}", *hints]))
