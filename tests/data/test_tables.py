"""Rows from files, folders and the hub's folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from graft.data import arrow, hub
from graft.data.errors import DataError
from graft.data.hub import locate, read_hub, splits_of
from graft.data.tables import RowTable, data_files, read_table
from tests.row_files import write_rows as write

ROWS = [{"problem": f"{n} + {n}", "answer": str(2 * n)} for n in range(5)]


@pytest.mark.parametrize(
    "ending", [".parquet", ".jsonl", ".json", ".csv", ".arrow", "stream.arrow"]
)
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str):
    table = read_table(write(tmp_path / f"rows{ending}", ROWS))
    assert list(table) == ROWS
    assert table.columns == ["problem", "answer"]
    with pytest.raises(IndexError, match="row 5 of 5"):
        table[5]


def test_a_split_is_what_the_names_of_its_files_start_with(tmp_path: Path):
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[2:4])
    write(tmp_path / "test_v2.jsonl", ROWS[4:])
    write(tmp_path / "dataset_info.json", [])
    write(tmp_path / ".cache" / "train.jsonl", ROWS)
    assert list(data_files(tmp_path)) == ["train", "test_v2"]
    assert list(read_table(tmp_path, "train")) == ROWS[:4]
    assert list(read_table(tmp_path, "test")) == ROWS[4:]
    with pytest.raises(DataError, match=r"several splits \(train, test_v2\): choose one"):
        read_table(tmp_path)
    with pytest.raises(DataError, match="no split 'tes'; it has train, test_v2"):
        read_table(tmp_path, "tes")


def test_a_folder_may_be_the_split(tmp_path: Path):
    write(tmp_path / "default" / "train" / "0000.parquet", ROWS)
    assert list(read_table(tmp_path)) == ROWS
    assert list(data_files(tmp_path)) == ["train"]


def test_what_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="no file or folder"):
        read_table(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no \.parquet, .*, \.arrow file"):
        read_table(tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR0")
    with pytest.raises(DataError, match="is not a parquet file"):
        read_table(tmp_path / "broken.parquet")
    (tmp_path / "numbers.jsonl").write_text("1\n2\n")
    with pytest.raises(DataError, match="row 1 is int, not an object"):
        read_table(tmp_path / "numbers.jsonl")
    write(tmp_path / "two" / "train.jsonl", ROWS)
    write(tmp_path / "two" / "train.parquet", ROWS)
    with pytest.raises(DataError, match="several formats"):
        read_table(tmp_path / "two")


def test_a_folder_named_for_its_split_is_that_split_whatever_its_files_are_called(tmp_path: Path):
    write(tmp_path / "train" / "data.jsonl", ROWS[:3])
    write(tmp_path / "test" / "data.jsonl", ROWS[3:])
    assert list(read_table(tmp_path, "train")) == ROWS[:3]
    assert list(read_table(tmp_path, "test")) == ROWS[3:]


def test_two_versions_of_a_dataset_in_one_folder_are_not_mixed(tmp_path: Path):
    for version in ("main", "socratic"):
        write(tmp_path / version / "train-00000-of-00001.parquet", ROWS)
    with pytest.raises(DataError, match=r"in several folders \(.*main, .*socratic\): name one"):
        read_table(tmp_path, "train")
    assert len(read_table(tmp_path / "main", "train")) == 5


@pytest.mark.parametrize("ending", [".jsonl", ".JSONL", ".json"])
def test_a_byte_order_mark_and_windows_line_ends_are_ignored(tmp_path: Path, ending: str):
    lines = [json.dumps(row) for row in ROWS]
    text = "\r\n".join(lines) if ending != ".json" else json.dumps(ROWS)
    (tmp_path / f"rows{ending}").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    assert list(read_table(tmp_path / f"rows{ending}")) == ROWS


def test_lines_in_a_file_called_json_are_read_and_unusual_line_ends_are_text(tmp_path: Path):
    rows = [{"problem": "one\u2028two\x85", "answer": "é"}, *ROWS]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    for name in ("rows.json", "rows.jsonl"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert list(read_table(tmp_path / name)) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{oops\n', "line 2 is not JSON"),
        (
            '{"a": "é"}'.encode("latin-1"),
            "line 1 is not JSON in UTF-8: .*0xe9.*; save the file as UTF",
        ),
        ('{"a": 1}'.encode("utf-16"), "line 1 is not JSON in UTF-8.*; it seems to be UTF-16; save"),
        (b"[" * 100_000, "line 1 is not JSON in UTF-8: maximum recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 1 is not JSON in UTF-8: Exceeds the limit"),
        (b'{"a": 1},\n{"a": 2}\n', "line 1 is not JSON .* after its object comes ','; remove it"),
        (b'{"a": 1} {"a": 2}\n', "after its object comes '{\"a\": 2}'; give every row a line"),
        (b'{"a": 1}\n[1]', "row 2 is list, not an object with named fields"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_table(file)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_of_a_row_of_text_only_its_start_is_kept(tmp_path: Path, ending: str):
    rows = [{"problem": "\u00e9\n" * 5000 + str(n), "answer": str(n)} for n in range(4)]
    table = read_table(write(tmp_path / f"rows{ending}", rows))
    (starts,) = table.rows.starts
    assert len(starts) * starts.itemsize == 32
    assert [table[n] for n in (3, 0, 2)] == [rows[3], rows[0], rows[2]]
    assert table[3] is not table[3]


def test_a_file_that_changes_while_it_is_in_use_is_not_misread(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    table = read_table(write(file, ROWS))
    write(file, [{"problem": "longer than before", "answer": "7"}, *ROWS])
    with pytest.raises(DataError, match="was changed while it was in use"):
        table[2]


def test_without_a_check_a_bad_line_fails_only_when_it_is_used(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n\n{oops\n{"a": "\xff"}\n{"a": 3}\n')
    table = read_table(file, check=False)
    assert (len(table), table[0], table[3]) == (4, {"a": 1}, {"a": 3})
    with pytest.raises(DataError, match="line 3 is not JSON in UTF-8"):
        table[1]
    assert [isinstance(row, DataError) for row in table.scan()] == [False, True, True, False]
    with pytest.raises(DataError, match="line 3"):
        read_table(file)


def test_a_large_parquet_file_keeps_the_row_groups_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"n": n, "text": "x" * 1000} for n in range(40)]
    files = [tmp_path / f"train-0000{part}-of-00002.parquet" for part in (0, 1)]
    for part, file in enumerate(files):
        table = pyarrow.Table.from_pylist(rows[20 * part : 20 * part + 20])
        pyarrow.parquet.write_table(table, file, row_group_size=5)
    monkeypatch.setattr(arrow, "IN_MEMORY", 12_000)  # two groups of five rows
    table = read_table(tmp_path)
    assert isinstance(table.rows, arrow.RowGroups)
    assert (len(table), table.columns) == (40, ["n", "text"])
    assert [table[n]["n"] for n in (39, 0, 4, 5, 19, 20, 21, 38)] == [39, 0, 4, 5, 19, 20, 21, 38]
    assert list(table.rows._kept) == [4, 7]
    assert list(table) == rows


def test_parts_whose_columns_differ_in_type_are_named(tmp_path: Path):
    write(tmp_path / "train-00000-of-00002.parquet", [{"answer": "1"}])
    write(tmp_path / "train-00001-of-00002.parquet", [{"answer": 1}])
    with pytest.raises(DataError, match=r"columns of train-00000.* are not of one type"):
        read_table(tmp_path)


def test_a_table_is_loaded_once_and_again_when_its_file_changes(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    first = read_table(write(file, ROWS))
    assert read_table(str(file)) is first
    write(file, ROWS[:2])
    os.utime(file, ns=(1, 1))
    assert len(read_table(file)) == 2


def test_a_copy_of_a_hub_dataset_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("GRAFT_DATA", str(tmp_path / "mine"))
    assert locate("owner/name") is None
    snapshot = tmp_path / "hf" / "hub" / "datasets--owner--name" / "snapshots" / "abc"
    write(snapshot / "data" / "train-00000-of-00001.parquet", ROWS[:3])
    assert locate("owner/name") == snapshot
    assert list(read_hub("owner/name", "train")) == ROWS[:3]
    write(tmp_path / "mine" / "owner" / "name" / "test.jsonl", ROWS[3:])
    assert locate("owner/name") == tmp_path / "mine" / "owner" / "name"
    assert splits_of("owner/name") == ["test"]
    assert list(read_hub("owner/name")) == ROWS[3:]


def test_the_error_about_an_absent_dataset_names_the_download_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("GRAFT_DATA", raising=False)
    monkeypatch.setattr(hub, "_is_worth_trying", lambda hub_id: False)
    with pytest.raises(DataError) as caught:
        read_hub("axon-rl/no-such-set")
    text = str(caught.value)
    assert (
        "hf download --repo-type dataset axon-rl/no-such-set --local-dir data/no-such-set" in text
    )
    assert 'data="data/no-such-set"' in text
    assert "--args LABEL.data=data/no-such-set" in text
    assert "$GRAFT_DATA/axon-rl/no-such-set" in text
    assert 'pip install "graft-rl[hub]"' in text


@pytest.mark.peer
def test_the_hub_librarys_rows_are_the_files_rows(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"problem": "p", "answer": ["a", "b"], "image": {"bytes": b"\x89PNG"}}]
    features = datasets.Features(
        problem=datasets.Value("string"),
        answer=datasets.List(datasets.Value("string")),
        image=datasets.Image(),
    )
    loaded = datasets.DatasetDict(train=datasets.Dataset.from_list(rows, features=features))
    monkeypatch.setattr(datasets, "load_dataset", lambda hub_id: loaded)
    monkeypatch.setattr(hub, "_is_worth_trying", lambda hub_id: True)
    monkeypatch.setattr(hub, "locate", lambda hub_id: None)
    assert list(read_hub("owner/lives-in-memory")) == rows  # images are not decoded
    assert splits_of("owner/lives-in-memory") == ["train"]
    with pytest.raises(DataError, match="has no split 'test'; it has train"):
        read_hub("owner/lives-in-memory", "test")
    hub._open.cache_clear()


def test_rows_in_memory_are_a_table_too():
    table = RowTable(ROWS)
    assert (len(table), table[1], table.source) == (5, ROWS[1], "rows")
