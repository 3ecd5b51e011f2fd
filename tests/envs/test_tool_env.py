"""Calls inside text: what counts as one, what comes back, and what happens beyond the limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.envs.base import BaseEnv
from graft.envs.countdown import Countdown
from graft.envs.tooled import COMPACT, Call, CallStyle, ToolEnv, find_call, tagged
from graft.protocols import Env
from graft.tools.calculator import Calculator
from graft.types import Turn


class Echo:
    name = "echo"

    def __call__(self, content: str) -> str:
        return content


class Chat(BaseEnv):
    """Three turns of small talk; keeps what it was told."""

    max_turns = 3

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def pose(self) -> str:
        self.told = []
        return "Hello."

    def respond(self, action: str) -> Turn:
        self.told.append(action)
        return Turn("And?", info={"words": len(action.split())})


def chat(**options: Any) -> ToolEnv:
    env = ToolEnv(Chat(), [Calculator(), Echo()], **options)
    env.reset(0)
    return env


def test_a_call_is_answered_inline_and_never_reaches_the_inner_env():
    env = chat()
    assert isinstance(env, Env)
    assert env.stop == ("</calculator>", "</echo>")
    assert env.observe_as == "inline"
    turn = env.step("Let me see. <calculator>34*5</calculator>")
    assert turn.observation == "<result>170</result>"
    assert (turn.reward, turn.is_over) == (0.0, False)
    assert turn.info == {"tool": "calculator", "tool_ok": True, "tool_uses": 1}
    assert env.told == []


def test_a_text_without_a_call_is_the_inner_envs_and_says_how_its_answer_enters():
    env = chat()
    env.step("<echo>hi</echo>")
    turn = env.step("It is 170.")
    assert turn.observation == "And?"
    assert turn.info == {"words": 3, "tool_uses": 1, "observe_as": "user"}
    assert env.told == ["It is 170."]


def test_failed_calls_are_counted_and_marked():
    env = chat()
    assert env.step("<calculator>1/0</calculator>") == Turn(
        "<result>Error: division by zero</result>",
        info={"tool": "calculator", "tool_ok": False, "tool_uses": 1},
    )
    turn = env.step("oops</echo>")
    assert turn.observation == "<result>Error: </echo> without <echo></result>"
    assert turn.info == {"tool": "echo", "tool_ok": False, "tool_uses": 2}


def test_beyond_max_uses_calls_are_refused_and_the_policy_may_still_answer():
    env = chat(max_uses=1)
    assert env.max_turns == 5  # 3 of the inner env, 1 use, 1 refusal
    assert env.step("<echo>a</echo>").observation == "<result>a</result>"
    refused = env.step("<echo>b</echo>")
    assert refused.observation == tagged("echo").spent
    assert refused.info == {"tool": "echo", "tool_ok": False, "tool_uses": 2}
    assert env.step("so").observation == "And?"


def test_a_policy_that_only_calls_is_truncated():
    env = chat(max_uses=1)
    turns = [env.step("<echo>a</echo>") for _ in range(5)]
    assert [turn.truncated for turn in turns] == [False] * 4 + [True]
    assert not any(turn.terminated for turn in turns)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("<echo>a</echo>")


def test_without_max_uses_there_is_no_limit():
    env = chat(max_uses=None)
    assert env.max_turns is None
    assert all(env.step("<echo>a</echo>").info["tool_ok"] for _ in range(50))


def test_reset_starts_counting_anew():
    env = chat(max_uses=1)
    env.step("<echo>a</echo>")
    assert env.reset(1)[1] == {"seed": 1, "answer": None, "tool_uses": 0}
    assert env.step("<echo>a</echo>").info["tool_uses"] == 1


def test_a_fork_has_its_own_counters_and_the_same_tools():
    env = chat()
    env.step("<echo>a</echo>")
    twin = env.fork()
    twin.step("<echo>b</echo>")
    twin.step("hello")
    assert (env.tool_uses, twin.tool_uses) == (1, 2)
    assert (env.told, twin.told) == ([], ["hello"])
    assert twin.tools["echo"] is env.tools["echo"]


def test_instructions_stand_at_the_end_of_the_prompt_and_of_the_task():
    env = ToolEnv(Chat(), [Echo()], instructions="You may write <echo>...</echo>.")
    observation, _ = env.reset(0)
    assert observation == "Hello.\nYou may write <echo>...</echo>."
    assert env.task().prompt == ({"role": "user", "content": observation},)


def test_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="share a name"):
        ToolEnv(Chat(), [Echo(), Echo()])


def test_it_goes_around_any_env():
    env = ToolEnv(Countdown(tag="answer"), [Calculator()])
    env.reset(0)
    assert env.step("<calculator>90 - (13 + 19)</calculator>").observation == "<result>58</result>"
    turn = env.step("<answer>90 - (13 + 19)</answer>")
    assert (turn.reward, turn.terminated, turn.info["tool_uses"]) == (1.0, True, 1)


STYLES = {"calculator": COMPACT, "echo": CallStyle("{", "]", "{};")}


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("[34*5]", Call("calculator", "34*5")),
        ("so [34*5] \n", Call("calculator", "34*5")),
        ("[1][2]", Call("calculator", "2")),
        ("[[1]", Call("calculator", "1")),
        ("[]", Call("calculator", "")),
        ("{hi]", Call("echo", "hi")),
        ("[1 {hi]", Call("echo", "hi")),  # closes what was opened last
        ("12]", Call("calculator", None)),
        ("[34*5", None),
        ("[34*5] is 170", None),
        ("", None),
    ],
)
def test_a_turn_is_a_call_if_it_ends_with_a_close_string(action: str, call: Call | None):
    assert find_call(action, STYLES) == call


@given(st.text(max_size=30), st.text(max_size=30).filter(lambda text: "<t>" not in text))
def test_whatever_was_said_before_the_content_comes_back_whole(before: str, content: str):
    found = find_call(f"{before}<t>{content}</t>", {"t": tagged("t")})
    assert found == Call("t", content)


def test_a_small_alphabet_has_one_text_for_every_fault():
    assert COMPACT.render("170") == "170;"
    assert COMPACT.render("Error: division by zero") == "?;"
    assert tagged("t").render("{}") == "<result>{}</result>"
