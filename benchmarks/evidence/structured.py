"""A task whose answers are under a JSON schema, learnt from random weights: with the masks in the learner, and
with the log-probs that other trainers compute, in which every token might have been drawn.

python -m benchmarks.evidence.structured --seeds 0 1 2        # two minutes on two CPU cores

The prompt is a letter, the answer {"colour": "green"}: of eight colours the one that begins with it. A random policy is right in
an eighth of the cases.
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
from graft.models.tree.forest import Forest

COLOURS = ("amber", "blue", "cyan", "denim", "ebony", "fawn", "green", "hazel")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": [*COLOURS]}},
    "required": ["colour"],
    "additionalProperties": False,
}


class Colours(graft.BaseEnv):
    """Name the colour that begins with a letter, as JSON."""

    def pose(self) -> str:
        self.answer = self.rng.choice(COLOURS)
        return f"{self.answer[0]}:"

    def respond(self, action: str) -> graft.Turn:
        try:
            is_right = json.loads(action)["colour"] == self.answer
        except (ValueError, TypeError, KeyError):
            is_right = False
        return graft.Turn(reward=float(is_right), terminated=True)


def recipe(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    shape = {"family": "qwen3", "width": 64, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 32}
    return {
        "run": {
            "name": "colours",
            "dir": str(folder),
            "seed": seed,
            "eval_tasks": 0,
            "trackers": [],
        },
        "model": {
            "shape": {**shape, "ff": 128, "max_positions": 64},
            "alphabet": '{}": abcdefghijklmnopqrstuvwxyz',
            "chat_template": "plain",
        },
        "task": {
            "env": f"{__name__ if __name__ != '__main__' else 'benchmarks.evidence.structured'}:Colours"
        },
        "rollout": {
            "tasks": 16,
            "samples": 8,
            "max_tokens": 24,
            "max_context": 40,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    for seed in asked.seeds:
        for masked in (True, False):
            steps = rewards(seed, asked.steps, masked)
            curve = [row["reward"] for row in steps]
            gap = "sampling/sampling_logp_difference/max"
            print(
                f"seed {seed}, {'masks of the sampler' if masked else 'no masks'}: reward "
                f"{mean(curve[:3]):.3f} -> {mean(curve[-5:]):.3f}, first above 0.9 at step "
                f"{next((n for n, r in enumerate(curve) if r > 0.9), None)}, largest gap "
                f"{max(row[gap] for row in steps):.2e}, every tenth: {[round(r, 2) for r in curve[::10]]}"
            )


if __name__ == "__main__":
    main()
