"""What no caller expects: exceptions, numbers, texts and JSON of every kind."""

from __future__ import annotations

import asyncio
import builtins
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np


class Raised:
    """An oddity that is raised, not returned."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"raise {type(self.error).__name__}"


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Rude:
    """Every way to look at it raises."""

    def __float__(self) -> float:
        raise ZeroDivisionError

    def __str__(self) -> str:
        raise RudeError

    __repr__ = __bool__ = __len__ = __iter__ = __str__  # type: ignore[assignment]

    @property
    def shape(self) -> Any:
        raise RudeError


class RudeMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError(key)

    def __iter__(self) -> Iterator[str]:
        raise OSError("no keys")

    def __len__(self) -> int:
        return 3


class ExitingFloat:
    def __float__(self) -> float:
        raise SystemExit(3)


def all_errors() -> Iterator[BaseException]:
    """One of every built-in kind, and some that no log likes."""
    for kind in vars(builtins).values():
        if isinstance(kind, type) and issubclass(kind, BaseException):
            if issubclass(kind, BaseExceptionGroup):
                yield kind("many", [ValueError("one")])
            elif issubclass(kind, UnicodeDecodeError):
                yield kind("utf-8", b"\xff", 0, 1, "odd")
            elif issubclass(kind, UnicodeEncodeError):
                yield kind("utf-8", "\ud800", 0, 1, "odd")
            elif issubclass(kind, UnicodeTranslateError):
                yield kind("\ud800", 0, 1, "odd")
            else:
                yield kind("odd")
    yield BaseExceptionGroup("many", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
    yield asyncio.CancelledError("nobody asked")
    yield asyncio.InvalidStateError()
    yield RudeError()
    yield ValueError("\ud800" * 3 + "\0")
    yield ValueError("x" * 3_000_000)


NUMBERS: list[Any] = [
    math.nan, math.inf, -math.inf, 1e308, -1e308, 1e13, 5e-324, 10**400, -(10**400), True, 0, -0.0,
    np.float32("nan"), np.float64(1e300), np.int64(3), np.bool_(True), np.ones(3), np.ones((1, 1)),
    Decimal("NaN"), Decimal("sNaN"), Decimal("1e400"), Decimal("0.5"), Fraction(1, 3), 1j,
]  # fmt: skip
TEXTS: list[Any] = [
    "", "\ud800", "a\udfffb", "\0" * 9, "x" * 3_000_000, "<|im_end|>" * 9, "𝔘", "a\r\n\u2028b", "nan",
]  # fmt: skip


def json_oddities() -> Iterator[Any]:
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    yield from (
        None,
        [],
        {},
        [[]],
        {"\ud800": 1},
        {"a": "\ud800"},
        {"reward": "\ud800"},
        deep,
        loop,
    )
    yield from (
        {1: 2},
        {None: 1},
        {(1, 2): 3},
        {"a": math.nan},
        {"a": b"\xff"},
        {"a": {1, 2}},
        b"\xff",
    )
    yield from (
        {"x" * 100_000: 1},
        {f"k{n}": n for n in range(20_000)},
        Rude(),
        RudeMapping(),
        object(),
    )
    yield from (
        ExitingFloat(),
        {"a": Rude()},
        {Rude: 1},
        iter([1]),
        lambda: 1,
        (x for x in [1]),
        int,
    )
    yield from ({"reward": math.nan}, {"reward": 1e13}, {"reward": None, "a": Rude()}, {"tool": 3})
    yield from ({"tools/x": "much"}, {"tool": 1, "tool_calls": "many"}, {"observe_as": Rude()})


def oddities() -> list[Any]:
    return [*map(Raised, all_errors()), *NUMBERS, *TEXTS, *json_oddities()]


class Oddity:
    """Holds one, so that a class attribute that is a function is not made a method."""

    def __init__(self, value: Any) -> None:
        self.value = value


def give(oddity: Any) -> Any:
    oddity = oddity.value if isinstance(oddity, Oddity) else oddity
    if isinstance(oddity, Raised):
        raise oddity.error
    return oddity
