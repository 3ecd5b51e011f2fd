"""Rows of supervised data, recipes that read them, and what of them is learned."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from graft.config import Config, check
from graft.rollout.batching import to_batch
from graft.types import Author, Episode

TINY = {
    "width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16,
    "max_positions": 256,
}  # fmt: skip


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*texts: str) -> dict[str, Any]:
    """A row of user and assistant, taking turns."""
    roles = ("user", "assistant")
    return {"messages": [message(roles[i % 2], text) for i, text in enumerate(texts)]}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe(folder: Path, sft: dict[str, Any], **sections: Any) -> Config:
    return check(
        {
            "run": {"dir": str(folder), "name": "run", "eval_tasks": 0, "trackers": [], "seed": 1},
            "model": {"shape": TINY, "alphabet": "bytes"},
            "rollout": {"max_tokens": 8, "max_context": 200},
            "train": {"steps": 0},
            "sft": {"batch": 2, "warmup": 0, "lr": 0.01, **sft},
            **sections,
        }
    )


def learned(episode: Episode, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text of the example's only row, cut where training begins or ends, token by token.

    What is trained is read off the batch that the learner gets, not off the spans.
    """
    (row,) = episode.trajectories()
    prompt = sum(len(span) for span in row.spans if span.author is Author.TASK)
    mask = [False] * prompt + to_batch([row]).mask[0].tolist()
    pairs = groupby(zip(row.tokens, mask, strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in some]), flag) for flag, some in pairs]


def trained(episode: Episode, tokenizer: Any) -> list[str]:
    return [text for text, is_trained in learned(episode, tokenizer) if is_trained]
