"""Every layout that people publish, recognised by its columns and read as the same task or chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from graft.data.chats import open_chats
from graft.data.errors import DataError
from graft.data.layouts import LAYOUTS, MIXED, detect_layout, matching_layouts
from graft.envs import make
from tests.graft_envs.earl.earl_rows_kit import sorting
from tests.row_files import write_rows as write

USER = {"role": "user", "content": "2+3="}
ASSISTANT = {"role": "assistant", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "verl": {
        "data_source": "gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 1},
        "question": "2+3=",  # the columns that it was made from
        "answer": "#### 5",
    },
    "arpo": {
        "data_source": "gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"ground_truth": "5"},
        "extra_info": {"index": 1, "question": "2+3="},
        "metadata": None,
    },
    "earl-sorting": sorting("sort", [1, 0], "B,A"),
    "easyrl": {
        "prompt": [USER],
        "ground_truth": "5",
        "extra_info": {"data_source": "gsm8k", "pass@k": 8},
    },
    "skyrl": {
        "data_source": "gsm8k",
        "prompt": [USER],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "5"},
    },
    "trl-prompt": {"prompt": "2+3=", "solution": "5", "level": 3, "data_source": "gsm8k"},
    "trl-completion": {"prompt": "2+3=", "completion": "5"},
    "openai": {"messages": [USER, ASSISTANT]},
    "spans": {
        "messages": [USER],
        "spans": [{"author": "policy", "text": "[2+3]"}, {"author": "env", "text": "=5"}],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2+3="}, {"from": "gpt", "value": "5"}]
    },
    "alpaca": {"instruction": "2+3=", "input": "", "output": "5"},
    "rl-grpo": {"messages": [USER], "nums": [2, 3], "target": 5},
    "plain": {"question": "2+3=", "answer": "5", "data_source": "gsm8k"},
}


def test_there_is_an_example_of_every_layout():
    assert list(EXAMPLES) == list(LAYOUTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_layout_is_recognised_among_all_others(name: str):
    assert [layout.name for layout in matching_layouts(EXAMPLES[name])] == [name]
    assert detect_layout([EXAMPLES[name]], "here").name == name


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "name", [n for n, one in LAYOUTS.items() if one.task and n != "earl-sorting"]
)
def test_every_layout_with_a_prompt_is_the_same_task(tmp_path: Path, name: str, ending: str):
    env = make("prompts", data=write(tmp_path / f"rows{ending}", [EXAMPLES[name]]))
    assert env.reset(0)[0] == [USER]
    expected = {"rl-grpo": {"numbers": [2, 3], "target": 5}, "openai": None, "trl-completion": None}
    task = env.task()
    assert task.answer == expected.get(name, "5")
    sourced = "data_source" in json.dumps(EXAMPLES[name])
    assert task.data_source == ("gsm8k" if sourced else "prompts")
    json.dumps(task.to_json(), allow_nan=False)
    answer = "<answer>2 + 3</answer>" if name == "rl-grpo" else "<answer>5</answer>"
    turn = env.step(answer)
    assert turn.reward == (0.0 if task.answer is None else 1.0)
    assert turn.terminated


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", [n for n, one in LAYOUTS.items() if one.chat])
def test_every_layout_with_an_assistant_turn_is_the_same_chat(
    tmp_path: Path, name: str, ending: str
):
    chats = open_chats(write(tmp_path / f"rows{ending}", [EXAMPLES[name]] * 2))
    assert (len(chats), chats.layout.name, chats.bad) == (2, name, 0)
    if name == "spans":
        assert (chats[1].messages, chats[1].spans) == ([USER], EXAMPLES[name]["spans"])
    else:
        assert chats[1].messages == [USER, ASSISTANT]
        assert chats[1].spans is chats[1].tools is None


def test_what_is_not_used_of_a_row_goes_to_the_meta():
    metas = {
        name: make("prompts", rows=[EXAMPLES[name]]).reset(0)[1]["meta"]
        for name in ("verl", "easyrl", "trl-prompt", "plain")
    }
    assert metas == {
        "verl": {"idx": 0, "ability": "math", "index": 1},
        "easyrl": {"idx": 0, "data_source": "gsm8k", "pass@k": 8},
        "trl-prompt": {"idx": 0, "level": 3},
        "plain": {"idx": 0},
    }


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({**EXAMPLES["verl"], "ground_truth": "5"}, "verl or easyrl"),
        ({**EXAMPLES["openai"], **EXAMPLES["sharegpt"]}, "openai or sharegpt"),
        ({**EXAMPLES["openai"], **EXAMPLES["plain"]}, "openai or plain"),
        ({**EXAMPLES["alpaca"], **EXAMPLES["plain"]}, "alpaca or plain"),
        ({**EXAMPLES["trl-completion"], **EXAMPLES["openai"]}, "trl-completion or openai"),
    ],
)
def test_a_file_that_can_be_read_in_two_ways_names_both(row: dict[str, Any], names: str):
    first, _, second = names.partition(" or ")
    with pytest.raises(DataError) as caught:
        detect_layout([row], "a.jsonl")
    assert f"a.jsonl can be read as {names} (" in str(caught.value)
    assert f"layout={first}" in str(caught.value)
    for name in (first, second):
        assert detect_layout([row], "a.jsonl", layout=name).name == name


def test_what_a_file_is_for_may_decide():
    row = {**EXAMPLES["alpaca"], **EXAMPLES["plain"]}
    assert detect_layout([row], "here", purpose="task").name == "plain"


def test_a_row_that_lacks_a_column_is_a_bad_one_of_the_layout_that_the_others_have():
    lacking = {"prompt": [USER], "reward_model": None}
    assert detect_layout([lacking, EXAMPLES["verl"]], "here").name == "verl"
    with pytest.raises(DataError, match=r"rows, row 1: 'reward_model.ground_truth' holds nothing"):
        make("prompts", rows=[lacking, EXAMPLES["verl"]])


def test_one_file_may_hold_chats_of_several_layouts(tmp_path: Path):
    rows = [EXAMPLES["openai"], EXAMPLES["sharegpt"], EXAMPLES["alpaca"], EXAMPLES["plain"]]
    chats = open_chats(write(tmp_path / "a.jsonl", rows))
    assert chats.layout is MIXED
    assert [one.messages for one in chats] == [[USER, ASSISTANT]] * 4


@pytest.mark.parametrize("purpose", ["chat", "task"])
def test_a_file_of_broken_lines_is_not_called_empty(tmp_path: Path, purpose: str):
    (tmp_path / "rows.jsonl").write_text('{"messages": [}\n')
    with pytest.raises(DataError, match="line 1 is not JSON"):
        if purpose == "chat":
            open_chats(str(tmp_path / "rows.jsonl"))
        else:
            make("prompts", data=str(tmp_path / "rows.jsonl"))


def test_unknown_columns_are_listed_with_the_known_layouts():
    with pytest.raises(DataError) as caught:
        detect_layout([{"text": "Hi"}], "a.jsonl")
    assert "a.jsonl: no layout matches its columns (found: text)" in str(caught.value)
    assert all(f"    {name} " in str(caught.value) for name in LAYOUTS)
    with pytest.raises(DataError, match="is read as verl, which has no chats to imitate"):
        detect_layout([EXAMPLES["verl"]], "a.jsonl", purpose="chat")
    with pytest.raises(DataError, match="layout=alpaca has no tasks; those that have: verl"):
        detect_layout([EXAMPLES["alpaca"]], "a.jsonl", layout="alpaca", purpose="task")
    with pytest.raises(DataError, match="unknown layout 'velr'; known: auto, verl, arpo"):
        detect_layout([EXAMPLES["verl"]], "a.jsonl", layout="velr")
    with pytest.raises(DataError, match="its rows have several layouts"):
        detect_layout([EXAMPLES["verl"], EXAMPLES["openai"]], "here", purpose="task")


@pytest.mark.parametrize("as_text", [True, False])
def test_tools_and_arguments_may_be_json_texts(tmp_path: Path, as_text: bool):
    text = json.dumps if as_text else lambda value: value
    function = {**CALL["function"], "arguments": text(CALL["function"]["arguments"])}
    call = {**CALLED, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    rows = [
        {"messages": [USER, call, RESULT, ASSISTANT], "tools": text([TOOL])},
        {"messages": [USER, ASSISTANT], "tools": text([TOOL["function"]])},
        {"messages": [USER, ASSISTANT], "tools": [text(TOOL)]},
        {"messages": [USER, ASSISTANT], "tools": ""},
    ]
    chats = open_chats(write(tmp_path / "a.jsonl", rows))
    opened = {**CALLED, "tool_calls": [{"id": "c1", **CALL}]}
    assert chats[0].messages == [USER, opened, RESULT, ASSISTANT]
    assert [one.tools for one in chats] == [[TOOL], [TOOL], [TOOL], None]
    env = make("prompts", rows=[{"prompt": [USER], "ground_truth": "5", "tools": text([TOOL])}])
    assert env.reset(0)[1]["tools"] == [TOOL]


def test_keys_that_parquet_adds_to_arguments_are_left_out(tmp_path: Path):
    calls = [{"function": {"name": name, "arguments": {key: 1}}} for name, key in ("fx", "gy")]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    (chat,) = open_chats(write(tmp_path / "a.parquet", [{"messages": messages}]))
    made = [call["function"]["arguments"] for call in chat.messages[1]["tool_calls"]]
    assert made == [{"x": 1}, {"y": 1}]


def test_numbers_and_a_target_without_a_prompt_get_one():
    for numbers in ([3, 7, 12], "[3, 7, 12]", numpy.array([3, 7, 12]), [3.0, 7.0, 12.0]):
        env = make("prompts", rows=[{"nums": numbers, "target": "33"}])
        (message,), info = env.reset(0)
        assert message["content"].startswith("Combine the numbers 3, 7, 12 into 33.")
        assert info["answer"] == {"numbers": [3, 7, 12], "target": 33}
        assert env.step("<answer>12 + 7 * 3</answer>").reward == 1.0
    env.reset(0)
    assert env.step("<answer>12 * 3</answer>").reward == 0.0
    within = {"ground_truth": {"target": 33, "numbers": [3, 7, 12]}}
    env = make("prompts", rows=[{"prompt": "?", "reward_model": within}])
    assert env.reset(0)[1]["answer"] == {"numbers": [3, 7, 12], "target": 33}


def test_a_completion_may_be_messages():
    prompt, completion = [{"role": "system", "content": "s"}, USER], [CALLED, RESULT, ASSISTANT]
    chat = LAYOUTS["trl-completion"].chat
    assert chat is not None
    row = {"prompt": prompt, "completion": completion}
    assert chat(row).messages == [*prompt, *completion]


def test_a_worked_solution_is_imitated_and_the_answer_graded():
    row = {"problem": "2+3=", "solution": "2+3 is 5.", "answer": 5}
    assert LAYOUTS["plain"].chat is not None
    assert LAYOUTS["plain"].chat(row).messages[1]["content"] == "2+3 is 5."
    assert make("prompts", rows=[row]).reset(0)[1]["answer"] == 5


def test_of_a_chat_the_last_answer_is_not_shown():
    env = make("prompts", rows=[{"messages": [USER, ASSISTANT, USER, ASSISTANT], "answer": "5"}])
    assert env.reset(0)[0] == [USER, ASSISTANT, USER]
    assert env.step("\\boxed{5}").reward == 1.0


def called(arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"messages": [USER, {**CALLED, "tool_calls": calls}]}


def spanned(author: str, text: str) -> dict[str, Any]:
    return {"messages": [USER], "spans": [{"author": author, "text": text}]}


TALK = [USER, ASSISTANT]
HALF = {"name": "f", "description": "ab\ud800"}
BAD = {
    "tools": ({"messages": TALK, "tools": "{"}, "tools", "'tools' is not JSON"),
    "tool": ({"messages": TALK, "tools": [{"x": 1}]}, "tools", "tool 1 is dict"),
    "arguments": (called("{"), "messages", "message 2: `arguments` of the call to 'f'"),
    "completion": ({"prompt": "?", "completion": 3}, "completion", "'completion': holds int '3'"),
    "blank": ({"prompt": " ", "completion": "x"}, "prompt", "'prompt': has no text"),
    "span": (spanned("me", ""), "spans", "'spans': span 1 is dict"),
    "silent": (spanned("env", ""), "spans", "none is the policy's"),
    "output": ({"instruction": "?", "output": 3}, "output", "`output` holds int '3'"),
    "answer": ({"question": "?", "answer": 3}, "answer", "'answer' holds int '3'"),
    "half argument": (
        called('{"a": "\\ud800"}'),
        "messages",
        "`arguments`: character 1 is \\ud800",
    ),
    "half tool": ({"messages": TALK, "tools": [HALF]}, "tools", "'tools': character 3 is \\ud800"),
    "half span": (spanned("policy", "\ud800"), "spans", "'spans': character 1 is \\ud800"),
    "half answer": ({"question": "?", "answer": "a\ud800"}, "answer", "'answer': character 2 is"),
    "utf8": (b'{"messages": "\xff"}', "", "line 2 is not JSON in UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_chat_stops_and_can_be_skipped(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
):
    from graft.data.show import inspect

    bad, field, message = BAD[case]
    names = {"completion": "trl-completion", "blank": "trl-completion", "span": "spans"}
    names |= {"silent": "spans", "output": "alpaca", "answer": "plain"}
    names |= {"half span": "spans", "half answer": "plain"}
    good = EXAMPLES[names.get(case, "openai")]
    lines = [
        row if isinstance(row, bytes) else json.dumps(row).encode() for row in (good, bad, good)
    ]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl, (row|line) 2") as caught:
        open_chats(str(file))
    assert message in str(caught.value)
    assert "2 of 3 rows are fine; skip_bad=true leaves this one out" in str(caught.value)
    for _ in range(2):
        chats = open_chats(str(file), skip_bad=True)
    assert (len(chats), chats.bad, chats.where(1)) == (2, 1, f"{file}, row 3")
    assert [record.getMessage() for record in caplog.records].count(caplog.messages[0]) == 1
    assert "1 of 3 rows are bad and left out" in caplog.messages[0]
    (fault,) = inspect(str(file)).verdict.faults
    assert (fault.row, fault.field) == (2, field)
    assert message in fault.why


def test_an_id_that_was_there_before_is_a_bad_row(tmp_path: Path):
    rows = [{**EXAMPLES["openai"], "id": number} for number in (7, 8, 7, 9, 7)]
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"row 3: 'id' is that of row 1 already.*2 of 5 rows"):
        open_chats(file)
    assert list(open_chats(file, skip_bad=True).numbers) == [0, 1, 3]
    unnamed = [{**EXAMPLES["openai"], "id": one} for one in (None, float("nan"), float("nan"), "")]
    assert len(open_chats(write(tmp_path / "b.jsonl", unnamed * 2))) == 8


def test_a_file_of_bad_rows_alone_is_refused_even_when_they_may_be_skipped(tmp_path: Path):
    file = write(tmp_path / "a.jsonl", [{"messages": [USER]}] * 3)
    with pytest.raises(DataError, match=r"no assistant message.*all 3 rows are bad"):
        open_chats(file, skip_bad=True)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"b\.jsonl has no rows"):
        open_chats(str(tmp_path / "b.jsonl"))


def test_a_split_of_a_folder_is_named_before_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for split, count in (("train", 3), ("test", 1)):
        write(tmp_path / f"{split}.jsonl", [EXAMPLES["plain"]] * count)
    assert len(open_chats(f"train@{tmp_path}")) == 3
    assert len(make("prompts", data=f"test@{tmp_path}").numbers) == 1
    assert len(open_chats(f"train@{tmp_path}/test.jsonl")) == 1
    with pytest.raises(DataError, match="is one file and has no splits; leave test@ out"):
        open_chats(f"test@{tmp_path}/test.jsonl")
    with pytest.raises(DataError, match=r"no file or folder 'me/rows', and the dataset me/rows"):
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setattr("graft.data.hub._is_worth_trying", lambda hub_id: False)
        open_chats("train@me/rows")
    write_to = tmp_path / "me" / "rows"
    write_to.mkdir(parents=True)
    write(write_to / "train.jsonl", [EXAMPLES["plain"]] * 2)
    monkeypatch.setenv("GRAFT_DATA", str(tmp_path))
    assert len(open_chats("train@me/rows")) == 2
    assert len(make("prompts", data="me/rows").numbers) == 2
