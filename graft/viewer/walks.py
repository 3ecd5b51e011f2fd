"""An episode in the parts that the page requests: the tree without tokens, and a walk in pages of tokens.

    tree   spans with parent, author, the first words, number of tokens, mean entropy; leaves with rewards
    walk   the tokens from the root to one tip, `start` to `start + count`, parallel lists of numbers

Numbers that JSON cannot express (NaN, infinities) are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from graft.train.run_dir.token_log import TokenRow
from graft.viewer.contexts import contexts
from graft.viewer.episodes import prompt_text
from graft.viewer.runs import NotThere, ViewedRun

EXCERPT = 160
"""Characters of a span's text in the tree."""
MAX_INFO = 4000
"""Characters of an environment's info about one span or leaf."""
MAX_TEXT = 20_000
MAX_SPANS = 20_000


def tree(run: ViewedRun, step: str, line: int) -> dict[str, Any]:
    episode = run.episode(step, line)
    task, spans, leaves = episode["task"], episode["spans"], episode["leaves"]
    return {
        "run": run.number,
        "step": step,
        "line": line,
        "task": {
            "id": str(task.get("id", "")),
            "env": str(task.get("env", "")),
            "prompt": prompt_text(task)[:MAX_TEXT],
            "answer": _short(task.get("answer")),
            "meta": _short(task.get("meta")),
        },
        "num_spans": len(spans),
        "spans": [_branch(span) for span in spans[:MAX_SPANS]],
        "leaves": [_leaf(leaf, spans) for leaf in leaves],
    }


def _leaf(leaf: Mapping[str, Any], spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made = contexts(leaf, spans)
    info = leaf.get("info") or {}
    return {
        "tips": leaf["tips"],
        "reward": _number(leaf["reward"]),
        "status": str(leaf["status"]),
        "twin": leaf.get("twin"),
        "seat": str(leaf.get("seat") or ""),
        "match": leaf.get("match"),
        "metrics": {k: _number(v) for k, v in (leaf.get("metrics") or {}).items()},
        "info": _info({k: v for k, v in info.items() if not made or k != "contexts"}),
        "contexts": made,
    }


def _branch(span: Mapping[str, Any]) -> dict[str, Any]:
    text = str(span.get("text", ""))
    return {
        "parent": span["parent"],
        "author": str(span["author"]),
        "tokens": len(span["tokens"]),
        "trained": sum(map(bool, span.get("mask") or ())),
        "reward": _number(span.get("reward", 0.0)),
        "version": span.get("version", 0),
        "text": text[:EXCERPT],
        "characters": len(text),
        "entropy": _mean(span.get("entropies") or ()),
        "logprob": _mean(span.get("logprobs") or ()),
        "info": _info(span.get("info") or {}),
    }


def walk(episode: Mapping[str, Any], leaf: int, context: int) -> list[int]:
    """Indices of the spans from the root to the tip of one context of a leaf."""
    leaves, spans = episode["leaves"], episode["spans"]
    if not 0 <= leaf < len(leaves):
        raise NotThere(f"the episode has {len(leaves)} leaves, there is no leaf {leaf}")
    tips = leaves[leaf]["tips"]
    if not 0 <= context < len(tips):
        raise NotThere(f"leaf {leaf} has {len(tips)} contexts, there is no context {context}")
    path: list[int] = []
    at: int | None = tips[context]
    while at is not None:
        if not 0 <= at < len(spans) or (path and at >= path[-1]):  # parents come before children
            raise NotThere(f"leaf {leaf} ends in span {at}, which leads to no root")
        path.append(at)
        at = spans[at]["parent"]
    return path[::-1]


def tokens(
    run: ViewedRun, step: str, line: int, leaf: int, context: int, start: int, count: int
) -> dict[str, Any]:
    """One page of a walk: parallel lists, null where a token has no such number."""
    episode = run.episode(step, line)
    path = walk(episode, leaf, context)
    spans = [episode["spans"][i] for i in path]
    lengths = [len(span["tokens"]) for span in spans]
    ids = [token for span in spans for token in span["tokens"]]
    start = min(start, len(ids))
    end = min(start + max(count, 1), len(ids))
    authors = [str(span["author"]) for span in spans]
    prompt = sum(lengths[: next((i for i, a in enumerate(authors) if a != "task"), len(spans))])
    with run.lock:
        learned = run.learned(step, line, leaf, context)
        pieces = run.pieces(ids, start, end)
        actions = _column(spans, "actions", start, end)
        names = {
            action: name
            for action in {a for a in actions if isinstance(a, int) and a >= 0}
            if (name := run.pieces.action(action))
        }
        reason = run.pieces.reason
    advantages, learner = _learner_numbers(learned, prompt, start, end)
    return {
        "total": len(ids),
        "start": start,
        "end": end,
        "spans": [[i, length] for i, length in zip(path, lengths, strict=True)],
        "ids": ids[start:end],
        "pieces": pieces,
        "no_pieces": reason,
        "logprobs": _column(spans, "logprobs", start, end),
        "entropies": _column(spans, "entropies", start, end),
        "mask": _column(spans, "mask", start, end),
        "actions": actions,
        "names": names,
        "modes": _column(spans, "modes", start, end),
        "advantages": advantages,
        "learner": learner,
        "no_learned": learned if isinstance(learned, str) else "",
    }


def text(run: ViewedRun, step: str, line: int, span: int, start: int) -> dict[str, Any]:
    """A part of the text of one span, as its environment saw it."""
    spans = run.episode(step, line)["spans"]
    if not 0 <= span < len(spans):
        raise NotThere(f"the episode has {len(spans)} spans, there is no span {span}")
    whole = str(spans[span].get("text", ""))
    start = min(start, len(whole))
    return {"text": whole[start : start + MAX_TEXT], "start": start, "total": len(whole)}


def _column(spans: Sequence[Mapping[str, Any]], name: str, start: int, end: int) -> list[Any]:
    """The numbers of tokens start to end; null where a span has none."""
    found: list[Any] = []
    begins = 0
    for span in spans:
        size = len(span["tokens"])
        first, last = max(start - begins, 0), min(end - begins, size)
        if first < last:
            values = span.get(name) or ()
            found += map(_number, values[first:last]) if values else [None] * (last - first)
        begins += size
    return found


def _learner_numbers(
    learned: TokenRow | str, prompt: int, start: int, end: int
) -> tuple[list[Any], list[Any]]:
    """The learner's numbers at the walk's positions: null over the prompt and where none were recorded."""
    if isinstance(learned, str):
        return [], []

    def placed(values: list[float]) -> list[float | None]:
        wanted = (i - prompt for i in range(start, end))
        return [_number(values[i]) if 0 <= i < len(values) else None for i in wanted]

    return placed(learned.advantages.tolist()), placed(learned.logprobs.tolist())


def _info(info: Mapping[str, Any]) -> dict[str, Any]:
    """The info of a span; long values are cut."""
    return {str(name): _short(value) for name, value in list(info.items())[:50]}


def _short(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return _number(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_INFO else f"{text[:MAX_INFO]}... ({len(text)} characters)"


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[float]) -> float | None:
    return _number(sum(values) / len(values)) if values else None
