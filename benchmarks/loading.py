"""From nothing to the first token: seconds, processor seconds and host memory by part.

python -m benchmarks.loading coder.gguf              # a .gguf file or a Hugging Face folder
python -m benchmarks.loading 30B-A3B cuda bfloat16   # a shape of benchmarks.shapes, random weights

The parts are those of `graft generate`, and the search of the order of rows that training makes too.
"""

from __future__ import annotations

import resource
import sys
import time

STARTED = time.perf_counter()


class Parts:
    """A line for each part, when it ends."""

    def __init__(self) -> None:
        self.wall, self.cpu = STARTED, 0.0
        print(f"{'part':<24}{'seconds':>9}{'cpu':>9}{'peak GB':>9}")

    def end(self, part: str, note: str = "") -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{part:<24}{wall - self.wall:9.2f}{cpu - self.cpu:9.2f}{peak:9.2f}  {note}", flush=True
        )
        self.wall, self.cpu = wall, cpu


def main(model: str, device: str = "auto", dtype: str = "auto") -> None:
    parts = Parts()
    import asyncio
    from pathlib import Path

    import torch

    from benchmarks.shapes import SHAPES
    from graft.engine.native.engine import NativeEngine
    from graft.models.decoder import Decoder
    from graft.models.device_choice import choose_device, choose_dtype
    from graft.models.io.gguf_read import open_tokenizer
    from graft.models.io.load import load_model
    from graft.models.order_probe import find_order
    from graft.types import Sampling

    parts.end("imports")
    where = choose_device(device)
    kind, _ = choose_dtype(dtype, where)
    torch.zeros(1, device=where)
    parts.end("device", f"{where}, {kind}")
    if model in SHAPES:
        decoder = Decoder.empty(SHAPES[model], kind, where).initialise(0)
    else:
        try:
            tokenizer = open_tokenizer(Path(model))
            parts.end("tokenizer", f"{tokenizer.vocab_size} tokens")
        except (OSError, ValueError) as error:  # weights alone
            parts.end("tokenizer", f"none: {str(error)[:60]}")
        decoder = load_model(model, dtype=kind, device=where)
    if where.type == "cuda":
        torch.cuda.synchronize()
    num_bytes = sum(weight.numel() * weight.itemsize for weight in decoder.parameters())
    parts.end("weights", f"{num_bytes / 1e9:.2f} GB in memory")
    decoder.use_order(find_order(decoder))
    parts.end("order of rows", str(decoder.order)[:60])
    engine = NativeEngine(decoder.requires_grad_(False))
    parts.end("engine")
    context = engine.open(range(16))
    asyncio.run(context.sample(Sampling(max_tokens=1, min_tokens=1)))
    parts.end("first token")
    print(f"{'start to first token':<24}{time.perf_counter() - STARTED:9.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
