"""Files with attempts at countdown, and what they did with the calculator, as EARL analyses them.

    python -m benchmarks.expa.countdown runs/countdown-earl/evaluations/table.samples/*.jsonl
    python -m benchmarks.expa.countdown earl-cpo/0.jsonl prompt-cpo/0.jsonl --same-tasks --attempts wrong

    {"input": "... Using the numbers [3, 5, 7], create ...", "output": "...", "reward": 1.0}     EARL's
    {"task": "earl:countdown-1:test:7", "seed": 7, "text": "...", "reward": 1.0, ...}            graft eval's

EARL writes the first into trainer.validation_data_dir. The second are the samples of `graft eval`, whose
first line names the environment, so that the numbers of a task can be drawn again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from graft.data.errors import DataError
from graft.envs.table import build_env
from graft.rewards.countdown_use import PHRASES, countdown_use

WHICH = ("all", "right", "wrong")
_GIVEN = re.compile(r"\[([0-9,\s-]+)\]")


class CountdownAttempt(NamedTuple):
    task: str
    numbers: Sequence[int]
    text: str
    reward: float


class CountdownReport(NamedTuple):
    """Means over the attempts of a file; `phrases` is their sum, as EARL reports it."""

    file: str
    attempts: int
    right: float
    calls: float
    invalid: float
    phrases: int

    @property
    def sentence(self) -> str:
        return (
            f"{self.file}: {self.attempts:,} attempts, {self.right:.1%} right; per attempt {self.calls:.2f} "
            f"calls, {self.invalid:.2f} with numbers that were not given; {self.phrases:,} planning phrases"
        )


def countdown_report(
    path: Path,
    which: str = "all",
    tasks: frozenset[str] | None = None,
    phrases: Sequence[str] = PHRASES,
) -> CountdownReport:
    """The report of one file.

    which  "right" or "wrong" leaves out the others; EARL compares right attempts of one method with
           the wrong ones of another at the same tasks
    tasks  only these
    """
    kept = [
        one
        for one in read_attempts(path)
        if which == "all" or (one.reward == 1.0) == (which == "right")
        if tasks is None or one.task in tasks
    ]
    if not kept:
        raise DataError(f"{path} has no attempt that is left; --attempts all keeps every one")
    uses = [countdown_use(one.text, one.numbers, phrases) for one in kept]
    count = len(kept)
    return CountdownReport(
        file=str(path),
        attempts=count,
        right=sum(one.reward == 1.0 for one in kept) / count,
        calls=sum(use.calls for use in uses) / count,
        invalid=sum(use.invalid for use in uses) / count,
        phrases=sum(use.phrases for use in uses),
    )


def read_attempts(path: Path) -> Iterator[CountdownAttempt]:
    """The attempts of a file, in order; tasks of EARL's files are their lines."""
    if not path.is_file():
        raise DataError(
            f"no file {str(path)!r}; give the samples of `graft eval`, or EARL's 0.jsonl"
        )
    settings: Mapping[str, Any] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error})") from error
            if "of" in row:
                settings = row["of"].get("settings", {})
            elif "output" in row:
                yield from_earl(row, f"{path}, line {number}", number)
            elif "text" in row and settings:
                yield from_samples(row, settings, f"{path}, line {number}")
            else:
                raise DataError(
                    f"{path}, line {number}: neither {{input, output, reward}}, as EARL writes them, nor a "
                    "sample of `graft eval`"
                )


def from_earl(row: Mapping[str, Any], where: str, number: int) -> CountdownAttempt:
    found = _GIVEN.search(str(row.get("input")))
    if found is None:
        raise DataError(f"{where}: 'input' has no list of numbers, so it is no countdown task")
    numbers = [int(one) for one in found[1].split(",") if one.strip()]
    reward = row.get("reward", row.get("score", 0.0))
    return CountdownAttempt(str(number), numbers, str(row["output"]), float(reward))


def from_samples(
    row: Mapping[str, Any], settings: Mapping[str, Any], where: str
) -> CountdownAttempt:
    with closing(build_env(settings["env"], **settings["args"])) as env:
        env.reset(row["seed"])
        numbers = getattr(env, "given_numbers", None)
    if not numbers:
        raise DataError(f"{where}: {settings['env']} poses no countdown task there")
    return CountdownAttempt(row["task"], numbers, row["text"], float(row["reward"]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="samples of graft eval, or EARL's validation files")
    add("--attempts", choices=WHICH, default="all")
    add(
        "--same-tasks",
        action="store_true",
        help="tasks that the first file has right; its right attempts",
    )
    add("--phrases", default=",".join(PHRASES), help="to count, with commas")
    chosen = parser.parse_args(arguments)
    phrases = [one.strip() for one in chosen.phrases.split(",") if one.strip()]
    tasks = None
    if chosen.same_tasks:
        first = read_attempts(chosen.files[0])
        tasks = frozenset(one.task for one in first if one.reward == 1.0)
    for number, file in enumerate(chosen.files):
        which = "right" if chosen.same_tasks and not number else chosen.attempts
        print(countdown_report(file, which, tasks, phrases).sentence)


if __name__ == "__main__":
    main()
