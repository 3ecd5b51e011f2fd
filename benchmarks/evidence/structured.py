"""A task whose answers are under a JSON schema, learnt from random weights: with the sampler's masks in the
learner, and with the log-probs that other trainers compute, as if every token could have been drawn.

python -m benchmarks.evidence.structured --seeds 0 1 2

"da:" is to be answered {"letters": ["d", "a"]}; the policy chooses the letters and where the list ends.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import graft
from benchmarks.record import Figure, record
from graft.models.tree.forest import Forest

GAP = "sampling/sampling_logp_difference/max"

LETTERS = "abcd"
SCHEMA = {
    "type": "object",
    "properties": {
        "letters": {"type": "array", "items": {"enum": [*LETTERS]}, "minItems": 1, "maxItems": 4}
    },
    "required": ["letters"],
    "additionalProperties": False,
}


class Copies(graft.BaseEnv):
    """Repeat two letters as JSON; the reward is the share of places that are right."""

    def pose(self) -> str:
        self.answer = "".join(self.rng.choices(LETTERS, k=2))
        return f"{self.answer}:"

    def respond(self, action: str) -> graft.Turn:
        try:
            letters = json.loads(action)["letters"]
        except (ValueError, TypeError, KeyError):
            letters = []
        right = sum(a == b for a, b in zip(letters, self.answer, strict=False))
        return graft.Turn(reward=right / max(len(letters), len(self.answer)), terminated=True)


def recipe(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    shape = {"family": "qwen3", "width": 64, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 32}
    return {
        "run": {
            "name": "copies",
            "dir": str(folder),
            "seed": seed,
            "eval_tasks": 0,
            "trackers": [],
        },
        "model": {
            "shape": {**shape, "ff": 128, "max_positions": 96},
            "alphabet": '{}[]":, abcdelrst',
            "chat_template": "plain",
        },
        "task": {
            "env": f"{__name__ if __name__ != '__main__' else 'benchmarks.evidence.structured'}:Copies"
        },
        "rollout": {
            "tasks": 16,
            "samples": 8,
            "max_tokens": 44,
            "max_context": 60,
            "answer_schema": SCHEMA,
        },
        "train": {"steps": steps, "lr": 1.0e-3},
        "sft": {"steps": 0},
    }


def rewards(seed: int, steps: int, masked: bool) -> list[dict[str, float]]:
    """The metrics of every step."""
    with tempfile.TemporaryDirectory() as folder, nullcontext() if masked else unmasked():
        run = graft.train(recipe(Path(folder), seed, steps), progress=False)
        lines = (Path(run.folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row.get("phase") == "rl"]


@contextmanager
def unmasked() -> Iterator[None]:
    """A learner that does not know the masks; the run's own check would stop it before the first step."""
    check = "graft.train.phases.reinforcement._check_attempts"
    with patch.object(Forest, "table", _all_allowed), patch(check, lambda *_: None):
        yield


def _all_allowed(forest: Any, _: Any, width: int) -> Any:
    rows = 1 + int(forest.modes.max()) if len(forest.modes) else 1
    return forest.tokens.new_ones(rows, width).bool()


def figures(seed: int, masked: bool, steps: list[dict[str, float]]) -> list[Figure]:
    """Reward of the first three and the last five steps, and the largest gap of all trained tokens."""
    curve = [row["reward"] for row in steps]
    name, what = (
        f"structured.seed{seed}.{'masks' if masked else 'none'}",
        f"structured task, seed {seed}",
    )
    learner = "the sampler's masks in the learner" if masked else "no masks in the learner"
    return [
        Figure(f"{name}.before", f"{what}, {learner}: reward of the first steps", mean(curve[:3])),
        Figure(f"{name}.after", f"{what}, {learner}: reward of the last steps", mean(curve[-5:])),
        Figure(f"{name}.gap", f"{what}, {learner}: largest gap", max(step[GAP] for step in steps)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--record", action="store_true", help="keep them in docs/numbers.json")
    asked = parser.parse_args()
    rows: list[Figure] = []
    for seed in asked.seeds:
        for masked in (True, False):
            rows += figures(seed, masked, rewards(seed, asked.steps, masked))
            for row in rows[-3:]:
                print(f"{row.what}: {row.value:.3f}")
    if asked.record:
        record(rows)


if __name__ == "__main__":
    main()
