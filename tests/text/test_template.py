"""Templates render as transformers renders them; the bundled ones write what they should."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from text_templates import INSTRUCT, LLAMA, SEARCH, THINKING, calling, message, small_bpe

from graft.text.chat import Chat
from graft.text.template import CHATML, PLAIN, TEMPLATES, TemplateError, find_template, render
from graft.text.tokenizer import FastTokenizer

HELLO = [message("user", "hi")]


def test_plain_writes_contents_and_closes_the_assistant():
    messages = [message("user", "12+3="), message("assistant", "15"), message("user", "1+1=")]
    assert render(PLAIN, messages, eos_token="<eos>") == "12+3=15<eos>1+1="
    assert render(PLAIN, messages[:1], add_generation_prompt=True, eos_token="<eos>") == "12+3="
    kept = render(PLAIN, messages[:2], continue_final_message=True, eos_token="<eos>")
    assert kept == "12+3=15"


def test_plain_refuses_what_it_cannot_show():
    with pytest.raises(TemplateError, match="cannot show tools"):
        render(PLAIN, HELLO, tools=[SEARCH])
    with pytest.raises(TemplateError, match="no form for tool_calls"):
        render(PLAIN, [calling("", {})])


def test_chatml_by_hand():
    messages = [
        message("system", "Be brief."),
        message("user", "who?"),
        calling("Let me see.", {"query": "naïve <b>"}),
        message("tool", "A"),
        message("tool", "B"),
        message("assistant", "<think>\nok\n</think>\n\nA "),
    ]
    assert render(CHATML, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nwho?<|im_end|>\n"
        "<|im_start|>assistant\nLet me see.\n<tool_call>\n"
        '{"name": "search", "arguments": {"query": "naïve <b>"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nA\n</tool_response>\n"
        "<tool_response>\nB\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nok\n</think>\n\nA <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chatml_puts_tools_behind_the_system_message():
    with_system = render(CHATML, [message("system", "Be brief."), *HELLO], tools=[SEARCH])
    without = render(CHATML, HELLO, tools=[SEARCH])
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert with_system.replace("Be brief.\n\n", "") == without
    assert f"<tools>\n{json.dumps(SEARCH, ensure_ascii=False)}\n</tools>" in without
    assert with_system.count("<|im_start|>system") == 1


def test_chatml_takes_contents_in_parts_thoughts_apart_and_no_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(CHATML, [message("user", parts)]) == "<|im_start|>user\nab<|im_end|>\n"  # type: ignore[arg-type]
    thought = message("assistant", "5", reasoning_content="2+3")
    assert "assistant\n<think>\n2+3\n</think>\n\n5<|im_end|>" in render(CHATML, [thought])
    assert "assistant\n<tool_call>\n{" in render(CHATML, [calling(None, {})])
    with pytest.raises(TemplateError, match="unknown role 'narrator'"):
        render(CHATML, [message("narrator", "once")])


@pytest.mark.parametrize("template", [CHATML, LLAMA, THINKING])
def test_arguments_and_tools_may_be_json_strings(template: str):
    messages = [*HELLO, calling("", {"query": "x"})]
    as_text = [*HELLO, calling("", '{"query": "x"}')]
    want = render(template, messages, tools=[SEARCH])
    assert '{"query": "x"}' in want
    for tools in ([json.dumps(SEARCH)], json.dumps([SEARCH])):
        assert render(template, as_text, tools=tools) == want
    assert as_text[1]["tool_calls"][0]["function"]["arguments"] == '{"query": "x"}'  # type: ignore[index]


def test_arguments_that_are_no_json_are_shown_as_written():
    assert '"arguments": {"query": }\n</tool_call>' in render(CHATML, [calling("", '{"query": ')])


def test_a_tool_that_is_no_schema_is_refused():
    with pytest.raises(TemplateError, match="a tool must be a schema"):
        render(CHATML, HELLO, tools=["search"])
    with pytest.raises(TemplateError, match="not a JSON list"):
        render(CHATML, HELLO, tools="search")


def test_templates_are_found_by_name_path_or_text(tmp_path: Path):
    (tmp_path / "my.jinja").write_text("{{ 'mine' }}", encoding="utf-8")
    assert find_template("chatml") == TEMPLATES["chatml"]
    assert find_template(str(tmp_path / "my.jinja")) == "{{ 'mine' }}"
    assert find_template("{{ 1 }}") == "{{ 1 }}"
    assert find_template("tool_use", {"tool_use": "{{ 2 }}"}) == "{{ 2 }}"
    with pytest.raises(
        TemplateError, match=r"did you mean 'chatml'\? known: chatml, code, no, plain"
    ):
        find_template("chatlm")


def test_broken_and_refusing_templates_are_errors():
    with pytest.raises(TemplateError, match=r"does not compile: .* \(line 2\)"):
        render("\n{% for %}", HELLO)
    with pytest.raises(TemplateError, match="only user and assistant speak here"):
        render(INSTRUCT, [message("system", "x")], bos_token="")
    with pytest.raises(TemplateError, match="cannot write these messages"):
        render("{{ messages[0].content + 'x' }}", [message("user", None)])
    with pytest.raises(TemplateError, match="refuses"):  # the sandbox
        render("{{ messages.append(1) }}", HELLO)


def test_a_final_message_that_cannot_be_continued_is_refused():
    with pytest.raises(TemplateError, match="no text to continue"):
        render(CHATML, [message("assistant", None)], continue_final_message=True)
    with pytest.raises(TemplateError, match="drops the final message"):
        render("{{ eos_token }}", [message("assistant", "x")], continue_final_message=True)
    with pytest.raises(ValueError, match="exclude each other"):
        render(CHATML, HELLO, continue_final_message=True, add_generation_prompt=True)


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": HELLO,
    "system": [
        message("system", " s "),
        message("user", "a\n"),
        message("assistant", "b "),
        message("user", "c"),
    ],
    "thinking": [
        message("user", "a"),
        message("assistant", "<think>\nt1\n</think>\n\nb"),
        message("user", "c"),
        message("assistant", "<think>\nt2\n</think>\n\nd"),
    ],
    "tools": [
        message("user", "a"),
        calling("", {"query": "naïve <b> & 'c'"}),
        message("tool", "found"),
        message("assistant", "b  "),
    ],
    "space": [message("user", "a"), message("assistant", "The answer is ")],
}
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}\n"
    "{% set x = m.content %}{{ x }}{{ eos_token }}\n{% endgeneration %}\n"
    "{% else %}{{ m.content }}{% continue %}{% endif %}-{{ x }}{% endfor %}\n\n"
)


@pytest.mark.peer
@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize(
    "template",
    [CHATML, PLAIN, LLAMA, THINKING, INSTRUCT, GENERATION],
    ids=["chatml", "plain", "llama", "thinking", "instruct", "generation"],
)
def test_rendering_equals_transformers(template: str, case: str, peer: Any):
    messages = CONVERSATIONS[case]
    ways: list[dict[str, Any]] = [
        {},
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"tools": [SEARCH]},
        {"tools": [], "add_generation_prompt": True},
    ]
    if messages[-1]["role"] == "assistant":
        ways.append({"continue_final_message": True})
    for way in ways:
        want = outcome(
            peer.apply_chat_template, messages, chat_template=template, tokenize=False, **way
        )
        got = outcome(render, template, messages, **peer.special_tokens_map, **way)
        assert got.removeprefix("the chat template refuses these messages: ") == want


def outcome(write: Callable[..., str], *given: Any, **how: Any) -> str:
    """The text, or the template's own error message."""
    try:
        return write(*given, **how)
    except (TemplateError, jinja2.TemplateError) as error:
        return str(error)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("peer")
    small_bpe(CHATML).save(folder)
    return AutoTokenizer.from_pretrained(str(folder))


BROKEN = "{% for m in messages %}{{ m.content }"


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "mine.jinja"])
def test_errors_of_a_template_name_its_file_and_the_key(where: str, tmp_path: Path):
    """One that does not compile, when it is opened; one that refuses messages, when it renders them."""

    def chat_with(text: str) -> Chat:
        FastTokenizer.bytes().save(tmp_path)
        if where == "mine.jinja":
            (tmp_path / where).write_text(text)
            return Chat(FastTokenizer.load(tmp_path), str(tmp_path / where))
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        if where == "tokenizer_config.json":
            (tmp_path / where).write_text(json.dumps(config | {"chat_template": text}))
        else:
            (tmp_path / where).write_text(text)
        return Chat(FastTokenizer.load(tmp_path))

    named = rf"(?=.*{re.escape(str(tmp_path / where))}).*model\.chat_template"
    with pytest.raises(TemplateError, match=named + ".*does not compile"):
        chat_with(BROKEN)
    chat = chat_with(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    with pytest.raises(TemplateError, match=named + ".*no system"):
        chat.prompt([message("system", "a"), message("user", "b")])


def test_a_template_that_is_no_utf_8_or_no_name_names_the_key(tmp_path: Path):
    (tmp_path / "latin.jinja").write_bytes("é{{ messages }}".encode("latin-1"))
    for which in (str(tmp_path / "latin.jinja"), "chatlm"):
        with pytest.raises(TemplateError, match=rf"model\.chat_template={which!r}"):
            Chat(FastTokenizer.bytes(), which)
