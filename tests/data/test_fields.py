"""Fields of a row: explicit nulls, objects as text or as pairs, values that Python cannot hold."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from graft.cli import app
from graft.data.chats import open_chats
from graft.data.errors import DataError
from graft.data.rows import scan_rows
from graft.data.show import inspect
from graft.envs import make
from graft.text.template import CHATML, render

USER = {"role": "user", "content": "2+3="}
ASSISTANT = {"role": "assistant", "content": "5"}
NULLED = {"name": "look", "arguments": {"city": "Rome", "day": None, "where": {"lat": None}}}
CHAT = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": NULLED}]}]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": ["string", "null"], "default": None}},
        },
    },
}


def lines(file: Path, *rows: Any) -> str:
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(file)


def parquet(file: Path, **columns: Any) -> str:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return str(file)


def rendered(row: Any) -> str:
    return render(CHATML, row.messages, tools=row.tools)


@pytest.mark.parametrize("is_text", [False, True])
def test_a_null_that_was_written_reaches_the_template(tmp_path: Path, is_text: bool):
    """The model must learn to write the null of a call, and read the default of a schema."""
    row: dict[str, Any] = {"messages": CHAT, "tools": [SCHEMA]}
    if is_text:
        function = {**NULLED, "arguments": json.dumps(NULLED["arguments"])}
        chat = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
        row = {"messages": chat, "tools": json.dumps([SCHEMA])}
    (read,) = open_chats(lines(tmp_path / "a.jsonl", row))
    assert read.messages[1]["tool_calls"][0]["function"] == NULLED
    assert read.tools == [SCHEMA]
    text = rendered(read)
    assert '"day": null' in text and '"lat": null' in text and '"default": null' in text


def test_nulls_that_parquet_filled_in_are_no_part_of_a_call(tmp_path: Path):
    """Two calls with other arguments make one struct of both, and every call has every key."""
    other = {"name": "add", "arguments": {"a": 1}}
    chats = [
        CHAT,
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": other}]}],
    ]
    file = parquet(tmp_path / "a.parquet", messages=pyarrow.array(chats))
    first, second = open_chats(file)
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Rome",
        "where": {},
    }
    assert second.messages[1]["tool_calls"][0]["function"] == other


def test_json_text_in_parquet_keeps_its_nulls(tmp_path: Path):
    calls = [{"function": {"name": "look", "arguments": json.dumps(NULLED["arguments"])}}]
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    file = parquet(
        tmp_path / "a.parquet", messages=pyarrow.array([chat]), tools=[json.dumps([SCHEMA])]
    )
    (read,) = open_chats(file)
    assert read.messages[1]["tool_calls"][0]["function"] == NULLED
    assert read.tools == [SCHEMA]


@pytest.mark.peer
def test_rows_of_the_hubs_library_are_those_of_its_file(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"prompt": "a", "ground_truth": "1", "extra_info": {"x": 1}},
        {"prompt": "b", "ground_truth": "2", "extra_info": {"y": 2}},
    ]
    held = make("prompts", rows=datasets.Dataset.from_list(rows))
    assert held.reset(0)[1]["meta"] == {"idx": 0, "x": 1}  # no "y": None
    assert make("prompts", data=lines(tmp_path / "a.jsonl", *rows)).reset(0) == held.reset(0)


def test_nulls_in_what_rewards_get_stay():
    row = {"prompt": "2+3=", "answer": "5", "hint": None}
    assert make("prompts", rows=[row]).reset(0)[1]["meta"] == {"idx": 0, "hint": None}
    row = {"prompt": "2+3=", "ground_truth": "5", "extra_info": {"hint": None}}
    assert make("prompts", rows=[row]).reset(0)[1]["meta"] == {"idx": 0, "hint": None}


VERL = {"prompt": [USER], "reward_model": {"ground_truth": "5"}, "extra_info": {"index": "1"}}
WRITTEN: dict[str, dict[str, Any]] = {
    "JSON text": {key: json.dumps(value) for key, value in VERL.items()},
    "pairs": {
        **VERL,
        "reward_model": [["ground_truth", "5"]],
        "extra_info": [{"key": "index", "value": "1"}],
    },
    "one message": {**VERL, "prompt": json.dumps(USER)},
    "Python's text": {key: str(value) for key, value in VERL.items()},
    "text of pairs": {**VERL, "reward_model": '[["ground_truth", "5"]]'},
}


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("form", WRITTEN)
def test_an_object_is_read_in_whatever_form_it_was_kept(tmp_path: Path, form: str, ending: str):
    row, file = WRITTEN[form], tmp_path / f"a{ending}"
    if ending == ".csv":
        row = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in row.items()
        }
        cells = ['"' + value.replace('"', '""') + '"' for value in row.values()]
        file.write_text(",".join(row) + "\n" + ",".join(cells) + "\n", encoding="utf-8")
    elif ending == ".parquet":
        parquet(file, **{key: pyarrow.array([value]) for key, value in row.items()})
    else:
        lines(file, row)
    env = make("prompts", data=str(file))
    assert env.reset(0)[0] == [USER]
    assert (env.task().answer, env.task().meta) == ("5", {"idx": 0, "index": "1"})
    assert env.step("<answer>5</answer>").reward == 1.0


def test_a_parquet_map_is_an_object_with_the_nulls_that_it_has(tmp_path: Path):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    file = parquet(
        tmp_path / "a.parquet",
        prompt=pyarrow.array([[USER]]),
        reward_model=pyarrow.array([[("ground_truth", "5")]], kind),
        extra_info=pyarrow.array([[("index", "1"), ("hint", None)]], kind),
    )
    env = make("prompts", data=file)
    env.reset(0)
    assert env.task().answer == "5"
    assert env.task().meta == {"idx": 0, "index": "1", "hint": None}


def test_a_text_that_should_be_an_object_is_named():
    with pytest.raises(DataError, match="row 1: 'reward_model' holds str 'ground_truth=5', not an"):
        make("prompts", rows=[{**VERL, "reward_model": "ground_truth=5"}])


def test_chats_that_are_json_text_are_chats(tmp_path: Path):
    entries = [{"from": "human", "value": "2+3="}, {"from": "gpt", "value": "5"}]
    rows = [{"conversations": json.dumps(entries)}, {"messages": json.dumps([USER, ASSISTANT])}]
    for row in rows:
        (read,) = open_chats(lines(tmp_path / "a.jsonl", row))
        assert read.messages == [USER, ASSISTANT]
    row = {"prompt": json.dumps([USER]), "completion": json.dumps([ASSISTANT])}
    assert open_chats(lines(tmp_path / "a.jsonl", row))[0].messages == [USER, ASSISTANT]


def test_show_lists_the_columns_that_were_text(tmp_path: Path):
    file = lines(tmp_path / "a.jsonl", WRITTEN["JSON text"], VERL)
    text = CliRunner().invoke(app, ["data", "show", file]).output
    assert "prompt: text in 1 rows, parsed as a list or an object\n" in text
    assert "reward_model: text in 1 rows, parsed as a list or an object\n" in text


@pytest.mark.parametrize(
    "prompt",
    [
        '[{"role": "user"}] Is this JSON?',
        '[{"x": 1}]',
        "[1, 2]",
        "{'role': 'king'} or not?",
        '{"name": "Ann"}',
    ],
)
def test_a_text_that_only_looks_like_messages_is_a_text(prompt: str):
    observation, _ = make("prompts", rows=[{"prompt": prompt, "answer": "5"}]).reset(0)
    assert observation == [{"role": "user", "content": prompt}]


def test_a_list_of_messages_that_cannot_be_read_is_refused():
    """How pandas writes an array into csv: no commas."""
    row = {"prompt": "[{'role': 'user', 'content': 'a'}\n {'role': 'user'}]", "answer": "5"}
    with pytest.raises(
        DataError, match=r"row 1: 'prompt': begins and ends like a list of messages"
    ):
        make("prompts", rows=[row])


def test_an_answer_that_is_json_text_is_the_text_unless_it_has_a_target():
    """The user's grader may parse it; only countdown's form is parsed here."""
    env = make("prompts", rows=[{"prompt": "?", "ground_truth": '{"inputs": [1]}'}])
    env.reset(0)
    assert env.task().answer == '{"inputs": [1]}'
    env = make(
        "prompts", rows=[{"prompt": "?", "ground_truth": '{"target": 5, "numbers": [2, 3]}'}]
    )
    env.reset(0)
    assert env.task().answer == {"numbers": [2, 3], "target": 5}


TIMES = {
    "year 148107": pyarrow.array([2**62, 0], pyarrow.timestamp("us")),
    "year 0": pyarrow.array([-62135596801000000, 0], pyarrow.timestamp("us")),
    "a date": pyarrow.array([2**30, 0], pyarrow.date32()),
    "a duration": pyarrow.array([2**62, 0], pyarrow.duration("ms")),
    "in a list": pyarrow.array([[2**62], []], pyarrow.list_(pyarrow.timestamp("us"))),
}


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_time_that_python_cannot_hold_is_text(tmp_path: Path, name: str, ending: str):
    table = pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"], "at": TIMES[name]})
    file = tmp_path / f"a{ending}"
    if ending == ".parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    first, second = (row for row in scan_rows(file))
    assert isinstance(first["at"] if name != "in a list" else first["at"][0], str)
    assert not isinstance(second["at"], str)  # the other rows are unchanged
    json.dumps(make("prompts", data=str(file)).reset(0)[1], allow_nan=False)


def test_a_value_that_cannot_be_read_is_named_with_its_row_and_column(tmp_path: Path):
    when = pyarrow.array([None, 1], pyarrow.timestamp("us", "Nowhere/City"))
    parquet(tmp_path / "a.parquet", prompt=["a", "b"], when=when)
    first, second = (row for row in scan_rows(tmp_path / "a.parquet"))
    assert first == {"prompt": "a", "when": None}
    assert "a.parquet, row 2: 'when' (timestamp[us, tz=Nowhere/City]) holds a value" in str(second)


@pytest.mark.parametrize(
    ("column", "answer"),
    [
        (pyarrow.array([Decimal("1.50")]), "1.50"),
        (pyarrow.array(["5"]).dictionary_encode(), "5"),
        (pyarrow.array(["5"], pyarrow.large_string()), "5"),
        (pyarrow.array([["5", "five"]], pyarrow.large_list(pyarrow.string())), ["5", "five"]),
        (pyarrow.array([[("target", "5")]], pyarrow.map_(pyarrow.string(), pyarrow.string())), "5"),
    ],
)
def test_answers_of_every_type_that_arrow_has(tmp_path: Path, column: Any, answer: Any):
    env = make("prompts", data=parquet(tmp_path / "a.parquet", prompt=["?"], answer=column))
    env.reset(0)
    assert env.task().answer == answer


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    table = pyarrow.table([["a"], ["1"], ["2"]], names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns called 'answer'"):
        list(scan_rows(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"ground_truth": float("nan")}, "'ground_truth' holds float 'nan'"),
        ({"ground_truth": float("inf")}, "'ground_truth' holds float 'inf'"),
        ({"extra_info": {"x": [1, float("-inf")]}}, "'x' holds -inf, which JSON cannot hold"),
    ],
)
def test_numbers_that_json_cannot_hold_are_named(tmp_path: Path, field: Any, message: str):
    row = {"prompt": "2+3=", "ground_truth": "5", **field}
    with pytest.raises(DataError, match=message):
        make("prompts", data=lines(tmp_path / "a.jsonl", row))


def test_nan_in_the_arguments_of_a_call_is_refused(tmp_path: Path):
    calls = [{"function": {"name": "look", "arguments": '{"x": NaN}'}}]
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}]}
    with pytest.raises(DataError, match="are not JSON: NaN is not a JSON number"):
        open_chats(lines(tmp_path / "a.jsonl", row))


MARK = "\ufeff"
ROW = '{"prompt": "2+3=", "answer": "5"}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", f"{MARK}{ROW}\n{ROW}\n"),
        ("a.jsonl", f"{MARK}\n{ROW}\n{MARK}\n{MARK}{ROW}\n{MARK}"),
        ("a.json", f"{MARK}[{ROW}, {ROW}]"),
        ("a.json", f"{MARK}\n\n{ROW}\n{ROW}\n"),
        ("a.csv", f'{MARK}"prompt","answer"\n2+3=,5\n2+3=,5\n'),
        ("a.csv", f"{MARK}\nprompt,answer\n2+3=,5\n2+3=,5\n"),
    ],
)
def test_byte_order_marks_are_not_part_of_the_rows(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert list(scan_rows(tmp_path / name)) == [json.loads(ROW)] * 2
    env = make("prompts", data=str(tmp_path / name))
    for number in range(2):  # by number, as a run reads them
        assert env.reset(number)[0] == [USER]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": "a", "answer": "1", "answer": "2"}'),
        ("a.json", '[{"prompt": "a", "answer": "1", "answer": "2"}]'),
        (
            "a.jsonl",
            '{"prompt": "a", "answer": "1", "extra_info": {"x": 1, "answer": 1, "answer": 2}}',
        ),
        ("a.csv", 'prompt,answer,extra_info\na,1,"{""answer"": 1, ""answer"": 2}"\n'),
    ],
)
def test_a_key_that_occurs_twice_makes_a_bad_row(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="the key 'answer' occurs twice"):
        inspect(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((f"a.{kind}", text) for kind in ("jsonl", "csv", "json") for text in ("", MARK, "\n")),
        ("a.csv", "prompt,answer\n"),
        ("a.json", "[]"),
    ],
)
def test_a_file_without_rows_is_an_error(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=f"{name} (has no rows|is empty|is not JSON)"):
        make("prompts", data=str(tmp_path / name))


def test_tools_given_by_name_are_read_and_listed(tmp_path: Path):
    """ARPO's documented row; the schemas are those of the run."""
    file = lines(
        tmp_path / "a.jsonl", {**VERL, "tools": ["search"]}, {**VERL, "tools": '["python"]'}
    )
    env = make("prompts", data=file)
    _, info = env.reset(0)
    assert "tools" not in info and info["meta"]["tools"] == ["search"]
    text = CliRunner().invoke(app, ["data", "show", file]).output
    assert "tools by name alone: search 1, python 1; the run must provide them" in text
