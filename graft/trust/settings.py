"""The one list of settings that do something, and what a stranger's recipe or run may do with each.

A setting that can hold a text is a key of a recipe (`KEYS`), an argument of a part that a recipe names
(`ARGUMENTS`: of every environment, wrapper, reward, tool, source, branch, credit, loss, ...) or the name of
a part that acts by itself (`NAMES`). `check_settings` walks a recipe that is not the user's own and refuses

    {"task": {"reward": {"f1": {}}}}                              nothing: a name of graft's tables
    {"task": {"reward": {"judge": {"url": "http://h/v1"}}}}       judge: CONNECT
    {"task": {"args": {"data": "/home/me/rows.jsonl"}}}           data: READ, outside of the run
    {"task": {"args": {"colour": "/etc/passwd"}}}                 an argument that is not listed: UNKNOWN

so whatever is not on the list is refused too. tests/trust/test_strangers_settings.py walks every key, and
every argument of every table, and fails for one that can hold a text and is not here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from graft.trust import HOW, NotTrusted, Source, stranger


class Effect(StrEnum):
    """What happens with the value of a setting; for a stranger's, the value is why it is refused."""

    SHOW = "a text that is compared, shown or given to the policy"
    """Allowed."""
    NAME = "a name of one of graft's tables"
    """Allowed, unless the name is in `NAMES`; "module:attr" is refused where it would be imported."""
    PARTS = "names with their arguments"
    """Allowed, if the names and the arguments are."""
    BUNDLED = "a file of this machine that would be read, not one that comes with graft or the run"
    """Allowed: the name of a file that comes with graft, a template's text, a file in the run."""
    READ = "a file of this machine that would be read, not one in the run"
    """Allowed: a file in the run."""
    MODEL = "a model that would be read or downloaded, not one in the run"
    """Allowed: a model in the run, and the run's own: policy, reference."""
    WRITE = "a place that would be written"
    CONNECT = "a server that would be asked, or an address to listen on"
    EXECUTE = "a program that would be started"
    SECRET = "an environment variable whose value would be sent"
    UNKNOWN = "an argument that graft does not know, with a path, an address or a name"
    """Allowed: plain words."""


S, N, P = Effect.SHOW, Effect.NAME, Effect.PARTS

KEYS: dict[str, Effect] = {
    "run.name": S,  # a folder below run.dir: its validator refuses others
    "run.dir": Effect.WRITE,
    "run.trackers": N,
    "model.path": Effect.MODEL,
    "model.shape": S,
    "model.alphabet": S,
    "model.chat_template": Effect.BUNDLED,
    "model.template_args": S,
    "model.device": S,
    "task.env": P,
    "task.args": P,
    "task.eval_args": P,
    "task.wrappers": P,
    "task.reward": P,
    "task.prefill": S,
    "task.agent": Effect.EXECUTE,
    "task.salt": S,
    "agent.main": S,
    "agent.models": Effect.CONNECT,
    "agent.embeddings": Effect.CONNECT,
    "agent.host": Effect.CONNECT,
    "agent.variables": Effect.SECRET,
    "actions.file": Effect.BUNDLED,
    "actions.tools": S,
    "actions.start": S,
    "rollout.branch": P,
    "rollout.answer_schema": S,
    "rollout.frozen": Effect.MODEL,
    "eval.env": P,
    "engine.name": N,
    "engine.url": Effect.CONNECT,
    "engine.api_key_env": Effect.SECRET,
    "engine.exchange": Effect.WRITE,
    "engine.args": Effect.EXECUTE,  # of vLLM: trust_remote_code, download_dir, ...
    "algo.name": N,
    "algo.credit": P,
    "algo.loss": P,
    "algo.reduction": P,
    "algo.weights": P,
    "algo.kl_control": S,
    "algo.entropy_control": S,
    "distill.teacher": Effect.MODEL,
    "distill.by": S,
    "distill.divergence": P,
    "distill.context": N,
    "distill.data": Effect.READ,
    "distill.api_key_env": Effect.SECRET,
    "sft.data": Effect.READ,
    "sft.layout": S,
    "sft.demo_args": P,
    "sft.mask_results": S,
    "sft.eval_data": Effect.READ,
    "cluster.address": Effect.CONNECT,
}
"""Every key of a recipe that can hold a text."""

ARGUMENTS: dict[str, Effect] = {
    # of an item of task.env
    "env": N,
    "name": N,
    "args": P,
    "eval_args": P,
    "wrappers": P,
    "reward": P,
    "prefill": S,
    # files
    "data": Effect.READ,
    "corpus": Effect.BUNDLED,
    "vectors": Effect.READ,
    "wiki": Effect.READ,
    "zimfile": Effect.READ,
    "prompt": Effect.BUNDLED,
    "path": Effect.READ,
    "cache": Effect.WRITE,
    "index": Effect.WRITE,
    "exchange": Effect.WRITE,
    # servers, programs
    "hub": Effect.CONNECT,
    "url": Effect.CONNECT,
    "urls": Effect.CONNECT,
    "headers": Effect.CONNECT,
    "token": Effect.CONNECT,
    "trawler_kwargs": Effect.CONNECT,
    "api_key_env": Effect.SECRET,
    "key": Effect.SECRET,
    "program": Effect.EXECUTE,
    "command": Effect.EXECUTE,
    "interpreter": Effect.EXECUTE,
    "run_args": Effect.EXECUTE,
    "variables": Effect.SECRET,
    "agent_folder": Effect.READ,
    # parts inside parts
    "use": P,
    "tools": P,
    "source": N,
    "customer": N,
    "customer_args": P,
    "backend": N,
    "sandbox": N,
    "summariser": P,
    "tool_options": P,
    # texts
    "answer_key": S,
    "api": S,
    "cache_mode": S,
    "country": S,
    "description": S,
    "device": S,
    "divergence": N,
    "document_prefix": S,
    "dtype": S,
    "engine": S,  # of a web search
    "form": S,
    "format": N,
    "gate": S,
    "grade": S,
    "hub_split": S,
    "image_key": S,
    "init_algo": S,
    "instruction": S,
    "instructions": S,
    "instructions_at": S,
    "kind": S,
    "layout": S,
    "model": S,  # as a server calls it; that of the source dense is in NAMES
    "observation_mode": S,
    "operators": S,
    "order": S,
    "page_summary_length": S,
    "params": S,  # of a web search, which is in NAMES
    "penalty_over": S,
    "per": S,
    "prompt_key": S,
    "query_prefix": S,
    "question": S,
    "question_key": S,
    "read": N,
    "request": S,
    "rows": S,
    "rule": S,
    "scale": S,
    "split": S,
    "styles": S,
    "sync": S,
    "syntax": N,
    "system": S,
    "tag": S,
    "tasks": S,
    "template": S,
    "test_key": S,
    "valid": S,
    "variant": S,
    "wire": S,
}
"""Every argument that can hold a text, of every part that a recipe can name. One name, one effect."""

NAMES: dict[str, Effect] = {
    "judge": Effect.CONNECT,  # also without url: $JUDGE_URL
    "fetch": Effect.CONNECT,  # the policy chooses the pages
    "browse": Effect.CONNECT,
    "mcp": Effect.CONNECT,
    "http": Effect.CONNECT,
    "serpapi": Effect.CONNECT,
    "google_cse": Effect.CONNECT,
    "bing": Effect.CONNECT,
    "brightdata": Effect.CONNECT,
    "tavily": Effect.CONNECT,
    "dense": Effect.EXECUTE,  # sentence-transformers opens its model
    "model": Effect.CONNECT,  # the customer of tau:retail
    "mw": Effect.CONNECT,
    "kiwix": Effect.CONNECT,
    "wandb": Effect.CONNECT,
    "terminal": Effect.EXECUTE,  # containers
    "none": Effect.EXECUTE,  # the sandbox that is none
}
"""Names of graft's tables that do something without an argument."""

WORD = re.compile(r"[\w .,+*=()<>-]*")
"""What an argument that is not listed may hold: no path, address or "module:attr"."""
OWN_MODELS = ("policy", "reference", "random", "none")
LITERAL = re.compile(r"[^~$*?\[\]{}:]*")
"""A path as it stands: no home, variable, pattern or address, which a reader may expand."""
TEMPLATE = ("{{", "{%")
"""What makes a chat template a text and not a file."""


def check_settings(
    values: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Mapping[str, Any]],
    own: Collection[str] = (),
) -> None:
    """NotTrusted if a stranger's settings are in use and one of them would do something.

    values     the sections of a recipe; `defaults` those of a recipe that sets nothing
    own        keys that the user's command sets, with all below them: ["task.args.data"]
    """
    source = stranger()
    if source is None:
        return
    for section, keys in values.items():
        for key, value in keys.items():
            path = f"{section}.{key}"
            if path in KEYS and value != defaults[section][key]:
                for where, text, effect in _acting(path, value, KEYS[path]):
                    if not _is_own(where, own) and not _is_allowed(text, effect, source):
                        raise NotTrusted(
                            f"{source.file} has {where}={text!r}, {effect}, and {source.why}. {HOW}; or "
                            f"set {where} yourself"
                        )


def _acting(path: str, value: Any, effect: Effect) -> Iterator[tuple[str, str, Effect]]:
    """Every text in a value: where it is, and what is done with it."""
    if isinstance(value, Mapping) and effect is Effect.PARTS:
        for key, one in value.items():
            yield from _acting_part(f"{path}.{key}", str(key), one)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _acting(f"{path}.{key}", one, effect)
        if effect not in (Effect.SHOW, Effect.MODEL) and value:  # {program: null} is one too
            yield from ((path, str(key), effect) for key in value)
    elif isinstance(value, Sequence | set) and not isinstance(value, str | bytes):
        for one in value:
            yield from _acting(path, one, effect)
    elif isinstance(value, str | bytes | Path):
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if effect not in (Effect.NAME, Effect.PARTS):
            yield path, text, effect
            return
        for name in text.split(","):
            yield path, name.strip(), NAMES.get(name.strip(), Effect.NAME)


def _acting_part(path: str, key: str, value: Any) -> Iterator[tuple[str, str, Effect]]:
    """{key: value} among parts: an argument, or a part with its arguments."""
    if key in ARGUMENTS:
        yield from _acting(path, value, ARGUMENTS[key])
        return
    if key in NAMES:
        yield path, key, NAMES[key]
    is_text = isinstance(value, str | bytes | Path)
    yield from _acting(path, value, Effect.UNKNOWN if is_text else Effect.PARTS)


def _is_own(path: str, own: Collection[str]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in own)


def _is_allowed(text: str, effect: Effect, source: Source) -> bool:
    match effect:
        case Effect.SHOW | Effect.NAME | Effect.PARTS:
            return True
        case Effect.UNKNOWN:
            return bool(WORD.fullmatch(text)) and not _exists(text)
        case Effect.MODEL:
            return text in ("", *OWN_MODELS) or _is_inside(text, source)
        case Effect.READ:
            return not text or _is_inside(text, source)
        case Effect.BUNDLED:
            is_name = bool(re.fullmatch(r"[\w-]*", text)) and not _exists(text)
            is_text = any(mark in text for mark in TEMPLATE)
            return is_name or is_text or _is_inside(text, source)
        case _:
            return not text


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return True  # too long, or with a NUL: no plain word


def _is_inside(text: str, source: Source) -> bool:
    """Whether this is a file in the stranger's run, links followed; a lone recipe has no folder."""
    file = Path(source.file)
    if file.name != "config.yaml" or not LITERAL.fullmatch(text):
        return False
    try:
        path = Path(text).resolve(strict=True)
        is_inside = path.is_relative_to(file.parent.resolve())
    except (OSError, ValueError, RuntimeError):
        return False
    links = (
        Path(folder, name).is_symlink()
        for folder, folders, files in os.walk(path)
        for name in (*folders, *files)
    )
    return is_inside and not any(links)
