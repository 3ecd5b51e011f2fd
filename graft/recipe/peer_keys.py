"""Settings under their names in other libraries: a recipe with one is refused, and the error names ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from graft.recipe.peer_table import read_table
from graft.spelling import nearest

PEER_KEYS = {name: row.entry for row in read_table() for name in (*row.trl, *row.verl, *row.others)}
"""Their names -> graft's key, and what differs."""

RECIPE_OPTIONS = ("config", "config_name", "config_file", "config_path", "recipe")
"""Options by which other programs are given their settings' file."""

FIRST_KEYS = {
    "run": "run.name", "model": "model.path", "task": "task.env", "agent": "agent.seconds",
    "actions": "actions.file",
    "rollout": "rollout.samples", "eval": "eval.samples", "engine": "engine.name",
    "algo": "algo.name", "distill": "distill.teacher", "train": "train.steps", "sft": "sft.steps",
    "lora": "lora.rank",
    "parallel": "parallel.tp", "cluster": "cluster.address",
}  # fmt: skip
"""Section -> the key that a value given to the whole section is probably meant for."""


NO_ANSWER = "see `graft config --keys`"

LEAST_LIKENESS = 0.75
"""Of a guess, from 0 to 1: use_remove_padding and use_role_baseline have 0.63."""


def meant(key: str, known: Mapping[str, Any]) -> str:
    """The hint about an unknown key: graft's key that it probably stands for.

    >>> meant("train.learning_rate", {"train.lr": ""})
    "did you mean 'train.lr'?"
    """
    name = plain(key)
    found = _same_section(name, translated(name, known) or _nearest(name, known), known)
    if not found:
        return NO_ANSWER
    ours, _, remark = found.partition(" ")
    if ours == "-":
        return f"graft has no such key: {remark}"
    return f"did you mean {ours!r}?{f' ({remark})' if remark else ''}"


def has_answer(hint: str) -> bool:
    """Whether a hint of `meant` names a key, or says why there is none."""
    return hint != NO_ANSWER


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    """The entry, or graft's key, that is spelled most like `name`; "" if none is.

    In a section that is not ours the last part alone says nothing: trainer.v1.sync is not engine.sync.
    """
    section, _, last = name.rpartition(".")
    ends: dict[str, str] = {}
    for ours in known:  # the first of keys with the same end: lr is train.lr, not sft.lr
        ends.setdefault(ours.split(".")[-1], ours)
    pools = [(name, {ours: ours for ours in known})]
    if not section or section in FIRST_KEYS:
        pools.append((last, PEER_KEYS | ends))
    if not section and (near := nearest(name, list(FIRST_KEYS))) and name not in ends:
        pools.append((name, {near: FIRST_KEYS[near]}))  # a section by itself: modle
    found = [
        (SequenceMatcher(None, near, typed).ratio(), pool[near])
        for typed, pool in pools
        if (near := nearest(typed, pool))
    ]
    likeness, entry = max(found, default=(0.0, ""))
    return entry if likeness >= LEAST_LIKENESS else ""


def plain(key: str) -> str:
    """
    >>> plain("--per-device-train-batch-size"), plain("+actor_rollout_ref.rollout.n")
    ('per_device_train_batch_size', 'actor_rollout_ref.rollout.n')
    """
    return key.lstrip("-+~").replace("-", "_").rstrip(":").lower()


def translated(name: str, known: Mapping[str, Any]) -> str:
    """The entry of the longest end of a dotted name, or of a section in it; "" if there is none."""
    parts = name.split(".")
    for start, section in enumerate(parts):
        end = ".".join(parts[start:])
        if start and end in known:  # actor_rollout_ref.model.path
            return end
        if entry := PEER_KEYS.get(end) or PEER_KEYS.get(f"{section}.*" if end != section else ""):
            return entry
    return ""


def _same_section(name: str, entry: str, known: Mapping[str, Any]) -> str:
    """sft.learning_rate is sft.lr, although learning_rate alone is train.lr."""
    section, _, rest = name.partition(".")
    ours, _, remark = entry.partition(" ")
    here = f"{section}.{ours.partition('.')[2]}"
    return here if rest and here != ours and here in known and not remark else entry


def leaves_of(key: str, value: Any) -> Iterator[str]:
    """Keys below an unknown section: {"optim": {"lr": 1}} has optim.lr."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves_of(f"{key}.{name}", below)
    else:
        yield key


def as_override(option: str, following: Iterable[str], known: Mapping[str, Any]) -> str:
    """The hint about `--key value`, `--key=value` or a bare `key`, which are not overrides.

    >>> as_override("--lr", ["1e-4"], {"train.lr": ""})
    "settings are written key=value, without dashes: train.lr=1e-4"
    """
    key, has_value, value = option.partition("=")
    key = plain(key)
    if not has_value:
        value = next((v for v in following if "=" not in v and not v.startswith("--")), "")
    if key in ("resume", "run.resume") and not value:
        return "the same command resumes a run; run.resume=false refuses a folder with a checkpoint"
    if key in RECIPE_OPTIONS:
        return (
            f"the recipe is the first argument and needs no option: graft train {value or 'RECIPE'}"
        )
    text = "settings are written key=value, without dashes"
    if key in known:
        return f"{text}: {key}={value or 'VALUE'}"
    entry = _same_section(key, translated(key, known), known)
    ends = [k for k in known if k.endswith(f".{key}")]
    ours, _, remark = (entry or next(iter(ends), "")).partition(" ")
    if ours and not remark:
        return f"{text}: {ours}={value or 'VALUE'}"
    return f"{text}, and {key!r} is not a key of graft; {meant(key, known)}"
