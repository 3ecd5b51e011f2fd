"""`graft replay RUN --step N`: compute a recorded step again and compare it with the record."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from graft.commands.options import AsJson, Overrides, Run, Trust, progress

if TYPE_CHECKING:
    from graft.replay.result import Replay


def replay(
    run: Run,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(min=1, help="The RL step to compute again.")] = None,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=0,
            help="Start from this step's checkpoint. Default: the newest one before.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute. Default: as the run did.")] = "",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compute a step's credit, loss and gradients again. Prints where they differ from the record.

    With key=value of algo.* or train.*: also the step under these settings.
    """
    from graft.config import ConfigError
    from graft.replay.replay import replay as replay_step
    from graft.runs import find_run

    record = find_run(run)
    if step is None:
        raise ConfigError("give the step to compute again: --step 12")
    found = replay_step(
        record.path,
        step,
        start=start,
        overrides=overrides or [],
        device=device,
        trust=trust,
        report=progress,
    )
    typer.echo(json.dumps(found.to_json()) if as_json else "\n".join(table(found)))
    if found.first is not None:
        raise typer.Exit(1)


def table(found: Replay) -> list[str]:
    """A line per comparison; then the first difference, and the step under other settings."""
    exact = "to the last bit"
    if found.inexact:
        exact = f"to {found.tolerance:g}, since {found.inexact}"
    lines = [f"step {found.step} of {found.run}, from {found.checkpoint}; compared {exact}"]
    width = max(len(finding.what) for finding in found.findings)
    for step, what, verdict, text in found.findings:
        earlier = f"step {step}: " if step != found.step and verdict == "DIFFERS" else ""
        lines.append(f"{verdict:<8} {what:<{width}}  {earlier}{text}")
    first = found.first
    if first is None:
        lines.append("the same")
    else:
        lines.append(f"differs first at step {first.step}: {first.what}")
    if found.other is not None:
        lines += ["", f"with {' '.join(found.other.overrides)}", *_other_metrics(found)]
    return lines


def _other_metrics(found: Replay) -> list[str]:
    """Metrics that other settings change, beside the recorded ones."""
    from graft.replay.comparison import NOT_LEARNED

    assert found.other is not None
    now = found.other.metrics
    changed = [
        name
        for name in dict.fromkeys(("loss", "grad_norm", *now, *found.metrics))
        if not name.startswith(NOT_LEARNED)
        and (name in ("loss", "grad_norm") or now.get(name) != found.metrics.get(name))
    ]
    width = max(map(len, changed))
    rows = [("", "recorded", "now")]
    rows += [(name, _number(found.recorded.get(name)), _number(now.get(name))) for name in changed]
    lines = [f"{name:<{width}}  {before:>14}  {after:>14}" for name, before, after in rows]
    cosine = found.other.cosine
    return [*lines, f"cosine of the two gradients (of the first update): {cosine:.6f}"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
