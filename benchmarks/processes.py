"""Sampling and learning by 1, 2 and 4 processes, whole steps of GRPO as `graft train` takes them.

    python -m benchmarks.processes                             # all layouts, 3 rounds, about 5 minutes
    python -m benchmarks.processes --layouts 1 "fsdp 1"        # what FSDP2 costs where nothing is split
    torchrun --nproc-per-node 1 benchmarks/processes.py --layout "fsdp 1" --width 1024 --layers 24

Every layout takes the same steps on the same tasks and samples the same tokens (draws are keyed by
task), so seconds compare. In each round every layout is started once, one after the other; reported are
medians over all steps of all rounds but the first of each start, and, under "beside one process", the
median over the rounds of how the seconds of a step compare.

    sampling    tokens of the policy's a second, until every process has all episodes
    learning    tokens of the packed forest a second, forward, backward, gradients exchanged, AdamW
    handing     seconds until the engines have the new weights (nothing where they share the tensors)

Processes beyond the number of cores take turns on them: their rows show what a layout costs, not what
it gains. `--steps` and `--rounds` make it longer; `--json FILE` keeps every number, `--record` the medians
for the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "1": (1, {}, "one process"),
    "replicas 2": (2, {"shard": False}, "2 replicas"),
    "fsdp 2": (2, {}, "FSDP2 over 2"),
    "tp 2": (2, {"tp": 2}, "tensor parallel over 2"),
    "replicas 4": (4, {"shard": False}, "4 replicas"),
    "fsdp 4": (4, {}, "FSDP2 over 4"),
    "2x2": (4, {"tp": 2}, "2 x 2: FSDP2 and tensor parallel"),
    "fsdp 1": (1, {}, "FSDP2 over 1"),
}
"""Name -> processes, the recipe's section `parallel`, and what a table calls it."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS)[:-1], choices=list(LAYOUTS))
    parser.add_argument(
        "--layout", default="", choices=["", *LAYOUTS], help="this one, here and now"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=4, help="measured in each start; one more goes first"
    )
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument(
        "--record", action="store_true", help="keep the medians in docs/numbers.json"
    )
    return parser.parse_args()


# one layout, in its own processes


def recipe(args: argparse.Namespace, folder: str) -> Any:
    from graft.config import check

    return check(
        {
            "run": {"dir": folder, "seed": 1, "trackers": []},
            "model": {
                "device": args.device,
                "shape": {
                    "family": "qwen3",
                    "width": args.width,
                    "layers": args.layers,
                    "heads": args.width // 32,
                    "kv_heads": args.width // 64,
                    "head_dim": 32,
                    "ff": 3 * args.width,
                    "max_positions": 256,
                },
            },
            "task": {"env": "calculator"},
            "rollout": {
                "tasks": args.tasks,
                "samples": args.samples,
                "max_tokens": 64,
                "max_turns": 2,
                "max_context": 160,
            },
            "algo": {"name": "grpo"},
            "train": {"steps": args.steps + 1, "lr": 1e-5, "tokens_per_micro": 2048},
            "parallel": {**LAYOUTS[args.layout][1], "deadline": 300},
        }
    )


def split_alone(components: Any, processes: Any) -> Any:
    """FSDP2 over one process: the trained model is split, and the engine keeps the plain one."""
    from dataclasses import replace

    from graft.models.io.tensor_names import weights_of
    from graft.models.parallel.decoder import shard

    plain = components.policy
    policy = shard(plain.shape, processes.mesh(1), weights_of(plain).get, dtype=plain.dtype)
    return replace(components, policy=policy, shares_weights=False)


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """The seconds and tokens of each step but the first; all processes do the same."""
    from graft.models.device_choice import choose_device
    from graft.train.build import build_run
    from graft.train.distributed.process_group import ProcessGroup
    from graft.train.learner_build import make_learner
    from graft.train.rl import learn
    from graft.train.rollouts.collected_rollouts import CollectedRollouts
    from graft.train.rollouts.rollout_engine import make_collector
    from graft.train.tasks import TaskStream

    found: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessGroup.start(300.0, choose_device(args.device)) as processes,
        processes.guarded(),
    ):
        config = recipe(args, folder)
        components = build_run(config, None, processes)
        if args.layout == "fsdp 1":
            components = split_alone(components, processes)
        collector = make_collector(components, processes)
        learner = make_learner(components, None)
        collector.load(components.weights_to_publish(), 0)
        source = CollectedRollouts(
            components, collector, TaskStream(config.task.env, config.run.seed)
        )
        for step in range(1, args.steps + 2):
            processes.barrier(f"the start of step {step}")
            started = time.perf_counter()
            rollouts = source.take(step)
            metrics = learn(step, rollouts, components.algo, learner).metrics
            learned = time.perf_counter()
            collector.load(components.weights_to_publish(), step)
            ended = time.perf_counter()
            found.append(
                {
                    "step": ended - started,
                    "sampling": metrics["num_tokens"] / rollouts.seconds,
                    "learning": metrics["num_forward_tokens"] / metrics["time/learn"],
                    "handing": ended - learned,
                    "tokens": metrics["num_tokens"],
                    "loss": metrics["loss"],
                }
            )
        collector.close()
        is_first = processes.is_first
        processes.barrier("the last step")
    return found[1:] if is_first else []


# all of them, in turn


def run_once(args: argparse.Namespace, layout: str) -> list[dict[str, float]]:
    count = LAYOUTS[layout][0]
    start = [sys.executable]
    if count > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    passed = {
        name: getattr(args, name)
        for name in ("steps", "tasks", "samples", "width", "layers", "device")
    }
    paths = [Path(__file__).parent.parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    options = [text for name, value in passed.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [*start, __file__, "--layout", layout, *options],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    if done.returncode:
        raise SystemExit(f"{layout} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rounds: list[dict[str, list[dict[str, float]]]]) -> str:
    """Markdown; the first layout is what the others are held against."""
    names = list(rounds[0])
    lines = [
        "| layout | processes | sampling, tokens/s | learning, tokens/s | handing over, s | a step, s "
        "| beside one process |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        steps = [step for one in rounds for step in one[name]]
        middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        ratio = statistics.median(_seconds(one[name]) / _seconds(one[names[0]]) for one in rounds)
        lines.append(
            f"| {LAYOUTS[name][2]} | {LAYOUTS[name][0]} | {middle['sampling']:,.0f} | "
            f"{middle['learning']:,.0f} | {middle['handing']:.3f} | {middle['step']:.2f} | "
            f"{ratio:.2f} x |"
        )
    return "\n".join(lines)


def figures(rounds: list[dict[str, list[dict[str, float]]]]) -> list[Any]:
    from benchmarks.record import Figure, slug

    found: list[Figure] = []
    for name in rounds[0]:
        steps = [step for each in rounds for step in each[name]]
        middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        ratios = [_seconds(each[name]) / _seconds(next(iter(each.values()))) for each in rounds]
        what = LAYOUTS[name][2]
        note = (
            f"sampling {middle['sampling']:,.0f} tok/s, learning {middle['learning']:,.0f} tok/s, weights to "
            f"engines {middle['handing']:.2f} s; {statistics.median(ratios):.2f} of one process"
        )
        found.append(Figure(f"processes.{slug(what)}", what, middle["step"], "s", note=note))
    return found


def _seconds(steps: list[dict[str, float]]) -> float:
    return statistics.median(step["step"] for step in steps)


def main() -> None:
    args = arguments()
    if args.layout:
        found = measure(args)
        if found:
            print(json.dumps(found))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds: list[dict[str, list[dict[str, float]]]] = []
    for number in range(args.rounds):
        rounds.append({name: run_once(args, name) for name in args.layouts})
        times = ", ".join(f"{name} {_seconds(steps):.2f} s" for name, steps in rounds[-1].items())
        print(f"round {number + 1}: {times}", file=sys.stderr, flush=True)
    losses = {name: rounds[0][name][0]["loss"] for name in args.layouts}
    if (
        max(losses.values()) - min(losses.values()) > 1e-4
    ):  # bf16 rounds, and then other tokens follow
        print(f"layouts did not learn the same: {losses}", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps(rounds))
    first = rounds[0][args.layouts[0]][0]
    print(
        f"{args.tasks} x {args.samples} attempts, {first['tokens']:,.0f} sampled tokens a step; width "
        f"{args.width}, {args.layers} layers; {os.cpu_count()} cores, OMP_NUM_THREADS="
        f"{os.environ['OMP_NUM_THREADS']}; medians of {args.rounds} rounds of {args.steps} steps\n"
    )
    print(table(rounds))
    if args.record:
        from benchmarks.record import record

        record(figures(rounds))


if __name__ == "__main__":
    main()
