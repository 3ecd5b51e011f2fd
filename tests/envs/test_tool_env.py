"""Calls inside text: what counts as one, what comes back, and what happens beyond the limit."""

from __future__ import annotations

import json
import random
from operator import ne
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
from graft.envs.base import BaseEnv, as_messages
from graft.envs.countdown import Countdown
from graft.envs.tool_env import ToolEnv, with_instructions
from graft.protocols import Env
from graft.text.chat import Chat as ChatTemplate
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.tools.calculator import Calculator
from graft.tools.formats import COMPACT, CallStyle, WrittenCall, find_call, tagged
from graft.types import Turn


class Echo:
    name = "echo"

    def __call__(self, content: str) -> str:
        return content


class Chat(BaseEnv):
    """Three turns; keeps the actions that it gets."""

    max_turns = 3

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[str] = []

    def pose(self) -> str:
        self.actions = []
        return "Hello."

    def respond(self, action: str) -> Turn:
        self.actions.append(action)
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
    assert env.actions == []


def test_a_text_without_a_call_goes_to_the_inner_env():
    env = chat()
    env.step("<echo>hi</echo>")
    turn = env.step("It is 170.")
    assert turn.observation == "And?"
    assert turn.info == {"words": 3, "tool_uses": 1, "observe_as": "user"}
    assert env.actions == ["It is 170."]


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
    wanted = {"tool": "echo", "tool_ok": False, "tool_uses": 2, "tool_refusals": 1}
    assert refused.info == wanted
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


def test_a_fork_has_its_own_counters_and_the_same_tools():
    env = chat()
    env.step("<echo>a</echo>")
    twin = env.fork()
    twin.step("<echo>b</echo>")
    twin.step("hello")
    assert (env.tool_uses, twin.tool_uses) == (1, 2)
    assert (env.actions, twin.actions) == ([], ["hello"])
    assert twin.tools["echo"] is env.tools["echo"]


@pytest.mark.parametrize(
    ("place", "prompt"), [("start", "You may echo.\n\nHello."), ("end", "Hello.\nYou may echo.")]
)
def test_instructions_stand_before_the_task_or_after_it(place: str, prompt: str):
    env = ToolEnv(Chat(), [Echo()], instructions="You may echo.", instructions_at=place)
    observation, _ = env.reset(0)
    assert observation == prompt
    assert env.task().prompt == ({"role": "user", "content": observation},)


def test_all_tasks_share_the_tokens_of_the_instructions():
    """What the forest computes once: the common prefix of two prompts."""
    rows = [{"prompt": "Who wrote Emma?", "answer": "a"}, {"prompt": "1 + 2 + 3?", "answer": "6"}]
    system = {"system": "You answer."}
    template = ChatTemplate(FastTokenizer.bytes(), TEMPLATES["chatml"])
    for args in ({}, system):
        shared: dict[str, int] = {}
        for place in ("start", "end"):
            inner = graft.make("prompts", rows=rows, **args)
            env = ToolEnv(inner, [Calculator()], instructions=None, instructions_at=place)
            first, second = (template.prompt(as_messages(env.reset(seed)[0])) for seed in (0, 1))
            shared[place] = [*map(ne, first, second), True].index(True)
        tokens = len(template.tokenizer.encode(env.instructions))
        assert shared["start"] >= tokens and shared["end"] < tokens


def test_it_goes_around_any_env():
    env = ToolEnv(Countdown(tag="answer"), [Calculator()])
    env.reset(0)
    (_, solution), *_ = env.demonstrate(random.Random(0))
    sum_ = solution.removeprefix("<answer>").removesuffix("</answer>")
    result = f"<result>{Calculator()(sum_)}</result>"
    assert env.step(f"<calculator>{sum_}</calculator>").observation == result
    turn = env.step(solution)
    assert (turn.reward, turn.terminated, turn.info["tool_uses"]) == (1.0, True, 1)


STYLES = {"calculator": COMPACT, "echo": CallStyle("{", "]", "{};")}


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("[34*5]", WrittenCall("calculator", "34*5")),
        ("so [34*5] \n", WrittenCall("calculator", "34*5")),
        ("[1][2]", WrittenCall("calculator", "2")),
        ("[[1]", WrittenCall("calculator", "1")),
        ("[]", WrittenCall("calculator", "")),
        ("{hi]", WrittenCall("echo", "hi")),
        ("[1 {hi]", WrittenCall("echo", "hi")),  # closes what was opened last
        ("12]", WrittenCall("calculator", None)),
        ("[34*5", None),
        ("[34*5] is 170", None),
        ("", None),
    ],
)
def test_a_turn_is_a_call_if_it_ends_with_a_close_string(action: str, call: WrittenCall | None):
    assert find_call(action, STYLES) == call


@given(st.text(max_size=30), st.text(max_size=30).filter(lambda text: "<t>" not in text))
def test_the_content_of_a_call_is_whole_whatever_the_text_before_it(before: str, content: str):
    found = find_call(f"{before}<t>{content}</t>", {"t": tagged("t")})
    assert found == WrittenCall("t", content)


def test_a_small_alphabet_has_one_text_for_every_fault():
    assert COMPACT.render("170") == "170;"
    assert COMPACT.render("Error: division by zero") == "?;"
    assert tagged("t").render("{}") == "<result>{}</result>"


def square(x: int) -> int:
    """x times x."""
    return x * x


class Memory:
    """A tool with state: all contents of its calls, in order."""

    name = "memory"
    blocking = True

    def __init__(self) -> None:
        self.contents: list[str] = []
        self.is_closed = False

    def __call__(self, content: str) -> str:
        self.contents.append(content)
        return " ".join(self.contents)

    def fork(self) -> Memory:
        twin = Memory()
        twin.contents = [*self.contents]
        return twin

    def reset(self) -> None:
        self.contents = []

    def close(self) -> None:
        self.is_closed = True

    def get_state(self) -> dict[str, Any]:
        return {"contents": [*self.contents]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.contents = [*state["contents"]]


def test_functions_and_names_are_tools_too():
    env = ToolEnv(Chat(), [square, "calculator"])
    env.reset(0)
    assert env.step("<square>12</square>").observation == "<result>144</result>"
    assert env.step("<calculator>2*3</calculator>").observation == "<result>6</result>"
    assert env.blocking  # a function may wait for something


def test_a_call_is_paid_and_a_success_more():
    env = chat(tool_reward=0.05, tool_success_reward=0.25, max_uses=3, max_tool_reward=1.0)
    rewards = [env.step(f"<calculator>{e}</calculator>").reward for e in ("1+1", "1/0", "2", "2")]
    assert rewards == [0.3, 0.05, 0.3, 0.0]  # the last one was refused


def test_an_error_reward_is_all_that_a_failed_call_earns():
    env = chat(tool_reward=0.05, tool_success_reward=0.25, tool_error_reward=-0.1)
    rewards = [env.step(f"<calculator>{e}</calculator>").reward for e in ("1+1", "1/0")]
    assert rewards == [0.3, -0.1]
    assert env.step("oops</echo>").reward == -0.1
    assert env.step("hello").reward == 0.0


def test_long_results_are_cut_with_a_note():
    env = chat(max_result=6)
    turn = env.step("<echo>0123456789</echo>")
    assert turn.observation == "<result>012\n[... 4 characters left out ...]\n789</result>"
    assert len(chat().step(f"<echo>{'x' * 1_000_000}</echo>").observation) < 10_100


def test_arpos_tags_give_the_result_on_lines_of_its_own():
    env = chat(format="arpo")
    turn = env.step("<think>hm</think> <calculator>34*5</calculator>")
    assert turn.observation == " <result>\n170\n</result>"
    assert (env.observe_as, env.stop) == ("inline", ("</calculator>", "</echo>"))


def test_in_gems_format_the_first_call_counts_and_the_rest_is_ignored():
    env = chat(format="gem", max_uses=2)
    assert (env.observe_as, env.stop) == ("tool", ("</calculator>", "</echo>"))
    turn = env.step("Let me see: ```calculator\n34*5\n```, so \\boxed{170} <echo>x</echo>")
    assert turn.observation == "170"
    assert turn.info == {
        "tool": "calculator",
        "tool_ok": True,
        "tool_uses": 1,
        "parsed_action": "Let me see: ```calculator\n34*5\n```",
    }
    last = env.step("<echo>x</echo>")
    assert last.observation == "x\nNo calls are left. Give the final answer."
    assert "parsed_action" not in last.info
    refused = env.step("<echo>y</echo>")
    assert refused.observation == "No calls are left. Give the final answer."
    assert env.actions == []  # a call after the limit is no move in the game
    assert env.step("170").info == {"words": 1, "tool_uses": 3, "observe_as": "user"}


def test_a_match_that_fails_is_not_lost_to_a_later_tool():
    env = chat(format="gem")
    turn = env.step("<calculator>1/0</calculator> <echo>x</echo>")
    assert (turn.observation, turn.info["tool"]) == ("Error: division by zero", "calculator")
    assert turn.info["tool_ok"] is False
    assert env.actions == []


def test_fenced_code_is_answered_by_a_message():
    env = chat(format="fenced")
    assert (env.observe_as, env.stop) == ("user", ())
    turn = env.step("First:\n```echo\nhi\n```\nand on.")
    assert (turn.observation, turn.info["parsed_action"]) == ("hi\n", "First:\n```echo\nhi\n```")
    assert env.step("```sh\nls\n```").observation == "And?"


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_json_calls_run_in_order_and_their_schemas_are_in_the_prompts_info():
    env = ToolEnv(Chat(), [Calculator(), square], format="hermes")
    observation, info = env.reset(0)
    assert observation == "Hello."
    assert [one["function"]["name"] for one in info["tools"]] == ["calculator", "square"]
    json.dumps(info)
    assert (env.observe_as, env.stop) == ("tool", ())
    turn = env.step(hermes("calculator", expression="34*5"))
    assert (turn.observation, turn.info["tool"]) == ("170", "calculator")
    both = env.step("so " + hermes("square", x=3) + hermes("calculator", expression="1/0"))
    assert both.observation == "9\nError: division by zero"
    assert both.info == {
        "tool": "square",
        "tool_ok": False,
        "tool_uses": 3,
        "tool_calls": 2,
        "tool_failures": 1,
        "tool_results": ["9", "Error: division by zero"],
        "tool_seconds": both.info["tool_seconds"],
    }


def test_json_calls_that_make_no_sense_are_answered():
    env = ToolEnv(Chat(), [Calculator(), square], format="hermes")
    env.reset(0)
    turn = env.step(hermes("calculater", expression="1"))
    assert turn.observation == "Error: there is no tool 'calculater'; known: calculator, square"
    assert (turn.info["tool"], turn.info["tool_ok"]) == ("unknown", False)
    assert "not valid JSON" in env.step("<tool_call>{</tool_call>").observation
    assert env.step(hermes("square")).observation == "Error: x: Field required"
    assert env.step('<tool_call>{"name": "square"').observation == "And?"  # never closed: no call


def test_a_flood_of_calls_in_one_message_is_answered_once():
    env = ToolEnv(Chat(), [square], format="hermes", max_uses=None)
    env.reset(0)
    turn = env.step(hermes("square", x=3) * 20)
    assert turn.observation == "9\n" * 16 + "Error: 4 calls were left out: too many at once"
    assert turn.info["tool_uses"] == 16


def test_gems_mcp_form_lists_the_tools_in_the_prompt():
    env = ToolEnv(Chat(), [square], format="mcp", instructions=None)
    observation, info = env.reset(0)
    assert '"name": "square"' in observation and "<tool_name>name</tool_name>" in observation
    assert "tools" not in info
    call = "<tool_call><tool_name>square</tool_name><arguments>{}</arguments></tool_call>"
    turn = env.step(f"{call.replace('{}', json.dumps({'x': 4}))} {call}")
    assert (turn.observation, turn.info["tool_uses"]) == ("16", 1)


def test_instructions_can_be_written_from_the_tools():
    env = ToolEnv(Chat(), [Calculator()], instructions=None, max_uses=2)
    assert env.reset(0)[0] == (
        "You may use tools; the result of a call is shown to you before you go on. "
        "At most 2 calls in all.\n- calculator: Works out an arithmetic expression with + - * / and "
        "parentheses. Write <calculator>...</calculator>.\n\nHello."
    )


class Board(Chat):
    def pose(self) -> str:
        super().pose()
        return "Rules.\nBoard."

    def margins(self) -> dict[str, Any]:
        return {"suffix": "Board."}


def test_instructions_show_a_call_with_several_arguments():
    def mix(size: int | None, unit: Literal["g", "kg"], what: list[str] = []) -> str:  # noqa: B006
        """Mix."""
        return f"{size}{unit}{what}"

    written = ToolEnv(Chat(), [mix, square, Echo()], instructions=None).instructions.split("\n")[1:]
    assert written[0] == (
        '- mix: Mix. Write <mix>...</mix>. Inside, as JSON: {"size": integer or null, '
        '"unit": "g" or "kg", "what": array}.'
    )
    assert written[1].endswith('Write <square>...</square>. Inside, as JSON: {"x": integer}.')
    assert written[2].endswith("Write <echo>...</echo>.")


def test_instructions_come_before_a_board_which_stays_the_end():
    whole = {"start": "Tools.\n\nRules.\nBoard.", "end": "Rules.\nTools.\nBoard."}
    for place, prompt in whole.items():
        env = ToolEnv(Board(), [Echo()], instructions="Tools.", instructions_at=place)
        observation, info = env.reset(0)
        assert observation == prompt
        assert observation.endswith(info["suffix"])
        assert env.task().prompt[0]["content"] == observation
    messages = [{"role": "system", "content": "S."}, {"role": "user", "content": "R.\nB."}]
    assert with_instructions(messages, "T.", "B.", "end")[1]["content"] == "R.\nT.\nB."
    assert with_instructions(messages, "T.", "B.")[1]["content"] == "T.\n\nR.\nB."
    parts = [{"role": "user", "content": [{"type": "text", "text": "R."}]}]
    for place, texts in {"start": ["T.\n\n", "R."], "end": ["R.", "\nT."]}.items():
        [message] = with_instructions(parts, "T.", at=place)
        assert [part["text"] for part in message["content"]] == texts


def test_state_of_tools_is_forked_reset_saved_and_closed_with_the_env():
    env = ToolEnv(Chat(), [Memory()])
    env.reset(0)
    env.step("<memory>a</memory>")
    twin = env.fork()
    assert twin.step("<memory>b</memory>").observation == "<result>a b</result>"
    assert env.step("<memory>c</memory>").observation == "<result>a c</result>"
    state = json.loads(json.dumps(twin.get_state()))
    other = ToolEnv(Chat(), [Memory()])
    other.set_state(state)
    assert other.step("<memory>d</memory>").observation == "<result>a b d</result>"
    env.reset(1)
    assert env.step("<memory>e</memory>").observation == "<result>e</result>"
    twin.close()
    assert twin.tools["memory"].is_closed and not env.tools["memory"].is_closed


def test_waiting_is_measured_where_a_tool_waits():
    env = ToolEnv(Chat(), [Memory(), Echo()])
    env.reset(0)
    assert env.step("<memory>a</memory>").info["tool_seconds"] >= 0.0
    assert "tool_seconds" not in env.step("<echo>a</echo>").info


def test_counters_are_per_tool_and_have_gems_names():
    env = ToolEnv(Chat(), [Calculator(), Echo()], counters=True, max_uses=3)
    _, info = env.reset(0)
    assert info["use_tool"] is False
    assert (info["tool_use_counter"], info["prev_ep_tool_use_counter"]) == (0, 0)
    first = env.step("<calculator>1/0</calculator>").info
    assert (first["tool_use_counter"], first["tool_success_counter"]) == (1, 0)
    assert (first["use_tool"], first["tool_type"]) == (True, "calculator")
    assert first["parsed_action"] == "<calculator>1/0</calculator>"
    env.step("<calculator>1</calculator>")
    assert env.step("hm").info["use_tool"] is False
    assert env.step("hm").info["tools/echo/calls"] == 0
    end = env.step("hm")
    assert end.truncated
    assert {name: end.info[name] for name in end.info if name.startswith("tools/")} == {
        "tools/calculator/calls": 2,
        "tools/calculator/failures": 1,
        "tools/echo/calls": 0,
        "tools/echo/failures": 0,
    }
    again = env.reset(1)[1]
    assert (again["tool_use_counter"], again["prev_ep_tool_use_counter"]) == (0, 2)
    assert again["prev_ep_tool_success_counter"] == 1


def test_tools_around_tools_are_counted_together():
    inner = ToolEnv(Chat(), [Echo()], format="gem", counters=True)
    env = ToolEnv(inner, ["calculator"], format="gem", counters=True, max_uses=1)
    env.reset(0)
    first = env.step("<echo>1</echo>").info
    assert (first["tool"], first["tool_uses"], first["use_tool"]) == ("echo", 1, True)
    second = env.step("<calculator>1/0</calculator>").info
    assert (second["tool_uses"], second["tool_use_counter"]) == (2, 2)
    assert second["tool_success_counter"] == 1
    while not (turn := env.step("<calculator>1</calculator>")).is_over:
        pass
    assert turn.truncated and turn.info["tools/echo/calls"] == 1
    assert turn.info["tools/calculator/failures"] == 1
    again = env.reset(0)[1]
    assert (again["prev_ep_tool_use_counter"], again["tool_use_counter"]) == (2, 0)


def test_a_turn_limit_drawn_with_the_instance_is_followed():
    env = ToolEnv(Chat(), [Echo()], max_uses=2)
    env.env.max_turns = 5
    assert env.max_turns == 8
    env.env.max_turns = None
    assert env.max_turns is None


def test_mistakes_of_the_caller_are_refused():
    for options, said in (
        ({"max_uses": -1}, "max_uses=-1"),
        ({"max_result": 0}, "max_result=0"),
        ({"styles": {"eco": COMPACT}}, r"'eco'.*\['echo'\]"),
        ({"format": "hermess"}, "'hermess'.*'hermes'"),
        ({"instructions_at": "top"}, "instructions_at='top'"),
    ):
        with pytest.raises(ValueError, match=said):
            ToolEnv(Chat(), [Echo()], **options)
    with pytest.raises(ValueError, match="name of another tool"):
        ToolEnv(Chat(), [Echo(), Echo()])


TAGS = ["<echo>", "</echo>", "<tool_call>", "</tool_call>", "<tool_name>echo</tool_name>"]
HUGE = ["x" * 1_000_000, "<echo>" * 100_000, "<tool_call>" * 50_000, "```echo\n" * 100_000]
CALL = '{"name": "echo", "arguments": {"content": "é"}}'
PIECES = st.sampled_from(
    [*TAGS, *HUGE, CALL, "<arguments>", "</arguments>", "```echo\n", "```", "\x00", "9**9**9"]
)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(PIECES | st.text(max_size=6), max_size=8).map("".join),
    st.sampled_from(["tags", "arpo", "gem", "fenced", "hermes", "mcp", "actions"]),
)
def test_no_action_makes_a_format_raise_or_answer_without_end(action: str, format: str):
    env = ToolEnv(Chat(), [Echo()], format=format, max_uses=1)
    env.reset(0)
    while not (turn := env.step(action)).is_over:
        assert len(turn.observation) < 12_000
        json.dumps(turn.info)
