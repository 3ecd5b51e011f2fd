"""Search in transcripts: line by line until there are enough hits or the time is over.

    search(run, ["1", "2"], "calculator", from "1", 0)
        {"hits": [{"step": "1", "line": 4, "span": 7, "before": "ask the ", "match": "Calculator", ...}],
         "next": ["2", 31]}                             where to go on; null when everything was searched

Upper and lower case are the same. Lines are parsed only where the bytes of the words occur in them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from graft.files import parse_object
from graft.viewer.episodes import prompt_text
from graft.viewer.runs import ViewedRun

MAX_HITS = 50
MAX_PER_LINE = 3
SECONDS = 1.5
AROUND = 60
"""Characters shown before and after the words."""


def search(
    run: ViewedRun, steps: Sequence[str], words: str, step: str, line: int
) -> dict[str, Any]:
    until = time.monotonic() + SECONDS
    hits: list[dict[str, Any]] = []
    mark = json.dumps(words, ensure_ascii=False)[1:-1].encode().lower() if words.isascii() else b""
    files = run.files
    later = list(steps[steps.index(step) :]) if step in steps else []
    for name in later:
        first = line if name == step else 0
        if name not in files:
            continue
        for number, raw in files[name].lines(first):
            if mark in raw.lower():
                hits += [{"step": name, "line": number, **hit} for hit in _hits(raw, words)]
            if len(hits) >= MAX_HITS or time.monotonic() > until:
                return {"hits": hits, "next": [name, number + 1]}
    return {"hits": hits, "next": None}


def _hits(raw: bytes, words: str) -> list[dict[str, Any]]:
    episode = parse_object(raw) or {}
    needle = words.casefold()
    found: list[dict[str, Any]] = []
    task = episode.get("task") or {}
    texts = [(i, str(span.get("text", ""))) for i, span in enumerate(episode.get("spans") or ())]
    if not any(needle in text.casefold() for _, text in texts):
        texts.append((0, prompt_text(task)))
    for span, text in texts:
        folded = text.casefold()
        if len(folded) != len(text):  # folding ß makes two letters: positions would no longer match
            folded = text.lower() if len(text.lower()) == len(text) else text
        at = folded.find(needle)
        if at < 0:
            continue
        end = at + len(words)
        found.append(
            {
                "span": span,
                "task": str(task.get("id", "")),
                "before": text[max(at - AROUND, 0) : at],
                "match": text[at:end],
                "after": text[end : end + AROUND],
            }
        )
        if len(found) == MAX_PER_LINE:
            break
    return found
