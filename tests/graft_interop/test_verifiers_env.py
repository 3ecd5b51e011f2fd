"""A verifiers env as a graft env: real package, real servers on the loopback interface."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from graft_interop.messages import added, as_assistant
from graft_interop.model_server import ModelRequest, ModelServer
from graft_interop.verifiers import VerifiersEnv

pytestmark = [
    pytest.mark.peer,
    pytest.mark.usefixtures("vf"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def env(vf) -> Iterator[VerifiersEnv]:
    made = VerifiersEnv("toy-taskset", timeout=60)
    yield made
    made.close()


def test_a_single_turn_is_scored_by_the_rubric(env: VerifiersEnv):
    messages, info = env.reset(seed=0)
    assert [message["role"] for message in messages] == ["system", "user"]
    prompts = {"1+2=": 3, "3+4=": 7, "5+6=": 11}
    assert info["answer"] == prompts[messages[1]["content"]]
    turn = env.step(str(info["answer"]))
    assert (turn.reward, turn.terminated, turn.truncated) == (1.0, True, False)
    assert turn.info["rewards"] == {"correct": 1.0, "polite": 0.0}
    assert turn.info["metrics"] == {"turns": 1.0}
    assert env.reset(seed=0)[0] == messages
    assert env.step("please").reward == pytest.approx(0.1)


def test_a_tool_call_is_answered_and_the_episode_goes_on(env: VerifiersEnv):
    _, info = env.reset(seed=1)
    assert info["tools"][0]["function"]["name"] == "add"
    turn = env.step('<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>')
    assert (turn.observation, turn.is_over) == ("23", False)
    assert turn.info["observe_as"] == "tool"
    assert turn.info["messages"][0]["role"] == "tool"
    turn = env.step(str(info["answer"]))
    assert turn.terminated and turn.reward == 1.0 and turn.info["metrics"] == {"turns": 2.0}


def test_bad_calls_and_odd_texts_are_just_answers(env: VerifiersEnv):
    for text in ("", "<tool_call>{</tool_call>", "é\x00" * 1000, "<tool_call>[1]</tool_call>"):
        env.reset(seed=2)
        turn = env.step(text)
        assert turn.is_over and turn.reward == 0.0
        json.dumps(turn.info, allow_nan=False)


def test_an_unfinished_episode_is_broken_off_by_the_next(env: VerifiersEnv):
    first = env.reset(seed=0)[0]
    for seed in (3, 4, 0):
        messages, info = env.reset(seed=seed)
    assert messages == first
    assert env.step(str(info["answer"])).reward == 1.0


def test_state_is_the_seed_and_the_actions(env: VerifiersEnv):
    env.reset(seed=1)
    env.step('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>')
    state = json.loads(json.dumps(env.get_state()))
    env.reset(seed=5)
    env.set_state(state)
    assert env.turns == 1 and env.step(str(env.answer)).info["metrics"] == {"turns": 2.0}


def test_a_dialogue_that_the_env_leads_comes_as_user_turns():
    env = VerifiersEnv("toy-dialogue", timeout=60)
    messages, _ = env.reset(seed=0)
    assert messages[-1]["role"] == "user"
    hints: list[str] = []
    for guess in ("5", "2", "3"):
        turn = env.step(guess)
        hints.append(turn.observation)
        if not turn.is_over:
            assert turn.info["observe_as"] == "user"
    assert hints == ["lower", "higher", ""]
    assert turn.terminated and turn.info["rewards"]["game"] == 1.0
    env.close()


def test_an_env_object_with_a_limit_of_its_own_is_truncated(vf):
    config = {
        "taskset": {"id": "toy-taskset"},
        "agent": {"runtime": {"type": "subprocess"}, "max_turns": 1},
    }
    made = vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate(config))
    env = VerifiersEnv(made, timeout=60)
    env.reset(seed=0)
    turn = env.step('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>')
    assert turn.truncated and turn.info["stop"] == "max_turns"
    env.close()


@pytest.fixture(scope="module")
def team(vf) -> Iterator[VerifiersEnv]:
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "toy-team"}}
    config = {"taskset": {"id": "toy-team"}, "agent": agent}
    made = VerifiersEnv(
        vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate(config)), timeout=60
    )
    yield made
    made.close()


def test_a_request_that_does_not_go_on_is_a_prompt_of_its_own(team: VerifiersEnv):
    """A helper's question, and the conversation after it, must not be appended to each other."""
    messages, info = team.reset(seed=0)
    turn = team.step("on")
    assert (turn.observation, turn.info["observe_as"]) == ("Go on.", "user")
    turn = team.step("delegate")
    assert turn.info["observe_as"] == "messages"
    assert [one["content"] for one in turn.info["messages"]] == ["Help.", "20+3="]
    assert [tool["function"]["name"] for tool in turn.info["tools"]] == ["add"]
    turn = team.step("23")  # the helper's answer: the main conversation is back, as a whole
    assert turn.info["observe_as"] == "messages" and turn.info["tools"] == []
    contents = [one["content"] for one in turn.info["messages"]]
    opening = [one["content"] for one in messages]
    assert contents == [*opening, "on", "Go on.", "delegate", "The helper says 23."]
    turn = team.step("on")  # from here it goes on
    assert (turn.observation, turn.info["observe_as"]) == ("Go on.", "user")
    turn = team.step("compact")
    assert turn.info["observe_as"] == "messages"
    assert turn.observation.endswith("So far 9 messages. " + str(messages[1]["content"]))
    turn = team.step("both")  # two messages at once are no turn that can be appended
    assert turn.info["observe_as"] == "messages"
    assert [one["role"] for one in turn.info["messages"]][-3:] == ["assistant", "user", "user"]
    turn = team.step(str(info["answer"]))
    assert turn.terminated and turn.reward == 1.0


def test_an_agent_that_is_fixed_does_not_call_the_policy():
    """verifiers' judges fall back to the run's model: the policy would be trained as a judge."""
    from toy_team import TeamConfig, TeamEnv

    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "toy-team"}}
    config = {"taskset": {"id": "toy-team"}, "player": agent, "judge": agent}
    env = VerifiersEnv(TeamEnv(TeamConfig.model_validate(config)), timeout=60)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"agent 'judge' is not trainable.*judge=.model:"):
        env.step("3")
    env.close()


PROMPT = [{"role": "user", "content": "20+3?"}]
ANSWER = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>'
ADD: Any = {"type": "function", "function": {"name": "add"}}
TOOL_RESULT = {"role": "tool", "content": "23", "tool_call_id": "x"}


def call_of(arguments: str, content: str | None) -> dict[str, Any]:
    calls = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize(
    ("messages", "fresh"),
    [
        ([*PROMPT, call_of('{"a": 20, "b": 3}', "So:"), TOOL_RESULT], [TOOL_RESULT]),
        (
            [*PROMPT, call_of('{"b":3,"a":20}', None), TOOL_RESULT, TOOL_RESULT],
            [TOOL_RESULT, TOOL_RESULT],
        ),
        ([*PROMPT, call_of('{"a": 20, "b": 3}', "So: \n"), PROMPT[0]], PROMPT),
        ([*PROMPT, call_of('{"a": 20, "b": 4}', "So:"), TOOL_RESULT], None),  # another call
        ([*PROMPT, call_of('{"a": 20, "b": 3}', "Hm:"), TOOL_RESULT], None),  # another text
        ([*PROMPT, call_of('{"a": 20, "b": 3}', "So:")], None),  # nothing new
        (
            [*PROMPT, call_of('{"a": 20, "b": 3}', "So:"), TOOL_RESULT, PROMPT[0]],
            None,
        ),  # two kinds at once
        (
            [
                {"role": "user", "content": "20+4?"},
                call_of('{"a": 20, "b": 3}', "So:"),
                TOOL_RESULT,
            ],
            None,
        ),
        ([{"role": "system", "content": "!"}, *PROMPT, call_of("{}", "So:"), TOOL_RESULT], None),
        (PROMPT, None),
    ],
)
def test_what_goes_on_from_an_answer(messages: list[Any], fresh: list[Any] | None):
    request = ModelRequest({"messages": PROMPT, "tools": [ADD]})
    answer = as_assistant(f"So: {ANSWER}", "hermes", request)
    assert answer["content"] == "So:"  # the call is not repeated
    assert added(request, answer, ModelRequest({"messages": messages, "tools": [ADD]})) == fresh
    assert added(request, answer, ModelRequest({"messages": messages, "tools": []})) is None


def post(url: str, body: bytes) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    connection.request("POST", f"{parts.path}/chat/completions", body)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def test_the_model_server_streams_and_refuses():
    import threading

    server = ModelServer(timeout=30)
    results: list[Any] = []
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    caller = threading.Thread(target=lambda: results.append(post(server.url, body)))
    caller.start()
    request = server.requests.get(timeout=30)
    assert request.messages[0]["content"] == "hi"
    request.answer({"role": "assistant", "content": "ho"})
    caller.join()
    status, text = results[0]
    events = [line[6:] for line in text.split("\n\n") if line]
    assert status == 200 and events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"]["content"] == "ho"
    assert post(server.url, b"{")[0] == 400
    address = server.url.partition("/v1")[0]
    assert post(f"{address.rpartition('/')[0]}/guess/v1", body)[0] == 401
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    path = f"{urlsplit(server.url).path}/chat/completions"
    connection.request("POST", path, headers={"Content-Length": "999999999"})
    reply = connection.getresponse()
    assert reply.status == 413 and reply.read()
    connection.request("POST", path, b"{}", headers={"Origin": "http://evil.example"})
    assert connection.getresponse().status == 403
    connection.close()
    impatient = ModelServer(timeout=0.01)
    assert post(impatient.url, b"{}")[0] == 503
    for one in (server, impatient):
        one.close()
