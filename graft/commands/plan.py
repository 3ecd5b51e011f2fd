"""`graft plan`: memory and time of a recipe on this device, or of a model on many GPUs."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.commands.options import AsJson, Overrides

if TYPE_CHECKING:
    from graft.config import Config
    from graft.planning.layouts import LayoutEstimate
    from graft.planning.planner import Planner
    from graft.planning.scaling import TrainingJob

MOST_GPUS, MOST_ROWS = 8192, 200_000
LONGEST = 4
"""The longest answer relative to the mean, unless --max-response is given."""


def plan(
    recipe: Annotated[
        str, typer.Argument(help="A YAML file or a bundled recipe; none with --gpus and --shape.")
    ] = "",
    overrides: Overrides = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Compute only; measure nothing.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(help="Plan for this number of GPUs instead of this device: computed."),
    ] = None,
    shape: Annotated[
        str, typer.Option(help="The model on them: 8B, 70B, ..., or a model's folder.")
    ] = "",
    gpu: Annotated[str, typer.Option(help="h200, h100, a100 or h20.")] = "h200",
    prompt: Annotated[int | None, typer.Option(help="Tokens of a prompt. Default: 1024.")] = None,
    response: Annotated[
        int | None, typer.Option(help="Tokens of an answer, on average. Default: 4096.")
    ] = None,
    max_response: Annotated[
        int | None, typer.Option(help="Tokens of the longest answer. Default: 4 x the average.")
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the log of lengths. Default: 0.6; with a recipe 0."
        ),
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Per step. Default: 128.")] = None,
    samples: Annotated[int | None, typer.Option(help="Answers per task. Default: 8.")] = None,
    tool_seconds: Annotated[
        float, typer.Option(help="Seconds that an attempt waits for tools in total.")
    ] = 0.0,
    staleness: Annotated[
        int | None, typer.Option(help="Steps that sampling may run ahead. Default: 0.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the memory and time of a recipe on this device. Exit code 1: it does not fit.

    With --gpus: estimate a recipe, or a model of --shape, on many GPUs, and how to divide them.
    """
    from graft.config import ConfigError, load_config

    if gpus is None:
        options = {
            "--shape": shape or None,
            "--prompt": prompt,
            "--response": response,
            "--max-response": max_response,
            "--spread": spread,
            "--tasks": tasks,
            "--samples": samples,
            "--tool-seconds": tool_seconds or None,
            "--staleness": staleness,
        }
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ConfigError(f"{given[0]} needs --gpus: it describes a step on many GPUs")
        if not recipe:
            raise ConfigError("give a recipe, or --gpus and --shape to plan for many GPUs")
        _this_device(load_config(recipe, overrides or []), not no_probe, as_json)
        return
    if "=" in recipe:
        raise ConfigError(f"{recipe!r} is an override of a recipe; name the recipe first")
    job = _job(
        load_config(recipe, overrides or []) if recipe else None,
        shape,
        prompt=prompt,
        response=response,
        longest=max_response,
        spread=spread,
        tasks=tasks,
        samples=samples,
        tool_seconds=tool_seconds,
        staleness=staleness,
    )
    _many_gpus(
        job, gpus, gpu, shape, shlex.join([recipe, *(overrides or [])]) if recipe else "", as_json
    )


def _this_device(config: Config, probing: bool, as_json: bool) -> None:
    from graft.planning.forecast import forecast, show

    found = forecast(config, probing=probing)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        show(found)
    if not found.memory.fits:
        raise typer.Exit(1)


def _job(config: Config | None, shape: str, **options: Any) -> TrainingJob:
    """The step of a recipe, of options, or of a recipe changed by options."""
    from graft.config import ConfigError
    from graft.planning.hardware import shape_named
    from graft.planning.scaling import TrainingJob
    from graft.train.memory.workload import Workload

    for name, value in options.items():
        least = 0 if name in ("tool_seconds", "staleness", "spread", "longest", "prompt") else 1
        if value is not None and not least <= value < float("inf"):
            option = "max-response" if name == "longest" else name.replace("_", "-")
            raise ConfigError(f"--{option} {value:g}: needs {least} or more")

    def given(name: str, otherwise: Any) -> Any:
        return otherwise if options[name] is None else options[name]

    extra: dict[str, Any] = {}
    if config is None:
        if not shape:
            raise ConfigError("--gpus needs a model: give --shape 8B, or a recipe")
        found, own, spread, staleness = shape_named(shape), Workload(128, 8, 1024, 4096), 0.6, 0
    else:
        from graft.algos.presets import resolve_preset
        from graft.planning.scaling import KINDS
        from graft.train.algorithm import branch_part, preset_of
        from graft.train.memory.plan import has_reference
        from graft.train.memory.workload import workload_of
        from graft.train.model import recipe_shape

        if config.lora.rank or resolve_preset(config.algo.name).needs_critic:
            which = "lora.rank" if config.lora.rank else f"algo.name={config.algo.name}"
            raise ConfigError(
                f"{which}: on many GPUs only a policy without critic and adapters is estimated"
            )
        found = shape_named(shape) if shape else recipe_shape(config)
        own, spread, staleness = workload_of(config), 0.0, config.rollout.staleness
        rounds = config.train.epochs * config.train.minibatches
        reference = int(has_reference(config))
        preset, redraws = preset_of(config), config.rollout.dynamic_rounds
        kinds = KINDS[:2] if config.actions.file else KINDS  # servers have the vocabulary alone
        if branch_part(config, preset)[0] == "counterfactual":
            kinds = KINDS[:1]  # each step decides where the next one forks
        is_dynamic = redraws > 1 or (preset.dynamic_sampling and redraws != 1)
        if is_dynamic and given("staleness", staleness):
            raise ConfigError(
                "sampling cannot run ahead where groups are drawn again after a step "
                "(rollout.dynamic_rounds, or the preset's): use --staleness 0"
            )
        extra = {
            "kinds": kinds,
            "can_run_ahead": not is_dynamic,
            "updates": config.train.minibatches,
            "epochs": config.train.epochs,
            "passes": reference + (rounds > 1),
            "copies": reference,
        }
    work = Workload(
        given("tasks", own.groups),
        given("samples", own.samples),
        given("prompt", own.prompt),
        given("response", own.sampled),
    )
    if work.rows > MOST_ROWS:
        raise ConfigError(f"{work.rows:,} attempts per step; the most is {MOST_ROWS:,}")
    longest = given("longest", LONGEST * work.sampled)
    if longest and longest < work.sampled:
        raise ConfigError(f"--max-response {longest} is below the average of {work.sampled}")
    return TrainingJob(
        found,
        work,
        spread=given("spread", spread),
        longest=longest,
        tool_seconds=options["tool_seconds"],
        staleness=given("staleness", staleness),
        **extra,
    )


def _many_gpus(
    job: TrainingJob, gpus: int, kind: str, shape: str, recipe: str, as_json: bool
) -> None:
    from graft.config import ConfigError
    from graft.planning.explanation import what_fits, why_not
    from graft.planning.hardware import gpu_named
    from graft.planning.planner import Planner

    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"--gpus {gpus}: needs 1 to {MOST_GPUS}")
    planner = Planner.of(job, gpu_named(kind), gpus)
    best, name = planner.best, shape or recipe
    advice = "" if best is not None else f"{why_not(planner)}. {what_fits(planner)}"
    if as_json:
        typer.echo(json.dumps(_as_json(planner, name, recipe, advice)))
    elif best is not None:
        _show(planner, best, name, recipe)
    else:
        typer.echo(f"{name} does not fit on {gpus} x {planner.gpu.name}. {advice}")
    if best is None:
        raise typer.Exit(1)


def _as_json(planner: Planner, name: str, recipe: str, advice: str) -> dict[str, Any]:
    from graft.planning.explanation import formula
    from graft.train.memory.footprint import num_parameters

    job, best = planner.job, planner.best
    return {
        "model": name,
        "gpus": planner.gpus,
        "gpu": planner.gpu.name,
        "parameters": num_parameters(job.shape),
        "is_measured": False,
        "job": {
            "tasks": job.work.groups,
            "samples": job.work.samples,
            "prompt": job.work.prompt,
            "response": job.work.sampled,
            "longest": float(job.lengths[-1]),
            "spread": job.spread,
            "tool_seconds": job.tool_seconds,
            "staleness": job.staleness,
        },
        "fits": best is not None,
        "best": None if best is None else best.to_json(),
        "commands": [] if best is None else best.layout.commands(recipe or "RECIPE"),
        "layouts": [one.to_json() for one in planner.per_kind],
        "formula": [] if best is None else formula(planner, best),
        "advice": advice,
    }


def _show(planner: Planner, best: LayoutEstimate, name: str, recipe: str) -> None:
    import sys

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from graft.planning.explanation import formula
    from graft.planning.scaling import gpu_memory
    from graft.train.memory.footprint import gigabytes, num_parameters

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.width = max(console.width, 100)
    job, work = planner.job, planner.job.work
    console.print(
        f"{name}: {num_parameters(job.shape):,} parameters in bfloat16 on {planner.gpus} x "
        f"{planner.gpu.name}: computed, not measured"
    )
    console.print(
        f"a step: {work.groups} tasks x {work.samples} answers, {work.prompt:,} -> {work.sampled:,} "
        f"tokens on average, {int(job.lengths[-1]):,} at the longest; tools {job.tool_seconds:g} s"
    )
    table = Table("layout", "learn", "sample", box=SIMPLE)
    for column in ("rollout s", "learn s", "sync s", "step s", "tokens/s"):
        table.add_column(column, justify="right")
    for one in sorted(planner.per_kind, key=lambda one: -one.step):
        layout = one.layout
        is_allowed = layout.staleness <= job.staleness
        seconds = (one.rollout, one.learning.seconds, one.sync, one.step)
        table.add_row(
            layout.name if is_allowed else f"({layout.name})",
            _gpus(layout.learners, layout.learner_tp),
            _gpus(layout.samplers or layout.learners, layout.sampler_tp),
            *(f"{x:,.3g}" if x < 100 else f"{x:,.0f}" for x in seconds),
            f"{one.tokens_per_second:,.0f}",
            style="bold" if one is best else None,
        )
    console.print(table)
    stale = any(one.layout.staleness > job.staleness for one in planner.per_kind)
    console.print(
        f"best: {best.layout.name}, {_gpus(best.layout.learners, best.layout.learner_tp)} learn"
        + (
            f", {_gpus(best.layout.samplers, best.layout.sampler_tp)} sample"
            * bool(best.layout.samplers)
        )
        + ("; layouts in brackets need a larger --staleness" if stale else "")
    )
    for command in best.layout.commands(recipe or "RECIPE"):
        console.print(f"  {command}", markup=False)
    if best.layout.kind == "servers":
        console.print(
            "servers were tested on a CPU only; they are assumed to decode as fast as the native engine"
        )
    usable = gpu_memory(planner.gpu).usable
    memory = Table("memory of one GPU", box=SIMPLE)
    memory.add_column("learner" if best.sampler_memory else "learns and samples", justify="right")
    memory.add_column("sampler", justify="right")
    for item in {**best.learner_memory, **best.sampler_memory}:
        sizes = [held.get(item, 0.0) for held in (best.learner_memory, best.sampler_memory)]
        memory.add_row(item, *(gigabytes(size) if size else "" for size in sizes))
    memory.add_section()
    totals = [sum(held.values()) for held in (best.learner_memory, best.sampler_memory)]
    memory.add_row("total", *(gigabytes(size) if size else "" for size in totals))
    memory.add_row("usable", gigabytes(usable), gigabytes(usable) if best.sampler_memory else "")
    console.print(memory)
    for line in formula(planner, best):
        console.print(line)
    console.print(
        "Rates were measured on one H200, where rows that set no rate are off by up to 21%. Links, "
        "overlap and other GPUs are assumed: docs/planning.md",
        style="dim",
    )


def _gpus(count: int, tp: int) -> str:
    """
    >>> _gpus(48, 8), _gpus(16, 1)
    ('48 (tp 8)', '16')
    """
    return f"{count}" if tp == 1 else f"{count} (tp {tp})"
