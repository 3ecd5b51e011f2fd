"""The one command: `graft VERB ...`. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.commands.data import data
from graft.commands.doctor import doctor
from graft.commands.evaluate import evaluate
from graft.commands.explain import explain
from graft.commands.export import export
from graft.commands.options import AsJson, Overrides, Trust, Wrappers, setting_meant
from graft.commands.plan import plan
from graft.commands.replay import replay
from graft.commands.rollout import rollout
from graft.commands.runs import runs, watch
from graft.commands.scale import scale
from graft.commands.view import report, view
from graft.trust.masking import mask, mask_terminal

app = typer.Typer(
    name="graft",
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TrustState = Annotated[
    bool, typer.Option("--trust", help="Resume from an older checkpoint, whose state is a pickle.")
]
Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a bundled recipe.")]


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from graft.version import __version__

        typer.echo(f"graft {__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: Recipe, overrides: Overrides = None, trust: TrustState = False, as_json: AsJson = False
) -> None:
    """Run a recipe: warm-up if it has one, then RL. Run it again to resume."""
    _run(recipe, overrides or [], trust, as_json)


@app.command()
def sft(
    recipe: Recipe, overrides: Overrides = None, trust: TrustState = False, as_json: AsJson = False
) -> None:
    """Run only the supervised part of a recipe."""
    _run(recipe, [*(overrides or []), "train.steps=0"], trust, as_json)


def _run(recipe: str, overrides: list[str], trust: bool, as_json: bool) -> None:
    from graft.config import load_config
    from graft.trust import Source, reading
    from graft.trust.ownership import remember

    config = load_config(recipe, overrides)
    remember(recipe)  # to train a recipe is to run its code
    with reading(Source(recipe, is_said=trust)):
        _run_config(config, as_json)


def _run_config(config: Any, as_json: bool) -> None:
    from graft.models.device import choose_device
    from graft.train.distributed.process_group import ProcessGroup

    if config.cluster.address:
        from graft.cluster.supervisor import train_on_cluster
        from graft.train.monitor.display import Display

        with Display(config.train.steps, json=as_json) as display:
            finished = train_on_cluster(config, display)
        _show(display, finished, finished.summary)
        if as_json:
            typer.echo(json.dumps(finished.summary))
        return
    device = choose_device(config.model.device)
    with (
        ProcessGroup.start(config.parallel.deadline, device) as processes,
        processes.guarded(_error_text),
    ):
        _train(config, as_json, processes)


def _train(config: Any, as_json: bool, processes: Any) -> None:
    from graft.train.monitor.display import Display
    from graft.train.session import Session

    display = Display(config.train.steps, json=as_json, quiet=not processes.is_first)
    session = Session(config, display, processes)
    try:
        with display:
            summary = session.train()
    except KeyboardInterrupt:
        if processes.failure is not None:
            raise  # the failure of another process arrives like this; it is reported elsewhere
        display.note(session.folder.interruption_note())
        raise
    if not processes.is_first:
        return
    _show(display, session, summary)
    if as_json:
        typer.echo(json.dumps(summary))


def _show(display: Any, session: Any, summary: dict[str, Any]) -> None:
    """Print scores, three attempts, and the next commands."""
    from graft.train.run_dir.names import short

    display.table(summary.get("before", {}), summary.get("after", {}))
    for number, episode in enumerate(session.episodes[:3], 1):
        display.note(f"held-out attempt {number}")
        display.transcript(episode, leaf=0)
    run, command = short(session.folder.path), _command()
    has_env = session.folder.config.task.env
    see = f"rollout {run}" if has_env else f"generate {run} --prompt '...'"
    display.closing(session.folder.path, [f"{command} {see}", f"{command} view {run}"])


def _command() -> str:
    """How this program was called: graft, or .venv/bin/graft without an activated environment."""
    called = Path(sys.argv[0])
    found = shutil.which("graft")
    if called.name != "graft" or (found and Path(found).resolve() == called.resolve()):
        return "graft"
    return min(str(called), os.path.relpath(called), key=len)


@app.command()
def config(
    recipe: Annotated[str, typer.Argument(help="A YAML file or a bundled recipe.")] = "",
    overrides: Overrides = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key and what it means.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a recipe with every default filled in, or list the keys."""
    from graft.config import ConfigError, load_config
    from graft.config import keys as all_keys

    if keys:
        documented = all_keys()
        width = max(map(len, documented))
        lines = [f"{key:<{width}}  {text}" for key, text in documented.items()]
        typer.echo(json.dumps(documented) if as_json else "\n".join(lines))
        return
    if not recipe:
        raise ConfigError("give a recipe, or --keys for the list of keys")
    resolved = load_config(recipe, overrides or [])
    if as_json:
        typer.echo(json.dumps(resolved.written()))
        return
    from graft.config import dump_config

    typer.echo(dump_config(resolved), nl=False)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, run, checkpoint or .gguf file.")
    ],
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="May be given several times.")
    ],
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token.")] = False,
    n: Annotated[int, typer.Option(min=1, help="Completions per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps every token.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps every token.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps every token.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of the text so far are less likely.")
    ] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End where this text appears.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Without the chat template: the text as it is.")
    ] = False,
    template: Annotated[str, typer.Option(help="Chat template: a name, path or text.")] = "",
    template_args: Annotated[
        list[str] | None,
        typer.Option("--template-arg", help="A variable it reads: enable_thinking=false."),
    ] = None,
    device: Annotated[str, typer.Option()] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Sample from a model. With --json: tokens, text, log-probs and entropies of every token."""
    from graft.evaluate.generate import Generator, read_variables
    from graft.rollout.event_loop import run
    from graft.train.monitor.formatting import visible
    from graft.train.run_dir.checkpoint import latest_model
    from graft.types import Sampling

    sampling = Sampling(
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    generator = Generator.open(
        latest_model(model),
        device=device,
        dtype=dtype,
        template=template or None,
        template_args=read_variables(template_args or []),
    )
    if generator.note:
        typer.echo(generator.note, err=True)
    drawn = run(lambda: generator.complete(prompt, sampling, n=n, seed=seed, raw=raw))
    if as_json:
        answers = [
            {"prompt": text, "completions": completions}
            for text, completions in zip(prompt, drawn, strict=True)
        ]
        typer.echo(json.dumps({"model": model, "answers": answers}))
        return
    for text, completions in zip(prompt, drawn, strict=True):
        for completion in completions:
            if len(prompt) * n > 1:
                typer.echo(f"--- {text}")
            answer = completion["text"]
            typer.echo(visible(answer) if sys.stdout.isatty() else answer)


@app.command()
def envs(
    pattern: Annotated[str, typer.Argument(help="Only ids that contain this text.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the environments: turns, what each needs, whether it can run here."""
    from graft.commands.envs import list_envs, table

    rows = list_envs(pattern)
    typer.echo(json.dumps({"envs": rows}) if as_json else "\n".join(table(rows)))


@app.command()
def recipes(
    pattern: Annotated[str, typer.Argument(help="Only names that contain this text.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the bundled recipes: what each needs, whether it is here; of one, how it is started."""
    from graft.commands.recipes import list_recipes, table

    rows = list_recipes(pattern)
    typer.echo(json.dumps({"recipes": rows}) if as_json else "\n".join(table(rows)))


@app.command()
def play(
    env_id: Annotated[str, typer.Argument(metavar="ID", help="As `graft envs` lists them.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the environment: key=value")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed, the same task.")] = None,
    wrappers: Wrappers = "",
    as_json: AsJson = False,
) -> None:
    """Play an environment yourself: read, type an action, see the reward."""
    from graft.commands.envs import open_env
    from graft.commands.envs import play as play_env

    with closing(open_env(env_id, wrappers, overrides or [])) as env:
        result = play_env(env, seed)
    if as_json:
        typer.echo(json.dumps(result))


serve = typer.Typer(
    help="Serve a policy to agents, and tools to rollouts on other machines.", no_args_is_help=True
)
app.add_typer(serve, name="serve")


@serve.command("agent")
def serve_agent(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="A recipe: agents elsewhere make its attempts. A model, run or hub name: it is served.",
        ),
    ],
    overrides: Overrides = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; else agent.host, or 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="0 picks a free one; else agent.host's, or a free one."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Of a model: the file that gets the episodes; else agent-episodes.jsonl."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Of a model's answers; else 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a model's answer; else 1024.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Serve a policy to agents as OpenAI's and Anthropic's APIs, and record or train their attempts."""
    from graft.commands.serve import recipe_overrides, refuse_options, serve_model

    options = {"--out": out, "--temperature": temperature, "--max-tokens": max_tokens}
    if refuse_options(source, overrides or [], options):
        _run(source, recipe_overrides(source, host, port, overrides or []), trust, as_json=False)
    else:
        at, drawn = (host or "127.0.0.1", port or 0), (temperature, max_tokens)
        serve_model(source, *at, out or Path("agent-episodes.jsonl"), *drawn, trust)


@serve.command("search")
def serve_search(
    corpus: Annotated[
        str, typer.Argument(help='A jsonl or parquet file, or "small"; none for a web source.')
    ] = "",
    source: Annotated[
        str, typer.Option(help="bm25, dense, or a web source: serpapi, google_cse, tavily, ...")
    ] = "",
    model: Annotated[str, typer.Option(help="The embedding model of a dense source.")] = "",
    index: Annotated[
        str, typer.Option(help="An existing faiss index file of the corpus, in its order.")
    ] = "",
    query_prefix: Annotated[
        str | None, typer.Option(help='Text before each query, such as "query: " for e5 models.')
    ] = None,
    topk: Annotated[
        int, typer.Option(min=1, help="Documents per query, unless a request says otherwise.")
    ] = 3,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
) -> None:
    """Answer POST /retrieve over a corpus or the web, in Search-R1's JSON and in GEM's msgpack."""
    from graft.tools.search.server import serve as serve_source
    from graft.tools.search.server import served_source

    made = served_source(corpus, source, model=model, vectors=index, query_prefix=query_prefix)
    serve_source(made, host=host, port=port, topk=topk)


app.add_typer(data, name="data")
app.command("eval")(evaluate)
app.command("rollout")(rollout)
app.command("export")(export)
app.command("plan")(plan)
app.command("explain")(explain)
app.command("runs")(runs)
app.command("watch")(watch)
app.command("report")(report)
app.command("view")(view)
app.command("doctor")(doctor)
app.command("replay")(replay)
app.command("scale")(scale)


def main() -> None:
    """Entry point: errors that a user can act on are one line; anything else is a bug, shown in full."""
    # torch's threads spin while they wait; with one busy process beside them a step was
    # sixteen times slower (4.1 s for 0.24 s), and on a quiet machine spinning gained nothing
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch logs lost connections from C++ before graft can say which process is lost and why
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    mask_terminal()
    try:
        code = app(standalone_mode=False)  # typer returns an exit code instead of raising it
        sys.exit(code if isinstance(code, int) else 0)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        sys.exit(_complain(error))


def _complain(error: Exception) -> int:
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's, wherever typer keeps it
        error.show()  # type: ignore[attr-defined]
        if hint := setting_meant(error, sys.argv[1:]):
            typer.echo(hint, err=True)
        return 2
    from graft.actions.fields import ActionsError
    from graft.config import ConfigError
    from graft.registry import UnknownName
    from graft.train.monitor.formatting import visible
    from graft.trust import NotTrusted

    if "out of memory" in str(error) and not os.environ.get("GRAFT_DEBUG"):
        seen = str(error).partition("\n")[0].partition("If reserved")[0].strip()
        typer.echo(
            f"graft: the device has no memory left: {seen} `graft plan RECIPE` shows what a recipe "
            "needs; other processes may hold some of it (nvidia-smi). Lower train.tokens_per_micro or "
            "engine.kv_tokens; the same command resumes from the last checkpoint.",
            err=True,
        )
        return 1
    if os.environ.get("GRAFT_DEBUG") or not _is_for_the_user(error):
        typer.echo(visible(mask("".join(traceback.format_exception(error)))), err=True, nl=False)
        if not os.environ.get("GRAFT_DEBUG"):
            typer.echo("graft: this is a fault in graft or in your own code, shown above", err=True)
        return 1
    typer.echo(f"graft: {visible(mask(str(error)))}", err=True)
    usage = (ConfigError, UnknownName, ActionsError, NotTrusted)
    is_usage = isinstance(error, usage) or type(error) is ValueError
    return 2 if is_usage else 1


def _error_text(error: BaseException) -> str:
    """The text with which other processes report an error of this one."""
    if isinstance(error, Exception) and _is_for_the_user(error):
        return str(error)
    return "".join(traceback.format_exception(error))


def _is_for_the_user(error: Exception) -> bool:
    """Raised by graft on purpose: a class of graft, or a plain one raised in one of its files."""
    if type(error).__module__.startswith("graft."):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    plain = (ValueError, ImportError, OSError)
    return bool(frames) and isinstance(error, plain) and frames[-1].filename.startswith(ours)


if __name__ == "__main__":
    main()
