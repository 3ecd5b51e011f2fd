"""Documents to search in, from files people have.

A row is {id, contents: "Title\\ntext"}, as retrieval corpora are published, or {id, title, text}.
The id may be absent; then the row's number stands for it, counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from graft.data.rows import DataError, read_rows


class Document(NamedTuple):
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text in one, the way corpora and retrieval services write them."""
        return f"{self.title}\n{self.text}" if self.text else self.title


def read_documents(path: str) -> Iterator[Document]:
    """Every document of a jsonl, json or parquet file; DataError names a row that is none."""
    for number, row in enumerate(read_rows(path)):
        yield as_document(row, number, f"{path}, row {number + 1}")


def as_document(row: Any, number: int, where: str) -> Document:
    r"""
    >>> as_document({"contents": "Rome\nA city."}, 4, "here")
    Document(id='4', title='Rome', text='A city.')
    """
    if not isinstance(row, dict):
        raise DataError(f"{where} is {type(row).__name__}, not an object with named fields")
    identity = row.get("id")
    name = str(number) if identity is None else str(identity)
    contents, text = row.get("contents"), row.get("text")
    if isinstance(contents, str):
        title, _, text = contents.partition("\n")
        return Document(whole(name), whole(title), whole(text))
    if isinstance(text, str):
        # a line break in the title would move words into the text once the two are joined
        title = " ".join(str(row.get("title") or "").split())
        return Document(whole(name), whole(title), whole(text))
    found = ", ".join(map(str, row)) or "nothing"
    raise DataError(
        f"{where}: no text in `contents` (title, line break, text) or `text` (found: {found})"
    )


def whole(text: str) -> str:
    """`text` without halves of characters (lone surrogates), which no file or wire can carry."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
