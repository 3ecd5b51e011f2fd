"""A supervised step, rows from a file, against the learner alone on the same packed examples.

    python -m benchmarks.sft_speed [--record]            # a small model on whatever device there is
    python -m benchmarks.sft_speed --width 1024 --layers 24 --vocab 32000 --batch 64 --words 600

Both sides train the same model on the same rows of chats, several turns each. The learner alone gets
rows and batch ready-made; the supervised step reads rows from the file, renders, encodes and masks them
for the next step while this one is learned. Blocks of steps take turns, each with the device idle before
it; reported are medians of tokens per second over the blocks, and the median of their ratios. `cpu_ratio`
compares seconds of processor time, which neighbours do not change: where it is 0.9 on a CPU, a tenth of
the work is preparation, hidden if a core is free for it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.record import Figure, record
from graft.config import check
from graft.models.decoder import Decoder
from graft.models.io.save import save_model
from graft.models.shape import ModelShape
from graft.rollout.batching import to_batch
from graft.text.template import CHATML
from graft.text.tokenizer import FastTokenizer
from graft.train.build import build_run
from graft.train.learner_build import sft_learner
from graft.train.sft import sft_step
from graft.train.sft_dataset import Prefetcher, make_dataset


def text(rng: random.Random, words: int) -> str:
    return " ".join(
        f"{rng.choice('bdfgklmnprst')}{rng.choice('aeiou')}x{rng.randrange(400)}"
        for _ in range(words)
    )


def tokenizer_of(vocab: int) -> FastTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, 8000),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    rng = random.Random(0)
    backend.train_from_iterator((text(rng, 200) for _ in range(200)), trainer)
    return FastTokenizer(backend, {"eos_token": "<|im_end|>"}, {"default": CHATML})


def write_rows(file: Path, count: int, words: int) -> None:
    """Chats of one to three rounds; the assistant writes two thirds of the words, and uses a tool."""
    rng = random.Random(1)
    with file.open("w") as lines:
        for _ in range(count):
            messages = [{"role": "system", "content": text(rng, 20)}]
            rounds = rng.randint(1, 3)
            for _ in range(rounds):
                part = max(2, int(rng.uniform(0.3, 1.0) * words / rounds))
                found = f"<result>{text(rng, part // 4)}</result>"
                answer = f"{text(rng, part // 3)} {found} {text(rng, part // 3)}"
                messages.append({"role": "user", "content": text(rng, part // 3)})
                messages.append({"role": "assistant", "content": answer})
            lines.write(json.dumps({"messages": messages}) + "\n")


def recipe(folder: Path, args: argparse.Namespace) -> Any:
    return check(
        {
            "run": {"dir": str(folder), "name": "run", "eval_tasks": 0, "trackers": []},
            "model": {"path": str(folder / "model")},
            "rollout": {"max_context": 8192, "max_tokens": 64, "tasks": 1, "samples": 1},
            "train": {"steps": 0, "tokens_per_micro": args.micro},
            "sft": {
                "data": str(folder / "rows.jsonl"),
                "steps": args.steps * args.blocks + 1,
                "batch": args.batch,
                "mask_results": ["<result>", "</result>"],
            },
        }
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    sizes = {"width": 384, "layers": 4, "vocab": 8000, "batch": 16, "words": 250, "rows": 400}
    for name, value in {**sizes, "steps": 4, "blocks": 5, "micro": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--record", action="store_true", help="keep them in docs/numbers.json")
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="graft-sft-"))
    tokenizer = tokenizer_of(args.vocab)
    heads = args.width // 64
    shape = ModelShape(
        vocab_size=args.vocab, width=args.width, layers=args.layers, heads=heads, kv_heads=heads,
        head_dim=64, ff=3 * args.width, max_positions=8192,
    )  # fmt: skip
    save_model(Decoder(shape).initialise(0), folder / "model")
    tokenizer.save(folder / "model")
    write_rows(folder / "rows.jsonl", args.rows, args.words)
    components = build_run(recipe(folder, args))
    started = time.perf_counter()
    dataset = make_dataset(components)
    checked = args.rows / (time.perf_counter() - started)
    learner = sft_learner(components, dataset.steps)
    device = components.policy.device

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def alone(steps: list[int]) -> tuple[float, float]:
        ready = []
        for step in steps:
            rows = [row for episode in dataset.examples(step) for row in episode.trajectories()]
            ready.append(to_batch(rows))
        wait()
        began = time.perf_counter(), time.process_time()
        for batch in ready:
            learner.update(batch)
        wait()
        return time.perf_counter() - began[0], time.process_time() - began[1]

    def whole(steps: list[int]) -> tuple[float, float]:
        with Prefetcher(dataset) as examples:
            sft_step(learner, examples(steps[0]))  # the first of a run is not prepared in advance
            wait()
            began = time.perf_counter(), time.process_time()
            for step in steps[1:]:
                sft_step(learner, examples(step))
            wait()
            return time.perf_counter() - began[0], time.process_time() - began[1]

    alone([1])  # warms up
    rates: dict[str, list[float]] = {"learner": [], "sft": []}
    work: dict[str, list[float]] = {"learner": [], "sft": []}
    trained = 0
    for block in range(args.blocks):
        steps = list(range(block * args.steps + 1, (block + 1) * args.steps + 2))
        spans = [s for step in steps[1:] for e in dataset.examples(step) for s in e.spans]
        tokens = sum(map(len, spans))
        trained = sum(sum(span.mask) for span in spans)
        for name in ("learner", "sft") if block % 2 else ("sft", "learner"):
            seconds, busy = alone(steps[1:]) if name == "learner" else whole(steps)
            rates[name].append(tokens / seconds)
            work[name].append(busy)
    ratios = [b / a for a, b in zip(rates["learner"], rates["sft"], strict=True)]
    report: dict[str, Any] = {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in components.policy.parameters()),
        "tokens_per_step": round(tokens / args.steps),
        "trained_share": round(trained / tokens, 2),
        **{f"{name}_tokens_per_second": round(statistics.median(v)) for name, v in rates.items()},
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(sum(work["learner"]) / sum(work["sft"]), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "rows_checked_per_second": round(checked),
    }
    print(json.dumps(report))
    if args.record:
        speed = "tokens per second of SFT, beside the learner alone on prepared batches"
        rounds = tuple(report["ratio_range"])
        record(
            [
                Figure("sft.speed", speed, report["ratio"], rounds=rounds),
                Figure(
                    "sft.checked", "rows of 300 tokens checked at the start", round(checked), "/s"
                ),
            ]
        )


if __name__ == "__main__":
    main(sys.argv[1:])
