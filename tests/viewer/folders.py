"""Run folders and episodes by hand, small enough to know every number in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_run(
    folder: Path,
    episodes: dict[int, list[dict[str, Any]]] | None = None,
    metrics: list[dict[str, Any]] | None = None,
    bytes_tokenizer: bool = True,
) -> Path:
    """A run folder by hand. Tokens are bytes where there is a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: made}\n", encoding="utf-8")
    lines = [json.dumps(row) + "\n" for row in metrics or []]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if bytes_tokenizer:
        from graft.text.tokenizer import FastTokenizer

        checkpoint = folder / "checkpoints" / "rl-000001"
        FastTokenizer.bytes().save(checkpoint)
        (checkpoint / "config.json").write_text('{"vocab_size": 258}', encoding="utf-8")
        (checkpoint / "actions.json").write_text('{"actions": ["compare"]}', encoding="utf-8")
        (checkpoint / "state.json").write_text("{}", encoding="utf-8")
    (folder / "episodes").mkdir()
    for step, made in (episodes or {}).items():
        write_step(folder, step, made)
    return folder


def write_step(folder: Path, step: int, episodes: list[dict[str, Any]]) -> Path:
    path = folder / "episodes" / f"step_{step:06d}.jsonl"
    lines = [json.dumps(episode, ensure_ascii=False) + "\n" for episode in episodes]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def span(parent: int | None, author: str, text: str, **more: Any) -> dict[str, Any]:
    """A span whose tokens are the bytes of its text; the policy's have numbers."""
    tokens = list(text.encode())
    n = len(tokens) if author == "policy" else 0
    return {
        "parent": parent,
        "author": author,
        "tokens": tokens,
        "actions": tokens[:n],
        "logprobs": [-0.5] * n,
        "entropies": [1.0] * n,
        "modes": [0] * n,
        "mask": [True] * n,
        "reward": 0.0,
        "version": 0,
        "text": text,
        "info": {},
        **more,
    }


def leaf(tip: int, reward: float = 0.0, status: str = "done", **more: Any) -> dict[str, Any]:
    return {"tips": [tip], "reward": reward, "status": status, "twin": None, "metrics": {}, **more}


def episode(task: str, spans: list[dict[str, Any]], leaves: list[dict[str, Any]]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": spans[0]["text"]}]
    named = {"id": task, "env": "made", "prompt": prompt, "answer": None, "seed": 0}
    return {"task": {**named, "data_source": "", "meta": {}}, "spans": spans, "leaves": leaves}


def until(holds: Callable[[], Any], seconds: float = 15.0) -> Any:
    """Wait until it holds, and fail if it never does."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
    return found
