"""Templates of several families: their variables, how their turns end, what they rewrite."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_families import GLM, HARMONY, LLAMA_2, QWEN3, glm, harmony, qwen3, sentencepiece
from text_templates import INSTRUCT, LLAMA, SEARCH, message, small_bpe

from graft.text.call_syntax import CallSyntax
from graft.text.chat import Chat
from graft.text.template import CHATML, PLAIN, TemplateError, render, variables_of
from graft.text.transcript import Transcript, contexts
from graft.text.turn import readings

HERMES = CallSyntax("json", "<tool_call>", "</tool_call>", before="\n")
LLAMA_31_DATE = (
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ date_string }}{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    "template, known",
    [
        (QWEN3, {"enable_thinking"}),
        (GLM, {"enable_thinking"}),
        (HARMONY, {"model_identity"}),
        (LLAMA, set()),
        (LLAMA_31_DATE, {"date_string", "custom_tools"}),
        (CHATML, set()),
        (PLAIN, set()),
    ],
)
def test_the_variables_of_a_template_are_those_it_reads(template: str, known: set[str]):
    assert variables_of(template) == known


def test_variables_that_a_template_never_reads_are_refused():
    with pytest.raises(
        TemplateError,
        match=r"never reads enable_thinkin; it reads enable_thinking\. .*did you mean 'enable_th",
    ):
        Chat(qwen3(), enable_thinkin=False)
    with pytest.raises(TemplateError, match="never reads enable_thinking; it reads none"):
        Chat(qwen3(), "chatml", enable_thinking=False)
    with pytest.raises(TemplateError, match="messages, eos_token come from the conversation"):
        Chat(qwen3(), messages=[], eos_token="x")
    with pytest.raises(ValueError, match="history='letter' is none of append, template"):
        Chat(qwen3(), history="letter")
    chat = Chat(qwen3(), enable_thinking=False)
    shown = chat.tokenizer.decode(chat.prompt([message("user", "a")]))
    assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", [QWEN3, CHATML])
@pytest.mark.parametrize("as_text", [True, False])
def test_nulls_in_calls_and_schemas_are_written(template: str, as_text: bool):
    arguments = '{"query": null, "n": [null]}' if as_text else {"query": None, "n": [None]}
    function = {"name": "search", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    schema = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    messages = [
        message("user", "a"),
        message("assistant", None, tool_calls=calls),
        message("tool", "b"),
    ]
    text = render(template, messages, tools=[schema])
    assert '"arguments": {"query": null, "n": [null]}}' in text
    assert '"parameters": {"default": null}' in text
    called = '<tool_call>{"name": "f", "arguments": {"a": null}}</tool_call>'
    (reading, *_) = readings(called, HERMES)
    assert reading["tool_calls"][0]["function"]["arguments"] == {"a": None}


def test_a_turn_is_read_as_thought_text_and_calls():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    first, second, *_, last = readings(f"<think>\nhm\n</think>\n\nso\n{call}", HERMES)
    assert (first["reasoning_content"], first["content"]) == ("hm", "so")
    assert [c["function"]["name"] for c in first["tool_calls"]] == ["f"]
    assert (second["content"], last["content"]) == (
        f"so\n{call}",
        f"<think>\nhm\n</think>\n\nso\n{call}",
    )
    (opened, *_) = readings("hm\n</think>\n\n5", HERMES)  # the prompt had opened the thought
    assert (opened["reasoning_content"], opened["content"]) == ("hm", "5")
    assert [r["content"] for r in readings(" 5", HERMES)] == [" 5", "5", " 5", "5"]


def test_a_blank_that_the_template_writes_is_none_of_the_message_s():
    chat = Chat(small_bpe(INSTRUCT), history="template")
    prompt = [message("user", "2+3?")]
    tokens = chat.prompt(prompt)
    transcript = Transcript.of(chat, prompt, None, tokens)
    answer = chat.tokenizer.encode_after(" the answer<|endoftext|>", tokens[-1])
    following = transcript.answered(chat, tokens + answer, [message("user", "and?")])
    assert not following.is_new
    assert following.transcript.messages[1]["content"] == "the answer"
    assert tokens + answer + following.tokens == chat.prompt(
        [*prompt, message("assistant", "the answer"), message("user", "and?")]
    )


def test_ends_of_turns_that_others_close_otherwise():
    chat = Chat(harmony())
    call, back = (chat.tokenizer.added_tokens[t] for t in ("<|call|>", "<|return|>"))
    bridge = "<|start|>user<|message|>a<|end|><|start|>assistant"
    decode = chat.tokenizer.decode
    assert decode(chat.extend([message("user", "a")], closed=True, last=back)) == bridge
    assert decode(chat.extend([message("user", "a")], closed=False)) == "<|end|>" + bridge
    result = chat.extend([message("tool", "a")], closed=True, last=call, tool="f")
    assert decode(result).startswith("<|start|>functions.f to=assistant")
    assert chat.turn_text([*chat.tokenizer.encode_after("a"), call]) == "a"
    chat = Chat(glm())
    user, seen = (chat.tokenizer.added_tokens[t] for t in ("<|user|>", "<|observation|>"))
    decode = chat.tokenizer.decode
    assert decode(chat.extend([message("user", "a")], closed=True, last=user)) == "\na<|assistant|>"
    wrong = chat.extend([message("user", "a")], closed=True, last=seen)  # it expected a tool
    assert decode(wrong) == "<|user|>\na<|assistant|>"


@pytest.mark.parametrize("make", [qwen3, glm, harmony])
@pytest.mark.parametrize("history", ["append", "template"])
def test_a_whole_chat_is_learned_with_the_ends_of_its_turns(make: Any, history: str):
    chat = Chat(make(), history=history)
    thought = {"reasoning_content": "easy", "thinking": "easy"}
    talk = [
        message("user", "2+3?"),
        message("assistant", "5", **thought),
        message("user", "and 4?"),
        message("assistant", "9", **thought),
    ]
    found = contexts(chat, talk, None)
    assert len(found) == (1 if history == "append" else 2)
    taught = [piece.text for pieces in found for piece in pieces if piece.is_trained]
    assert all("easy" in text for text in taught)
    assert [text[-len(chat.end_text) :] for text in taught] == [chat.end_text] * 2
    shown = "".join(piece.text for piece in found[-1])
    if history == "template":
        assert shown.removesuffix("<|user|>") == chat.render(talk)


# what follows holds for every conversation


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    short_text = st.text("ab1.", min_size=1, max_size=4)
    messages = [message("user", draw(short_text))]
    for _ in range(draw(st.integers(1, 4))):
        thought = draw(short_text) if draw(st.booleans()) else ""
        mind = {"reasoning_content": thought, "thinking": thought} if thought else {}
        messages.append(message("assistant", draw(short_text), **mind))
        messages.append(message("user", draw(short_text)))
    return messages


CHATS = {
    "qwen3": Chat(qwen3(), history="template"),
    "quiet": Chat(qwen3(), history="template", enable_thinking=False),
    "glm": Chat(glm(), history="template"),
    "harmony": Chat(harmony(), history="template"),
    "chatml": Chat(small_bpe(), "chatml", history="template"),
    "llama": Chat(small_bpe(LLAMA), history="template"),
    "llama 2": Chat(sentencepiece("legacy", LLAMA_2), history="template"),
}


@settings(max_examples=60)
@given(talks(), st.sampled_from(sorted(CHATS)))
def test_to_the_letter_every_turn_is_behind_what_the_template_writes(
    messages: list[dict[str, Any]], name: str
):
    chat = CHATS[name]
    if name in ("quiet", "llama", "llama 2"):  # they have no place for thoughts
        messages = [message(m["role"], m["content"]) for m in messages]
    tokens = chat.prompt(messages[:1])
    transcript = Transcript.of(chat, messages[:1], None, tokens)
    rows = [tokens]
    for turn in range(1, len(messages), 2):
        opened = chat.render(messages[:turn], add_generation_prompt=True)
        assert chat.tokenizer.decode(rows[-1]) == chat.tokenizer.decode(
            chat.tokenizer.encode(opened)
        )
        if name != "llama":  # this small tokenizer joins the blank lines before an answer
            assert chat.tokenizer.encode(opened) == rows[-1]
        whole = chat.render(messages[: turn + 1])
        text, end = chat.borders.assistant_text(messages[turn], opened, whole)
        written = rows[-1] + chat.tokenizer.encode_after(text + end, rows[-1][-1])
        after = transcript.answered(chat, written, messages[turn + 1 : turn + 2])
        rows.append(after.tokens if after.is_new else written + after.tokens)
        transcript = after.transcript
        assert transcript.length == len(rows[-1])
    if name in ("chatml", "llama", "llama 2"):
        assert chat.history_note() == ""
    assert chat.render(messages, add_generation_prompt=True) == transcript.shown


class AsTheirs:
    """Our tokenizer as the renderers of others take one."""

    name_or_path, unk_token_id, eos_token_id = "small", None, 0

    def __init__(self) -> None:
        self.ours = qwen3()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.ours.encode(text)

    def decode(self, ids: Any, **_: Any) -> str:
        return self.ours.decode(ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.ours.token_id(token)


@pytest.mark.peer
@settings(max_examples=30)
@given(talks(), st.booleans())
def test_contexts_of_qwen3_are_those_of_prime_s_renderer(
    messages: list[dict[str, Any]], has_result: bool
):
    """The hand-written renderer of Qwen3 in `renderers`, which verifiers and prime-rl use."""
    theirs = pytest.importorskip("renderers.qwen3").Qwen3Renderer(AsTheirs())
    chat = CHATS["qwen3"]
    if has_result:  # the last but one turn calls a tool instead
        function = {"name": "search", "arguments": {"query": "x"}}
        calls = [{"id": "call00000", "type": "function", "function": function}]
        call = {**messages[-2], "content": "", "tool_calls": calls}
        messages = [*messages[:-2], call, message("tool", "found"), *messages[-2:]]
        messages = messages[:-2]  # and its result is the last message
    messages = [{k: v for k, v in m.items() if k != "thinking"} for m in messages]
    wanted = theirs.render(messages, add_generation_prompt=True).token_ids
    assert chat.prompt(messages) == wanted


def test_tools_stand_in_every_context():
    chat = CHATS["qwen3"]
    talk = [
        message("user", "a"),
        message("assistant", "b"),
        message("user", "c"),
        message("assistant", "d"),
    ]
    for pieces in contexts(chat, talk, [SEARCH]):
        assert "# Tools" in pieces[0].text
