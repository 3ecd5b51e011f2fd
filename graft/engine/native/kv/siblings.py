"""Which sequences of a step are computed together: siblings that share pages, contexts of like length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from graft.engine.native.kv.sequences import Sequence

Item = TypeVar("Item")

SIBLING_PAGES = 4  # a shorter common prefix is cheaper to read once per sibling


@dataclass(slots=True)
class SiblingGroup:
    """Sequences that hold the same first `pages` pages."""

    pages: int
    members: list[Sequence]

    def num_pages(self) -> int:
        """The number of pages to read: the common ones, and those of each member."""
        longest = max(len(member.pages) for member in self.members)
        return self.pages + len(self.members) * (longest - self.pages)


def find_sibling_groups(
    sequences: list[Sequence], page_size: int
) -> tuple[list[SiblingGroup], list[Sequence]]:
    """Siblings that should read their common pages together, and the sequences without any.

    A sequence may have several stems (a prompt, a fork after a tool); it joins the group that saves
    more page reads: 8 rows on 20 pages (140) rather than 2 rows on 30 (30). Two sequences that hold the
    same page hold the same pages before it, so a page id identifies the group.
    """
    candidates: list[list[tuple[int, int]]] = []  # per sequence: (shared pages, the last of them)
    sizes: dict[int, int] = {}
    for sequence in sequences:
        found: list[tuple[int, int]] = []
        stem = None if sequence.freed else sequence.stem  # others may still see what it does not
        while stem is not None and len(stem.tokens) >= SIBLING_PAGES * page_size:
            pages = len(stem.tokens) // page_size
            last = sequence.pages[pages - 1]
            if not found or found[-1][1] != last:  # else both stems end in one page
                found.append((pages, last))
                sizes[last] = sizes.get(last, 0) + 1
            stem = stem.stem
        candidates.append(found)
    groups: dict[int, SiblingGroup] = {}
    alone: list[Sequence] = []
    for sequence, found in zip(sequences, candidates, strict=True):
        saved, pages, last = max(
            (((sizes[last] - 1) * pages, pages, last) for pages, last in found), default=(0, 0, 0)
        )
        if saved == 0:
            alone.append(sequence)
        else:
            groups.setdefault(last, SiblingGroup(pages, [])).members.append(sequence)
    return list(groups.values()), alone


def split_by_size(items: list[Item], key: Callable[[Item], int]) -> list[list[Item]]:
    """Runs of similar size, largest first: padding never more than doubles an item, plus 8.

    sizes 100 60 46 40 15 -> [100 60 46] [40] [15]: 2 * 45 + 8 would be below 100
    """
    runs: list[list[Item]] = []
    largest = 0
    for item in sorted(items, key=key, reverse=True):
        if not runs or 2 * key(item) + 8 < largest:
            runs.append([])
            largest = key(item)
        runs[-1].append(item)
    return runs


def split_by_total(items: list[Item], total: int, key: Callable[[Item], int]) -> list[list[Item]]:
    """Runs whose sizes add up to at most `total`, or that hold a single item.

    total 5, sizes 2 2 2 7 -> [2 2] [2] [7]
    """
    runs: list[list[Item]] = []
    filled = total
    for item in items:
        filled += key(item)
        if filled > total:
            runs.append([])
            filled = key(item)
        runs[-1].append(item)
    return runs


def split_by_pages(sequences: list[Sequence], max_pages: int) -> list[list[Sequence]]:
    """Parts of similar context length that gather at most `max_pages` pages, padding included."""
    parts: list[list[Sequence]] = []
    for run in split_by_size(sequences, key=lambda s: len(s.pages)):
        longest = len(run[0].pages)
        parts += split_by_total(run, max_pages, key=lambda _, longest=longest: longest)
    return parts
