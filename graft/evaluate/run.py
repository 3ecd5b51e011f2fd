"""Every checkpoint of a run on several sets of held-out tasks: what `graft eval` does.

    graft eval runs/sort --on earl:sort-4,earl:sort-4-5 --all-checkpoints --k 8

computes a table of results, one after the other. Every attempt is in `runs/sort/evaluations` as soon as it
ends; a second call makes those that are missing, such as the rest of a killed evaluation, or checkpoints
that the run has written since. `table.md` and `table.json` show all results of these settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.evaluate.candidates import Candidate, candidates, model_name, place
from graft.evaluate.comparison import Comparison, read_earlier, set_beside
from graft.evaluate.eval_spec import EvalSpec, make_spec
from graft.evaluate.evaluator import Evaluator, TaskList, chat_with, pose, trained_sets
from graft.evaluate.model_source import EndpointSpec, ModelSource
from graft.evaluate.options import EvalOptions
from graft.evaluate.results import EvalResult, ResultsFile
from graft.evaluate.table import ScoreTable
from graft.files import write_text
from graft.train.model import sampling_only
from graft.train.run_dir.folder import out_of_disk
from graft.train.run_dir.names import named
from graft.trust import check_written

PLAIN: dict[str, Any] = {
    "rollout": {"max_tokens": 4096, "max_context": 16384, "max_turns": 16},
    "train": {"steps": 0},
    "sft": {"steps": 1, "data": "none"},  # a recipe must train; an evaluation never does
}
"""The settings of a model without a recipe."""
DEFAULTS = EvalOptions()


def evaluate_checkpoints(
    model: ModelSource,
    options: EvalOptions = DEFAULTS,
    *,
    every_checkpoint: bool = False,
    against: str = "",
    name: str = "table",
    say: Callable[[str], None] = print,
) -> tuple[ScoreTable, Path, Comparison | None]:
    """Compute what is missing of the table; returns the table, its folder and the comparison.

    model     a run is evaluated by its newest checkpoint, or by every one
    against   an earlier evaluation: its JSON file or a folder with one
    name      of the files: another table of the same run
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} names files; give one word, without folders")
    model = model.locate_served(say) if model.path and model.urls else model.locate()
    earlier = read_earlier(str(named(against))) if against else None
    server, run = model.read_endpoint(), model.run
    with model.use_settings(options.on, options.prompt, *options.args):
        spec = make_spec(_recipe(model, options.on, server), options, server)
        rollout = spec.config.rollout
        if options.max_tokens and rollout.max_tokens >= rollout.max_context:
            raise ConfigError(
                f"max_tokens={rollout.max_tokens} leaves no room for a prompt in rollout.max_context="
                f"{rollout.max_context}; raise that too"
            )
        models = _candidates(model, every_checkpoint, server, say)
        if server is None:
            spec = replace(spec, config=sampling_only(spec.config, models[-1].path))
        task_lists = pose(spec, chat_with(spec.config, server, models[-1].path))
        folder = (run or Path(spec.config.run.dir) / spec.config.run.name) / "evaluations"
        check_written(folder)
        results_file = ResultsFile(folder / f"{name}.jsonl")
        if results_file.broken:
            say(
                f"{results_file.path} has {results_file.broken} unreadable line(s), left by a killed process"
            )
        try:
            table = fill(spec, task_lists, models, results_file, say)
        except KeyboardInterrupt:
            say(
                f"interrupted; finished attempts are in {folder}, the same command completes the rest"
            )
            raise
        compared = None if earlier is None else set_beside(table, earlier)
        _write(table, compared, folder, name)
        return table, folder, compared


def _recipe(model: ModelSource, on: str, server: EndpointSpec | None) -> Config:
    """The recipe, or the defaults of a model without one."""
    if not model.recipe_file and (not on or (model.run is not None and server is None)):
        raise ConfigError(
            f"'{model.run or model.path}' has no config.yaml of a run, which would name the environment "
            "and limits to evaluate with; give --recipe, or for a model --on"
        )
    server_name = "" if server is None else server.model or "endpoint"
    name = server_name.rpartition("/")[2] or model_name(Path(model.path))
    return model.load_config({**PLAIN, "run": {"name": name}})


def _candidates(
    model: ModelSource, every: bool, server: EndpointSpec | None, say: Callable[[str], None]
) -> list[Candidate]:
    path, run = Path(model.path), model.run
    if server is None:
        return candidates(path, run, every, say)
    if every:
        raise ConfigError(
            "--all-checkpoints and --endpoint exclude each other: it serves one model"
        )
    text = f"{server.model}/{server.api}".encode()
    weights = blake2b(text, digest_size=8).hexdigest()  # nothing else is known of the weights
    if run is not None:  # of a plain model the tokenizer is enough
        path = candidates(path, run, False, say)[-1].path
    return [Candidate(server.model or "endpoint", path, weights)]


def fill(
    spec: EvalSpec,
    task_lists: Sequence[TaskList],
    found: Sequence[Candidate],
    results_file: ResultsFile,
    say: Callable[[str], None],
) -> ScoreTable:
    """Compute every missing result, the oldest checkpoint first: it is the next to be deleted."""
    evaluator = Evaluator(spec)
    samples = results_file.path.with_suffix(".samples")
    unfinished: list[EvalResult] = []
    problems: list[str] = []
    try:
        for model in found:
            lacking = [
                one
                for one in task_lists
                if not results_file.find(one.tasks.label, one.settings, model.name, model.weights)
            ]
            if lacking and not evaluator.mount(model):
                say(f"{model.name} was deleted meanwhile; skipped")
                continue
            for one in lacking:
                result = evaluator.measure(model, one, samples, say)
                if result.missing:
                    unfinished.append(result)
                    problems.append(
                        f"{model.name} on {result.set} lacks {result.missing} attempts that "
                        "the server did not answer; the same command makes them"
                    )
                    continue
                with out_of_disk(results_file.path.parent):
                    results_file.append(result)
                say(f"{model.name} on {result.set}: {result.reward:.3f} in {result.seconds:.1f} s")
    finally:
        evaluator.close()
    return to_table(spec, task_lists, found, results_file, unfinished, problems)


def to_table(
    spec: EvalSpec,
    task_lists: Sequence[TaskList],
    found: Sequence[Candidate],
    results_file: ResultsFile,
    unfinished: Sequence[EvalResult],
    problems: Sequence[str],
) -> ScoreTable:
    """All results of these settings, also of checkpoints that the run has deleted since."""
    now = {model.name: model.weights for model in found}
    rows: dict[str, dict[str, EvalResult]] = {}
    for one in task_lists:
        for result in results_file.under(one.tasks.label, one.settings):
            # not of an older model of the same name
            if now.get(result.checkpoint, result.weights) == result.weights:
                rows.setdefault(result.checkpoint, {}).setdefault(result.set, result)
    for result in unfinished:
        rows.setdefault(result.checkpoint, {})[result.set] = result
    cramped = [
        f"{result.checkpoint} on {result.set}: {result.overlong} prompts leave no space for an answer and "
        "count as 0; raise rollout.max_context"
        for results in rows.values()
        for result in results.values()
        if result.overlong
    ]
    shown = {name: rows[name] for name in sorted(rows, key=place)}
    return ScoreTable.of(spec, shown, [*problems, *cramped], trained_sets(task_lists))


def _write(table: ScoreTable, compared: Comparison | None, folder: Path, name: str) -> None:
    with out_of_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = table.markdown() + (f"\n{compared.markdown()}" if compared is not None else "")
        write_text(folder / f"{name}.md", text)
        more = {} if compared is None else {"comparison": compared.to_json()}
        text = json.dumps({**table.to_json(), **more}, ensure_ascii=False)
        write_text(folder / f"{name}.json", text)
