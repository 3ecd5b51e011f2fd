"""graft's environments in verifiers: the real package runs the episode, a local server is the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graft.envs import make
from graft_interop.model_server import ModelServer
from graft_interop.verifiers import context, load
from graft_interop.verifiers_taskset import as_answers, as_written, taskset

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.usefixtures("vf"),
    pytest.mark.filterwarnings("ignore"),
]
GUESS = "game:GuessTheNumber-v0"
EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
Policy = Callable[[list[Any]], str]


def run_episode(env: Any, task: Any, policy: Policy) -> tuple[Any, list[list[Any]]]:
    """An episode of verifiers with `policy` as its model: the trace, and the requests."""
    server, requests = ModelServer(timeout=60), []

    def answer() -> None:
        while (request := server.requests.get()) is not None:
            requests.append(request.messages)
            request.answer({"role": "assistant", "content": policy(request.messages)})

    async def run() -> Any:
        async with env.serving():
            return await env.run_episode(task, context(server.url))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        episode = asyncio.run(run())
    finally:
        server.requests.put(None)  # type: ignore[arg-type]
        thread.join()
        server.close()
    (trace,) = episode.traces
    return trace, requests


def test_an_episode_in_verifiers_is_an_episode_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    env = load("guess-number")
    tasks = list(env.taskset.take(3))
    assert [task.data.seed for task in tasks] == [0, 1, 2]
    plain = make(GUESS, wrappers={"tools": {"use": "calculator", "format": "gem"}})
    observation, info = plain.reset(1)
    wrong, right = (f"\\boxed{{{info['answer'] - down}}}" for down in (1, 0))
    texts = [wrong, "<calculator>2+3</calculator> is", right]
    trace, requests = run_episode(env, tasks[1], lambda messages: texts[len(messages) // 2])
    assert tasks[1].data.prompt == observation
    assert [message["content"] for message in requests[0]] == [observation]
    assert requests[2][1:] == [
        {"role": "assistant", "content": wrong},
        {"role": "user", "content": plain.step(wrong).observation},
        {"role": "assistant", "content": texts[1]},
        {"role": "user", "content": "5"},
    ]
    assert trace.ok and trace.reward == 1.0 and trace.num_turns == 3
    assert trace.info["graft"] == {"reward": 1.0, "rewards": [0.0, 0.0, 1.0]}
    assert trace.metrics["turns"] == 3.0 and trace.num_branches == 1


def test_a_rewritten_history_is_a_branch_and_verifiers_limits_hold(
    vf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    text = (
        f'from {taskset.__module__} import taskset\nT, H = taskset("{GUESS}", wrappers="concat")\n'
    )
    (tmp_path / "guess_history.py").write_text(text + '__all__ = ["H", "T"]\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    hidden = make(GUESS).reset(1)[1]["answer"]
    texts = iter([f"\\boxed{{{hidden - 1}}}", f"\\boxed{{{hidden}}}", "\\boxed{21}"])
    env = load("guess-history")
    trace, requests = run_episode(env, list(env.taskset.take(2))[1], lambda messages: next(texts))
    assert [len(messages) for messages in requests] == [1, 1]
    assert trace.reward == 1.0 and trace.num_branches == 2
    agent = {"runtime": {"type": "subprocess"}, "max_turns": 1}
    config = {"taskset": {"id": "guess-history"}, "agent": agent}
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate(config))
    trace, _ = run_episode(env, list(env.taskset.take(2))[1], lambda messages: next(texts))
    assert trace.ok and trace.stop_condition == "max_turns" and trace.reward == 0.0


def test_the_text_of_a_reply_is_what_the_policy_wrote():
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply = {"role": "assistant", "content": "So:", "tool_calls": [call]}
    written = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert as_written(reply) == written
    result = {"role": "tool", "content": "5"}
    assert as_answers([result], reply) == [{**result, "tool_call_id": "a"}]
    assert as_answers([result], {"role": "assistant", "content": "<add>"}) == [
        {"role": "user", "content": "5"}
    ]
