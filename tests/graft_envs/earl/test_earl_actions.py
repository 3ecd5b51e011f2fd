"""Calls by actions: the calculator tasks and the toy calculator take a `CallText` and nothing else."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.actions.actions import load_actions
from graft.envs import make
from graft.envs.arithmetic import Arithmetic
from graft.envs.base import Trace
from graft.envs.tool_env import ToolEnv
from graft.text.tokenizer import FastTokenizer
from graft.tools.calculator import Calculator, evaluate, keys_of
from graft.types import Author, CallText, Turn
from graft_envs.earl.calc import TASKS
from tests.graft_envs.earl.earl_rows_kit import follow

DRAWN = [name for name in TASKS if name != "calc-gsm8k"]
DIGIT = "earl:arithmetic-digit"
syntaxes = pytest.mark.parametrize("syntax", ["tags", "actions"])


def call(expression: str) -> CallText:
    return CallText(f" calculate {expression} =", "calculator", keys_of(expression))


def calls_of(trace: Trace) -> list[CallText]:
    return [text for _, text in trace if isinstance(text, CallText)]


def test_a_tool_answers_actions_with_the_bare_result():
    env = ToolEnv(Arithmetic(), [Calculator()], format="actions", max_uses=2, instructions=None)
    prompt, _ = env.reset(0)
    assert "Write its keyword" in str(prompt)
    assert (env.stop, env.observe_as) == ((), "inline")
    turn = env.step(CallText("I calculate (12 + 6) / 4 =", "calculator", (*"(12+6)/4",)))
    assert turn == Turn("4.500", info={"tool": "calculator", "tool_ok": True, "tool_uses": 1})
    other = env.step(CallText("", "compare", ("A", "B")))
    assert other.observation == "Error: there is no tool 'compare'; known: calculator"
    assert env.step(call("1 + 1")).observation == "No calls are left. Give the final answer."
    assert env.step("calculate 1 + 1 =").terminated  # text is never a call


def test_the_chat_names_the_keyword_and_answers_bare():
    env = make(DIGIT, syntax="actions")
    system = env.reset(0)[0][0]["content"]
    assert "keyword calculate" in system and "calculate (12 + 6) / 3 = 6" in system
    assert "<calculator>" not in system
    assert (env.stop, env.observe_as) == ((), "inline")
    assert env.step(call("(12 + 6) / 3")).observation == "6"
    turn = env.step(call("1 / 0"))
    assert turn.observation == "Error: division by zero"
    assert turn.info == {"tool": "calculator", "tool_ok": False, "tool_uses": 2}
    assert env.step("<calculator> 1 + 1 </calculator>").terminated


@syntaxes
def test_without_the_tool_a_call_is_an_answer(syntax: str):
    env = make("earl:countdown-1", syntax=syntax, tool=False)
    assert "calculat" not in str(env.reset(0)[0])
    assert env.stop == ()
    for action in (call("1 + 1"), "<calculator> 1 + 1 </calculator>"):
        assert env.fork().step(action).terminated


def test_count_has_the_tool_but_no_hint():
    for syntax, action, shown in (
        ("actions", call("2 * 3"), "6"),
        ("tags", "<calculator> 2 * 3 </calculator>", " <result> 6 </result>"),
    ):
        env = make("earl:calc-count", syntax=syntax)
        assert "calculat" not in str(env.reset(0)[0])
        assert env.step(action).observation == shown


@syntaxes
def test_both_syntaxes_pose_the_same_questions(syntax: str):
    tags, other = make(DIGIT), make(DIGIT, syntax=syntax)
    for seed in range(5):
        assert tags.reset(seed)[0][1] == other.reset(seed)[0][1]


def test_bare_results_are_read_as_numbers_of_their_own():
    env = make(DIGIT, syntax="actions")
    env.reset(0)
    right = env.unwrapped.answer
    env.step(call(env.unwrapped.current.expression))
    assert env.fork().step("").reward == 1.0  # the result is the last number of the response
    assert env.fork().step("99 is not it.").reward == 0.0  # and not the head of a longer one
    env.step(CallText("no equals sign 1", "calculator", ("7",)))
    env.step(call(right if not right.startswith("-") else f"0 - {right[1:]}"))
    assert env.step("").reward == 1.0
    marked = make("earl:calc-arithmetic", syntax="actions")
    marked.reset(0)
    marked.step(CallText(f"#### {marked.unwrapped.answer} calculate 5 =", "calculator", ("5",)))
    assert marked.step("").reward == 1.0  # only what follows #### counts


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("syntax", ["tags", "actions", "no tool"])
def test_a_demonstration_earns_everything_and_its_calls_name_their_tools(
    name: str, split: str, syntax: str
):
    options = {"tool": False} if syntax == "no tool" else {"syntax": syntax}
    env = make(f"earl:{name}", split=split, **options)
    for seed in range(6):
        env.reset(seed)
        trace = env.demonstrate(random.Random(seed), tries=0 if syntax == "no tool" else 2)
        calls = calls_of(trace)
        assert len(calls) == sum(author is Author.POLICY for author, _ in trace) - 1
        assert all("".join(one.arguments) in one.replace(" ", "") for one in calls)
        if syntax == "tags":  # the text alone is enough
            trace = [(author, str(text)) for author, text in trace]
        end = follow(env, trace)[-1]
        assert (end.reward, end.terminated, end.truncated) == (1.0, True, False)
        assert end.info["is_right"] and end.info.get("tool_uses", 0) == len(calls)


@pytest.mark.parametrize(
    ("env_id", "file"),
    [
        *((f"earl:{name}", "calculator") for name in DRAWN),
        ("calculator", "compact"),
        *((f"earl:{name}", "sorting") for name in ("order", "sort", "compare")),
    ],
)
def test_every_call_of_a_teacher_can_be_spelled_by_the_actions(env_id: str, file: str):
    actions = load_actions(file, FastTokenizer.bytes())
    env = make(env_id, syntax="actions")
    options = {} if file == "sorting" else {"tool_rate": 1.0}
    count = 0
    for seed in range(20):
        env.reset(seed)
        for one in calls_of(env.demonstrate(random.Random(seed), **options)):
            spelled = actions.spell(one.tool, one.arguments)
            assert actions.read(spelled.actions, spelled.modes) == (one.tool, one.arguments)
            count += 1
    assert count >= 20 or env_id in ("earl:calc-count", "earl:calc-repeat", "earl:calc-sudoku")


def test_a_share_of_the_demonstrations_calls():
    env = make(DIGIT, syntax="actions")
    rng = random.Random(0)
    called = 0
    for seed in range(200):
        env.reset(seed)
        trace = env.demonstrate(rng, tool_rate=0.3)
        if calls_of(trace):
            called += 1
            assert trace[-1][1] == f"#### {env.unwrapped.answer}"
        else:
            assert len(trace) == 1 and trace[0][1].count(" = ") == 3  # worked out in the head
        assert follow(env, trace)[-1].reward == 1.0
    assert 34 <= called <= 86  # 60, four deviations of 6.5


@syntaxes
def test_a_countdown_teacher_misses_before_it_hits(syntax: str):
    env = make("earl:countdown-1", syntax=syntax)
    lengths: set[int] = set()
    for seed in range(40):
        env.reset(seed)
        inner = env.unwrapped.current
        trace = env.demonstrate(random.Random(seed), tries=3)
        *wrong, right = ["".join(one.arguments) for one in calls_of(trace)]
        target = evaluate(inner.solution)
        assert evaluate(right) == target
        assert all(evaluate(one) != target for one in wrong)
        lengths.add(len(wrong))
        assert follow(env, trace)[-1].reward == 1.0
    assert lengths == {0, 1, 2, 3}
    for tries in (-1, 32):
        with pytest.raises(ValueError, match=f"tries={tries}"):
            env.demonstrate(random.Random(0), tries=tries)


def test_the_syntax_is_checked_by_name():
    for env_id in (DIGIT, "calculator"):
        with pytest.raises(ValueError, match="'action'; did you mean 'actions'"):
            make(env_id, syntax="action")


def test_the_toy_calculator_answers_actions_without_its_semicolon():
    env = make("calculator", syntax="actions")
    env.reset(0)
    assert env.stop == ()
    assert env.alphabet == make("calculator").alphabet == "*+-0123456789;=?[]"
    turns = [
        env.step(CallText("[..]", "calculator", keys_of(e))) for e in ("12+34", "1+2+3", "", "7")
    ]
    assert [turn.observation for turn in turns] == ["46", "?", "?", "7"]
    assert env.step(CallText("[1+1]", "calculator", (*"1+1",))).observation == "?"  # four uses
    assert env.step("[1+1]").terminated


def test_both_syntaxes_of_the_toy_write_the_same_text():
    compact, actions = make("calculator"), make("calculator", syntax="actions")
    negative = 0
    for seed in range(80):
        assert compact.reset(seed) == actions.reset(seed)
        traces = [env.demonstrate(random.Random(seed), tool_rate=1.0) for env in (compact, actions)]
        assert [text for author, text in traces[0] if author is Author.POLICY] == [
            text for author, text in traces[1] if author is Author.POLICY
        ]
        bare = [text for author, text in traces[1] if author is Author.ENV]
        assert [f"{text};" for text in bare] == [t for a, t in traces[0] if a is Author.ENV]
        assert follow(compact, traces[0])[-1] == follow(actions, traces[1])[-1]
        negative += any(one.arguments[0] == "-" for one in calls_of(traces[1]))
    assert negative > 1


@pytest.mark.parametrize("env_id", ["calculator", DIGIT, "earl:countdown-1", "earl:sort"])
def test_state_and_fork_go_on_in_the_middle_of_an_episode(env_id: str):
    for seed in range(5):
        env = make(env_id, syntax="actions")
        env.reset(seed)
        trace = env.demonstrate(random.Random(0))
        env.step(CallText(" calculate 1 =", "calculator", ("1",)))
        other = make(env_id, syntax="actions")
        other.set_state(json.loads(json.dumps(env.get_state(), allow_nan=False)))
        twin, sent = env.fork(), pickle.loads(pickle.dumps(env))
        assert other.task() == twin.task() == sent.task() == env.task()
        ends = [follow(one, trace)[-1] for one in (env, other, twin, sent)]
        assert ends[1:] == ends[:1] * 3
        assert env.reset() == other.reset() == twin.reset()


@pytest.mark.parametrize("env_id", ["calculator", DIGIT, "earl:sort", "earl:calc-count"])
def test_random_actions_are_calls_or_answers(env_id: str):
    kinds: set[bool] = set()
    for seed in range(20):
        env = make(env_id, syntax="actions")
        env.reset(seed)
        action = env.sample_random_action()
        kinds.add(isinstance(action, CallText))
        assert env.step(action).is_over != isinstance(action, CallText)
    assert kinds == {True, False}


def test_every_call_counts_alike_in_both_syntaxes():
    expressions = ["1 + 1", "1 / 0", "", "1.2.3", "2 +", "9" * 120]
    infos: list[Any] = []
    for syntax in ("tags", "actions"):
        env = make(DIGIT, syntax=syntax, max_uses=5)
        env.reset(0)
        turns = [env.step(env.syntax.write(expression)) for expression in expressions]
        infos.append([turn.info for turn in turns])
        assert [turn.is_over for turn in turns] == [False] * 6
        infos[-1].append(env.step(f"#### {env.unwrapped.answer}").info)
    assert infos[0] == infos[1]
    assert [info.get("tool_ok") for info in infos[0]] == [True, *[False] * 5, None]
    assert [info["tool_uses"] for info in infos[0]] == [1, 2, 3, 4, 5, 6, 6]


KEYS = st.lists(st.sampled_from([*"0123456789+-*/().", "00", "", " ", "A"]), max_size=40)
TRAPS = st.sampled_from(
    [
        *("1/0", "1/(2-2)", "1..2", "1.2.3", "1.", ".", "0123", "7(8)", "2**9"),
        *("9" * 101, "9" * 400, "(" * 250),
    ]
).map(list)


@settings(deadline=None, max_examples=50)
@given(arguments=st.one_of(KEYS, TRAPS, KEYS.map(lambda keys: keys * 9)))
def test_no_arguments_make_a_calculator_raise(arguments: list[str]):
    text = "".join(arguments)
    for env_id, syntax, written in (
        (DIGIT, "actions", ""),
        (DIGIT, "tags", f"<calculator> {text} </calculator>"),
        ("calculator", "actions", ""),
        ("calculator", "compact", f"[{text}]"),
    ):
        env = make(env_id, syntax=syntax)
        env.reset(0)
        turn = env.step(CallText(written, "calculator", arguments))
        assert 0 < len(turn.observation) < 200
        assert not turn.is_over
        assert turn.info["tool_uses"] == 1
        assert (turn.observation in ("?", "?;") or "Error: " in turn.observation) != turn.info[
            "tool_ok"
        ]
