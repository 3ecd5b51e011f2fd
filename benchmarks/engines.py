"""The same steps of GRPO with graft's engine, vLLM and SGLang, on one machine.

    python -m benchmarks.engines MODEL --shape 0.6B                  # random weights in the folder MODEL
    python -m sglang.launch_server --model-path MODEL --port 30000   # then, for SGLang
    python -m benchmarks.engines MODEL native vllm sglang,http://127.0.0.1:30000,file

Each engine is a run of its own, `graft train`, one after the other. Printed are the medians of all steps but
the first: sampled tokens a second, seconds of rollouts, learning and of sending weights, and the gap between
the log-probs of the engine and of the learner.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.record import Figure, record, slug
from benchmarks.shapes import SHAPES, random_decoder
from graft.models.io.save import save_model
from graft.text.tokenizer import FastTokenizer

TIMEOUT = 300
SHOWN = {
    "reward": "reward",
    "tokens": "num_trained_tokens",
    "rollout s": "time/rollout",
    "learn s": "time/learn",
    "sync s": "time/sync",
    "gap mean": "sampling/sampling_logp_difference/mean",
    "gap max": "sampling/sampling_logp_difference/max",
}


def store_model(folder: Path, name: str) -> None:
    """Random weights of this shape over bytes: their vocabulary is small, so the head costs little."""
    tokenizer = FastTokenizer.bytes()
    shape = dataclasses.replace(SHAPES[name], vocab_size=tokenizer.vocab_size, max_positions=4096)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    save_model(random_decoder(shape, device, dtype), folder)
    tokenizer.save(folder)


def train(
    model: Path, engine: str, steps: int, tasks: int, samples: int, tokens: int
) -> dict[str, Any]:
    """Medians of a run; `engine` is NAME or NAME,URL or NAME,URL,SYNC."""
    name, *server = engine.split(",")
    settings = [f"engine.name={name}"]
    if server:
        settings += [f"engine.url=[{server[0]}]", f"engine.sync={(server[1:] or ['auto'])[0]}"]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(
            json.dumps(
                {
                    "run": {"dir": folder, "name": "run", "trackers": [], "eval_tasks": 0,
                            "save_every": 0},
                    "model": {"path": str(model.absolute())},
                    "task": {"env": "calculator"},
                    "algo": {"name": "reinforce"},
                    "rollout": {"tasks": tasks, "samples": samples, "max_tokens": tokens,
                                "max_turns": 1, "max_context": tokens + 128},
                    "train": {"steps": steps, "lr": 1e-6},
                }
            )
        )  # fmt: skip
        command = [sys.executable, "-m", "graft", "train", str(recipe), *settings]
        subprocess.run(command, check=True, timeout=TIMEOUT, stdout=sys.stderr)
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").open(encoding="utf-8"))
        logged = [line for line in lines if line["phase"] == "rl"][1:]
    found = {label: median(line.get(key, 0.0) for line in logged) for label, key in SHOWN.items()}
    return {"engine": engine, **found, "tok/s": found["tokens"] / found["rollout s"]}


def figures_of(row: dict[str, Any]) -> list[Figure]:
    name, *server = row["engine"].split(",")
    engine = slug(" ".join([name, *server[1:]]))  # an address is no part of a name
    values = (
        ("sampled", "tok/s", "tok/s"),
        ("new weights", "sync s", "s"),
        ("gap, mean", "gap mean", ""),
    )
    return [
        Figure(f"engines.{engine}.{slug(what)}", f"{engine}: {what}", row[key], unit)
        for what, key, unit in values
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE", help="NAME, or NAME,URL[,file|memory]"
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--record", action="store_true", help="keep them in docs/numbers.json")
    asked = parser.parse_args()
    figures: list[Figure] = []
    if not asked.model.exists():
        store_model(asked.model, asked.shape)
    for engine in asked.engines:
        row = train(asked.model, engine, asked.steps, asked.tasks, asked.samples, asked.tokens)
        print(json.dumps(row), flush=True)
        figures += figures_of(row)
    if asked.record:
        record(figures)


if __name__ == "__main__":
    main()
