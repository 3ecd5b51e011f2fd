"""Settings of TRL and verl as people have them: a command line, a script, Python or YAML. Nothing is run.

trl grpo --learning_rate 1e-6                        {"learning_rate": 1e-6}
python3 -m verl.trainer.main_ppo data.train_files=$A {"data.train_files": the text of A=... above}
args = GRPOConfig(learning_rate=1e-6)                {"learning_rate": 1e-6}
actor_rollout_ref: {rollout: {n: 8}}                 {"actor_rollout_ref.rollout.n": 8}
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.recipe.peer_keys import plain

OBJECTS = ("args", "train_dataset", "eval_dataset", "processing_class", "peft_config", "callbacks")
"""Arguments of a trainer that are objects; what they were made with is read where they are made."""
LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_KEY = re.compile(r"[+~]*[A-Za-z_][\w.]*")


@dataclass
class PeerSettings:
    """What a text sets, under their names, and what of it could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    """Key -> why."""


def read_settings(text: str, ending: str = "") -> PeerSettings:
    """`ending` is that of the file, such as ".py"; without one the text decides."""
    tree = _parse_python(text) if ending in ("", ".py") else None
    if ending == ".py" and tree is None:
        raise ValueError("this is not Python that can be parsed")
    if tree is not None and any(isinstance(node, ast.Call) for node in ast.walk(tree)):
        return _from_python(tree)
    if ending in (".yaml", ".yml") or (not ending and _is_yaml(text)):
        return _from_yaml(text)
    return _from_shell(text)


def _parse_python(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_yaml(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return bool(lines) and all(re.match(r"\s*(-\s|[\w.]+:(\s|$))", line) for line in lines)


def _from_yaml(text: str) -> PeerSettings:
    import yaml

    from graft.trust.bounds import check_yaml

    try:
        check_yaml(text, "the settings")
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"this is not YAML: {error}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"the YAML holds {type(values).__name__}, not keys and values")
    return PeerSettings(dict(_leaves("", values)))


def _leaves(above: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(key, value)
        else:
            yield plain(key), read_value(value) if isinstance(value, str) else value


def _from_shell(text: str) -> PeerSettings:
    """Commands with `--flag value` and `a.b=value`; VAR=value above them is filled in."""
    found = PeerSettings()
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(
                f"the command cannot be read: {error}, in {line.strip()[:80]!r}"
            ) from error
        if words[:1] == ["export"]:
            words = words[1:]
        if words and all(_ASSIGNED.fullmatch(word) for word in words):  # not a.b=c
            variables |= {
                m[1]: _fill(m[2], variables) for w in words if (m := _ASSIGNED.fullmatch(w))
            }
            if len(words) == 1 or any(word.partition("=")[0].isupper() for word in words):
                continue
        _from_words(words, variables, found)
    if not found.values and not found.unread:  # one setting by itself: num_generations=8
        found.values = {plain(name): read_value(value) for name, value in variables.items()}
    return found


def _from_words(words: Sequence[str], variables: Mapping[str, str], found: PeerSettings) -> None:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and len(word) > 2:
            key, has_value, value = word[2:].partition("=")
            values = [value] if has_value else []
            while (
                not has_value
                and rest
                and not rest[0].startswith("--")
                and not _is_override(rest[0])
            ):
                values.append(rest.pop(0))
            text = values[0] if len(values) == 1 else values if values else "true"
        elif _is_override(word):
            key, _, text = word.partition("=")
        else:
            continue
        parts = [_fill(part, variables) for part in ([text] if isinstance(text, str) else text)]
        if strange := next((part for part in parts if "$" in part and "${" not in part[:2]), None):
            found.unread[plain(key)] = f"{strange} is a variable of the shell that is not set here"
            continue
        read = [read_value(part) for part in parts]
        found.values[plain(key)] = read[0] if isinstance(text, str) else read


def _is_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and bool(_KEY.fullmatch(key))


def _fill(text: str, variables: Mapping[str, str]) -> str:
    """
    >>> _fill("$HOME_DIR/x ${SIZE:-8}", {"HOME_DIR": "/data"})
    '/data/x 8'
    """

    def value(match: re.Match[str]) -> str:
        default = match[2] if match[2] is not None else match[0]
        return variables.get(match[1] or match[3], default)

    return _VARIABLE.sub(value, text)


def read_value(text: str) -> Any:
    """
    >>> [read_value(text) for text in ("1e-6", "8", "True", "null", "['console','wandb']", "Qwen/x")]
    [1e-06, 8, True, None, ['console', 'wandb'], 'Qwen/x']
    """
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        value = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        bare = re.fullmatch(r"\[([\w./, -]*)\]", text.strip())  # [console,wandb] of Hydra
        return [part.strip() for part in bare[1].split(",") if part.strip()] if bare else text
    return value if isinstance(value, int | float | str | list | tuple | dict) else text


def _from_python(tree: ast.Module) -> PeerSettings:
    """Keywords of ...Config(), ...Arguments() and ...Trainer(); load_dataset(); an ArgumentParser."""
    found = PeerSettings()
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _constant(node.value, constants)
            if value is not _NOT:
                constants[node.targets[0].id] = value
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(call.func).rpartition(".")[2]
        for key, value in _settings_of(name, call):
            if name == "parse_args" and isinstance(value, ast.List | ast.Tuple):
                words = [_constant(word, constants) for word in value.elts]
                _from_words([str(word) for word in words if word is not _NOT], {}, found)
            elif key == "reward_funcs":  # functions: their names
                parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
                found.values[key] = [ast.unparse(part).strip("'\"") for part in parts]
            elif (constant := _constant(value, constants)) is not _NOT:
                found.values[plain(key)] = constant
            else:
                found.unread[plain(key)] = f"it is computed: {ast.unparse(value)[:60]}"
    return found


def _settings_of(name: str, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The settings of one call, as key and value."""
    keywords = [(one.arg, one.value) for one in call.keywords if one.arg is not None]
    if name == "parse_args" and call.args:
        yield "", call.args[0]
    elif name == "add_argument" and call.args and isinstance(call.args[0], ast.Constant):
        yield from ((str(call.args[0].value), value) for arg, value in keywords if arg == "default")
    elif name == "load_dataset" and call.args:
        yield "dataset_name", call.args[0]
        yield from (("dataset_train_split", value) for arg, value in keywords if arg == "split")
    elif name == "LoraConfig":
        yield from ((LORA.get(arg, arg), value) for arg, value in keywords)
    elif name.endswith(("Config", "Arguments", "Trainer")):
        yield from (pair for pair in keywords if pair[0] not in OBJECTS)


_NOT = object()
"""A value that is no constant."""


def _constant(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return constants.get(node.id, _NOT)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NOT
