"""Rows of a file in order, and the errors of files that are damaged."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from graft.data import records
from graft.data.errors import DataError
from graft.data.rows import read_rows, scan_rows
from graft.data.tables import read_table
from tests.row_files import write_rows as write

ROWS = [{"a": str(n), "b": 'é\n,"x" [{' * n} for n in range(1, 8)]
ENDINGS = [".jsonl", ".json", ".csv", ".parquet", ".arrow", "stream.arrow"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_rows_are_read_in_order_and_by_number_whatever_the_size_of_a_read(
    tmp_path: Path, ending: str, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "CHUNK", chunk)
    file = write(tmp_path / f"rows{ending}", ROWS)
    assert list(read_rows(str(file))) == ROWS
    table = read_table(file)
    assert [table[number] for number in range(len(ROWS))] == ROWS


def test_a_parquet_file_of_several_row_groups_is_read_in_order(tmp_path: Path):
    table = pyarrow.Table.from_pylist([{"n": n} for n in range(1000)])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=300)
    assert [row["n"] for row in scan_rows(tmp_path / "rows.parquet")] == list(range(1000))


def test_a_row_of_json_starts_at_the_byte_that_records_gives(tmp_path: Path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf [{"a": "\xc3\xa9"} ,\n {"a": 2}]\n')
    found = list(records.JsonList(tmp_path / "a.json").records())
    assert found == [(5, b'{"a": "\xc3\xa9"}'), (20, b'{"a": 2}')]


def test_a_scan_continues_behind_a_bad_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{oops\n[2]\n{"a": 4}\n')
    first, second, third, last = scan_rows(tmp_path / "a.jsonl")
    assert (first, last) == ({"a": 1}, {"a": 4})
    assert "line 2 is not JSON" in str(second)
    assert "row 3 is list, not an object" in str(third)
    with pytest.raises(DataError, match="line 2 is not JSON"):
        list(read_rows(str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("ending", [".parquet", ".arrow", "stream.arrow", ".json"])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, ending: str):
    file = Path(write(tmp_path / f"rows{ending}", [{"a": "x" * 50, "n": n} for n in range(200)]))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=f"rows{ending}.*may be cut off"):
        list(read_rows(str(file)))


def test_the_error_about_a_damaged_parquet_file_names_the_row(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([{"n": f"{n:07}" * 50} for n in range(200)])
    pyarrow.parquet.write_table(table, file, row_group_size=100, use_dictionary=False)
    with pyarrow.parquet.ParquetFile(file) as opened:
        second = opened.metadata.row_group(1).column(0).data_page_offset
    text = bytearray(file.read_bytes())
    text[second : second + 300] = b"\xff" * 300
    file.write_bytes(text)
    rows = scan_rows(file)
    assert [next(rows)["n"][:7] for _ in range(100)] == [f"{n:07}" for n in range(100)]
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read from row 101 on"):
        next(rows)


def test_text_of_a_parquet_file_that_is_not_utf8_is_a_bad_row(tmp_path: Path):
    raw = pyarrow.array([b"fine", b"\xff\xfe", b"too"], pyarrow.binary())
    table = pyarrow.table({"a": raw.view(pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = list(scan_rows(tmp_path / "a.parquet"))
    assert (found[0], found[2]) == ({"a": "fine"}, {"a": "too"})
    assert "row 2: 'a' holds text that is not UTF-8" in str(found[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}', r"must be a list of rows, .* and begins with '\{'"),
        (b'[{"a": 1} {"a": 2}]', "row 1 is not JSON in UTF-8: after it comes '{', where a comma"),
        (b'[{"a": 1}, {"a": }]', "row 2 is not JSON in UTF-8"),
        (b'[{"a": 1}, 2]', "row 2 is int, not an object"),
        (b'[{"a": "\xff"}]', "row 1 is not JSON in UTF-8: .*can't decode byte 0xff"),
        (b"[" * 100_000, "row 1 does not end; the file may be cut off"),
        (b"[" * 100_000 + b"]" * 100_000, "row 1 is not JSON in UTF-8: maximum recursion"),
        (b'[{"a": 1},]', "row 2 is not JSON in UTF-8"),
        (b"", "is not JSON in UTF-8: .* begins with ''"),
    ],
)
def test_a_json_file_that_is_no_list_of_rows_is_named(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(str(tmp_path / "a.json")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"a,b\n1,2\n3\n",
            "line 3 is no row of csv in UTF-8: it has 1 values, and the first line 2",
        ),
        (b"a,b\n1,\xff\n", "line 2 is no row of csv in UTF-8"),
        (b'a,b\n1,2\n"3,4\n', "line 3: no row can be read from here on: .*a quote left open"),
        (b"a,a\n1,2\n", "must name every column, each once; it holds 'a', 'a'"),
    ],
)
def test_a_row_of_csv_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(str(tmp_path / "a.csv")))


def test_a_cell_may_hold_a_chat_and_an_empty_one_is_nothing(tmp_path: Path):
    (tmp_path / "a.csv").write_text('m,x,y\n"[{""role"": ""user""}]",,[1]\n\n', encoding="utf-8")
    assert list(read_rows(str(tmp_path / "a.csv"))) == [
        {"m": [{"role": "user"}], "x": None, "y": "[1]"}
    ]


def test_a_line_longer_than_any_row_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "MAX_ROW", 100)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": "' + "x" * 200 + '"}\n')
    with pytest.raises(DataError, match=r"line 2 is longer than .* is it one row per line"):
        list(read_rows(str(tmp_path / "a.jsonl")))


def test_an_unknown_ending_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"ends in '\.txt'; readable are \.parquet"):
        list(read_rows(str(tmp_path / "a.txt")))
    with pytest.raises(DataError, match="no file"):
        list(read_rows(str(tmp_path)))
