"""Runs of a second: every kind of training with a model of some thousand weights, and their comparison.

`faults_of(folder, whole)` lists what differs between a run that died and resumed, and one that did not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graft.types import Task, Trajectory

RECIPE = """
run: {{dir: "{folder}", name: run, save_every: 1, keep_last: 2, eval_tasks: 2, trackers: [], seed: 3,
  log_episodes: 1}}
model: {{shape: {{width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 96}}}}
task: {{env: calculator, reward: "trust.tiny_runs:share_of_low_tokens", eval_args: {{split: test}}}}
rollout: {{tasks: 2, samples: 4, max_tokens: 6, max_turns: 3, max_context: 64}}
train: {{steps: 2, lr: 0.01}}
"""

KINDS: dict[str, list[str]] = {
    "sft": ["train.steps=0", "sft.steps=3", "sft.batch=4", "run.eval_tasks=0"],
    "grpo": ["algo.name=grpo", "algo.kl_coef=0.01", "sft.steps=1", "sft.batch=4"],
    "arpo": ["algo.name=arpo", "run.eval_every=1"],
    "cpo": ["algo.name=cpo", "task.args={{syntax: actions}}", "actions.file=compact"],
    "lora": ["algo.name=grpo", "lora.rank=2", "model.path={base}", "model.shape={{}}"],
    "async": ["algo.name=grpo", "rollout.staleness=1", "run.save_later=true"],
}
"""Kind of training -> its settings; the numbers of all of them depend on every step before."""

EXACT = re.compile(r"reward|loss|grad_norm|accuracy|eval/")
"""Metrics that must be equal to the bit. The others may contain how far the engine is from the learner,
which depends on how many attempts happened to be sampled together."""
TIMED = re.compile(r"time|seconds|per_second|steps_waiting|workers|redone|discarded|drafts")
"""Durations, counts of what happened to be done or lost at a moment, and drafts: a process that begins has
no attempts to draft from, and draws the same tokens without."""
KEPT_ASIDE = (".lock",)


def share_of_low_tokens(task: Task, trajectory: Trajectory) -> float:
    """A reward that any policy earns a part of, so that every step has a loss."""
    tokens = [
        token for span in trajectory.spans if span.author == "policy" for token in span.tokens
    ]
    return sum(token < 10 for token in tokens) / max(1, len(tokens))


def new_place(bank: str) -> TemporaryDirectory[str]:
    """A folder for many runs, in memory where there is such a disk: fsync is what they wait for."""
    memory = Path("/dev/shm")
    return TemporaryDirectory(prefix=f"graft-{bank}-", dir=memory if memory.is_dir() else None)


def recipe_of(kind: str, folder: Path, base: Path) -> list[str]:
    """The arguments of `graft train` for `kind` in `folder / "run"`; adapters are of the model `base`."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder), encoding="utf-8")
    return [str(recipe), *(setting.format(base=base) for setting in KINDS[kind])]


@dataclass
class Comparison:
    """What differs between two runs of the same recipe and seed."""

    faults: list[str] = field(default_factory=list[str])
    largest: float = 0.0
    """The largest difference of a metric that need not be equal to the bit."""


def compare(run: Path, whole: Path, is_timed: bool = False) -> Comparison:
    """Compare a run that was interrupted with one that was not.

    is_timed   new weights reach attempts under way at a moment that differs from run to run: only steps,
               tasks and the chain of the weights are compared
    """
    found = Comparison()
    found.faults += [f"left behind: {name}" for name in _left_behind(run)]
    # alarms are about metrics, which differ there from run to run
    may_miss = {"alarms.jsonl"} if is_timed else set[str]()
    if missing := sorted((_files(whole) ^ _files(run)) - may_miss):
        found.faults.append(f"files of one run only: {', '.join(missing[:5])}")
    steps = _steps(run)
    if steps != _steps(whole):
        found.faults.append(f"metrics of the steps {steps} instead of {_steps(whole)}")
        return found
    if is_timed:
        _compare_tasks(run, whole, found)
        return found
    _compare_metrics(run, whole, found)
    for file in sorted(whole.glob("episodes/*.jsonl")):
        if _read_lines(run / file.relative_to(whole)) != _read_lines(file):
            found.faults.append(f"other episodes in {file.name}")
    for file in sorted(whole.glob("learned/*.json")):
        if _weights(run / file.relative_to(whole)) != _weights(file):
            found.faults.append(f"other weights in {file.name}")
    for name in ("before", "after"):
        if _object(run / "summary.json").get(name) != _object(whole / "summary.json").get(name):
            found.faults.append(f"another score {name!r} in summary.json")
    return found


def _compare_metrics(run: Path, whole: Path, found: Comparison) -> None:
    for line, other in zip(_metrics(run), _metrics(whole), strict=True):
        where = f"{line['phase']} step {line['step']}"
        if line.keys() != other.keys():
            found.faults.append(f"{where}: other metrics {sorted(line.keys() ^ other.keys())}")
            continue
        for name, value in line.items():
            if value == other[name] or TIMED.search(name):
                continue
            off = abs(value - other[name]) if _is_number(value, other[name]) else math.inf
            if EXACT.search(name) or off > 1e-5:
                found.faults.append(f"{where}: {name} {value!r} instead of {other[name]!r}")
            else:
                found.largest = max(found.largest, off)


def _compare_tasks(run: Path, whole: Path, found: Comparison) -> None:
    """Every task of every step once, and every step continues with the weights of the one before."""
    last = None
    for file in sorted(whole.glob("episodes/*.jsonl")):
        own, other = _read_lines(run / file.relative_to(whole)), _read_lines(file)
        if [row["task"] for row in own] != [row["task"] for row in other]:
            found.faults.append(f"other tasks in {file.name}")
        _, before, after = _weights(run / "learned" / f"{file.stem}.json")
        if last not in (None, before):
            found.faults.append(
                f"{file.stem} does not continue with the weights of the step before"
            )
        last = after
    for line in _metrics(run):
        if line.get("staleness/max", 0.0) > 1.0:
            found.faults.append(f"step {line['step']} learned from tokens that are too old")


def _steps(run: Path) -> list[tuple[str, int]]:
    return [(line["phase"], line["step"]) for line in _metrics(run)]


def _left_behind(run: Path) -> Iterator[str]:
    for path in run.rglob(".*"):
        if path.name not in KEPT_ASIDE and path.parent.name != "trainer":
            yield str(path.relative_to(run))


def _files(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def _metrics(run: Path) -> list[dict[str, Any]]:
    return _read_lines(run / "metrics.jsonl", whole=True)


def _read_lines(path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """The objects in a file; of episodes what must be equal to the bit: tasks, tokens, rewards."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return rows if whole else [_outcome(row) for row in rows]


def _outcome(episode: Mapping[str, Any]) -> dict[str, Any]:
    spans = [
        (s["parent"], s["author"], s["tokens"], s["actions"], s["version"])
        for s in episode["spans"]
    ]
    leaves = [(leaf["tips"], leaf["reward"], leaf["status"]) for leaf in episode["leaves"]]
    return {"task": episode["task"]["id"], "spans": spans, "leaves": leaves}


def _weights(path: Path) -> Any:
    row = _object(path)
    return row.get("updates"), row.get("before"), row.get("after")


def _object(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _is_number(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)
