"""`graft plan`: memory and time of a recipe on this device, or of a model on many GPUs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.commands.options import AsJson, Overrides, Trust

if TYPE_CHECKING:
    from graft.config import Config
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
        float | None,
        typer.Option(help="Seconds that an attempt waits for tools in total. Default: 0."),
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(help="Steps that sampling may run ahead. Default: 0.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Estimate the memory and time of a recipe on this device. Exit code 1: it does not fit.

    With --gpus: estimate a recipe, or a model of --shape, on many GPUs, and how to divide them.
    """
    from graft.config import ConfigError, load_config
    from graft.recipe.admission import NOT_OF_A_PLAN
    from graft.trust.ownership import settings_from

    options = {
        "--prompt": prompt,
        "--response": response,
        "--max-response": max_response,
        "--spread": spread,
        "--tasks": tasks,
        "--samples": samples,
        "--tool-seconds": tool_seconds,
        "--staleness": staleness,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if gpus is None:
        if shape or given:
            first = "--shape" if shape else next(iter(given))
            raise ConfigError(f"{first} needs --gpus: it describes a step on many GPUs")
        if not recipe:
            raise ConfigError("give a recipe, or --gpus and --shape to plan for many GPUs")
        with settings_from(recipe, trust, overrides or []):
            config = load_config(recipe, overrides or [], unused=NOT_OF_A_PLAN)
            _this_device(config, not no_probe, as_json)
        return
    if "=" in recipe:
        raise ConfigError(f"{recipe!r} is an override of a recipe; name the recipe first")
    with settings_from(recipe, trust, overrides or []):
        config = load_config(recipe, overrides or [], unused=NOT_OF_A_PLAN) if recipe else None
        job = _job(config, shape, given)
    command = shlex.join([recipe, *(overrides or [])]) if recipe else ""
    _many_gpus(job, gpus, gpu, shape, command, as_json)


def _this_device(config: Config, probing: bool, as_json: bool) -> None:
    from graft.planning.forecast import forecast
    from graft.planning.report import show_forecast

    found = forecast(config, probing=probing)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        show_forecast(found)
    if not found.memory.fits:
        raise typer.Exit(1)


def _job(config: Config | None, shape: str, given: Mapping[str, Any]) -> TrainingJob:
    """The step of a recipe, of the given options, or of a recipe changed by options."""
    from graft.config import ConfigError
    from graft.planning.hardware import shape_named
    from graft.planning.scaling import TrainingJob
    from graft.train.memory.workload import Workload, workload_of
    from graft.train.model import recipe_shape

    for name, value in given.items():
        least = 1 if name in ("--tasks", "--samples", "--response") else 0
        if not least <= value < float("inf"):
            raise ConfigError(f"{name} {value:g}: needs {least} or more")
    if config is None:
        if not shape:
            raise ConfigError("--gpus needs a model: give --shape 8B, or a recipe")
        own, spread, staleness, extra = Workload(128, 8, 1024, 4096), 0.6, 0, {}
    else:
        own, spread, staleness = workload_of(config), 0.0, config.rollout.staleness
        extra = _of_recipe(config)
    staleness = given.get("--staleness", staleness)
    if staleness and not extra.get("can_run_ahead", True):
        raise ConfigError(
            "sampling cannot run ahead where groups are drawn again after a step "
            "(rollout.dynamic_rounds, or the preset's): use --staleness 0"
        )
    work = Workload(
        given.get("--tasks", own.groups),
        given.get("--samples", own.samples),
        given.get("--prompt", own.prompt),
        given.get("--response", own.sampled),
    )
    if work.rows > MOST_ROWS:
        raise ConfigError(f"{work.rows:,} attempts per step; the most is {MOST_ROWS:,}")
    longest = given.get("--max-response", LONGEST * work.sampled)
    if longest and longest < work.sampled:
        raise ConfigError(f"--max-response {longest} is below the average of {work.sampled}")
    return TrainingJob(
        shape_named(shape) if shape or config is None else recipe_shape(config),
        work,
        spread=given.get("--spread", spread),
        longest=longest,
        tool_seconds=given.get("--tool-seconds", 0.0),
        staleness=staleness,
        **extra,
    )


def _of_recipe(config: Config) -> dict[str, Any]:
    """What a recipe says about its step beside the number of tokens."""
    from graft.algos.presets import resolve_preset
    from graft.config import ConfigError
    from graft.planning.scaling import KINDS
    from graft.train.algorithm import branch_part, preset_of, rounds_of
    from graft.train.memory.plan import has_reference

    if config.lora.rank or resolve_preset(config.algo.name).needs_critic:
        which = "lora.rank" if config.lora.rank else f"algo.name={config.algo.name}"
        raise ConfigError(
            f"{which}: on many GPUs only a policy without critic and adapters is estimated"
        )
    train, reference = config.train, int(has_reference(config))
    preset = preset_of(config)
    kinds = KINDS[:2] if config.actions.file else KINDS  # servers have the vocabulary alone
    if branch_part(config, preset)[0] == "counterfactual":
        kinds = KINDS[:1]  # each step decides where the next one forks
    return {
        "kinds": kinds,
        "can_run_ahead": rounds_of(config, preset) == 1,
        "updates": train.minibatches,
        "epochs": train.epochs,
        "passes": reference + (train.epochs * train.minibatches > 1),
        "copies": reference,
    }


def _many_gpus(
    job: TrainingJob, gpus: int, kind: str, shape: str, recipe: str, as_json: bool
) -> None:
    from graft.config import ConfigError
    from graft.planning.hardware import gpu_named
    from graft.planning.planner import Planner
    from graft.planning.report import show_layouts, what_fits, why_not

    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"--gpus {gpus}: needs 1 to {MOST_GPUS}")
    planner = Planner(job, gpu_named(kind), gpus)
    best, name = planner.best, shape or recipe
    advice = "" if best is not None else f"{why_not(planner)}. {what_fits(planner)}"
    if as_json:
        typer.echo(json.dumps(_as_json(planner, name, recipe, advice)))
    elif best is not None:
        show_layouts(planner, best, name, recipe)
    else:
        typer.echo(f"{name} does not fit on {gpus} x {planner.gpu.name}. {advice}")
    if best is None:
        raise typer.Exit(1)


def _as_json(planner: Planner, name: str, recipe: str, advice: str) -> dict[str, Any]:
    from graft.planning.report import formula
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
