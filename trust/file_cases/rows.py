"""Tables of rows: Parquet, Arrow, text, folders of them."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import Command, case, some


def wide_parquet(file: Path, rng: Random) -> None:
    """Equal values: a megabyte becomes gigabytes."""
    import pyarrow
    import pyarrow.parquet

    rows, length = rng.choice([(8_000_000, 1000), (200, 20_000_000), (2_000_000, 4000)])
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 1000 if rows < 1000 else [0] * rows, pyarrow.int32()),
        pyarrow.array(["a" * length]),
    )
    table = pyarrow.table({"question": text[:rows], "answer": text[:rows]})
    pyarrow.parquet.write_table(
        table, file, compression="zstd", row_group_size=rng.choice([rows, 100_000_000])
    )


def compressed_parquet(file: Path, rng: Random) -> None:
    """One group of plain pages that compress 1000 to 1."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=False, write_statistics=False
    ) as writer:
        text = "b" * 1_000_000
        batch = pyarrow.record_batch([pyarrow.array([text] * 100)] * 2, schema)
        for _ in range(rng.randrange(8, 16)):
            writer.write_batch(batch)


def nested_parquet(file: Path, rng: Random) -> None:
    import pyarrow
    import pyarrow.parquet

    kind: Any = pyarrow.int32()
    value: Any = 1
    for _ in range(rng.randrange(50, 150)):
        kind, value = pyarrow.list_(kind), [value]
    table = pyarrow.table({"prompt": pyarrow.array([value], kind)})
    pyarrow.parquet.write_table(table, file)


def damaged_parquet(file: Path, rng: Random) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"question": ["a", "b"] * 500, "answer": ["c", "d"] * 500})
    pyarrow.parquet.write_table(table, file)
    whole = bytearray(file.read_bytes())
    for _ in range(rng.randrange(1, 30)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    file.write_bytes(whole)


PARQUET = [wide_parquet, compressed_parquet, nested_parquet, damaged_parquet]


@case("rows", PARQUET)
def parquet(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    variant(folder / "rows.parquet", rng)
    return rows_openers("rows.parquet", rng)


def rows_openers(name: str, rng: Random) -> list[Command]:
    train = ["sft", "quickstart", f"sft.data={name}", "task.env=", "sft.steps=1", "run.dir=out"]
    return some(rng, [["data", "show", name], train], 1)


@case("rows", range(3))
def arrow(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    import pyarrow

    file = folder / "rows.arrow"
    # short texts hardly shrink a hundredfold, long ones a thousandfold
    length = rng.choice([1_000, 10_000])
    count = 50_000_000 // length
    table = pyarrow.table({"question": ["a" * length] * count, "answer": ["c"] * count})
    codec = [None, "zstd", "lz4"][variant]
    with pyarrow.ipc.new_file(
        file, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        repeats = 40 if codec else 1
        for batch in table.to_batches() * repeats:
            writer.write_batch(batch)
    whole = bytearray(file.read_bytes())
    for _ in range(rng.randrange(0, 20)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    file.write_bytes(whole)
    return rows_openers("rows.arrow", rng)


@case("rows", range(10))
def text_rows(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    deep = rng.randrange(1000, 500_000)
    good = b'{"question": "1+1", "answer": "2"}\n'
    contents = [
        lambda: b'{"question": "' + b"a" * 300_000_000,
        lambda: b"[" * deep + b"]" * deep + b"\n",
        lambda: good + b'{"question": ' * deep,
        lambda: b'{"question": "x", "answer": ' + b"9" * deep + b"}\n",
        lambda: (
            b'{"question": "x", "answer": 1e400}\n' + b'{"question": "\\ud800", "answer": "x"}\n'
        ),
        lambda: b"\xff\xfe" * 1000,
        lambda: b"\0" * 10_000_000,
        lambda: gzip.compress(good * 1_000_000),
        lambda: good * 10 + b'{"messages": ' + b'[{"role": "user", "content": ' * deep,
        lambda: b'{"' + b'a": 1, "' * 1_000_000 + b'": 1}\n',
    ]
    ending = rng.choice(["jsonl", "json", "csv"])
    (folder / f"rows.{ending}").write_bytes(contents[variant]())
    return rows_openers(f"rows.{ending}", rng)


@case("rows", range(4))
def folders_of_rows(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    rows = folder / "rows"
    rows.mkdir()
    match variant:
        case 0:
            (rows / "train.jsonl").symlink_to("/dev/zero")
        case 1:
            (rows / "again").symlink_to(rows)
            (rows / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
        case 2:
            os.mkfifo(rows / "train.jsonl")
        case _:
            inner = rows
            for _ in range(200):
                inner /= "d"
                inner.mkdir()
            (inner / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return [["data", "show", "rows"]]
