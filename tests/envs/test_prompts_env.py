"""Rows in verl's columns, from memory, parquet and jsonl: chats as they stand, answers, sources."""

from __future__ import annotations

import asyncio
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from graft.config import ConfigError, load_config
from graft.data.errors import DataError
from graft.envs import make
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.train.build import env_factory, tool_note
from graft.train.monitor.settings_check import graded_check
from graft.types import Author, Sampling, Task
from tests.rollout.scripted import ScriptedEngine
from tests.row_files import write_rows as write

SYSTEM = {"role": "system", "content": "Search where you must."}
ASKED = {"role": "user", "content": "Where is the Louvre?"}
LOUVRE = {
    "data_source": "hotpotqa",
    "prompt": [SYSTEM, ASKED],
    "ability": "qa",
    "reward_model": {"ground_truth": ["Paris", "Paris, France"], "style": "rule"},
    "extra_info": {"index": 7, "question": "Where is the Louvre?", "split": "train"},
    "metadata": None,
}
HALF = {
    "data_source": "deepmath",
    "prompt": [{"role": "user", "content": "What is 1/4 + 1/4?"}],
    "ability": "math",
    "reward_model": {"ground_truth": ["0.5"]},
    "extra_info": {"index": 8},
    "metadata": {"level": 1},
}
TOOLS = {
    "use": ["python", {"search": {"corpus": "small"}}],
    "format": "arpo",
    "max_uses": 3,
    "instructions": "",
}


def row(prompt: Any = "?", gold: Any = "7", **columns: Any) -> dict[str, Any]:
    return {"prompt": prompt, "reward_model": {"ground_truth": gold}, **columns}


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".json"])
def test_a_file_is_read_as_it_is_and_what_a_struct_lacks_is_not_there(tmp_path: Path, ending: str):
    rows = [LOUVRE, HALF]
    env = make("prompts", data=write(tmp_path / f"train{ending}", rows))
    prompt, info = env.reset(0)
    assert prompt == [SYSTEM, ASKED]
    task = env.task()
    assert (task.answer, task.data_source) == (["Paris", "Paris, France"], "hotpotqa")
    assert task.meta == {"idx": 0, "ability": "qa", **LOUVRE["extra_info"]}
    assert (info["answer"], info["data_source"]) == (task.answer, task.data_source)
    assert info["meta"] == task.meta
    env.reset(1)
    assert env.task().prompt == tuple(HALF["prompt"])
    assert env.task().meta == {"idx": 1, "ability": "math", "index": 8}
    assert Task.from_json(json.loads(json.dumps(env.task().to_json()))) == env.task()


def test_parquet_keeps_its_rows_packed(tmp_path: Path):
    env = make("prompts", data=write(tmp_path / "train.parquet", [LOUVRE, HALF]))
    assert isinstance(env.table.rows, pyarrow.Table)
    assert make("prompts", data=str(tmp_path / "train.parquet")).table is env.table


def test_a_text_is_one_user_message_and_only_prompt_and_answer_are_needed():
    env = make("prompts", rows=[row("2+5=", 7)])
    prompt, _ = env.reset(0)
    assert prompt == [{"role": "user", "content": "2+5="}]
    assert env.task().data_source == "prompts"
    assert env.task().meta == {"idx": 0}
    assert env.step("#### 7.0").reward == 1.0


def test_a_template_of_columns_and_a_system_message_replace_those_of_the_row():
    chat = [{"role": "system", "content": "Old."}, {"role": "user", "content": "?"}]
    rows = [{"messages": chat, "nums": [1, 4], "target": 5}]
    env = make(
        "prompts", rows=rows, template=" Make {target} of {nums} in \\boxed{}.", system="New."
    )
    assert env.reset(0)[0] == [
        {"role": "system", "content": "New."},
        {"role": "user", "content": " Make 5 of [1, 4] in \\boxed{}."},
    ]
    assert env.step("<answer>1 + 4</answer>").reward == 1.0
    kept = make("prompts", rows=rows, system="New.")
    assert kept.reset(0)[0] == [{"role": "system", "content": "New."}, chat[1]]
    with pytest.raises(ValueError, match=r"names no column in braces; .*messages, nums, target"):
        make("prompts", rows=rows, template="Make {goal}.")


def test_braces_inside_a_column_are_text_and_a_row_without_the_column_is_named():
    rows = [{"prompt": "Is {ground_truth} right?", "ground_truth": "5"}]
    env = make("prompts", rows=rows, template="{prompt} ({ground_truth})")
    assert env.reset(0)[0][0]["content"] == "Is {ground_truth} right? (5)"
    rows = [{"prompt": "a", "ground_truth": "5", "unit": "m"}, {"prompt": "b", "ground_truth": "6"}]
    env = make("prompts", rows=rows, template="{prompt} in {unit}")
    assert env.reset(idx=0)[0][0]["content"] == "a in m"
    with pytest.raises(DataError, match="row 2 has no column 'unit', which template= names"):
        env.reset(idx=1)


def test_other_columns_are_named_by_their_keys():
    rows = [{"chat": [ASKED], "answer": "Paris"}, {"chat": [ASKED], "answer": "Lyon"}]
    env = make("prompts", rows=rows, prompt_key="chat", answer_key="answer")
    assert env.reset(1)[1]["answer"] == "Lyon"
    deep = make("prompts", rows=[{"prompt": "?", "a": {"b": {"c": 3}}}], answer_key="a.b.c")
    assert deep.reset(0)[1]["answer"] == 3
    flat = make("prompts", rows=[{"prompt": "?", "reward_model.ground_truth": "7"}])
    assert flat.reset(0)[1]["answer"] == "7"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("Paris", "Paris"),
        (7, 7),
        (["a", 1], ["a", 1]),
        ({"target": ["a", "b"]}, ["a", "b"]),
        ({"target": "a", "style": None}, "a"),
        (numpy.array(["a", "b"], dtype=object), ["a", "b"]),
        ({"target": numpy.array([1, 2])}, [1, 2]),
        (numpy.float32(0.5), 0.5),
        ([numpy.int64(3)], [3]),
        (Decimal("2.50"), "2.50"),
        (True, True),
    ],
)
def test_a_gold_in_any_of_its_forms_is_plain_json(gold: Any, answer: Any):
    env = make("prompts", rows=[row(gold=gold)])
    assert env.reset(0)[1]["answer"] == answer
    assert type(env.answer) is type(answer)
    json.dumps(env.task().to_json(), allow_nan=False)


def test_rows_that_pandas_read_are_the_same_as_the_files(tmp_path: Path):
    """pandas makes arrays of lists, and NaN of what is missing."""
    held = {
        **LOUVRE,
        "prompt": numpy.array([SYSTEM, ASKED], dtype=object),
        "reward_model": {"ground_truth": numpy.array(LOUVRE["reward_model"]["ground_truth"])},
        "extra_info": {**LOUVRE["extra_info"], "index": numpy.int64(7), "level": float("nan")},
    }
    ours = make("prompts", data=write(tmp_path / "train.jsonl", [LOUVRE]))
    theirs = make("prompts", rows=[held])
    assert ours.reset(0) == theirs.reset(0)
    assert ours.task() == theirs.task()


@pytest.mark.parametrize(
    ("gold", "action", "reward", "f1"),
    [
        (["Paris"], "<think>?</think><answer>\\boxed{paris}</answer>", 1.0, 1.0),
        (["Paris"], "<answer>It is \\boxed{Paris}.</answer>", 1.0, 1.0),
        (["Paris"], "<answer>The Paris!</answer>", 1.0, 1.0),
        (["Paris"], "\\boxed{\\text{Paris}}", 1.0, 0.0),  # F1 takes \text for a word
        (["Paris"], "so\n#### Paris", 1.0, 1.0),
        (["Paris"], "Paris", 1.0, 1.0),
        (["Paris"], "<answer>\\boxed{Lyon}</answer><answer>\\boxed{Paris}</answer>", 1.0, 1.0),
        (["Paris"], "\\boxed{Paris} <answer>Lyon</answer>", 0.0, 0.0),
        (["Paris"], "<answer>\\boxed{the city of Paris}</answer>", 0.0, 0.5),
        (["Lyon", "Paris"], "<answer>\\boxed{Paris}</answer>", 1.0, 1.0),
        (["0.5"], "<answer>\\boxed{\\frac{1}{2}}</answer>", 1.0, 0.0),
        (["2\\sqrt{3}"], "<answer>\\boxed{\\sqrt{12}}</answer>", 1.0, 0.0),
        ("3 + 4 = 7\n#### 7", "<answer>\\boxed{7}</answer>", 1.0, 1.0),
        ("\\boxed{7}", "<answer>\\boxed{7}</answer>", 1.0, 1.0),
        (18, "<answer>\\boxed{18.0}</answer>", 1.0, 0.0),
        (["live"], "<answer>\\boxed{evil}</answer>", 0.0, 0.0),  # words are no products
        (["no"], "<answer>\\boxed{on}</answer>", 0.0, 0.0),
        (["Paris"], "", 0.0, 0.0),
        (["Paris"], "<answer>\\boxed{Paris", 0.0, 0.0),
    ],
)
def test_the_last_answer_counts_as_text_or_as_mathematics(
    gold: Any, action: str, reward: float, f1: float
):
    env = make("prompts", rows=[row(gold=gold)])
    env.reset(0)
    turn = env.step(action)
    assert (turn.reward, turn.terminated, turn.info["correct"]) == (reward, True, reward == 1.0)
    assert turn.info["f1"] == pytest.approx(f1)


def test_an_answer_without_marks_is_recognised():
    env = make("prompts", rows=[row(gold="Paris")])
    for action, has_answer in (("Paris", False), ("<answer>Paris</answer>", True), ("", False)):
        env.reset(0)
        assert env.step(action).info["has_answer"] is has_answer


@pytest.mark.parametrize("gold", ["Paris", ["0.5"], "3 + 4 = 7\n#### 7", {"target": [12]}])
def test_a_demonstration_thinks_and_boxes_a_gold_and_is_paid(gold: Any):
    env = make("prompts", rows=[row(gold=gold)])
    env.reset(0)
    ((author, text),) = env.demonstrate(random.Random(0))
    assert author is Author.POLICY
    thought, _, answer = text.partition("</think>")
    assert thought.startswith("<think>")
    assert answer.startswith("<answer>\\boxed{") and answer.endswith("}</answer>")
    assert env.step(text).reward == 1.0


def test_tools_around_it_change_nothing_in_the_prompt_and_the_answer_is_the_last_turns():
    env = make("prompts", rows=[LOUVRE, HALF], wrappers=[{"tools": TOOLS}])
    prompt, info = env.reset(0)
    assert prompt == [SYSTEM, ASKED]
    assert info["meta"]["index"] == 7
    assert env.stop == ("</python>", "</search>")
    turn = env.step("<think>Let me see.</think><python>print(34 * 5)</python>")
    assert (turn.observation, turn.is_over) == (" <result>\n170\n</result>", False)
    twin = env.fork()
    turn = env.step("<think>It is Paris.</think><answer>\\boxed{Paris}</answer>")
    assert (turn.reward, turn.terminated, turn.info["tool_uses"]) == (1.0, True, 1)
    assert twin.step("<answer>\\boxed{Lyon}</answer>").reward == 0.0
    assert twin.task() == env.task()
    assert env.task().prompt == (SYSTEM, ASKED)


def test_a_rollout_passes_the_source_and_the_rest_of_the_row_to_its_reward():
    wrappers = [{"tools": TOOLS}]
    tokenizer = FastTokenizer.bytes()
    setup = RolloutSetup(
        engine=ScriptedEngine([]),
        chat=Chat(tokenizer, TEMPLATES["chatml"]),
        make_env=lambda task: make(task.env, rows=[LOUVRE, HALF], wrappers=wrappers),
        sampling=Sampling(),
    )

    async def opened() -> Task:
        async with EpisodeBuilder(Task("prompts:train:0", "prompts", seed=0), setup) as builder:
            await builder.open()
            text = tokenizer.decode(builder.episode.spans[0].tokens)
            assert text.count("Search where you must.") == text.count("Where is the Louvre?") == 1
            return builder.episode.task

    task = asyncio.run(opened())
    assert task.prompt == (SYSTEM, ASKED)
    assert (task.answer, task.data_source) == (["Paris", "Paris, France"], "hotpotqa")
    assert task.meta == {"idx": 0, "ability": "qa", **LOUVRE["extra_info"]}


def test_the_train_and_the_test_part_of_one_file_share_no_prompt(tmp_path: Path):
    data = write(
        tmp_path / "all.parquet", [row([ASKED, {**ASKED, "content": f"{n}?"}]) for n in range(99)]
    )
    parts = {split: make("prompts", data=data, split=split) for split in ("train", "test")}
    assert sorted([*parts["train"].numbers, *parts["test"].numbers]) == list(range(99))
    assert 0 < len(parts["test"].numbers) < 30


GOLD = "'reward_model.ground_truth' holds "
BAD = [
    ("empty list", row([]), "'prompt': the list of messages is empty"),
    ("no prompt", row(None), "'prompt': holds nothing"),
    ("no text", row("  "), "'prompt': has no text"),
    ("a number", row(3), "'prompt': holds int '3'"),
    ("a bare text", row(["Hi"]), "'prompt': message 1 is str 'Hi'"),
    ("an unknown role", row([SYSTEM, {"role": "bot", "content": "Hi"}]), "message 2: role 'bot'"),
    (
        "silence",
        row([SYSTEM, {"role": "user", "content": None}]),
        "message 2: `content` holds nothing",
    ),
    ("no question", row([{"role": "assistant", "content": "Hi"}, ASKED]), "'prompt': starts with"),
    ("no gold", row(gold=None), f"{GOLD}nothing"),
    ("no golds", row(gold=[]), f"{GOLD}list '[]'"),
    ("blank", row(gold=" "), f"{GOLD}str ' '"),
    ("a struct", row(gold={"x": 1}), "holds dict \"{'x': 1}\""),
    ("a gap", row(gold=["a", None]), f"{GOLD}list"),
    ("infinite", row(gold=[float("inf")]), f"{GOLD}list"),
    ("NaN", row(gold=float("nan")), f"{GOLD}float 'nan'"),
    ("no model", {"prompt": "?", "reward_model": None}, f"{GOLD}nothing"),
    ("text", {"prompt": "?", "reward_model": "7"}, "'reward_model' holds str '7'"),
]


@pytest.mark.parametrize(("bad", "message"), [case[1:] for case in BAD], ids=[c[0] for c in BAD])
def test_a_bad_row_is_named_with_its_field(bad: dict[str, Any], message: str):
    with pytest.raises(DataError) as caught:
        make("prompts", rows=[LOUVRE, bad])
    assert str(caught.value).startswith("rows, row 2: ")
    assert message in str(caught.value)
    env = make("prompts", rows=[LOUVRE, bad, HALF], skip_bad=True)
    assert [env.reset(seed)[0] for seed in (0, 1)] == [LOUVRE["prompt"], HALF["prompt"]]
    assert list(env.numbers) == [0, 2]


def test_rows_without_answer_or_reward_are_refused_at_the_start_of_a_run(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2"}\n{"prompt": "3+3"}\n')
    overrides = ["task.env=prompts", f"task.args.data={rows}", "task.eval_args={}"]
    config = load_config("quickstart", overrides)
    check = graded_check(config, config.task.envs[0], make("prompts", data=str(rows)))
    assert check is not None and check.verdict == "fail"
    assert "100% of the rows" in check.seen and "task.reward" in check.remedy
    rows.write_text('{"prompt": "2+2", "answer": "4"}\n')
    assert graded_check(config, config.task.envs[0], make("prompts", data=str(rows))) is None
    graded = load_config("quickstart", [*overrides, "task.reward=f1"])
    assert (
        graded_check(graded, graded.task.envs[0], make("prompts", rows=[{"prompt": "2+2"}])) is None
    )


def test_one_bad_row_among_many_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture):
    """ARPO's own training file: 10,000 rows, of which row 5275 has the answer " "."""
    rows = [row([ASKED], "Paris") for _ in range(400)]
    rows[275] = row([ASKED], " ")
    env = make("prompts", rows=rows)
    assert len(env.numbers) == 399 and 275 not in env.numbers
    (message,) = caplog.messages
    assert "1 of 400 rows are bad and left out; the first: rows, row 276: " in message
    with pytest.raises(DataError, match=r"row 276: .*399 of 400 rows are fine; skip_bad=true"):
        make("prompts", rows=rows, skip_bad=False)
    for number in range(5):  # 5 of 400 are more than 1%
        rows[number] = row([ASKED], " ")
    with pytest.raises(DataError, match=r"row 1: .*6 of 400 rows are bad"):
        make("prompts", rows=rows)
    assert len(make("prompts", rows=rows, skip_bad=0.05).numbers) == 394


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_bad_rows_of_a_file_are_named_by_file_and_row(tmp_path: Path, ending: str):
    silent = row([{"role": "user", "content": None}], "Paris")
    rows = [row([ASKED], "Paris"), silent, row([], "Paris"), row([ASKED], None)]
    data = write(tmp_path / f"all{ending}", rows)
    with pytest.raises(DataError) as caught:
        make("prompts", data=data)
    assert f"all{ending}, row 2: 'prompt': message 1: `content` holds nothing" in str(caught.value)
    assert "3 of 4 rows are bad" in str(caught.value) and "skip_bad=true" in str(caught.value)


def test_the_error_of_a_file_without_the_columns_names_the_key_that_sets_them(tmp_path: Path):
    data = write(tmp_path / "rows.jsonl", [{"query": "?", "reply": "7"}])
    with pytest.raises(DataError, match=r"no layout matches its columns \(found: query, reply\)"):
        make("prompts", data=data)
    with pytest.raises(DataError, match=r"no column 'prompt' \(found: query, reply\).*prompt_key="):
        make("prompts", data=data, answer_key="reply")
    with pytest.raises(DataError, match=r"no column 'reward_model' .*answer_key="):
        make("prompts", data=data, prompt_key="query")
    assert make("prompts", data=data, prompt_key="query", answer_key="reply").reset(0)
    with pytest.raises(ValueError, match="give one"):
        make("prompts", data=data, prompt_key="query", layout="verl")
    with pytest.raises(DataError, match="rows is empty: it has no rows"):
        make("prompts", rows=[])
    with pytest.raises(ValueError, match="no rows: give data="):
        make("prompts")


def listing(*names: str) -> dict[str, Any]:
    return {
        "prompt": "Who wrote Emma?",
        "answer": "Austen",
        **({"tools": [*names]} if names else {}),
    }


def test_the_tools_that_a_row_lists_are_the_only_ones_offered_and_carried_out():
    use = ["calculator", {"search": {"corpus": "small"}}]
    rows = [listing(), listing("search"), listing("calculator", "search")]
    together = [{"tools": {"use": use}}]
    layered = [{"tools": {"use": [one]}} for one in use]
    for wrappers in (together, layered):
        env = make("prompts", rows=rows, wrappers=wrappers)
        for seed, names in enumerate(
            [{"calculator", "search"}, {"search"}, {"calculator", "search"}]
        ):
            observation, _ = env.reset(seed)
            prompt = observation[-1]["content"]
            assert {name for name in ("calculator", "search") if f"- {name}:" in prompt} == names
            turn = env.step("<calculator>6*7</calculator>")
            assert (turn.observation == "<result>42</result>") == ("calculator" in names)
            assert turn.info["tool_ok"] == ("calculator" in names)
            assert env.fork().step("<search>Lima</search>").info["tool_ok"]
        env.reset(1)
        assert (
            "there is no tool 'calculator'; known: search"
            in env.step("<calculator>1</calculator>")[0]
        )
    schemas = make("prompts", rows=rows, wrappers=[{"tools": {"use": use, "format": "hermes"}}])
    shown = [schemas.reset(seed)[1]["tools"] for seed in range(3)]
    assert [len(tools) for tools in shown] == [2, 1, 2]
    assert shown[1][0]["function"]["name"] == "search"


def test_a_listed_tool_that_the_run_does_not_have_stops_it(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    rows = [listing("calculator"), listing("serach")]
    file.write_text("\n".join(map(json.dumps, rows)))
    task = ["task.env=prompts", f"task.args={{data: {file}}}", "task.eval_args={}"]
    wrappers = "task.wrappers=[{tools: {use: [calculator]}}]"
    config = load_config("quickstart", [*task, wrappers])
    with pytest.raises(ConfigError, match=r"row 2 lists the tool 'serach'.* are calculator"):
        tool_note(config, env_factory(config, FastTokenizer.bytes()))
    bare = load_config("quickstart", task)  # an agent may bring them
    assert tool_note(bare, env_factory(bare, FastTokenizer.bytes())) == ""
