"""Rows in the columns that EARL's scripts write, a few of each data source; how a trace is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from graft.types import Author, Turn

BEGUN = "Let me solve this step by step.\n"
HINTS = {
    "actions": "You may calculate (12 + 6) / 3 = 6, swap A and B => B, A.",
    "tags": "Use <calculator> (12 + 6) / 3 </calculator>, <swap> A, B </swap>.",
}


def row(
    source: str,
    gold: str,
    extra: dict[str, Any],
    *,
    syntax: str = "actions",
    begun: str = BEGUN,
    index: int = 0,
    split: str = "train",
    **columns: Any,
) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": HINTS[syntax]},
            {"role": "user", "content": f"{source} {index}: {gold}?"},
            {"role": "assistant", "content": begun},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": split, "index": index, **extra},
        **columns,
    }


def arithmetic(**options: Any) -> dict[str, Any]:
    extra = {"answer": "389", "question": "What is 305 + 12 * 7?"}
    expr = "305 + 12 * 7\n#### 389"
    return row("basic_calculator_tutorial", "389", extra, expr=expr, **options)


def countdown(**options: Any) -> dict[str, Any]:
    extra = {"nums": [3, 5, 7], "target": "4", "expr": "(5 + 7) / 3"}
    return row("countdown", "[3, 5, 7]->4", extra, begun=f"{BEGUN}<think>", **options)


def calc_bench(task: str, gold: str, expr: str, **options: Any) -> dict[str, Any]:
    extra = {"answer": gold, "question": "?", "task": task, "expr": expr}
    return row("calc_bench", gold, extra, expr=expr, **options)


CALC = (
    ("arithmetic", "389", "305 + 12 * 7"),
    ("countdown", "4", "(5 + 7) / 3"),
    ("gsm8kr", "72315", "48210 / 2 = 24105 ..."),
    ("count", "2", "str(331).count('3')"),
    ("modulo", "2", "1234 % 56"),
    ("repeat", "12", "12"),
    ("sudoku", "[[1, 2], [2, 1]]", "[[1, 2], [2, 1]]"),
)


def sorting(task: str, items: list[int], gold: str, **options: Any) -> dict[str, Any]:
    symbols = options.pop("symbols", list("ABCDE"[: len(items)]))
    tools = {"sort": ["compare", "swap"], "order": ["swap"], "compare": ["compare"]}[task]
    drawn = {"task": task, "tools": tools, "items": items, "symbols": symbols}
    if task != "compare":
        drawn["reverse"] = options.pop("reverse", False)
    if task == "order":
        drawn["conditions"] = options.pop("conditions")
    return row("sorting", gold, {"interaction_kwargs": drawn, "task": task}, **options)


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


def follow(env: Any, trace: Any) -> list[Turn]:
    """Play a trace; the env must observe what the trace holds."""
    turns: list[Turn] = []
    for author, text in trace:
        if author is Author.POLICY:
            turns.append(env.step(text))
        else:
            assert turns[-1].observation == text
    return turns
