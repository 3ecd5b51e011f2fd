"""What `model.exact` does to routes: a dense model whose MLPs were split into experts, sampled both ways.

    python -m benchmarks.evidence.split_experts SmolLM2.gguf --count 16 --top-k 8 --routes-only
    python -m benchmarks.evidence.split_experts SmolLM2.gguf --count 16 --top-k 8
    python -m benchmarks.evidence.split_experts --record      # results.jsonl -> docs/numbers.json

    split    an MLP of width F becomes E experts of width F/E. With all of them chosen it is the same
             function; with fewer, and routers that were drawn at random, it must be trained again
    train    warm-up and GRPO with the calculator, with `model.exact` and without it; not with --routes-only
    routes   attempts are sampled one at a time and scored packed: in how many layers of a sampled token does
             the learner choose the experts that the engine chose?

Each result is a line that is appended to results.jsonl, or to --out, as soon as it is known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graft
from benchmarks.evidence.exactness import GAP, RESULTS, read_results
from benchmarks.record import Figure, current_commit, describe_machine, record
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.models.layers import experts as layer
from graft.models.order_probe import find_order
from graft.models.shape import Experts
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch
from graft.types import Author, Episode, Leaf, Sampling, Span, Task

RECIPE = "distill/smollm2"
GRPO = (
    "distill.teacher=", "distill.divergence=null", "algo.name=grpo", "algo.reduction=token",
    "rollout.tasks=64", "rollout.samples=8", "train.schedule=constant",
)  # fmt: skip
SMALL = 0.01
"""The scale of new routers, so that chosen experts have nearly equal weights."""


@torch.no_grad()
def split(model: Decoder, count: int, top_k: int) -> Decoder:
    """A copy whose MLPs are `count` experts each, of which a token passes through `top_k`.

    Weights add up to the number of experts: all of them together are the MLP.
    """
    shape = model.shape
    width, ff = shape.width, shape.ff // count
    experts = Experts(count, top_k, ff, renormalise=True, router="sigmoid", scaling=float(count))
    copy = Decoder(replace(shape, family="glm4_moe", experts=experts)).to(model.dtype)
    copy.initialise(0)  # the routers
    state = model.state_dict()
    for index in range(shape.layers):
        mlp = f"blocks.{index}.mlp"
        copy.get_parameter(f"{mlp}.router.weight").mul_(SMALL)
        gate_up = state[f"{mlp}.gate_up.weight"].view(2, count, ff, width)
        state[f"{mlp}.gate_up.weight"] = gate_up.transpose(0, 1).reshape(-1, width)
        down = state[f"{mlp}.down.weight"].view(width, count, ff)
        state[f"{mlp}.down.weight"] = down.transpose(0, 1).reshape(-1, ff)
    copy.load_state_dict(copy.state_dict() | state)
    return copy


def train(model: str, folder: Path, exact: bool, more: list[str]) -> dict[str, Any]:
    """One run; its scores and gaps."""
    settings = [
        f"model.path={model}", f"run.dir={folder}", "run.name=run", "run.trackers=[]",
        f"model.exact={str(exact).lower()}", *GRPO, *more,
    ]  # fmt: skip
    command = [sys.executable, "-m", "graft", "train", RECIPE, *settings]
    with (folder / "log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if line["phase"] == "rl"]
    return {
        "before": summary["before"],
        "after": summary["after"],
        "gap_mean": sum(step[f"{GAP}/mean"] for step in steps) / len(steps),
        "gap_max": max(step[f"{GAP}/max"] for step in steps),
    }


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The choices [T, k] of every call of `route`, sorted by expert."""
    plain, calls = layer.route, list[Tensor]()

    def route(*args: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = plain(*args)
        calls.append(chosen.sort(1).values)
        return weights, chosen

    layer.route = route
    try:
        yield calls
    finally:
        layer.route = plain


@contextmanager
def recorded_inputs(decoder: Decoder) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Tokens and positions of every pass through the decoder."""
    passes = list[tuple[Tensor, Tensor]]()

    def keep(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        passes.append((args[0].clone(), args[1].clone()))  # an engine reuses its buffers

    handle = decoder.register_forward_pre_hook(keep)
    try:
        yield passes
    finally:
        handle.remove()


def decoded_routes(
    calls: list[Tensor], passes: list[tuple[Tensor, Tensor]], layers: int
) -> dict[int, tuple[int, Tensor]]:
    """The input token at each position and its choices [layers, k], of passes over one token.

    Two layers, position 7 is computed, and again in a step that was started ahead and is not used: the
    first counts.
    """
    if len(calls) != layers * len(passes):
        raise RuntimeError(
            f"{len(calls)} calls of route() in {len(passes)} passes of {layers} layers"
        )
    found = dict[int, tuple[int, Tensor]]()
    for number, (tokens, positions) in enumerate(passes):
        if len(tokens) == 1:
            chosen = torch.stack([c[0] for c in calls[number * layers : (number + 1) * layers]])
            found.setdefault(int(positions[0]), (int(tokens[0]), chosen))
    return found


def routes(policy: graft.Policy, exact: bool, attempts: int, tokens: int) -> dict[str, float]:
    """Shares of other routes in the learner, by layer and by token, and the gap, of sampled attempts."""
    decoder: Decoder = policy.model
    decoder.use_order(find_order(decoder) if exact else None)
    engine = NativeEngine(decoder, kv_tokens=4096)
    runner: Any = engine._loop.runner
    if hasattr(runner, "graphs"):  # a captured graph would not call `route`
        runner.graphs = runner.prefill.graphs = None
    prompt = policy.tokenizer.encode("What is 27 * 14 + 6? Think, then answer:")
    layers, sampled, episode = decoder.shape.layers, list[Tensor](), Episode(Task("0", "routes"))
    root = episode.append(Span(None, Author.TASK, prompt))
    for _ in range(attempts):
        context = engine.open(prompt)
        with recorded() as calls, recorded_inputs(decoder) as passes:
            done = asyncio.run(context.sample(Sampling(max_tokens=tokens, min_tokens=tokens)))
        context.close()
        # a first token may be drawn together with its prompt, so the later ones are compared
        found = decoded_routes(calls, passes, layers)
        steps = [found[len(prompt) + number] for number in range(tokens - 1)]
        if [token for token, _ in steps] != list(done.tokens[:-1]):
            raise RuntimeError("the passes that were recorded are not those of the sampled tokens")
        sampled.append(torch.stack([chosen for _, chosen in steps]))
        parts = done.tokens, done.actions, done.logprobs, done.entropies, done.modes
        tip = episode.append(Span(root, Author.POLICY, *parts, mask=[True] * tokens))
        episode.leaves.append(Leaf((tip,)))
    engine.close()
    batch = to_batch(list(episode.trajectories()))
    forest = Forest(batch.trajectories, batch.mask, decoder.device)
    with recorded() as calls, torch.no_grad():
        logp = forest.logprobs(decoder, 1.0, None)[0].cpu()
    calls = [call[forest.before] for call in calls[: layers - 1]] + calls[layers - 1 : layers]
    learned = torch.stack(calls, 1).unflatten(0, (attempts, tokens))[:, 1:].flatten(0, 1)
    is_other = (torch.cat(sampled) != learned).any(2)
    gap = (logp - batch.logprobs).abs()[batch.mask]
    return {
        "in_order": float(decoder.order is not None),
        "decisions": is_other.numel(),
        "other_layers": is_other.float().mean().item(),
        "other_tokens": is_other.any(1).float().mean().item(),
        "gap_mean": gap.mean().item(),
        "gap_max": gap.max().item(),
    }


def figures(case: dict[str, Any]) -> list[Figure]:
    """Rows of docs/numbers.json."""
    found, exact = case["routes"], "exact" if case["exact"] else "inexact"
    name = f"routes.{case['device']}.{case['dtype']}.{exact}"
    about = f"{case['dtype']}, model.exact={str(case['exact']).lower()}"
    about += "" if "after" in case else ", untrained routers"
    return [
        Figure(f"{name}.layers", f"{about}: choices of a layer that differ in the learner",
               100 * found["other_layers"], "%", note=f"of {found['decisions']:,}"),
        Figure(f"{name}.tokens", f"{about}: tokens with another choice in some layer",
               100 * found["other_tokens"], "%"),
        Figure(f"{name}.gap", f"{about}: mean gap of log-probs", found["gap_mean"]),
    ]  # fmt: skip


def record_results() -> None:
    """Write the newest result of each device and setting into docs/numbers.json."""
    newest = {
        (case["device"], case["dtype"], case["exact"]): case
        for case in read_results()
        if case["claim"] == "routes" and "device" in case
    }
    for case in newest.values():
        os.environ["GRAFT_COMMIT"] = case["commit"]  # the one that was measured
        record(figures(case), machine=case["machine"], command=case["command"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="a dense Llama: a folder, a .gguf file or a hub name"
    )
    parser.add_argument("--count", type=int, default=16, help="experts")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=8, help="sampled to compare their routes")
    parser.add_argument("--tokens", type=int, default=48, help="of each of them")
    parser.add_argument("--routes-only", action="store_true", help="no training")
    parser.add_argument("--dtype", default="auto", help="of the weights whose routes are compared")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of lines to append to")
    parser.add_argument(
        "--record", action="store_true", help="only copy results into docs/numbers.json"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for the training")
    asked = parser.parse_intermixed_args()
    if asked.record:
        return record_results()
    if asked.model is None:
        parser.error("which model? a dense Llama: a folder, a .gguf file or a hub name")
    commit = os.environ.get("GRAFT_COMMIT") or current_commit()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # bfloat16 on a CPU: no order of rows is searched for a model that computes nothing
        dense = graft.load(asked.model, device="cpu", dtype="bfloat16")
        dense.model = split(dense.model, asked.count, asked.top_k)
        model = str(dense.save(folder / "split"))
        untrained = graft.load(model, dtype=asked.dtype) if asked.routes_only else None
        for exact in (True, False):
            if exact and untrained is not None and find_order(untrained.model) is None:
                continue  # as in bfloat16 on a CPU: there is no order of rows to compare with
            case = {"claim": "routes", "model": Path(asked.model).name, "count": asked.count,
                    "top_k": asked.top_k, "exact": exact, "overrides": asked.overrides}  # fmt: skip
            if untrained is None:
                place = folder / f"exact-{exact}"
                place.mkdir()
                case |= train(model, place, exact, asked.overrides)
                policy = graft.load(str(place / "run"), dtype=asked.dtype)
            else:
                policy = untrained
            decoder: Decoder = policy.model
            case |= {
                "device": decoder.device.type,
                "dtype": str(decoder.dtype).removeprefix("torch."),
                "commit": commit,
                "machine": describe_machine(),
                "command": command_of(asked),
                "routes": routes(policy, exact, asked.attempts, asked.tokens),
            }
            print(json.dumps(case), flush=True)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(case) + "\n")


def command_of(asked: argparse.Namespace) -> str:
    """What measures this again; the model's folder is another one elsewhere."""
    parts = [
        f"python -m benchmarks.evidence.split_experts {Path(asked.model).name}",
        f"--count {asked.count} --top-k {asked.top_k}",
        f"--attempts {asked.attempts} --tokens {asked.tokens}",
        *(["--routes-only"] if asked.routes_only else []),
        *([f"--dtype {asked.dtype}"] if asked.dtype != "auto" else []),
        *asked.overrides,
    ]
    return " ".join(parts)


if __name__ == "__main__":
    main()
