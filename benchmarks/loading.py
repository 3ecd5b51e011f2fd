"""From nothing to the first token: seconds, processor seconds and host memory by part.

python -m benchmarks.loading coder.gguf                     # a .gguf file or a Hugging Face folder
python -m benchmarks.loading 30B-A3B --device cuda          # a shape of benchmarks.shapes, random weights
python -m benchmarks.loading 30B-A3B --layers 8 --shards /tmp/shards   # written, then read from the disk

The parts are those of `graft generate`, and the search of the order of rows that training makes too.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()


class Parts:
    """A line for each part, when it ends."""

    def __init__(self) -> None:
        self.wall, self.cpu = STARTED, 0.0
        print(f"{'part':<24}{'seconds':>9}{'cpu':>9}{'peak GB':>9}")

    def end(self, part: str, note: str = "") -> float:
        """Seconds since the end of the part before."""
        wall, cpu = time.perf_counter(), time.process_time()
        seconds, peak = wall - self.wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{part:<24}{seconds:9.2f}{cpu - self.cpu:9.2f}{peak:9.2f}  {note}", flush=True)
        self.wall, self.cpu = wall, cpu
        return seconds


def write_shards(decoder: Any, folder: Path) -> None:
    """Save the decoder, and let the system forget the files, so that they are read from the disk."""
    from graft.models.io.save import save_model

    save_model(decoder, folder)
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("model", help="a .gguf file, a folder, or a shape of benchmarks.shapes")
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--dtype", default="auto")
    arguments.add_argument("--layers", type=int, help="of a shape: the first so many")
    arguments.add_argument(
        "--shards", type=Path, help="a new folder: write a shape there and load it"
    )
    asked = arguments.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command has it
    parts = Parts()
    import asyncio
    from dataclasses import replace

    import torch

    from graft.engine.native.engine import NativeEngine
    from graft.models.decoder import Decoder
    from graft.models.device_choice import choose_device, choose_dtype
    from graft.models.io.gguf_read import open_tokenizer
    from graft.models.io.load import load_model
    from graft.models.order_probe import find_order
    from graft.types import Sampling

    parts.end("imports")
    where = choose_device(asked.device)
    kind, _ = choose_dtype(asked.dtype, where)
    torch.zeros(1, device=where)
    parts.end("device", f"{where}, {kind}")
    path, decoder = Path(asked.model), None
    if not path.exists():
        from benchmarks.shapes import SHAPES

        shape = SHAPES[asked.model]
        shape = replace(shape, layers=asked.layers or shape.layers)
        decoder = Decoder.empty(shape, kind, where).initialise(0)
        parts.end("random weights")
        if asked.shards:
            write_shards(decoder, asked.shards)
            path, decoder = asked.shards, None
            parts.end("written")
    if decoder is None:
        try:
            tokenizer = open_tokenizer(path)
            parts.end("tokenizer", f"{tokenizer.vocab_size} tokens")
        except (OSError, ValueError) as error:  # weights alone
            parts.end("tokenizer", f"none: {str(error)[:60]}")
        files = [path] if path.is_file() else [*path.glob("*.safetensors")]
        stored = sum(file.stat().st_size for file in files) / 1e9
        decoder = load_model(path, dtype=kind, device=where)
        if where.type == "cuda":
            torch.cuda.synchronize()
        seconds = parts.end("weights", f"{stored:.2f} GB of files")
        print(f"{'':<42}{stored / seconds:9.2f} GB/s")
    decoder.use_order(find_order(decoder))
    parts.end("order of rows", str(decoder.order)[:60])
    engine = NativeEngine(decoder.requires_grad_(False))
    parts.end("engine")
    context = engine.open(range(16))
    asyncio.run(context.sample(Sampling(max_tokens=1, min_tokens=1)))
    parts.end("first token")
    print(f"{'start to first token':<24}{time.perf_counter() - STARTED:9.2f}")


if __name__ == "__main__":
    main()
