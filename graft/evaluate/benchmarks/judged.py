"""Stored attempts graded by a judge: how far it agrees with the comparison of texts.

    report = agreement_of("runs/qwen/evaluations/table.samples/last.gaia.0f3a91.jsonl",
                          BENCHMARKS["gaia"].task_set("gaia.jsonl"), Judge(cache="verdicts.db"))
    print(report.markdown())

A sample has the answer and the seed of its task; the question and the right answer come from the set. With
the judge's cache of the evaluation, only answers that were not judged then (exact matches) are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.data.errors import DataError
from graft.evaluate.samples import StoredSample, read_sample
from graft.evaluate.task_set import TaskSet
from graft.rewards.answers import accepted_answers, in_words, question_of
from graft.rewards.judge import Agreement, Judge, JudgedItem
from graft.types import Status, Task


def agreement_of(path: str | Path, tasks: TaskSet, judge: Judge) -> Agreement:
    """The agreement on all attempts of a sample file that ended."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no file of samples {str(path)!r}; `graft eval` writes them")
    with file.open("rb") as lines:
        found = judge.agreement_on(items_of(filter(None, map(read_sample, lines)), tasks))
    if not found.count and not found.not_asked and not found.failures:
        raise DataError(f"{file} has no attempt that ended")
    return found


def items_of(samples: Iterable[StoredSample], tasks: TaskSet) -> Iterator[JudgedItem]:
    """The items to judge; an attempt that did not end has no answer."""
    bare = replace(tasks, has_tools=False)  # the tools are not needed: the attempts exist
    env: Any = bare.factory(None)(Task("", tasks.env))  # more than the protocol: it has task()
    try:
        for sample in samples:
            if sample.status != Status.DONE:
                continue
            env.reset(sample.seed)
            task: Task = env.task()
            yield JudgedItem(
                question_of(task),
                accepted_answers(task.answer),
                in_words(sample.answer),
                f"{sample.task}#{sample.sample}",
            )
    finally:
        env.close()
