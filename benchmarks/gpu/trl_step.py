"""TRL's GRPOTrainer on a work, as its own process: `trl` in peers.py starts it and reads its JSON."""

# pyright: basic, reportPrivateImportUsage=false

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

from benchmarks.gpu.peers import peer_model
from benchmarks.gpu.works import Work
from benchmarks.shapes import SHAPES, random_decoder

PROMPT_CHARACTERS = "abcdefgh ijk"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that a prompt of 256 letters has 256 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    vocabulary |= {"<eos>": len(vocabulary), "<pad>": len(vocabulary) + 1}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def main(order: dict[str, Any]) -> None:
    work, device = Work(**order["work"]), torch.device(order["device"])
    is_gpu = device.type == "cuda"
    tokenizer = byte_tokenizer()
    decoder = random_decoder(
        SHAPES[order["shape"]], device, torch.bfloat16 if is_gpu else torch.float32
    )
    model = peer_model(decoder, decoder.dtype)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        config.bos_token_id = None
    del decoder
    rng = random.Random(0)
    prompts = [
        {"prompt": "".join(rng.choice(PROMPT_CHARACTERS) for _ in range(work.prompt))}
        for _ in range(work.prompts * 2 * order["steps"])
    ]
    times: dict[str, list[float]] = {"steps": [], "generate": []}

    def now() -> float:
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Timed(trl.GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            started = now()
            result = super()._generate(*args, **kwargs)
            times["generate"].append(now() - started)
            return result

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times["steps"].append(now() - self.started)

    pieces = work.sequences // order["micro_batch"]
    arguments = trl.GRPOConfig(
        output_dir=order["folder"],
        use_cpu=not is_gpu,
        bf16=is_gpu,
        per_device_train_batch_size=order["micro_batch"],
        gradient_accumulation_steps=pieces,
        steps_per_generation=pieces,
        num_generations=work.samples,
        max_completion_length=work.response,
        generation_kwargs={"min_new_tokens": work.response},
        max_steps=order["steps"],
        learning_rate=1e-6,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,  # its faster setting; the memory is there
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Timed(
        model=model,
        args=arguments,
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )
    trainer.add_callback(Clock())
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    print(json.dumps({**times, "peak": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
