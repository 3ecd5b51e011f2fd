"""Writes the memory that recipes need on one GPU into recipes/one-gpu.json, which `graft recipes` shows, and
docs/recipes.md, as `graft plan` computes it.

python scripts/recipe_memory.py       # tests/docs/test_tables.py fails when they are not up to date

Models of the hub are counted by their published sizes, without the rows of actions beyond the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.fleet.hardware import SHAPES
from benchmarks.shapes import SHAPES as BENCHMARKED
from graft.config import Config, bundled_recipes, load_config
from graft.models.shape import ModelShape
from graft.planning.one_gpu import fitting_gpus, least_memory, plan_on_one_gpu
from graft.train.memory.workload import wanted_pool
from graft.train.model import recipe_shape
from graft.train.teachers.paths import teacher_paths

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "recipes" / "one-gpu.json"
PAGE = ROOT / "docs" / "recipes.md"
BEGIN = "<!-- memory: written by scripts/recipe_memory.py -->\n"
END = "<!-- end of memory -->\n"
KV_PAGE = 64
"""Tokens of a page where kernels run."""

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": SHAPES["135M"],
    "Qwen/Qwen2.5-0.5B-Instruct": SHAPES["0.5B"],
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": SHAPES["1.5B"],
    "Qwen/Qwen2.5-3B-Instruct": SHAPES["3B"],
    "Qwen/Qwen2.5-7B-Instruct": SHAPES["7B"],
    "Qwen/Qwen3-1.7B-Base": SHAPES["1.7B"],
    "Qwen/Qwen3-4B-Base": SHAPES["4B"],
    "Qwen/Qwen3-8B": SHAPES["8B"],
    "Qwen/Qwen3-14B": SHAPES["14B"],
    "meta-llama/Llama-3.1-8B-Instruct": ModelShape(
        "llama", 128_256, 4096, 32, 32, 8, 128, 14_336, False, False,
        norm_eps=1e-5, rope_theta=5e5, max_positions=131_072,
    ),
    "gemma-3-270m-q4_k_m.gguf": BENCHMARKED["270M"],
}  # fmt: skip
"""The shapes of models that recipes name; one that is not here has to exist before its memory is known."""


def memory_of(config: Config) -> dict[str, Any]:
    """What a recipe needs at least, and the usual GPUs that it fits, in gigabytes, and the share of a step's
    attempts that the smallest of these has room for at a time; or the model that has to exist first."""
    models = [config.model.path, *teacher_paths(config).values()]
    if unknown := [path for path in models if path and path not in PUBLISHED]:
        return {"after": unknown[0]}
    shape = PUBLISHED[config.model.path] if config.model.path else recipe_shape(config)
    sizes = fitting_gpus(config, shape)
    row = {"least": round(least_memory(config, shape) / 1e9, 1), "fits": sizes}
    if sizes:
        kv_tokens = plan_on_one_gpu(config, shape, sizes[0]).kv_tokens
        row["at_once"] = round(min(kv_tokens / wanted_pool(config, KV_PAGE), 1.0), 2)
    return row


def all_rows() -> dict[str, dict[str, Any]]:
    return {name: memory_of(load_config(path)) for name, path in bundled_recipes().items()}


def as_json(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Recipes that load a model; those from scratch fit everywhere."""
    lines = ["| recipe | needs at least | smallest GPU | attempts at a time |", "|---|---|---|---|"]
    for name, row in rows.items():
        if "after" in row:
            lines.append(f"| `{name}` | known after `{row['after']}` | | |")
        elif load_config(bundled_recipes()[name]).model.path:
            size = f"{row['fits'][0]} GB" if row["fits"] else "none"
            share = f"{row['at_once']:.0%}" if "at_once" in row else ""
            lines.append(f"| `{name}` | {row['least']} GB | {size} | {share} |")
    return "\n".join(lines) + "\n"


def updated(page: str, rows: dict[str, dict[str, Any]]) -> str:
    """The page with today's table between the two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}"


if __name__ == "__main__":
    computed = all_rows()
    FILE.write_text(as_json(computed), encoding="utf-8")
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), computed), encoding="utf-8")
