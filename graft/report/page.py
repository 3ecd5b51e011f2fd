"""The page: what a run was, what came of it, and everything one would ask about it next.

    write_report(Record(Path("runs/quickstart"))) -> runs/quickstart/report.html

Of several seeds of one recipe the scores and curves are means with their spread; the rest is of the first.

It is one file. It asks for nothing, runs no script (its own policy forbids both), and stays small
whatever the run: curves are drawn from columns, tables and texts are cut with a note.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from graft.files import new_file
from graft.registry import UnknownName
from graft.report import seeds, tables
from graft.report.curves import curve
from graft.report.markup import folded, section, shown
from graft.report.style import CSS
from graft.report.transcripts import transcripts
from graft.runs import PHASE_WORDS, Curves, RunRecord, RunStatus
from graft.runs.seed_means import metric_over
from graft.train.monitor.metric_docs import explain
from graft.train.run_dir.trackers import Phase
from graft.version import __version__

MATTER = (
    ("reward", "reward"),
    ("accuracy", "accuracy"),
    ("reward_std", "spread of rewards within a task"),
    ("frac_reward_zero_std", "tasks without spread"),
    ("entropy", "entropy"),
    ("completions/mean_length", "length of an attempt"),
    ("completions/clipped_ratio", "attempts cut off"),
    ("tools/rate", "attempts that call a tool"),
    ("tools/failure_frequency", "calls that fail"),
    ("sampling/sampling_logp_difference/mean", "log-prob gap, engine to learner"),
    ("clip_ratio/region_mean", "tokens clipped"),
    ("kl", "distance from the reference"),
    ("grad_norm", "gradient norm"),
    ("loss", "loss"),
    ("learning_rate", "learning rate"),
    ("tokens_per_second", "tokens per second"),
)
"""Metrics that get a curve, and their titles; in this order."""
MOST_EXTRA = 8
"""Curves of held-out scores and of single rewards, whose names depend on the run."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(
    record: RunRecord, out: Path | None = None, others: Sequence[RunRecord] = ()
) -> Path:
    """Write the page, whole or not at all; its path."""
    path = record.path / "report.html" if out is None else out
    text = page(record, *others)
    try:
        with new_file(path, is_shared=True) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(
            error.errno, f"the report cannot be written to {path}: {error.strerror}"
        ) from error
    return path


def page(record: RunRecord, *others: RunRecord, now: float | None = None) -> str:
    """The page of a run; with `others` of several seeds of its recipe."""
    records = (record, *others)
    if others:
        seeds.check_seeds(records)
    for one in records:
        one.refresh()
    body = (
        headline(records, time.time() if now is None else now),
        seeds.scores(records) if others else tables.scores(record),
        tables.alarms(record),
        *(curves(records, phase) for phase in ("rl", "sft")),
        transcripts(record),
        tables.timings(record),
        tables.settings(record),
        tables.environment(record),
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown(record.name, 120)}: graft report</title><style>{CSS}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def headline(records: Sequence[RunRecord], now: float) -> str:
    """Name, how it stands, before and after, what it is, when it was."""
    record, *others = records
    status = record.status
    parts = [
        f'<header><h1>{shown(record.name, 200)} <span class="status {status}">{status}</span></h1>',
        f'<p class="result">{(others and seeds.result(records)) or result(record)}</p>',
    ]
    if others:
        names = ", ".join(one.name for one in others)
        parts.append(
            f"<p>With {shown(names, 1000)}: scores and curves are of all {len(records)} seeds, everything "
            f"else is of {shown(record.name, 200)}.</p>"
        )
    if standing := _standing(record, status):
        parts.append(f"<p>{shown(standing, 1000)}</p>")
    wrote = [f"{shown(_what(record), 1000)}"] if record.config else []
    if record.last_activity:
        wrote.append(f"Last written {_moment(record.last_activity)}.")
    wrote.append(f"Report of {_moment(now)} by graft {__version__}.")
    parts.append(f'<p class="facts">{" ".join(wrote)}</p></header>')
    return "".join(parts)


def result(record: RunRecord) -> str:
    """ "sampled 0.310 → 0.952 (+0.642), greedy ..."; the reward so far where there is no score."""
    before, after = record.scores
    told: list[str] = []
    for name in ("sampled", "greedy"):
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None:
            told.append(f"{name} {old:.3f} → <b>{new:.3f}</b> ({new - old:+.3f})")
        elif new is not None:
            told.append(f"{name} <b>{new:.3f}</b>")
        elif old is not None:
            told.append(f"{name} {old:.3f} before training")
    reward = record.curves["rl"]["reward"]
    if not after and len(reward):
        told.append(
            f"reward <b>{reward[-1]:.3f}</b> at the last step, {reward[0]:.3f} at the first"
        )
    loss = record.curves["sft"]["loss"]
    if not told and len(loss):
        told.append(f"warm-up loss {loss[0]:.3f} → <b>{loss[-1]:.3f}</b>")
    return "; ".join(told) or "nothing is measured yet"


def _standing(record: RunRecord, status: RunStatus) -> str:
    """A sentence about a run that is not done."""
    last, saved = record.last, record.checkpoint
    if last is None:
        where = "before its first step"
    else:
        total = record.total_steps(last["phase"], last)
        of = "" if total is None else f" of {total}"
        where = f"at {PHASE_WORDS[last['phase']]} step {last['step']}{of}"
    if status is RunStatus.RUNNING:
        return f"This run is still going on, {where}; the numbers are those so far."
    if status is RunStatus.FAILED:
        why = "numbers that were not finite. The batch is in its folder failed/."
        return f"This run failed {where.replace('at ', 'after ', 1)}: {record.reason or why}"
    if status is RunStatus.STOPPED:
        kept = (
            "Nothing was saved." if saved is None else f"Its last checkpoint is {saved.path.name}."
        )
        return f"This run stopped {where}, before its end. {kept}"
    return ""


def _what(record: RunRecord) -> str:
    """ "GRPO on calculator, 60 steps of 16 x 8 attempts, after a warm-up of 400 steps." """
    config = record.config
    train, sft = config.get("train", {}), config.get("sft", {})
    rollout, model = config.get("rollout", {}), config.get("model", {})
    told: list[str] = []
    if train.get("steps"):
        told.append(
            f"{str(config.get('algo', {}).get('name', 'RL')).upper()} on "
            f"{config.get('task', {}).get('env', '?')}, {train['steps']} steps of "
            f"{rollout.get('tasks', '?')} x {rollout.get('samples', '?')} attempts"
        )
    if sft.get("steps") or sft.get("epochs"):
        length = f"{sft['steps']} steps" if sft.get("steps") else f"{sft['epochs']} epochs"
        source = f" on {sft['data']}" if sft.get("data") else ""
        warm_up = f"a warm-up of {length}{source}"
        told.append(f"after {warm_up}" if told else warm_up)
    told.append(f"from {model['path']}" if model.get("path") else "from random weights")
    text = ", ".join(told)
    return f"{text[:1].upper()}{text[1:]}."


def curves(records: Sequence[RunRecord], phase: Phase) -> str:
    """One figure for each metric that matters, with its alarms; the others in a table."""
    record, *others = records
    known = record.curves[phase]
    if not len(known):
        return ""
    of_all = [one.curves[phase] for one in records]
    extra = sorted(name for name in known.columns if name.startswith(("eval/", "rewards/")))
    titled = [*MATTER, *((name, name) for name in extra[:MOST_EXTRA])]
    alarms = record.alarms
    figures = [
        curve(
            title,
            **_drawn(of_all, name),
            marks=[(a.step, a.text) for a in alarms[:200] if (a.phase, a.metric) == (phase, name)],
            about=name if name != title else "",
            more=_explained(name),
        )
        for name, title in titled
        if name in known
    ]
    word = {"rl": "Reinforcement", "sft": "Warm-up"}[phase]
    each = "the mean of the seeds at each step" if others else "each step"
    around = " Shaded: from the least to the greatest of the seeds." if others else ""
    return section(
        word,
        f'<p class="note">Pale: {each}. Strong: the mean over a twentieth of the steps. Dashed: '
        f"alarms.{around}</p>",
        f'<div class="curves">{"".join(figures)}</div>',
        tables.metrics(PHASE_WORDS[phase], known),
    )


def _drawn(of_all: Sequence[Curves], name: str) -> dict[str, Any]:
    """The curve of one run, or the mean of several in its band."""
    if len(of_all) == 1:
        return {"steps": of_all[0].steps, "values": of_all[0][name]}
    over = metric_over(of_all, name)
    return {"steps": over.steps, "values": over.mean, "band": (over.low, over.high)}


def _explained(name: str) -> str:
    try:
        said = explain(name)
    except UnknownName:
        return ""
    texts: Sequence[str] = (said.what, said.healthy, said.remedy)
    told = "".join(f"<p>{shown(text, 2000)}</p>" for text in texts if text)
    return folded("what this is", told)


def _moment(seconds: float) -> str:
    try:
        at: Any = datetime.fromtimestamp(seconds).astimezone()
    except (OverflowError, ValueError, OSError):  # a file from the year 30000
        return "at an unknown time"
    return at.strftime("%Y-%m-%d %H:%M %Z")
