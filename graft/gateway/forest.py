"""The calls of all attempts at one task as a forest of spans in which equal prefixes are one path.

A request's tokens are placed from a root, or behind an answer that it continues. What is there already is
shared; where it ends inside a span, the span is cut:

    root "sys A"                  place "sys B", no answer before it
    root "sys " ┬ "A"
                └ "B"             new

Only an attempt's own answers are shared: two attempts that sample the same tokens are two samples. A prompt
that repeats an own answer to the letter runs through it, and `to_batch` trains it in the first row only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graft.protocols import Context, Engine
from graft.types import Author, Episode, Leaf, Span, Task

WORTH_FORKING = 16
"""Tokens from which on the keys and values of another context are shared."""
MAX_PARKED = 32
"""Prompts of one task whose contexts stay open to be forked."""


@dataclass(slots=True, eq=False)
class Node:
    """A span with its place in the forest; `span.parent` is set when the episode is written."""

    span: Span
    parent: Node | None
    children: list[Node] = field(default_factory=list["Node"])

    def path(self) -> list[Node]:
        """The nodes from its root to itself."""
        found: list[Node] = [self]
        node = self.parent
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


@dataclass(slots=True, eq=False)
class LiveContext:
    """A context of the engine that answers are sampled from, one at a time."""

    context: Context
    is_busy: bool = False


class CallForest:
    """Spans of one task while its attempts run; `decode(tokens, last)` gives the text of tokens."""

    def __init__(
        self, task: Task, engine: Engine, decode: Callable[[Sequence[int], int | None], str]
    ) -> None:
        self.task, self.engine, self._decode = task, engine, decode
        self.roots: list[Node] = []
        self.leaves: list[tuple[int, list[Node], Leaf]] = []
        """The number of an attempt, the last node of each of its contexts, and its leaf."""
        self._parked: list[Context] = []

    def place(
        self, tokens: Sequence[int], start: Node | None, own: Collection[Node], text: str = ""
    ) -> Node | None:
        """The node at which `tokens` end behind `start` (None: from a root); new spans where needed.

        own: answers that may be part of the way.
        """
        rest, here = list(tokens), start
        while rest:
            siblings = self.roots if here is None else here.children
            usable = [one for one in siblings if one.span.author is not Author.POLICY or one in own]
            shared = [common_length(one.span.tokens, rest) for one in usable]
            most = max(shared, default=0)
            if not most:
                is_prompt = here is None or here.span.author is Author.TASK
                span = Span(None, Author.TASK if is_prompt else Author.ENV, rest)
                is_whole = len(rest) == len(tokens)
                span.text = text if is_whole and text else self._text(rest, here)
                return self.add(span, here)
            here = usable[shared.index(most)]
            if most < len(here.span):
                here = self._cut(here, most)
            rest = rest[most:]
        return here

    def add(self, span: Span, parent: Node | None) -> Node:
        """A new span under a parent."""
        node = Node(span, parent)
        (self.roots if parent is None else parent.children).append(node)
        return node

    def context(
        self, tokens: Sequence[int], key: int, others: Sequence[Context]
    ) -> tuple[Context, int]:
        """A context of its own over `tokens`, forked from the one that shares most with it, and how many.

        others: contexts of the attempt that nothing samples from at the moment.
        """
        best, shared = None, WORTH_FORKING - 1
        for one in (*self._parked, *others):
            if (common := common_length(one.tokens, tokens)) > shared:
                best, shared = one, common
        if best is None:
            return self.engine.open(tokens, key=key), 0
        fork = best.fork(key, at=shared)
        if rest := list(tokens[shared:]):
            fork.append(rest)
        return fork, shared

    def park(
        self, tokens: Sequence[int], key: int, others: Sequence[Context]
    ) -> tuple[Context, int]:
        """A context over a prompt that stays open, so that other attempts and sub-agents fork it."""
        for one in self._parked:
            if one.tokens == list(tokens):
                return one, len(tokens)
        parked, shared = self.context(tokens, key, others)
        self._parked.append(parked)
        if len(self._parked) > MAX_PARKED:  # the first one is the prompt of every attempt
            self._parked.pop(1).close()
        return parked, shared

    def close(self) -> None:
        """Close the contexts."""
        for context in self._parked:
            context.close()
        self._parked = []

    def episode(self) -> Episode:
        """Everything so far as an Episode, attempts in the order of their numbers."""
        made = Episode(self.task)
        index: dict[Node, int] = {}
        waiting = self.roots[::-1]
        while waiting:
            node = waiting.pop()
            parent = None if node.parent is None else index[node.parent]
            index[node] = made.append(replace(node.span, parent=parent))
            waiting += node.children[::-1]
        for _, tips, leaf in sorted(self.leaves, key=lambda one: one[0]):
            leaf.tips = tuple(index[tip] for tip in tips)
            made.leaves.append(leaf)
        return made

    def part(self, task: Task, nodes: Collection[Node], sampled: Collection[Node]) -> Episode:
        """The paths to some nodes, without leaves. What is known of a span besides its tokens may come from
        attempts that share it, and is only told of the `sampled` ones."""
        made = Episode(task)
        index: dict[Node | None, int | None] = {None: None}
        for node in nodes:
            for one in node.path():
                if one not in index:
                    span = replace(one.span, parent=index[one.parent])
                    is_own = one in sampled
                    span.info = dict(span.info) if is_own else {}
                    span.reward = span.reward if is_own else 0.0
                    index[one] = made.append(span)
        return made

    def _cut(self, node: Node, at: int) -> Node:
        """Cut a node's span; the node keeps the rest, so that what refers to its end stays right."""
        span = node.span
        tail = self._decode(span.tokens[at:], span.tokens[at - 1])
        head, node.span = span.cut(at, (self._text(span.tokens[:at], node.parent), tail))
        above = Node(head, node.parent, [node])
        siblings = self.roots if node.parent is None else node.parent.children
        siblings[siblings.index(node)] = above
        node.parent = above
        return above

    def _text(self, tokens: Sequence[int], before: Node | None) -> str:
        last = before.span.tokens[-1] if before is not None and before.span.tokens else None
        return self._decode(tokens, last)


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the longest common prefix; slices are compared, which takes no loop in Python."""
    low, high = 0, min(len(a), len(b))
    if list(a[:high]) == list(b[:high]):
        return high
    while low < high - 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle
    return low
