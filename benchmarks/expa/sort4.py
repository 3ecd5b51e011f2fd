"""What a trained policy does with all 24 orders of four hidden items, greedily, in both directions.

python -m benchmarks.expa.sort4 runs/expa/sort-earl-0

Beside it the least there is: 4 - H4 = 1.917 swaps on average, and 4.67 comparisons on average, which
is what the best decision tree over 24 leaves needs (112 / 24).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from graft.config import load_config
from graft.envs import make
from graft.protocols import Env
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.train.build import build_run
from graft.train.run_dir.checkpoint import latest_model
from graft.types import Task
from graft_envs.earl.sorting_sets import all_permutations


def main(folder: str) -> None:
    config = load_config(str(Path(folder) / "config.yaml"), ["run.name=sort4"])
    components = build_run(config, latest_model(folder))
    given = {"syntax": config.task.args.get("syntax", "tags"), "held_out": False}
    instances = {
        f"sort4:{way}:{''.join(map(str, items))}": (items, way == "down")
        for way in ("up", "down")
        for items in all_permutations(4)
    }
    tasks = [Task(name, "earl:sort-4") for name in instances]

    def make_env(task: Task) -> Env:
        items, reverse = instances[task.id]
        return make("earl:sort-4", items=items, reverse=reverse, **given)

    greedy = replace(components.setup.sampling, temperature=0.0)
    setup = replace(components.held_out, sampling=greedy, make_env=make_env)
    episodes = collect(tasks, setup, independent(1))
    print("| direction | sorted | compares, mean (most) | swaps, mean (most) | reward |")
    print("|---|---|---|---|---|")
    for way, name in (("up", "ascending"), ("down", "descending")):
        mine = [e for e in episodes if e.task.id.split(":")[1] == way]
        leaves = [episode.leaves[0] for episode in mine]
        compares = [int(leaf.metrics.get("tools/compare/calls", 0)) for leaf in leaves]
        swaps = [int(leaf.metrics.get("tools/swap/calls", 0)) for leaf in leaves]
        right = sum(leaf.reward > 0 for leaf in leaves)
        print(
            f"| {name} | {right} of {len(leaves)} | {sum(compares) / len(leaves):.2f} "
            f"({max(compares)}) | {sum(swaps) / len(leaves):.2f} ({max(swaps)}) | "
            f"{sum(leaf.reward for leaf in leaves) / len(leaves):.3f} |"
        )


if __name__ == "__main__":
    main(sys.argv[1])
