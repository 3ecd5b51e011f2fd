"""Rows of an Arrow table as the plain data that a JSON file with the same rows would give.

struct<a: int, b: int> {a: 1, b: null}    {"a": 1}: Arrow fills every struct with every key
map<string, string> [("a", "1")]          {"a": "1"}
a timestamp in the year 148107            text, since Python's datetime ends with 9999
float 0.1 (32 bits)                       0.1, not the 0.10000000149011612 that it is as 64 bits

The file does not say whether a null in a struct was written or filled in, so it is left out; a null in
a map, in a list or in JSON text was written, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from graft.data.arrow_bounds import AT_ONCE, MAX_ROW, has_dictionary, written_out
from graft.data.errors import DataError

UNREADABLE = (ValueError, OverflowError, KeyError, NotImplementedError)
"""Errors of `to_pylist` for values that Python's types cannot hold; an unknown time zone is a KeyError."""

Clean = Callable[[Any], Any]


def plain_rows(part: Any, source: Any, first: int) -> Iterator[Any]:
    """The rows of a batch or table; a row that cannot be read is a DataError in its place.

    `part` starts after `first` rows of `source`.
    """
    names: list[str] = part.schema.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{source} has several columns called {', '.join(map(repr, twice))}, of which only one could "
            "be read; rename the others"
        )
    cleaners = [
        (field.name, clean)
        for field, column in zip(part.schema, part.columns, strict=True)
        if (clean := cleaner(field.type)) and may_need_cleaning(column)
    ]
    try:
        refuse_broken(part, source)
        is_large = has_dictionary(part.schema) and written_out(part) > AT_ONCE
        rows: Any = _one_by_one(part, source, first) if is_large else part.to_pylist()
    except DataError:
        raise
    except UNREADABLE:  # one row is bad: convert each on its own
        rows = (
            _row(part.slice(offset, 1), f"{source}, row {first + offset + 1}")
            for offset in range(len(part))
        )
    for row in rows:
        if not isinstance(row, DataError):
            for name, clean in cleaners:
                row[name] = clean(row[name])
        yield row


def refuse_broken(part: Any, where: Any) -> None:
    """Raise for offsets that point outside of the data; ValueError for text that is not UTF-8.

    A file in Arrow's own format is used as it lies on the disk, and its numbers may be anything.
    """
    import pyarrow

    try:
        for column in part.columns:
            column.validate(full=True)
    except pyarrow.ArrowException as error:
        if "UTF8" in str(error):
            raise ValueError(str(error)) from error
        raise DataError(f"{where} is damaged: {str(error).strip()[:200]}") from error


def _one_by_one(part: Any, source: Any, first: int) -> Iterator[Any]:
    """Rows with repeated texts, of which only one at a time is written out."""
    for offset in range(len(part)):
        row, where = part.slice(offset, 1), f"{source}, row {first + offset + 1}"
        if (size := written_out(row)) > MAX_ROW:
            yield DataError(f"{where} has {size:,} bytes; at most {MAX_ROW:,} are read of a row")
        else:
            yield _row(row, where)


def _row(part: Any, where: str) -> Any:
    """One row, column by column, so that an error can name its column."""
    import pyarrow

    row: dict[str, Any] = {}
    for name, column in zip(part.schema.names, part.columns, strict=True):
        try:
            column.validate(full=True)
            row[name] = column.to_pylist()[0]
        except pyarrow.ArrowInvalid as error:
            why = "holds text that is not UTF-8" if "UTF8" in str(error) else "is damaged"
            return DataError(f"{where}: {name!r} {why}: {error}")
        except UnicodeDecodeError as error:
            return DataError(f"{where}: {name!r} holds text that is not UTF-8: {error}")
        except UNREADABLE as error:
            try:
                row[name] = column.cast(times_as_text(column.type)).to_pylist()[0]
            except (*UNREADABLE, pyarrow.ArrowException):
                what = f"{name!r} ({column.type}) holds a value that Python has no type for"
                return DataError(f"{where}: {what}: {error}")
    return row


def times_as_text(kind: Any) -> Any:
    """The same type with text in place of times."""
    from pyarrow import field, large_list, list_, map_, string, struct, types

    if types.is_temporal(kind):
        return string()
    if types.is_struct(kind):
        return struct([field(one.name, times_as_text(one.type)) for one in kind])
    if types.is_map(kind):
        return map_(times_as_text(kind.key_type), times_as_text(kind.item_type))
    if types.is_large_list(kind):
        return large_list(times_as_text(kind.value_type))
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return list_(times_as_text(kind.value_type))
    return times_as_text(kind.value_type) if types.is_dictionary(kind) else kind


def may_need_cleaning(column: Any) -> bool:
    """Whether a struct of this column has nulls, or there is a map or a short float: most files have none."""
    from pyarrow import BaseExtensionType, ChunkedArray, types

    if isinstance(column, ChunkedArray):
        return any(map(may_need_cleaning, column.chunks))
    if types.is_struct(column.type):
        inner = column.flatten()
        return any(one.null_count for one in inner) or any(map(may_need_cleaning, inner))
    if types.is_list(column.type) or types.is_large_list(column.type):
        return may_need_cleaning(column.flatten())
    kind = column.type
    is_plain = not (types.is_nested(kind) or types.is_dictionary(kind) or is_short_float(kind))
    return not is_plain or isinstance(kind, BaseExtensionType)


def is_short_float(kind: Any) -> bool:
    from pyarrow import types

    return types.is_float16(kind) or types.is_float32(kind)


@lru_cache(maxsize=256)
def cleaner(kind: Any) -> Clean | None:
    """A function that turns values of a type into plain data; None where they are plain already."""
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        return cleaner(kind.storage_type)
    if types.is_dictionary(kind):
        return cleaner(kind.value_type)
    if types.is_struct(kind):
        inner = [(one.name, clean) for one in kind if (clean := cleaner(one.type))]
        return lambda value: value and _struct(value, inner)
    if types.is_map(kind):
        item = cleaner(kind.item_type) or (lambda value: value)
        return lambda value: None if value is None else {str(key): item(one) for key, one in value}
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # lists of every kind
        each = cleaner(kind.value_type)
        return each and (lambda value: value and [each(one) for one in value])
    if is_short_float(kind):
        short = kind.to_pandas_dtype()
        return lambda value: (
            value and float(str(short(value)))
        )  # the shortest text that it is read from
    return None


def _struct(value: dict[str, Any], inner: list[tuple[str, Clean]]) -> dict[str, Any]:
    given = {key: one for key, one in value.items() if one is not None}
    for key, clean in inner:
        if key in given:
            given[key] = clean(given[key])
    return given
