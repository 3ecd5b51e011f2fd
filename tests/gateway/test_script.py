"""`graft serve agent --script`: an agent's tool path without a model, and how serving ends."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graft.commands.serve import refuse_script
from graft.config import ConfigError
from graft.engine.errors import EngineError
from graft.gateway.gateway import Gateway
from graft.gateway.request import RefusedRequest
from graft.gateway.speakers.script import ScriptedEngine, ScriptError, read_script, turn_of
from graft.text.chat import Chat
from graft.types import Episode, Sampling
from tests.command_line import start
from tests.gateway.run_agents import post
from tests.gateway.tiny import CALCULATOR, TASK, asks, said, tiny_tokenizer

pytest.importorskip("uvicorn")
CALL = '{"content": "Adding.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}'


def scripted(*turns: str, **limits: Any) -> Gateway:
    chat = Chat(tiny_tokenizer())
    how = {"sampling": Sampling(max_tokens=500), "max_context": 4096, **limits}
    return Gateway(ScriptedEngine(chat, [turn_of(t, "x") for t in turns]), chat, **how)  # type: ignore[arg-type]


async def test_answers_come_in_order_in_each_conversation():
    session = scripted(CALL, '"5"').open(TASK)
    for question in ("2+3?", "1+1?"):
        (call,) = await session.answer(asks(question, tools=(CALCULATOR,)))
        assert (call.content, call.finish) == ("Adding.", "tool_calls")
        assert [(one.name, json.loads(one.arguments)) for one in call.calls] == [("add", {"a": 1})]
        result = {"role": "tool", "content": "5", "tool_call_id": call.calls[0].id}
        more = asks(question, said(call), result, tools=(CALCULATOR,))
        (text,) = await session.answer(more)
        assert (text.content, text.calls, text.finish) == ("5", (), "stop")
        with pytest.raises(RefusedRequest, match=r"has 2 answers.*for answer 3"):
            await session.answer(asks(*more.messages, said(text), "more?", tools=(CALCULATOR,)))
    leaf = session.end()
    assert leaf.metrics["agent/tool_calls"] == 2 and len(leaf.info["contexts"]) == 2


async def test_a_limit_a_stop_string_and_a_demanded_call_are_honoured():
    session = scripted('"one two three"', max_context=4096).open(TASK)
    (cut,) = await session.answer(asks("a", max_tokens=3))
    assert (cut.content, cut.finish) == ("one", "length")
    (stopped,) = await session.answer(asks("b", stop=("two",)))
    assert (stopped.content, stopped.stop_string) == ("one ", "two")
    call = json.loads(CALL) | {"content": ""}
    session = scripted(json.dumps(call)).open(TASK)
    (forced,) = await session.answer(asks("c", tools=(CALCULATOR,), tool_choice="required"))
    assert [(one.name, one.arguments) for one in forced.calls] == [("add", '{"a": 1}')]


@pytest.mark.parametrize(
    "line",
    ["{", "5", '{"text": "x"}', '{"content": 5}', '{"tool_calls": [{"arguments": {}}]}'],
)
def test_a_line_that_is_no_answer_is_named(line: str, tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(f'"fine"\n\n{line}\n')
    with pytest.raises(ScriptError, match="line 3"):
        read_script(file)
    file.write_text("\n")
    with pytest.raises(ScriptError, match="no answers"):
        read_script(file)


def test_arguments_may_be_a_text_and_thoughts_are_written():
    line = {
        "reasoning_content": "hm",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    written = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert turn_of(json.dumps(line), "x") == written
    engine = ScriptedEngine(SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=3)), ["a"])  # type: ignore[arg-type]
    with pytest.raises(EngineError):
        engine.score()


def test_a_script_and_a_model_exclude_each_other():
    script = Path("a.jsonl")
    assert refuse_script("", [], script, None) == script
    for given in (("m", [], script, None), ("", ["x=1"], script, None), ("", [], script, 0.5)):
        with pytest.raises(ConfigError, match="has no use"):
            refuse_script(*given)
    with pytest.raises(ConfigError, match="--script"):
        refuse_script("", [], None, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_session_and_saves_it(tmp_path: Path, number: int):
    (tmp_path / "a.jsonl").write_text('"four"\n')
    words = ("serve", "agent", "--script", "a.jsonl", "--out", "episodes.jsonl")
    running = start(*words, cwd=tmp_path, GRAFT_AGENT_TOKEN="chosen-token-1")
    try:
        printed = ""
        for _ in range(600):
            if "end with" in (printed := running.stdout) or running.poll() is not None:
                break
            time.sleep(0.1)
        url = printed.split("OPENAI_BASE_URL=")[1].split()[0]
        assert "token=chosen-token-1" in printed
        body = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
        done = post(f"{url}/chat/completions", "chosen-token-1", body)
        assert done["choices"][0]["message"]["content"] == "four"
        running.send_signal(number)
        assert running.wait(60).returncode == 130
    finally:
        running.kill()
    (line,) = (tmp_path / "episodes.jsonl").read_text().splitlines()
    (leaf,) = Episode.loads(line).leaves
    assert (leaf.status, leaf.metrics["agent/calls"]) == ("done", 1.0)
