"""The documents of a search corpus, from the usual kinds of files.

A row is {id, contents: "Title\\ntext"}, as retrieval corpora are published, or {id, title, text}.
Without an id the row's number, counted from 0, is the id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from graft.data.errors import DataError
from graft.data.rows import read_rows


class Document(NamedTuple):
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as one text, the way corpora and retrieval services write them."""
        return f"{self.title}\n{self.text}" if self.text else self.title


def read_documents(path: str) -> Iterator[Document]:
    """Every document of a jsonl, json or parquet file; DataError names a row that is not one."""
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
    elif isinstance(text, str):
        # a line break in the title would move words into the text once the two are joined
        title = " ".join(str(row.get("title") or "").split())
    else:
        found = ", ".join(map(str, row)) or "nothing"
        raise DataError(
            f"{where}: no text in `contents` (title, line break, text) or `text` (found: {found})"
        )
    return Document(*map(without_surrogates, (name, title, text)))


def without_surrogates(text: str) -> str:
    """`text` with "?" for lone surrogates (halves of characters), which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
