"""What `model.exact` does to routes: a dense model whose MLPs were split into experts, trained both ways.

    python -m benchmarks.evidence.split_experts SmolLM2.gguf --count 16 --top-k 8

    split    an MLP of width F becomes E experts of width F/E. With all of them chosen it is the same
             function; with fewer, and routers that were drawn at random, it must be trained again
    train    warm-up and GRPO with the calculator, with `model.exact` and without it
    routes   attempts are sampled one at a time and scored packed: in how many layers of a sampled token does
             the learner choose the experts that the engine chose?

Appends what it found to results.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from benchmarks.evidence.exactness import GAP, RESULTS
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
"""Of the routers at first, so that experts that are chosen have nearly equal weights."""
ATTEMPTS, TOKENS = 16, 48


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
        "machine": summary["machine"],
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


def routes(path: str, exact: bool, attempts: int = ATTEMPTS) -> dict[str, float]:
    """Shares of equal routes, by layer and by token, of sampled attempts."""
    policy = graft.load(path)
    decoder: Decoder = policy.model
    decoder.use_order(find_order(decoder) if exact else None)
    engine = NativeEngine(decoder, kv_tokens=65_536)
    runner: Any = engine._loop.runner
    if hasattr(runner, "graphs"):  # a captured graph would not call `route`
        runner.graphs = runner.prefill.graphs = None
    prompt = policy.tokenizer.encode("What is 27 * 14 + 6? Think, then answer:")
    layers, sampled, episode = decoder.shape.layers, list[Tensor](), Episode(Task("0", "routes"))
    root = episode.append(Span(None, Author.TASK, prompt))
    for _ in range(attempts):
        context = engine.open(prompt)
        sampling = Sampling(max_tokens=TOKENS, min_tokens=TOKENS)
        with recorded() as calls:
            done = asyncio.run(context.sample(sampling))
        context.close()
        # a first token may be drawn together with its prompt, so the later ones are compared
        rows = [call[0] for call in calls[-layers * (TOKENS - 1) :]]
        sampled.append(torch.stack(rows).view(TOKENS - 1, layers, -1))
        parts = done.tokens, done.actions, done.logprobs, done.entropies, done.modes
        tip = episode.append(Span(root, Author.POLICY, *parts, mask=[True] * TOKENS))
        episode.leaves.append(Leaf((tip,)))
    engine.close()
    batch = to_batch(list(episode.trajectories()))
    forest = Forest(batch.trajectories, batch.mask, decoder.device)
    with recorded() as calls, torch.no_grad():
        logp = forest.logprobs(decoder, 1.0, None)[0].cpu()
    calls = [call[forest.before] for call in calls[: layers - 1]] + calls[layers - 1 : layers]
    learned = torch.stack(calls, 1).unflatten(0, (attempts, TOKENS))[:, 1:].flatten(0, 1)
    equal = (torch.cat(sampled) == learned).all(2)
    return {
        "layers": equal.float().mean().item(),
        "tokens": equal.all(1).float().mean().item(),
        "gap": (logp - batch.logprobs).abs()[batch.mask].mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="a dense Llama: a folder, a .gguf file or a name on the hub")
    parser.add_argument("--count", type=int, default=16, help="experts")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = graft.load(asked.model, device="cpu")
        policy.model = split(policy.model, asked.count, asked.top_k)
        model = str(policy.save(folder / "split"))
        for exact in (True, False):
            place = folder / f"exact-{exact}"
            place.mkdir()
            found = train(model, place, exact, asked.overrides)
            found |= {"routes": routes(str(place / "run"), exact)}
            case = {"claim": "routes", "model": Path(asked.model).name, "count": asked.count,
                    "top_k": asked.top_k, "exact": exact, "overrides": asked.overrides}  # fmt: skip
            print(json.dumps({**case, **found}), flush=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**case, **found}) + "\n")


if __name__ == "__main__":
    main()
