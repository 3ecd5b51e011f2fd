"""The examples of a warm-up, step by step, and held-out rows.

100 good rows, a tenth held out, batch 32, two epochs: 90 rows twice are 180 examples, 6 steps

    step   1 2 3 4 5 6        the third step takes the last 26 rows of one order and the first 6
    rows  32 . . . . 20       of the next; the last step takes what is left

Every row is read and encoded once before the first step, so that a bad one does not stop a run after
hours, and counts are known when the learning rate is planned. Memory holds one number per row; the rows
stay in their file. Examples are a function of the step: a resumed run gets the same ones.
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
from itertools import islice

from graft.config import SftSection
from graft.data.chats import Chats, open_chats
from graft.data.check import is_spared
from graft.data.errors import DataError
from graft.data.readers import ChatRow
from graft.rollout.action_spelling import ActionSpeller
from graft.rollout.demonstration import attempt, show
from graft.rollout.examples import contexts_of, example, shortened
from graft.rollout.setup import draw_key
from graft.text.chat import TemplateRewrites
from graft.train.components import RunComponents
from graft.train.tasks import TaskStream
from graft.types import Episode, Task

Examples = Callable[[int], list[Episode]]
"""step -> the examples of that step, the first is 1."""

MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What a row with values of wrong types can raise."""


@dataclass(frozen=True, slots=True)
class SFTDataset:
    """The steps of a warm-up, their examples, and held-out ones."""

    steps: int
    examples: Examples
    held_out: Callable[[], Iterator[list[Episode]]] | None = None
    """Held-out examples, a batch at a time."""
    passes: float = 0.0
    """Share of the rows that one step takes; 0 where there are no rows."""
    notes: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    fingerprint: str = ""
    """Of the tokens of all rows: a run cannot be resumed with other rows."""


def make_dataset(components: RunComponents) -> SFTDataset:
    sft = components.config.sft
    if not sft.data:
        held_out = recorded(components, sft.eval_data) if sft.eval_data else None
        return SFTDataset(sft.steps, demonstrations(components), _batches(held_out, sft))
    rows = recorded(components, sft.data)
    if sft.eval_data:
        held_out, learned = recorded(components, sft.eval_data), rows
    else:
        held_out, learned = rows.split(sft.eval_share)
    steps = sft.steps or math.ceil(sft.epochs * len(learned) / sft.batch)
    counts = {"rows": len(learned), "held_out": len(held_out), **rows.counts}
    last = sft.epochs * len(learned) if sft.epochs else None
    return SFTDataset(
        steps,
        in_order(learned, sft.batch, components.config.run.seed, last),
        _batches(held_out, sft),
        sft.batch / len(learned),
        [*rows.notes, *(held_out.notes if sft.eval_data else [])],
        counts,
        rows.fingerprint + (held_out.fingerprint if sft.eval_data else ""),
    )


def demonstrations(components: RunComponents) -> Examples:
    """Demonstrations of the environment, on training tasks."""
    config, actions = components.config, components.actions
    seed, count = config.run.seed, config.sft.batch
    prefills = {item.label: item.prefill or "" for item in config.task.envs}

    def examples(step: int) -> list[Episode]:
        tasks = TaskStream(config.task.envs, seed, cursor=(step - 1) * count)
        # all environments first, then all tokens: code that runs many times in a row stays in the
        # processor's cache, which is worth a seventh of the time
        shown = [
            show(
                task,
                components.setup.make_env(task),
                draw_key(seed, task.id, 0),
                actions is not None,
                **config.sft.demo_args,
            )
            for task in islice(tasks, count)
        ]
        return [
            attempt(
                one.task,
                one.entries,
                components.chat,
                actions,
                prefills[one.task.env],
                one.tools,
                config.actions.start,
            )
            for one in shown
        ]

    return examples


@dataclass(frozen=True, slots=True)
class SFTRows:
    """Rows of a file as examples. `numbers` are the rows that are usable."""

    chats: Chats
    build: Callable[[int, ChatRow], Episode]
    limit: int
    numbers: Sequence[int]
    counts: dict[str, int] = field(default_factory=dict[str, int])
    notes: list[str] = field(default_factory=list[str])
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.numbers)

    def example(self, index: int) -> Episode:
        number = self.numbers[index]
        return shortened(self.build(number, self.chats[number]), self.limit)

    def split(self, share: float) -> tuple[SFTRows, SFTRows]:
        """`share` of the rows, the same ones for every run and seed, and all others."""
        if not share:
            return self._some(()), self
        count = max(1, round(share * len(self)))
        if count >= len(self):
            raise DataError(
                f"{self.chats.table.source} has {len(self)} rows; with sft.eval_share={share:g} "
                "none is left to train on"
            )
        indices = list(range(len(self)))
        random.Random(draw_key(0, "held out", 0)).shuffle(indices)
        apart = set(indices[:count])
        return (
            self._some([n for i, n in enumerate(self.numbers) if i in apart]),
            self._some([n for i, n in enumerate(self.numbers) if i not in apart]),
        )

    def _some(self, numbers: Sequence[int]) -> SFTRows:
        return SFTRows(self.chats, self.build, self.limit, array("q", numbers))


def row_builder(
    components: RunComponents, path: str
) -> tuple[Chats, Callable[[int, ChatRow], Episode]]:
    """The rows of a file, and the function that makes an example of one; no row is read yet."""
    sft = components.config.sft
    chats = open_chats(path, sft.skip_bad, sft.layout)
    marks = sft.mask_results
    speller = None
    if components.actions is not None:
        speller = ActionSpeller(components.actions, components.tokenizer, marks)

    def build(number: int, row: ChatRow) -> Episode:
        task = Task(f"row:{chats.numbers[number]}", "", data_source=path)
        config = components.config
        start = config.task.prefill, config.actions.start
        return example(task, row, components.chat, marks, speller, *start)

    return chats, build


def recorded(components: RunComponents, path: str) -> SFTRows:
    """The rows of a file, each checked once; unusable rows are refused or counted."""
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
        except TemplateRewrites as error:  # the template's fault: other rows would fail too
            raise TemplateRewrites(f"{where}: {error}") from error
        except OverlongRows:
            raise
        except MISSHAPEN as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            first = first or f"{where}: {kind}{error}"
            counts["bad"] += 1
            if not is_spared(counts["bad"], len(chats.table), sft.skip_bad):
                raise DataError(
                    f"{first}. Fix the row, or leave such rows out: sft.skip_bad=true"
                ) from error
            continue
        if length > limit and sft.overlong == "skip":
            counts["overlong"] += 1
            continue
        counts["cut"] += length > limit
        numbers.append(number)
    source = chats.table.source
    if not numbers:
        raise DataError(
            f"{source}: no row is left to train on: {_described(counts, limit)}. {first}"
        )
    # the other bad ones are reported when the file is opened
    new = {**counts, "bad": counts["bad"] - chats.bad}
    why = f"; the first: {first}" if first else ""
    notes = [f"rows of {source}: {_described(new, limit)}{why}"] if any(new.values()) else []
    return SFTRows(chats, build, limit, numbers, counts, notes, seen.hexdigest())


class OverlongRows(DataError):
    """A row has more tokens than a context holds."""


def _length(episode: Episode, limit: int, where: str, sft: SftSection) -> int:
    """The number of tokens of an example; one without a trained token, after any cut, is refused."""
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
                f"the text before the assistant's fills all {limit} tokens of "
                "rollout.max_context, so none of the assistant's is left to train on"
            )
        raise ValueError("none of its tokens is the assistant's, so there is nothing to train on")
    return length


def _described(counts: dict[str, int], limit: int) -> str:
    texts = {
        "bad": "left out as bad",
        "overlong": f"left out, longer than rollout.max_context={limit}",
        "cut": f"cut to rollout.max_context={limit}",
    }
    return ", ".join(f"{counts[name]} {text}" for name, text in texts.items() if counts[name])


def in_order(rows: SFTRows, count: int, seed: int, last: int | None) -> Examples:
    """`count` rows per step, each epoch in another order; `last` rows in all, where that is known."""

    @lru_cache(maxsize=2)  # a batch may straddle two epochs
    def order(epoch: int) -> list[int]:
        indices = list(range(len(rows)))
        random.Random(draw_key(seed, "epoch", epoch)).shuffle(indices)
        return indices

    def examples(step: int) -> list[Episode]:
        stop = step * count if last is None else min(step * count, last)
        positions = [divmod(i, len(rows)) for i in range((step - 1) * count, stop)]
        return [rows.example(order(epoch)[index]) for epoch, index in positions]

    return examples


def _batches(rows: SFTRows | None, sft: SftSection) -> Callable[[], Iterator[list[Episode]]] | None:
    if not rows:
        return None

    def batches() -> Iterator[list[Episode]]:
        for start in range(0, len(rows), sft.batch):
            stop = min(start + sft.batch, len(rows))
            yield [rows.example(index) for index in range(start, stop)]

    return batches


class Prefetcher:
    """Prepares the examples of the next step while this one is learned.

    Only rows of files: reading and encoding them leaves Python free to feed the device. Demonstrations
    call environments, which may not be thread-safe, so they are made when they are needed.
    """

    def __init__(self, dataset: SFTDataset) -> None:
        self.dataset = dataset
        self._worker = ThreadPoolExecutor(1, "examples") if dataset.passes else None
        self._next: tuple[int, Future[list[Episode]]] | None = None

    def __call__(self, step: int) -> list[Episode]:
        if self._worker is None:
            return self.dataset.examples(step)
        prepare = partial(self._worker.submit, self.dataset.examples)
        begun, self._next = self._next, None
        wanted = begun[1] if begun is not None and begun[0] == step else prepare(step)
        if step < self.dataset.steps:
            self._next = step + 1, prepare(step + 1)
        return wanted.result()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
