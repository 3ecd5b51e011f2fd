"""The report and the exit code of `graft data show`."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from graft.cli import app
from graft.data.chats import open_chats
from graft.data.check import Repeats
from graft.data.errors import DataError
from graft.data.show import LengthStats, inspect, shortened
from tests.row_files import write_rows as write

ROW = {"prompt": "2+3=", "reward_model": {"ground_truth": "5"}, "data_source": "sums"}


def show(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["data", "show", *args])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_lengths_are_exact():
    lengths = LengthStats()
    for length in (3, 3, 4, 10):
        lengths.add(length)
    assert lengths.to_json() == {"min": 3, "median": 3, "mean": 5.0, "p95": 10, "max": 10}


def test_texts_that_occur_in_several_rows_are_found():
    repeats = Repeats()
    assert repeats.repeated() == []
    for row, text in enumerate("abcabca", 1):
        repeats.add(text, row)
    assert repeats.repeated() == [(4, 1), (5, 2), (6, 3), (7, 1)]
    unlike = Repeats()
    for row in range(1, 1000):
        unlike.add(str(row), row)
    assert unlike.repeated() == []


def test_a_good_file_is_described_with_exit_code_0(tmp_path: Path):
    rows = [ROW, {**ROW, "prompt": "2+33="}, {**ROW, "data_source": "other"}, ROW]
    code, text = show(write(tmp_path / "a.jsonl", rows), "--rows", "1")
    assert code == 0
    assert f"{tmp_path}/a.jsonl: 4 rows, read as verl" in text
    assert "its rows have: prompt, reward_model, data_source" in text
    assert 'row 1\n    user         2+3=\n    answer       "5"\n    data source  sums\n' in text
    assert "row 2\n" not in text
    assert "data sources: sums 3, other 1" in text
    assert "same prompt: 2 rows repeat an earlier one (row 3 that of row 1, ...)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("prompt, characters")]
    assert line.split()[2:] == ["4", "4", "4", "5", "5"]
    assert text.endswith("no bad rows\n")


def test_bad_rows_are_listed_with_their_fields_and_exit_code_1(tmp_path: Path):
    rows = [ROW, *[{**ROW, "prompt": ""}] * 12, {**ROW, "reward_model": {"ground_truth": None}}]
    file = write(tmp_path / "a.jsonl", rows)
    code, text = show(file)
    assert code == 1
    assert "bad rows: 13 of 14 (a run stops; skip_bad=true leaves them out)" in text
    assert "    row 2, prompt: 'prompt': has no text" in text
    assert text.count("\n    row ") == 10
    assert text.endswith("    and 3 more\n")
    code, text = show(file, "--skip-bad")
    assert (code, "bad rows: 13 of 14 (left out)" in text) == (0, True)
    code, text = show(file, "--json")
    found = json.loads(text.splitlines()[-1])
    assert (code, found["rows"], found["bad"], len(found["faults"])) == (1, 14, 13, 10)
    assert found["faults"][0]["row"] == 2
    assert found["lengths"]["prompt, characters"]["max"] == 4


def test_a_row_with_a_repeated_id_is_in_no_example_length_or_source(tmp_path: Path):
    long = {**ROW, "prompt": "2+3=" * 10, "data_source": "left out"}
    rows = [{**ROW, "id": 1}, {**long, "id": 1}, {**ROW, "id": 2}, {"id": 3}, {**long, "id": 1}]
    file = write(tmp_path / "a.jsonl", rows)
    code, text = show(file, "--json", "--rows", "5")
    found = json.loads(text.splitlines()[-1])
    assert (code, found["rows"], found["bad"]) == (1, 5, 3)
    assert [fault["row"] for fault in found["faults"]] == [2, 4, 5]
    assert found["faults"][2]["why"].startswith("'id' is that of row 1 already")
    assert [one["row"] for one in found["examples"]] == [1, 3]
    assert found["lengths"]["prompt, characters"]["max"] == 4
    assert found["data_sources"] == {"sums": 2}
    assert found["same_prompt"] == 1  # row 3, which stays
    one = json.loads(show(file, "--json", "--rows", "2")[1].splitlines()[-1])
    assert [one["row"] for one in one["examples"]] == [1, 3]  # as many as were wanted


def test_parts_are_shown_as_they_are_trained(tmp_path: Path):
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3="}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "5"}]}
    file = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": parts}, answer]}])
    assert inspect(file).examples == [(1, [("user", "2+3="), ("assistant", "5")])]
    assert [one["content"] for one in open_chats(file)[0].messages] == ["2+3=", "5"]


def test_two_layouts_are_an_error_until_one_is_named(tmp_path: Path):
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    file = write(tmp_path / "a.jsonl", [{"messages": chat, "question": "?", "answer": "!"}])
    with pytest.raises(DataError, match="can be read as openai or plain"):
        show(file)
    assert "read as plain" in show(file, "--layout", "plain")[1]
    assert "read as openai" in show(file, "--layout", "openai", "--for", "task")[1]
    assert show(file, "--for", "nothing")[0] == 2


def test_messages_are_chats_where_there_is_an_assistant_turn_and_else_tasks(tmp_path: Path):
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    chats = write(
        tmp_path / "a.jsonl", [{"messages": [question, answer]}, {"messages": [question]}]
    )
    report = inspect(chats)
    assert (report.purpose, [fault.row for fault in report.verdict.faults]) == ("chat", [2])
    assert not inspect(chats, purpose="task").verdict.bad
    tasks = inspect(write(tmp_path / "b.jsonl", [{"messages": [question]}]))
    assert (tasks.purpose, len(tasks.verdict.bad), tasks.unanswered) == ("task", 0, 1)


def test_results_inside_the_assistants_text_are_reported(tmp_path: Path):
    answer = "<search>Bern</search><result>A city.</result><answer>yes</answer>"
    entries = [{"from": "human", "value": "?"}, {"from": "gpt", "value": answer}]
    _, text = show(write(tmp_path / "a.jsonl", [{"conversations": entries}]))
    assert "tool results inside the assistant's text (<result> </result>): 1 rows" in text


def test_of_a_file_that_is_cut_off_the_rows_before_are_reported(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text("[" + ",".join([json.dumps(ROW)] * 30)[:-5])
    code, text = show(str(file), "--skip-bad")
    assert code == 1
    assert "29 rows, read as verl" in text
    assert "not read to the end: " in text and "may be cut off" in text


def test_a_file_without_readable_rows_is_one_line_of_error(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="is not a parquet file"):
        show(str(tmp_path / "a.parquet"))
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match="has no rows"):
        show(str(tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match="several splits"):
        show(str(tmp_path))
    table = pyarrow.Table.from_pylist([{"prompt": 3, "reward_model": {"ground_truth": "5"}}])
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    code, text = show(str(tmp_path / "c.parquet"))
    assert code == 1
    assert "row 1, prompt: 'prompt': holds int '3', not a list of messages" in text


def test_tokens_are_counted_by_the_given_function(tmp_path: Path):
    report = inspect(write(tmp_path / "a.jsonl", [ROW]), count_tokens=lambda text: 2 * len(text))
    assert report.lengths["prompt, tokens"].to_json()["max"] == 8


def test_a_long_text_is_shown_by_its_ends():
    text = shortened("a" * 500 + "b" * 500)
    assert text == "a" * 120 + " [... 760 characters ...] " + "b" * 120
