"""Options of several commands."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import typer

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, as in train.lr=1e-4")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run code that this run or recipe names, though you did not start it."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name in runs/.")]
Wrappers = Annotated[str, typer.Option(help='python_tool,concat or "[{max_history: {turns: 2}}]"')]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Default: the recipe's.")]
ModelRecipe = Annotated[str, typer.Option(help="Settings for a model without a run.")]
Endpoint = Annotated[
    list[str] | None,
    typer.Option(
        help="A server with OpenAI's API, http://host:8000/v1; several: with commas, or again."
    ),
]
ServedModel = Annotated[str, typer.Option(help="The name that the endpoint serves.")]
EndpointApi = Annotated[
    str, typer.Option(help="completions (raw prompts; needs a tokenizer) or chat.")
]


def read_temperature(temperature: float | None, greedy: bool) -> float | None:
    """`--temperature` and `--greedy`, which is 0."""
    if greedy and temperature:
        from graft.config import ConfigError

        raise ConfigError(f"--greedy and --temperature {temperature:g} exclude each other")
    return 0.0 if greedy else temperature


def progress(text: str) -> None:
    """Progress goes to stderr; stdout is for the result."""
    typer.echo(text, err=True)


def flag_meant(error: Any, words: list[str]) -> str:
    """A hint for a flag that was given a value; "" for other errors.

    `graft export RUN --adapter out` gives "--adapter takes no value ...: --adapter --out out".
    """
    text, context = str(getattr(error, "message", "")), getattr(error, "ctx", None)
    flags = {getattr(error, "option_name", None)} if "not take a value" in text else set[Any]()
    if context is not None and "extra argument" in text:
        params = [one for one in context.command.params if getattr(one, "is_flag", False)]
        flags = {name for one in params for name in one.opts}
    parts = (word.partition("=") for word in words)
    given = [*((name, value) for name, _, value in parts if value), *pairwise(words)]
    for flag, value in given:
        if flag in flags and not value.startswith("-"):
            target = f"; to write there: {flag} --out {value}" if "export" in words[:1] else ""
            return f"graft: {flag} takes no value, and {value!r} was given to it{target}"
    if "extra argument" in text:
        return "graft: a value with blanks needs quotes: --name 'my model'"
    return ""


def value_given(error: Any, words: list[str]) -> str:
    """The value that an option refuses, which its error may leave out; "" for other errors.

    `graft view RUN --port web` gives "--port was given 'web'".
    """
    options = getattr(getattr(error, "param", None), "opts", ())
    joined = [(name, value) for name, found, value in (w.partition("=") for w in words) if found]
    for option, value in [*pairwise(words), *joined]:
        if option in options and "Invalid value" in error.format_message():
            return f"graft: {option} was given {value!r}"
    return ""


def command_meant(error: Any) -> str:
    """The command for a word that other programs have for it; "" for other errors."""
    text = str(getattr(error, "message", ""))
    word = text.partition("No such command ")[2].strip(".").strip("'")
    return f"graft: {OTHER_COMMANDS[word]}" if word in OTHER_COMMANDS else ""


OTHER_COMMANDS = {
    "resume": "the same `graft train` command resumes a run",
    "run": "`graft train RECIPE` runs a recipe",
    "finetune": "`graft sft RECIPE` does supervised fine-tuning",
    "test": "`graft eval RUN` scores a run on held-out tasks",
    "predict": "`graft generate MODEL --prompt TEXT` completes a text",
    "infer": "`graft generate MODEL --prompt TEXT` completes a text",
    "convert": "`graft export RUN --out FOLDER` writes other formats",
    "merge": "`graft export RUN --out FOLDER` writes merged weights",
    "list": "`graft runs` lists runs, `graft recipes` recipes, `graft envs` environments",
    "ls": "`graft runs` lists runs, `graft recipes` recipes, `graft envs` environments",
    "logs": "`graft watch RUN` follows a run, `graft view RUN` shows it in the browser",
    "tensorboard": "`graft view RUN` shows curves and episodes in the browser",
    "new": "`graft init NAME` writes a project",
    "create": "`graft init NAME` writes a project",
    "check": "`graft doctor RECIPE` checks a recipe and what it needs",
    "help": "`graft --help` lists the commands",
}


def option_meant(error: Any) -> str:
    """What to write instead of an option that other programs have; "" for other errors."""
    option = getattr(error, "option_name", None)
    return f"graft: {OTHER_OPTIONS[option]}" if option in OTHER_OPTIONS else ""


OTHER_OPTIONS = dict.fromkeys(
    ("--checkpoint", "--ckpt", "--step"),
    "a checkpoint is named by its folder, in place of the run: RUN/checkpoints/rl-000016",
)


def setting_meant(error: Any, words: list[str]) -> str:
    """A hint for an unknown option that looks like a setting; "" for other errors.

    `graft train RECIPE --learning_rate 1e-4` gives "... key=value, without dashes: train.lr=1e-4".
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or getattr(error, "possibilities", None):
        return ""
    takes = [parameter.name for parameter in context.command.params]
    place = next((i for i, word in enumerate(words) if word.startswith(option)), None)
    if "overrides" not in takes or place is None:
        return ""
    from graft.config import keys
    from graft.recipe.peer_keys import as_override

    return as_override(words[place], words[place + 1 : place + 2], keys())
