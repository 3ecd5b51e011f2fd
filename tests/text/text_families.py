"""Tokenizers and templates in the manner of Llama 2, Mistral, Zephyr, Qwen3, GLM and gpt-oss."""
# ruff: noqa: E501  lines of templates are as long as they were published

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from graft.text.template import CHATML
from graft.text.tokenizer import FastTokenizer
from tests.text.text_templates import small_bpe

LLAMA_2 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}
    {%- set system_message = messages[0]['content'] %}
{%- else %}
    {%- set loop_messages = messages %}
    {%- set system_message = false %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if loop.index0 == 0 and system_message is string %}
        {%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- else %}
        {%- set content = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
    {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}
"""
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn a json object within <tool_call></tool_call> tags.<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# no end of its own: the mark of the next speaker ends a turn; thoughts before the last question go
GLM = """\
{{- '[gMASK]<sop>' }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- set thought = '' %}{% set content = m.content or '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '\\n<think>' + thought.strip() + '</think>' }}
        {%- else %}
            {{- '\\n<think></think>' }}
        {%- endif %}
        {%- if content.strip() %}{{ '\\n' + content.strip() }}{% endif %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|system|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '\\n<think></think>' }}{% endif %}
{%- endif %}
"""
# thoughts only of a last answer; that ends with <|return|>, one that others follow with <|end|>
HARMONY = """\
{{- '<|start|>system<|message|>You are ' + (model_identity | default('ChatGPT')) + '.<|end|>' }}
{%- set ns = namespace(tool=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.tool_calls %}
            {%- set call = m.tool_calls[0].function or m.tool_calls[0] %}
            {%- if m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
            {%- set ns.tool = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
            {%- set ns.tool = none %}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if ns.tool is none %}{{ raise_exception('a tool message without a call') }}{% endif %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

MARKS = {
    "glm": ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
    "harmony": [
        "<|start|>",
        "<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|channel|>",
        "<|constrain|>",
    ],
}


@cache
def qwen3() -> FastTokenizer:
    """A byte-level BPE in which <think>, <tool_call> and the like are tokens that are not special."""
    names = ("think", "tool_call", "tool_response")
    return marked(QWEN3, *(f"<{mark}{name}>" for name in names for mark in ("", "/")))


@cache
def glm() -> FastTokenizer:
    return marked(GLM, "<think>", "</think>", special=MARKS["glm"])


@cache
def harmony() -> FastTokenizer:
    return marked(HARMONY, special=MARKS["harmony"])


def marked(template: str, *added: str, special: list[str] | None = None) -> FastTokenizer:
    base = small_bpe()
    backend = tokenizers.Tokenizer.from_str(base._backend.to_str())
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in special or []]
    )
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return FastTokenizer(backend, base.special_tokens, {"default": template})


@cache
def sentencepiece(kind: str, template: str = "") -> FastTokenizer:
    """BPE with byte fallback as transformers converts it from a SentencePiece model.

    legacy  Llama 2, Mistral, TinyLlama: a "▁" before every text between added tokens
    first   newer conversions: before the first one only
    always  as legacy, but not before one that begins with a blank
    """
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=list('▁abcdefghijklmnopqrstuvwxyzINST[]/0123456789<>|,.?!:{}"_+=-\n'),
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    corpus = [
        "the answer is the number of the user [INST] [/INST] and the assistant, 12 is 345"
    ] * 4
    backend.train_from_iterator(corpus, trainer)
    spec: dict[str, Any] = json.loads(backend.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    if kind == "legacy":
        backend.pre_tokenizer = None
        replace = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return FastTokenizer(backend, special, {"default": template or CHATML})


TEMPLATES = {
    "chatml": CHATML,
    "llama 2": LLAMA_2,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
}
KINDS = ("legacy", "first", "always")
