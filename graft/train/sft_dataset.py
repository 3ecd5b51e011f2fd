"""What a warm-up goes through: examples step by step, and rows that it only looks at.

100 good rows, a tenth held out, batch 32, two epochs: 90 rows twice are 180 examples, 6 steps

    step   1 2 3 4 5 6        the third step takes the last 26 rows of one order and the first 6
    rows  32 . . . . 20       of the next; the last step takes what is left

Every row is read and encoded once before the first step, so that a bad one does not stop a run that is
hours old, and counts are known when the learning rate is planned. Kept of it is a number per row; the
rows stay in their file. Examples are a function of the step: a resumed run sees the same ones.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b

from graft.config import SftSection
from graft.data.chats import Chats, open_chats
from graft.data.check import is_spared
from graft.data.errors import DataError
from graft.data.readers import ChatRow
from graft.rollout.action_spelling import ActionSpeller
from graft.rollout.demonstration import demonstration
from graft.rollout.examples import contexts_of, example, shortened
from graft.rollout.setup import draw_key
from graft.text.chat import TemplateRewrites
from graft.train.build import RunComponents
from graft.train.rl import TaskStream
from graft.types import Episode, Task

Examples = Callable[[int], list[Episode]]
"""step -> the examples of that step, the first is 1."""

MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What a row can raise that has the wrong things in the right places."""


@dataclass(frozen=True, slots=True)
class SFTDataset:
    """The whole of a warm-up, before it begins."""

    steps: int
    examples: Examples
    held_out: Callable[[], Iterator[list[Episode]]] | None = None
    """Held-out examples, a batch at a time."""
    passes: float = 0.0
    """Passes over the rows that one step makes; 0 where there are no rows."""
    notes: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    fingerprint: str = ""
    """Of the tokens of all rows; who goes on with others would not see what it would have seen."""


def make_course(components: RunComponents) -> SFTDataset:
    sft = components.config.sft
    if not sft.data:
        held_out = recorded(components, sft.eval_data) if sft.eval_data else None
        return SFTDataset(sft.steps, demonstrations(components), _batches(held_out, sft))
    rows = recorded(components, sft.data)
    if sft.eval_data:
        looked_at, learned = recorded(components, sft.eval_data), rows
    else:
        looked_at, learned = rows.split(sft.eval_share)
    steps = sft.steps or math.ceil(sft.epochs * len(learned) / sft.batch)
    counts = {"rows": len(learned), "held_out": len(looked_at), **rows.counts}
    last = sft.epochs * len(learned) if sft.epochs else None
    return SFTDataset(
        steps,
        in_order(learned, sft.batch, components.config.run.seed, last),
        _batches(looked_at, sft),
        sft.batch / len(learned),
        [*rows.notes, *(looked_at.notes if sft.eval_data else [])],
        counts,
        rows.fingerprint + (looked_at.fingerprint if sft.eval_data else ""),
    )


def demonstrations(components: RunComponents) -> Examples:
    """The environment's own teacher, on training tasks."""
    config = components.config
    seed, count = config.run.seed, config.sft.batch

    def examples(step: int) -> list[Episode]:
        tasks = TaskStream(config.task.env, seed, cursor=(step - 1) * count)
        return [
            demonstration(
                task,
                components.setup.make_env(task),
                components.chat,
                seed=draw_key(seed, task.id, 0),
                actions=components.actions,
                prefill=config.task.prefill,
                **config.sft.demo_args,
            )
            for task in (next(tasks) for _ in range(count))
        ]

    return examples


@dataclass(frozen=True, slots=True)
class SFTRows:
    """Rows of a file as examples. `numbers` are those that can be learned from."""

    chats: Chats
    build: Callable[[int, ChatRow], Episode]
    limit: int
    numbers: Sequence[int]
    counts: dict[str, int] = field(default_factory=dict[str, int])
    notes: list[str] = field(default_factory=list[str])
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.numbers)

    def example(self, place: int) -> Episode:
        number = self.numbers[place]
        return shortened(self.build(number, self.chats[number]), self.limit)

    def split(self, share: float) -> tuple[SFTRows, SFTRows]:
        """`share` of the rows, the same ones for every run and seed, and all others."""
        if not share:
            return self._some(()), self
        count = max(1, round(share * len(self)))
        if count >= len(self):
            raise DataError(
                f"{self.chats.table.source} has {len(self)} rows; with sft.eval_share={share:g} "
                "none is left to learn from"
            )
        places = list(range(len(self)))
        random.Random(draw_key(0, "held out", 0)).shuffle(places)
        apart = set(places[:count])
        return (
            self._some([n for place, n in enumerate(self.numbers) if place in apart]),
            self._some([n for place, n in enumerate(self.numbers) if place not in apart]),
        )

    def _some(self, numbers: Sequence[int]) -> SFTRows:
        return SFTRows(self.chats, self.build, self.limit, array("q", numbers))


def row_builder(
    components: RunComponents, path: str
) -> tuple[Chats, Callable[[int, ChatRow], Episode]]:
    """The rows of a file, and what makes an example of one; none is looked at yet."""
    sft = components.config.sft
    chats = open_chats(path, sft.skip_bad, sft.layout)
    marks = sft.mask_results
    speller = (
        None
        if components.actions is None
        else ActionSpeller(components.actions, components.tokenizer, marks)
    )

    def build(number: int, row: ChatRow) -> Episode:
        task = Task(f"row:{chats.numbers[number]}", "", data_source=path)
        return example(task, row, components.chat, marks, speller, components.config.task.prefill)

    return chats, build


def recorded(components: RunComponents, path: str) -> SFTRows:
    """The rows of a file, each looked at once; what cannot be learned from is refused or counted."""
    sft, limit = components.config.sft, components.config.rollout.max_context
    chats, build = row_builder(components, path)
    numbers, counts = array("q"), {"bad": chats.bad, "cut": 0, "overlong": 0}
    first, seen = "", blake2b(digest_size=8)
    for number in range(len(chats)):
        where = chats.where(number)
        try:
            built = build(number, chats[number])
            for span in built.spans:
                seen.update(array("q", (-1, *span.tokens)).tobytes())
            length = _length(built, limit, where, sft)
        except TemplateRewrites as error:  # not the row's fault: others would fail like it
            raise TemplateRewrites(f"{where}: {error}") from error
        except OverlongRows:
            raise
        except MISSHAPEN as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            first = first or f"{where}: {kind}{error}"
            counts["bad"] += 1
            if not is_spared(counts["bad"], len(chats.table), sft.skip_bad):
                raise DataError(
                    f"{first}. Mend the row, or leave such rows out: sft.skip_bad=true"
                ) from error
            continue
        if length > limit and sft.overlong == "skip":
            counts["overlong"] += 1
            continue
        counts["cut"] += length > limit
        numbers.append(number)
    source = chats.table.source
    if not numbers:
        raise DataError(f"{source}: no row is left to learn from: {_told(counts, limit)}. {first}")
    new = {**counts, "bad": counts["bad"] - chats.bad}  # the others have been told of
    why = f"; the first: {first}" if first else ""
    notes = [f"rows of {source}: {_told(new, limit)}{why}"] if any(new.values()) else []
    return SFTRows(chats, build, limit, numbers, counts, notes, seen.hexdigest())


class OverlongRows(DataError):
    """A row of more tokens than a context has."""


def _length(episode: Episode, limit: int, where: str, sft: SftSection) -> int:
    """Tokens of an example that something can be learned from, cut if it will be."""
    length = max(sum(map(len, spans)) for spans in contexts_of(episode))
    if length > limit and sft.overlong == "refuse":
        raise OverlongRows(
            f"{where} has {length} tokens, and rollout.max_context is {limit}; raise it, or set "
            "sft.overlong to cut or skip"
        )
    kept = shortened(episode, limit) if sft.overlong == "cut" else episode
    if not any(any(span.mask) for span in kept.spans):
        if any(any(span.mask) for span in episode.spans):
            raise ValueError(
                f"what comes before the assistant's words fills all {limit} tokens of "
                "rollout.max_context, so nothing is left of them to learn"
            )
        raise ValueError("none of its tokens is the assistant's, so there is nothing to learn")
    return length


def _told(counts: dict[str, int], limit: int) -> str:
    said = {
        "bad": "left out as bad",
        "overlong": f"left out, longer than rollout.max_context={limit}",
        "cut": f"cut to rollout.max_context={limit}",
    }
    return ", ".join(f"{counts[name]} {text}" for name, text in said.items() if counts[name])


def in_order(rows: SFTRows, count: int, seed: int, last: int | None) -> Examples:
    """`count` rows per step, each epoch shuffled anew; `last` rows in all, where that is known."""

    @lru_cache(maxsize=2)  # a batch may straddle two epochs
    def order(epoch: int) -> list[int]:
        places = list(range(len(rows)))
        random.Random(draw_key(seed, "epoch", epoch)).shuffle(places)
        return places

    def examples(step: int) -> list[Episode]:
        stop = step * count if last is None else min(step * count, last)
        places = [divmod(i, len(rows)) for i in range((step - 1) * count, stop)]
        return [rows.example(order(epoch)[place]) for epoch, place in places]

    return examples


def _batches(rows: SFTRows | None, sft: SftSection) -> Callable[[], Iterator[list[Episode]]] | None:
    if not rows:
        return None

    def batches() -> Iterator[list[Episode]]:
        for start in range(0, len(rows), sft.batch):
            places = range(start, min(start + sft.batch, len(rows)))
            yield [rows.example(place) for place in places]

    return batches


class Prefetcher:
    """Prepares the examples of the next step while this one is learned.

    Only rows of files are: reading and encoding them leaves Python free to feed the device. A teacher
    is an environment, which may be anybody's and is asked when its turn comes.
    """

    def __init__(self, course: SFTDataset) -> None:
        self.course = course
        self._worker = ThreadPoolExecutor(1, "examples") if course.passes else None
        self._next: tuple[int, Future[list[Episode]]] | None = None

    def __call__(self, step: int) -> list[Episode]:
        if self._worker is None:
            return self.course.examples(step)
        prepare = partial(self._worker.submit, self.course.examples)
        begun, self._next = self._next, None
        wanted = begun[1] if begun is not None and begun[0] == step else prepare(step)
        if step < self.course.steps:
            self._next = step + 1, prepare(step + 1)
        return wanted.result()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
