"""Limits of chat templates, which come with models of strangers: time, and the size of every value.

Jinja's sandbox keeps a template from private attributes and from changing values. It may still loop for
hours, or write 'a' * 10 ** 10. Here loops, calls, filters, operators and texts are counted:

    {% for a in range(99999) %}{% for b in range(99999) %}...    TemplateLimit: it runs for more than 3 s
    {{ 'a' * 10000000000 }}                                      TemplateLimit: it makes a value of ...
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from threading import local
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 3.0
"""Of the thread's own time, per rendering; real templates take milliseconds."""
MAX_LENGTH = 1 << 24
"""Characters or items of one value, and of the text that a template writes."""
MAX_BITS = 1 << 14
"""Of a whole number."""
MAX_PARTS = 200_000
"""Values inside of a list or dict, each counted as often as it is shown."""
SHORT = 1 << 12
"""Characters of a text that takes no time: a template has at most MAX_SOURCE places that join two."""
MAX_SOURCE = 1 << 20
"""Characters of a template."""


class TemplateLimit(jinja2.TemplateError):
    """A template that runs too long, or makes too large a value."""


def refuse_beyond(length: float) -> None:
    if length > MAX_LENGTH:
        raise TemplateLimit(
            f"it makes a value of {length:,.0f}; at most {MAX_LENGTH:,} are allowed"
        )


def check_source(text: str) -> None:
    if len(text) > MAX_SOURCE:
        raise TemplateLimit(f"it has {len(text):,} characters; at most {MAX_SOURCE:,} are allowed")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits; `limited` renders within them."""

    intercepted_binops = frozenset(["+", "*", "**", "%", "-", "/", "//"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=checked_parts, **options)
        self._clock = local()
        self.globals.pop("lipsum", None)
        for slow in ("wordwrap", "urlize"):  # of texts, and no chat template uses them
            self.filters.pop(slow, None)
        for name, call in list(self.filters.items()):
            self.add_filter(name, call)
        self.filters |= {"_counted": self._counted, "_parts": checked_parts, "_size": checked_size}

    def limited(self, render: Callable[[], str]) -> str:
        """The text that `render` returns."""
        self._clock.end = time.thread_time() + MAX_SECONDS
        try:
            return checked_size(render())
        except RecursionError:
            raise TemplateLimit("its macros or values are nested too deeply") from None
        except MemoryError:
            raise TemplateLimit("it takes more memory than there is") from None
        finally:
            self._clock.end = float("inf")

    def tick(self) -> None:
        if time.thread_time() > getattr(self._clock, "end", float("inf")):
            raise TemplateLimit(f"it runs for more than {MAX_SECONDS:g} s")

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The text of a template, macro or block from its pieces."""
        found, length = [], 0
        for piece in pieces:
            length += len(piece)
            refuse_beyond(length)
            found.append(piece)
        return "".join(found)

    def add_filter(self, name: str, call: Callable[..., Any]) -> None:
        """A filter whose arguments and result are checked."""

        @wraps(call)  # with Jinja's marks, which say whether the first argument is the context
        def checked(*given: Any, **named: Any) -> Any:
            self.tick()
            first = next((n for n, x in enumerate(given) if not isinstance(x, OF_JINJA)), 0)
            own = [self._listed(x) if name == "join" else x for x in given[first:]]
            for value in (*own, *named.values()):
                checked_parts(value)
            for value in (*own[1:], *named.values()):
                if isinstance(value, int):
                    refuse_beyond(value)
            if name in GROWTH:
                refuse_beyond(GROWTH[name](*own, **named))
            return checked_size(call(*given[:first], *own, **named))

        self.filters[name] = checked

    def _listed(self, items: Any) -> Any:
        """Items of a generator as a list, to count them first."""
        return list(_Counted(items, self.tick)) if isinstance(items, Iterator) else items

    def _counted(self, items: Any) -> Any:
        # an undefined one is an error or an empty loop, as without limits
        return items if isinstance(items, jinja2.Undefined) else _Counted(items, self.tick)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Checks().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str and len(left) + len(right) < SHORT:
            return left + right
        self.tick()
        _check_operator(operator, left, right)
        return checked_size(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A function or method; the names of the arguments are Jinja's, since a template may give any."""
        __self.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | list | tuple | dict):
            args = tuple(__self._listed(x) for x in args)
            for value in (*args, *kwargs.values()):
                checked_parts(value)
                if isinstance(value, int):
                    refuse_beyond(value)
            if isinstance(owner, str | bytes) and __obj.__name__ in METHOD_GROWTH:
                refuse_beyond(METHOD_GROWTH[__obj.__name__](owner, *args))
        return checked_size(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"{:>9}".format(...)`: its widths are numbers in the text, or arguments."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            values = [*args, *kwargs.values()]
            for one in values:
                checked_parts(one)
            numbers = [one for one in values if isinstance(one, int)]
            widths = numbers if re.search(r":[^{}]*\{", text) else []
            refuse_beyond(max(_largest_number(text), *widths, 0) * max(1, text.count("{")))
            return wrapped(*args, **kwargs)

        return checked


OF_JINJA = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)
"""What Jinja passes to filters before the template's own arguments."""


class _Checks(NodeTransformer):
    """Puts the checks into a template: loops are counted, texts and comparisons are measured first."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(one, "_parts") for one in node.nodes]
        return _filtered(node, "_size")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_parts")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_parts")
        return node


def _filtered(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)


class _Counted:
    """The items of a loop, each of them counted; its length is known where theirs is."""

    def __init__(self, items: Iterable[Any], tick: Callable[[], None]) -> None:
        self._items, self._tick = items, tick

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError: then Jinja counts


def checked_size(value: Any) -> Any:
    """The value, if it is not too long."""
    if isinstance(value, str | list | tuple | dict | bytes):
        refuse_beyond(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateLimit("it makes a number with too many digits")
    return value


def checked_parts(value: Any) -> Any:
    """The value, if showing or comparing it ends: x = [x, x], 40 times, is small and has 2 ** 40 parts."""
    if not isinstance(value, list | tuple | dict):
        return value
    count, left = 0, [iter([value])]
    while left:
        one = next(left[-1], left)
        if one is left:
            left.pop()
            continue
        count += 1
        if count > MAX_PARTS or len(left) > 200:
            raise TemplateLimit(f"it makes a value with more than {MAX_PARTS:,} parts")
        if isinstance(one, dict):
            left.append(iter([*one, *one.values()]))
        elif isinstance(one, list | tuple):
            left.append(iter(one))
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | bytes) else 1


def _check_operator(operator: str, left: Any, right: Any) -> None:
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and numbers and left.bit_length() * right > MAX_BITS:
        raise TemplateLimit("it makes a number with too many digits")
    if operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(one, str | list | tuple | bytes):
                refuse_beyond(len(one) * times)
    if operator == "+":
        refuse_beyond(_size(left) + _size(right))
    if operator == "%" and isinstance(left, str | bytes):
        refuse_beyond(_formatted(left, right))


def _formatted(text: Any, *values: Any, **named: Any) -> float:
    """A bound of the length of `text % values`, of its widths."""
    flat = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
    for value in (*flat, *named.values()):
        checked_parts(value)
    text = str(text)
    stars = [value for value in flat if isinstance(value, int)] if "*" in text else []
    return max(_largest_number(text), *stars, 0) * max(1, text.count("%"))


def _largest_number(text: str) -> int:
    """The largest of the widths in a text such as "%10d" or "{:>10}"."""
    return max((int(digits[:20]) for digits in re.findall(r"[0-9]+", text)), default=0)


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> float:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def _joined(items: Any, between: Any = "", *_: Any, **__: Any) -> float:
    listed = items if isinstance(items, list | tuple) else []
    return sum(map(_size, listed)) + _size(items) * len(str(between))


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> float:
    each = width if isinstance(width, int) else len(str(width))
    return len(str(text)) + (1 + str(text).count("\n")) * each


def _summed(items: Any, attribute: Any = None, start: Any = 0, *_: Any, **__: Any) -> float:
    return _joined(items) if isinstance(start, list | tuple) else 0


GROWTH: dict[str, Callable[..., float]] = {
    "replace": _replaced,
    "join": _joined,
    "indent": _indented,
    "format": _formatted,
    "sum": _summed,
}
"""Filters whose result may be longer than all that they get -> a bound of its length."""

METHOD_GROWTH: dict[str, Callable[..., float]] = {
    "replace": _replaced,
    "join": lambda between, items=(), *_: _joined(items, between),
    "expandtabs": lambda text, size=8, *_: text.count("\t") * size,
    "translate": lambda text, table=(), *_: (
        len(text) * max((_size(x) for x in table.values()), default=1)
        if isinstance(table, dict)
        else 0
    ),
}
"""The same for methods of texts."""
