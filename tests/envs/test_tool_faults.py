"""Calls that go wrong in ARPO's tags: what the policy reads, and what is counted."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from graft.envs.base import BaseEnv
from graft.envs.tool_env import ToolEnv
from graft.envs.wrappers import wrap
from graft.tools import calling, make_tools
from graft.tools.calling import call_tool
from graft.tools.errors import ToolError
from graft.types import Turn
from graft_envs.code.python_tool import PythonTool
from graft_search import SearchTool


class Talk(BaseEnv):
    """Goes on until it gets an answer."""

    max_turns = 50

    def pose(self) -> str:
        return "Well?"

    def respond(self, action: str) -> Turn:
        return Turn("Go on.", terminated="<answer>" in action)


def repeat(text: str) -> str:
    """Say it again."""
    return text


def now() -> str:
    """The time."""
    return "noon"


def tooled(*tools: Any, **options: Any) -> ToolEnv:
    env = ToolEnv(Talk(), list(tools), **{"format": "arpo", "counters": True, **options})
    env.reset(0)
    return env


def numbers(turn: Turn) -> dict[str, float]:
    """Counters without seconds, which differ from run to run."""
    found = {n: v for n, v in turn.info.items() if n.startswith("tools/")}
    return {n.removeprefix("tools/"): v for n, v in found.items() if not n.endswith("/seconds")}


def inline(text: str) -> str:
    return f" <result>\n{text}\n</result>"


def test_python_and_search_share_one_limit():
    env = tooled("python", {"search": {"corpus": "small"}}, max_uses=3)
    calls = ["<python>1</python>", "<search>Lima</search>", "<python>2</python>"]
    assert all(env.step(call).info["tool_ok"] for call in calls)
    for call in ("<search>Bern</search>", "<python>3</python>"):
        assert env.step(call).observation == inline("No calls are left. Give the final answer.")
    assert numbers(env.step("so")) == {
        "python/calls": 2,
        "python/failures": 0,
        "search/calls": 1,
        "search/failures": 0,
        "refused": 2,
    }


def test_the_limit_is_written_into_the_prompt_its_default_too():
    env = wrap(Talk(), [{"tools": {"use": ["calculator"], "format": "arpo"}}])
    assert "At most 10 calls in all." in env.reset(0)[0]
    assert env.max_uses == 10


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("<search></search>", "Error: empty query; write it inside the call"),
        ("<search> \n </search>", "Error: empty query; write it inside the call"),
        ("<python></python>", "Error: empty code; write it inside the call"),
    ],
)
def test_an_empty_call_is_a_failed_one(call: str, result: str):
    env = tooled(PythonTool(), SearchTool(corpus="small"))
    turn = env.step(call)
    name = turn.info["tool"]
    assert (turn.observation, turn.info["tool_ok"]) == (inline(result), False)
    assert (numbers(turn)[f"{name}/calls"], numbers(turn)[f"{name}/failures"]) == (1, 1)
    assert not turn.is_over


def test_a_tool_that_states_no_need_may_be_called_with_nothing():
    class Bell:
        name = "bell"

        def __call__(self, content: str) -> str:
            return f"ding{content}"

    assert tooled(now).step("<now></now>").observation == inline("noon")
    assert tooled(Bell()).step("<bell></bell>").observation == inline("ding")


def test_code_without_output_is_a_plain_result():
    turn = tooled("python").step("<python>x = 1</python>")
    assert (turn.observation, turn.info["tool_ok"]) == (inline("(no output)"), True)


def test_a_close_tag_without_an_open_one_is_answered_and_counted():
    env = tooled(repeat)
    turn = env.step("so</repeat>")
    assert turn.observation == inline("Error: </repeat> without <repeat>")
    assert numbers(turn) == {"repeat/calls": 1, "repeat/failures": 1, "malformed": 1}
    assert numbers(env.step("</repeat>"))["malformed"] == 2


def test_json_that_cannot_be_read_is_malformed_too():
    env = tooled(repeat, format="hermes")
    turn = env.step("<tool_call>{</tool_call>")
    assert (turn.info["tool_ok"], numbers(turn)["malformed"]) == (False, 1)


def test_results_that_the_policy_writes_itself_are_counted_and_change_nothing():
    env = tooled(repeat)
    turn = env.step("<repeat>a</repeat> <result>\nb\n</result> <repeat>c</repeat>")
    assert turn.observation == inline("c")  # the last call is the one that was made
    assert numbers(turn)["invented"] == 1
    turn = env.step("<result>1</result><result>2</result> <answer>2</answer>")
    assert turn.terminated and numbers(turn)["invented"] == 3


def test_where_results_have_no_mark_none_can_be_invented():
    assert "invented" not in numbers(tooled(repeat, format="gem").step("<result>1</result> hm"))


def test_tools_around_tools_count_each_fault_once():
    inner = ToolEnv(Talk(), [repeat], format="arpo", counters=True)
    env = ToolEnv(inner, [now], format="arpo", counters=True, max_uses=0)
    env.reset(0)
    env.step("<result> so</repeat>")
    turn = env.step("<now></now>")
    assert numbers(turn) == {
        "repeat/calls": 1,
        "repeat/failures": 1,
        "now/calls": 0,
        "now/failures": 0,
        "malformed": 1,
        "invented": 1,
        "refused": 1,
    }


def test_counters_are_on_every_turn_and_begin_anew_with_an_episode():
    env = tooled(repeat, max_uses=1)
    seen = [env.step(text) for text in ("<repeat>a</repeat>", "hm", "<repeat>b</repeat>", "hm")]
    assert [numbers(turn).get("repeat/calls") for turn in seen] == [1, 1, 1, 1]
    assert [numbers(turn).get("refused") for turn in seen] == [None, None, 1, 1]
    env.reset(1)
    assert numbers(env.step("hm")) == {"repeat/calls": 0, "repeat/failures": 0}


def test_a_fork_counts_on_from_where_its_parent_stood_and_leaves_it_alone():
    env = tooled(repeat, max_uses=1)
    env.step("<repeat>a</repeat>")
    env.step("<result> </repeat>")
    twin = env.fork()
    faults = {"repeat/calls": 1, "repeat/failures": 0, "invented": 1, "refused": 1}
    assert numbers(twin.step("<repeat>b</repeat>")) == {**faults, "refused": 2}
    assert numbers(env.step("hm")) == faults
    other = tooled(repeat, max_uses=1)
    other.set_state(json.loads(json.dumps(twin.get_state())))
    assert numbers(other.step("hm")) == {**faults, "refused": 2}


def test_a_limit_of_0_refuses_every_call():
    env = tooled(repeat, max_uses=0)
    turn = env.step("<repeat>a</repeat>")
    assert turn.observation == inline("No calls are left. Give the final answer.")
    assert numbers(turn) == {"repeat/calls": 0, "repeat/failures": 0, "refused": 1}
    assert env.step("<answer>1</answer>").terminated


def test_half_characters_and_megabytes_never_reach_the_context():
    class Strange:
        name = "strange"
        answer = "a\udcffb"

        def __call__(self, content: str) -> str:
            return self.answer

    env = tooled(Strange())
    assert env.step("<strange>x</strange>").observation == inline("a?b")
    Strange.answer = "\udcff" * 10_000_000
    assert len(env.step("<strange>x</strange>").observation) < 10_100
    whole = tooled(Strange(), max_result=None).step("<strange>x</strange>")
    assert 1_000_000 < len(whole.observation) < 1_000_100


def test_what_a_tool_raises_is_a_tool_error_that_names_it():
    class Leaving:
        name = "leaving"

        def __call__(self, content: str) -> str:
            raise SystemExit(f"no {content}")

    with pytest.raises(ToolError, match="tool 'leaving' failed: SystemExit: no x"):
        tooled(Leaving()).step("<leaving>x</leaving>")
    (quiet,) = make_tools([repeat])
    assert call_tool(quiet, "x") == "x"


def test_no_more_calls_are_made_while_too_many_run_that_were_given_up(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(calling, "MAX_GIVEN_UP", 2)
    opened = threading.Event()

    class Hanging:
        name = "hanging"

        def __call__(self, content: str) -> str:
            opened.wait()
            return content

    class Errand(threading.Thread):
        is_given_up = False

    errands = [Errand(target=call_tool, args=(Hanging(), "x"), daemon=True) for _ in range(2)]
    for errand in errands:
        errand.start()
    while len(calling._running.get((Hanging, "hanging"), ())) < 2:
        pass
    errands[0].is_given_up = True  # one of two: calls are still made
    opened.set()
    assert call_tool(Hanging(), "y") == "y"
    for errand in errands:
        errand.join()
    opened.clear()
    again = [Errand(target=call_tool, args=(Hanging(), "x"), daemon=True) for _ in range(2)]
    for errand in again:
        errand.is_given_up = True
        errand.start()
    while len(calling._running[(Hanging, "hanging")]) < 2:
        pass
    with pytest.raises(
        ToolError, match="2 calls of tool 'hanging' were abandoned at their deadline"
    ):
        call_tool(Hanging(), "y")
    assert call_tool(make_tools([repeat])[0], "x") == "x"
    opened.set()
    for errand in again:
        errand.join()
    assert call_tool(Hanging(), "y") == "y"
