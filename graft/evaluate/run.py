"""Every checkpoint of a run on several sets of held-out tasks: what `graft eval` does.

    graft eval runs/sort --on earl:sort-4,earl:sort-4-5 --all-checkpoints --k 8

computes a table of results, one after the other. Every attempt is in `runs/sort/evaluations` as soon as it
ends; a second call makes those that are missing, such as the rest of a killed evaluation, or checkpoints
that the run has written since. `table.md` and `table.json` show all results of these settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError, load_config
from graft.evaluate.benchmarks.arpo import with_prompt
from graft.evaluate.benchmarks.arpo_prompts import read_prompt
from graft.evaluate.candidates import (
    Candidate,
    candidates,
    model_name,
    place,
    recipe_of,
    run_behind,
)
from graft.evaluate.comparison import Comparison, read_earlier, set_beside
from graft.evaluate.eval_spec import EndpointSpec, EvalSpec, read_k
from graft.evaluate.evaluator import (
    Evaluator,
    TaskList,
    chat_with,
    pose,
    temperature_of,
    trained_sets,
)
from graft.evaluate.results import EvalResult, ResultsFile
from graft.evaluate.table import ScoreTable
from graft.evaluate.task_set import TaskSet
from graft.evaluate.task_sets import read_sets
from graft.files import write_text
from graft.models.io.hub import HubError, find_model
from graft.recipe.admission import NOT_OF_ATTEMPTS
from graft.train.build import sampling_of
from graft.train.model import sampling_only
from graft.train.run_dir.checkpoint import located
from graft.train.run_dir.folder import out_of_disk
from graft.train.run_dir.names import named
from graft.trust import check_written
from graft.trust.ownership import settings_from

PLAIN: dict[str, Any] = {
    "rollout": {"max_tokens": 4096, "max_context": 16384, "max_turns": 16},
    "train": {"steps": 0},
    "sft": {"steps": 1, "data": "none"},  # a recipe must train; an evaluation never does
}
"""The settings of a model without a recipe."""


def evaluate_checkpoints(
    source: str,
    *,
    on: str = "",
    args: Sequence[str] = (),
    recipe: str = "",
    overrides: Sequence[str] = (),
    every_checkpoint: bool = False,
    tasks: int | None = None,
    samples: int | None = None,
    k: str = "",
    solved: float = 1.0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    max_tokens: int | None = None,
    tools: bool = True,
    prompt: str = "",
    endpoint: str | Sequence[str] = "",
    model: str = "",
    api: str = "",
    against: str = "",
    name: str = "table",
    trust: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[ScoreTable, Path, Comparison | None]:
    """Compute what is missing of the table; returns the table, its folder and the comparison.

    source       a run folder, one checkpoint of it, or a model; with an `endpoint` "", or the name of the
                 model that it serves
    on, args     the sets; see `graft.evaluate.task_sets`
    k            "1,8": pass@k and maj@k; `samples` attempts per task, or as many as the largest k; neither:
                 eval.samples, else as many as a row asks for
    solved       the least reward of a right attempt
    temperature  None, here and for top_p, top_k, min_p, repetition_penalty: the recipe's; 0 is greedy
    max_tokens   sampled tokens per turn; None: the recipe's
    tools        False: the same tasks without any tool
    prompt       a system prompt for all sets: a name of `arpo_prompts.PROMPTS`, or a file
    endpoint     a server with OpenAI's API that serves `model`, or several that share the attempts; `api` is
                 completions or chat
    against      an earlier evaluation: its JSON file or a folder with one
    name         of the files: another table of the same run
    trust        run code that the recipe of a stranger names
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} names files; give one word, without folders")
    ks, samples = read_k(k, samples)
    if source and endpoint:
        source, model = served_model(source, model, api, say)
    elif source:
        source = str(located(source))
    earlier = read_earlier(str(named(against))) if against else None
    server = read_endpoint(source, endpoint, model, api)
    run = run_behind(Path(source)) if source else None
    urls = server.urls if server is not None else ()
    typed = [source, on, prompt, *args, *overrides, *urls]
    with settings_from(recipe or recipe_of(run), trust, typed):
        config = _settings(source, run, recipe, overrides, on, server)
        given = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "max_tokens": max_tokens,
        }
        config = with_given(config, given)
        sampling = sampling_of(config, held_out=True)
        if samples is None and config.eval.samples and sampling.temperature:
            ks, samples = (config.eval.samples,), config.eval.samples
        temperature_of(sampling.temperature, None, samples, "one attempt")
        refuse_actions(config, tools, server, prompt)
        if config.task.agent and not tools:
            raise ConfigError("--no-tools: the tools are those of task.agent, which brings its own")
        sets = read_sets(on, args, config.task, config.held_out_envs, has_tools=tools)
        sets = prompted(sets, prompt)
        found = _models(source, run, every_checkpoint, server, say)
        spec = EvalSpec(
            config=config if server is not None else sampling_only(config, found[-1].path),
            sets=sets,
            tasks=tasks,
            samples=samples,
            sampling=sampling,
            k=ks,
            solved=solved,
            endpoint=server,
        )
        task_lists = pose(spec, chat_with(spec.config, server, found[-1].path))
        folder = (run or Path(config.run.dir) / config.run.name) / "evaluations"
        check_written(folder)
        results_file = ResultsFile(folder / f"{name}.jsonl")
        if results_file.broken:
            say(
                f"{results_file.path} has {results_file.broken} unreadable line(s), left by a killed process"
            )
        try:
            table = fill(spec, task_lists, found, results_file, say)
        except KeyboardInterrupt:
            say(
                f"interrupted; finished attempts are in {folder}, the same command completes the rest"
            )
            raise
        compared = None if earlier is None else set_beside(table, earlier)
        _write(table, compared, folder, name)
        return table, folder, compared


def with_given(config: Config, given: Mapping[str, Any]) -> Config:
    """The recipe as it is evaluated: with its section `eval`, and what a command gives instead (not None)."""
    changes = {f"eval.{name}": value for name, value in given.items() if value is not None}
    changed = config.changed(changes)
    try:
        sampling = sampling_of(changed, held_out=True)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    evaluated = changed.as_evaluated()
    if given.get("max_tokens") and sampling.max_tokens >= evaluated.rollout.max_context:
        raise ConfigError(
            f"max_tokens={sampling.max_tokens} leaves no room for a prompt in rollout.max_context="
            f"{evaluated.rollout.max_context}; raise that too"
        )
    return evaluated


def refuse_actions(config: Config, tools: bool, server: EndpointSpec | None, prompt: str) -> None:
    """Refuse what calls made by actions exclude."""
    if not config.actions.file:
        return
    if not tools:
        raise ConfigError(
            f"--no-tools, and actions.file={config.actions.file} makes calls; add actions.file="
        )
    if server is not None:
        raise ConfigError(
            f"actions.file={config.actions.file} makes calls by a grammar, which no server can apply; add "
            "actions.file= to let the model write its calls as plain text (task.args.syntax=tags)"
        )
    if prompt:
        raise ConfigError(
            f"--prompt describes calls in tags, and actions.file={config.actions.file} makes calls "
            "by actions; leave one out"
        )


def prompted(sets: list[TaskSet], prompt: str) -> list[TaskSet]:
    """The sets with this system prompt, by its name or file; "": as they are."""
    return [with_prompt(one, read_prompt(prompt)) for one in sets] if prompt else sets


def served_model(source: str, model: str, api: str, say: Callable[[str], None]) -> tuple[str, str]:
    """The folder with the tokenizer of a served model, and its name on the server.

    Weights are neither needed nor downloaded. Of a name without a tokenizer here or on the hub the folder
    is "": then messages are sent (--api chat), and the server writes them with its own template.
    """
    where = named(source)
    if where.exists():
        return str(where), model
    model = model or source.partition("@")[0]
    if api == "chat":
        return "", model
    why = "it is no folder here and no name of the hub (OWNER/NAME)"
    try:
        found = find_model(source, weights=False)
        if found.exists():
            return str(found), model
    except HubError as error:
        why = str(error)
    if api:
        raise ConfigError(
            f"--api {api} writes whole prompts with the tokenizer of {source!r}, which cannot be had: {why}. "
            "Use --api chat, or give a folder that has it"
        )
    say(f"{source} is evaluated as a model of the server, by messages (--api chat): {why}")
    return "", model


def read_endpoint(
    source: str, url: str | Sequence[str], model: str, api: str
) -> EndpointSpec | None:
    given = [url] if isinstance(url, str) else url
    urls = tuple(one.strip() for text in given for one in text.split(",") if one.strip())
    if not urls:
        if model or api:
            raise ConfigError("--model and --api belong to --endpoint URL; give that too")
        if not source:
            raise ConfigError("nothing to evaluate: give a run, a model, or --endpoint URL")
        return None
    api = api or ("completions" if source else "chat")
    if api not in ("completions", "chat"):
        raise ConfigError(f"--api {api!r}: must be completions or chat")
    if api == "completions" and not source:
        raise ConfigError(
            "--api completions writes whole prompts, which takes the model's tokenizer and chat "
            "template; give a folder that has them as first argument, or use --api chat"
        )
    return EndpointSpec(urls, model, api)


def _settings(
    source: str,
    run: Path | None,
    recipe: str,
    overrides: Sequence[str],
    on: str,
    server: EndpointSpec | None,
) -> Config:
    """The recipe, or the defaults of a model without one."""
    recipe = recipe or recipe_of(run)
    if recipe:
        return load_config(recipe, overrides, unused=NOT_OF_ATTEMPTS)
    if not on or (run is not None and server is None):
        raise ConfigError(
            f"'{run or source}' has no config.yaml of a run, which would name the environment "
            "and limits to evaluate with; give --recipe, or for a model --on"
        )
    server_name = "" if server is None else server.model or "endpoint"
    name = server_name.rpartition("/")[2] or model_name(Path(source))
    values = {**PLAIN, "model": {"path": source or "none"}, "run": {"name": name}}
    return load_config(values, overrides, "settings")


def _models(
    source: str,
    run: Path | None,
    every: bool,
    server: EndpointSpec | None,
    say: Callable[[str], None],
) -> list[Candidate]:
    if server is None:
        return candidates(Path(source), run, every, say)
    if every:
        raise ConfigError(
            "--all-checkpoints and --endpoint exclude each other: it serves one model"
        )
    text = f"{server.model}/{server.api}".encode()
    weights = blake2b(text, digest_size=8).hexdigest()  # nothing else is known of the weights
    path = Path(source)  # of a plain model the tokenizer is enough
    if run is not None:
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
