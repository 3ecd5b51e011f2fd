"""GGUF files with false counts, sizes and offsets."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import Command, case, some


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_file(listed: list[bytes], sizes: list[bytes] | None = None, **counts: int) -> bytes:
    """A file; `counts` are what its head says instead of the truth."""
    sizes = sizes or []
    tensors, entries = counts.get("tensors", len(sizes)), counts.get("entries", len(listed))
    head = b"GGUF" + struct.pack("<IQQ", counts.get("version", 3), tensors, entries)
    return head + b"".join(listed) + b"".join(sizes) + b"\0" * 64


def entry(key: str, kind: int, value: bytes) -> bytes:
    return gguf_text(key.encode()) + struct.pack("<I", kind) + value


def write_model(folder: Path, path: Path) -> None:
    """A whole file with the weights of a qwen3 model, and a token for each character of sums."""
    from gguf import GGUFWriter

    from graft.models.io.gguf_read import gguf_names
    from graft.models.io.gguf_tokenizer import NORMAL, UNUSED
    from graft.models.io.load import load_model
    from graft.models.io.tensor_names import hf_names

    decoder = load_model(folder)
    shape = decoder.shape
    writer = GGUFWriter(path, shape.family)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    letters = [*"0123456789+-*/=()"][: shape.vocab_size]
    unused = range(len(letters), shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, *(f"[PAD{number}]" for number in unused)])
    writer.add_token_types([NORMAL] * len(letters) + [UNUSED] * len(unused))
    names = gguf_names(shape)
    for name, tensor in hf_names(decoder).items():
        writer.add_tensor(names[name], tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ARCHITECTURE = entry("general.architecture", 8, gguf_text(b"llama"))
U32, TEXT, ARRAY, U64 = 4, 8, 9, 10


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return gguf_text(name) + sizes + struct.pack("<IQ", kind, offset)


def gguf_cases(rng: Random) -> list[Callable[[], bytes]]:
    many = rng.randrange(1_000_000, 4_000_000)
    nested = struct.pack("<IQ", ARRAY, 1) * rng.randrange(100, 100_000) + struct.pack("<IQ", U32, 0)
    return [
        lambda: gguf_file([ARCHITECTURE], entries=1 << 62),
        lambda: gguf_file([ARCHITECTURE], tensors=1 << 62),
        lambda: gguf_file([ARCHITECTURE], tensors=1 << 31),
        lambda: gguf_file([struct.pack("<Q", 1 << 62) + b"a"]),
        lambda: gguf_file([struct.pack("<Q", (1 << 64) - 1) + b"a"]),
        lambda: gguf_file([entry("a", TEXT, struct.pack("<Q", 1 << 40) + b"x")]),
        lambda: gguf_file([ARCHITECTURE, entry("a", ARRAY, struct.pack("<IQ", U32, 1 << 60))]),
        lambda: gguf_file([ARCHITECTURE, entry("a", ARRAY, struct.pack("<IQ", TEXT, 1 << 40))]),
        lambda: gguf_file(
            [ARCHITECTURE, entry("a", ARRAY, struct.pack("<IQ", TEXT, many) + b"\0" * 8 * many)]
        ),
        lambda: gguf_file([ARCHITECTURE, entry("a", ARRAY, nested)]),
        lambda: gguf_file([ARCHITECTURE, entry("general.alignment", U32, struct.pack("<I", 0))]),
        lambda: gguf_file(
            [ARCHITECTURE, entry("general.alignment", U32, struct.pack("<I", 1 << 31))]
        ),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"token_embd.weight", [1 << 40, 1 << 40])]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"token_embd.weight", [4, 4], offset=1 << 60)]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"a", [2] * 1000)]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"a", [4], kind=9999)]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"a", [])] * 2),
        lambda: gguf_file([entry("general.architecture", U32, struct.pack("<I", 3))]),
        lambda: gguf_file(
            [ARCHITECTURE, entry("llama.block_count", U64, struct.pack("<Q", 1 << 60))]
        ),
        lambda: gguf_file([ARCHITECTURE, ARCHITECTURE]),
        lambda: gguf_file([entry("a" * 100, 77, b"")]),
        lambda: gguf_file([], version=99),
        lambda: b"GGUF",
        lambda: b"",
        lambda: b"GGUF" + rng.randbytes(1000),
        lambda: gguf_file([entry(f"k{n}", U32, struct.pack("<I", n)) for n in range(200_000)]),
    ]


@case("gguf", range(26))
def gguf(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    (folder / "model.gguf").write_bytes(gguf_cases(rng)[variant]())
    commands = [
        ["generate", "model.gguf", "--prompt", "1+1="],
        ["export", "model.gguf", "--out", "exported"],
        ["eval", "model.gguf", "--on", "calculator", "--tasks", "1"],
    ]
    return some(rng, commands, 1)


@case("gguf", range(6))
def damaged_gguf(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    """A whole file with some bytes changed."""
    whole = bytearray((base / "model.gguf").read_bytes())
    for _ in range(rng.randrange(1, 10)):
        place = rng.randrange(min(len(whole), rng.choice([100, 2000, len(whole)])))
        whole[place] = rng.randrange(256)
    (folder / "model.gguf").write_bytes(whole)
    return [["generate", "model.gguf", "--prompt", "1+1=", "--max-tokens", "2"]]
