"""A full GRPO step on a CPU: graft against TRL's GRPOTrainer, step by step in one process.

    python -m benchmarks.cpu_step A 5 --record     # workload, measured steps (one more is a warm-up)
    OMP_NUM_THREADS=1 python -m benchmarks.cpu_step B 2 64 2    # rows of TRL's micro-batch; half of B

Both begin with the same weights, so that answers are equally long, and train on the same kind of prompts
with the same number of samples. TRL's trainer
runs; before each of its steps one graft step is taken, so both see the same machine. Reported are
medians and their ratio, generation and training apart. With one thread it is the process's own time, which
other work on the machine hardly changes. `--record` keeps the figures for the pages. Needs the `peer` extra.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

# both sides: threads that sleep while they wait; spinning ones stall whenever the machine is shared
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")

import torch

from benchmarks.record import Figure, record, table_name, take_flag
from benchmarks.workloads import (
    CHARACTERS,
    SHAPE,
    WORKLOADS,
    GraftTrainer,
    Workload,
    digits_share,
    prompt,
)
from graft.models.io.tensor_names import weights_of

clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def trl_trainer(work: Workload, steps: int, micro_batch: int, hook):
    """GRPOTrainer with its clocks: `hook` runs before each step, outside the measured time."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

    names = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=SHAPE.width,
            intermediate_size=SHAPE.ff,
            num_hidden_layers=SHAPE.layers,
            num_attention_heads=SHAPE.heads,
            num_key_value_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim,
            tie_word_embeddings=True,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    rng = random.Random(0)
    rows = Dataset.from_list([{"prompt": prompt(rng, work.prompt_length)} for _ in range(2048)])
    times: dict[str, list[float]] = {"generate": [], "step": []}

    class Timed(trl.GRPOTrainer):
        def _generate(self, *args, **kwargs):
            started = clock()
            result = super()._generate(*args, **kwargs)
            times["generate"].append(clock() - started)
            return result

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            hook()
            self.started = clock()

        def on_step_end(self, *args, **kwargs):
            times["step"].append(clock() - self.started)

    arguments = trl.GRPOConfig(
        output_dir="/tmp/graft-benchmark-trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.prompts * work.samples // micro_batch,
        num_generations=work.samples,
        max_completion_length=work.max_tokens,
        max_steps=steps,
        learning_rate=1e-4,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        generation_kwargs={"min_new_tokens": work.max_tokens} if work.is_forced else None,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    trainer = Timed(
        model=model,
        args=arguments,
        reward_funcs=lambda completions, **_: [digits_share(text) for text in completions],
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.add_callback(Clock())
    return trainer, times


def figures(report: dict[str, Any]) -> list[Figure]:
    table = table_name()
    work = report["workload"]

    def step(name: str, what: str, times: dict[str, float]) -> Figure:
        note = f"{times['generate']:.3g} rollout + {times['train']:.3g} learning"
        return Figure(f"{table}.{name}.{work.lower()}", what, times["step"], "s", note=note)

    ratio = Figure(
        f"{table}.ratio.{work.lower()}",
        "TRL's time over graft's, step by step",
        report["speedup"],
        rounds=tuple(report["speedup_range"]),
    )
    ours = step("step", f"GRPO step {work}", report["graft"])
    return [ours, step("trl.step", "TRL: the same", report["trl"]), ratio]


def main(
    name: str = "A", steps: int = 5, micro_batch: int = 64, share: int = 1, *, keep: bool = False
) -> None:
    work = WORKLOADS[name]
    work = replace(work, prompts=work.prompts // share)
    graft = GraftTrainer(work)
    mine: dict[str, list[float]] = {"generate": [], "step": []}
    tokens: list[int] = []

    def graft_step() -> None:
        started = clock()
        episodes = graft.rollout()
        rolled = clock()
        graft.learn(episodes)
        mine["generate"].append(rolled - started)
        mine["step"].append(clock() - started)
        tokens.append(sum(len(s) for e in episodes for s in e.spans if s.author == "policy"))

    trainer, theirs = trl_trainer(work, steps + 1, micro_batch, graft_step)
    with torch.no_grad():
        initial = trainer.model.state_dict()
        for key, weight in weights_of(graft.policy).items():
            weight.copy_(initial[key])
    # TRL generates on the first micro-batch of a step; pair those calls with the steps they served
    trainer.train()
    per_step = len(theirs["generate"]) // len(theirs["step"])
    theirs["generate"] = [
        sum(theirs["generate"][i * per_step : (i + 1) * per_step])
        for i in range(len(theirs["step"]))
    ]

    def median(values: list[float]) -> float:
        return statistics.median(values[1:])  # the first step warms both up

    lengths = [log["completions/mean_length"] for log in trainer.state.log_history[1:-1]]
    report: dict[str, Any] = {"workload": name, "steps": steps}
    report["tokens_per_step"] = statistics.median(tokens[1:])
    report["trl_tokens_per_step"] = round(statistics.median(lengths) * work.prompts * work.samples)
    for who, times in (("trl", theirs), ("graft", mine)):
        step, generate = median(times["step"]), median(times["generate"])
        report[who] = {
            "step": round(step, 3),
            "generate": round(generate, 3),
            "train": round(step - generate, 3),
        }
    ratios = [a / b for a, b in zip(theirs["step"][1:], mine["step"][1:], strict=True)]
    report["speedup"] = round(statistics.median(ratios), 2)
    report["speedup_range"] = [round(min(ratios), 2), round(max(ratios), 2)]
    report["prompts"], report["threads"] = work.prompts, torch.get_num_threads()
    report["clock"] = clock.__name__
    print(json.dumps(report))
    if keep:
        record(figures(report))


if __name__ == "__main__":
    arguments, keep = take_flag(sys.argv[1:])
    main(*arguments[:1], *map(int, arguments[1:]), keep=keep)
