"""Rows written to a file in the format that its name says."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write_rows(file: Path, rows: list[Any]) -> str:
    """Parquet, arrow (a stream if the name says so), csv, a list in .json, and lines elsewhere."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix in (".parquet", ".arrow"):
        columns = {key: None for row in rows for key in row}  # arrow looks at the first row only
        table = pyarrow.Table.from_pylist([{**columns, **row} for row in rows])
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(table, file)
            return str(file)
        new = pyarrow.ipc.new_stream if "stream" in file.name else pyarrow.ipc.new_file
        with new(str(file), table.schema) as writer:
            writer.write_table(table)
    elif file.suffix == ".csv":
        with file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        file.write_text(json.dumps(rows) if file.suffix == ".json" else lines, encoding="utf-8")
    return str(file)
