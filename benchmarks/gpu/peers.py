"""Other libraries on the same work in the same run: transformers' `generate`, TRL's GRPOTrainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.rollouts import WARM_UP, Player
from benchmarks.gpu.works import Work
from graft.models.decoder import Decoder
from graft.models.families.table import config_of
from graft.models.io.tensor_names import hf_names

GENERATE_ROUNDS = 2
TRL_STEPS = 2  # the first one warms up
TRL_MICRO_BATCH = 16


def peer_model(decoder: Decoder, dtype: torch.dtype) -> Any:
    """transformers' model of the same shape and weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(decoder.shape))
    with torch.device(decoder.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    missing, unexpected = model.load_state_dict(hf_names(decoder), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(
            f"weights do not fit: missing {missing[:4]}, unexpected {unexpected[:4]}"
        )
    model.generation_config.eos_token_id = None  # nothing ends a sequence: lengths are forced
    return model.eval()


def generate(bench: Bench, name: str, work: Work) -> list[Row]:
    """`generate` (sdpa, dynamic cache, no log-probs) and our rollouts, by turns."""
    player = Player(bench, name, work)
    model = peer_model(player.decoder, bench.dtype)

    def theirs(response: int) -> float:
        prompts = work.random_prompts(player.rng, player.shape.vocab_size)
        ids = torch.tensor(prompts, device=bench.device).repeat_interleave(work.samples, 0)
        made: list[torch.Tensor] = []

        def call() -> None:
            with torch.inference_mode():
                made.append(
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=True,
                        temperature=1.0,
                        top_k=0,
                        top_p=1.0,
                        max_new_tokens=response,
                        pad_token_id=0,
                    )
                )

        seconds = bench.time(call)
        if made[0].shape != (work.sequences, work.prompt + response):
            raise RuntimeError(f"generate made {tuple(made[0].shape)} tokens")
        return work.sequences * response / seconds

    player.play(min(WARM_UP, work.response))
    theirs(min(16, work.response))
    ours_rates, their_rates = [], []
    for _ in range(GENERATE_ROUNDS):
        ours_rates.append(player.rate())
        their_rates.append(theirs(work.response))
    player.close()
    # its first full-length call is slow (a growing cache meets an empty allocator): its best counts
    ratio = median(ours_rates) / max(their_rates)
    title = f"{name} transformers generate {work.title}"
    note = f"graft between its rounds: {' '.join(f'{r:,.0f}' for r in ours_rates)} tok/s"
    return [
        Row(title, "tok/s", max(their_rates), rounds=their_rates, note=note),
        Row(f"{name} graft / generate {work.title}", "ratio", ratio),
    ]


def trl(bench: Bench, name: str, work: Work) -> list[Row]:
    """TRL's full step, in a process of its own: what it holds is given back with it."""
    absent = [package for package in ("trl", "datasets") if find_spec(package) is None]
    if absent:
        print(f"trl: left out, {' and '.join(absent)} cannot be imported here")
        return []
    with tempfile.TemporaryDirectory() as folder:
        order = {
            "shape": name,
            "work": asdict(work),
            "device": str(bench.device),
            "steps": TRL_STEPS,
            "micro_batch": min(TRL_MICRO_BATCH, work.sequences),
            "folder": folder,
        }
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.trl_step", json.dumps(order)],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "TRL_EXPERIMENTAL_SILENCE": "1",
                "WANDB_DISABLED": "true",
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=240,
        )
    result = json.loads(done.stdout.splitlines()[-1])
    steps, generating = result["steps"], result["generate"]
    note = (
        f"first step {steps[0]:.1f} s; generation {generating[-1]:.1f} s, "
        f"the rest {steps[-1] - generating[-1]:.1f} s; peak {result['peak'] / 1e9:.1f} GB"
    )
    title = f"{name} TRL full step {work.title}"
    return [Row(title, "s", median(steps[1:]), is_less_better=True, rounds=steps[1:], note=note)]
