"""Models: configs, tensors, indices, links."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import Command, case, evil


def config_changes(rng: Random) -> list[Any]:
    huge = 10 ** rng.randrange(9, 30)
    keys = ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "head_dim"]
    keys += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]
    values = [huge, -1, 0, 1e308, "9" * 50, [1] * 1000, None, {}, True, float("nan")]
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    return [
        {rng.choice(keys): rng.choice(values)},
        {rng.choice(keys): huge},
        {"num_hidden_layers": huge, "layer_types": ["full_attention"] * 10},
        {"auto_map": code},
        {"model_type": "evil", "auto_map": code, "architectures": ["Evil"]},
        {"model_type": "../../evil"},
        {"model_type": "gpt2", "n_layer": 10**6, "n_embd": 10**6},
        {"rope_scaling": {"rope_type": "yarn", "factor": huge}},
        {"rope_theta": "x" * 1_000_000},
        {"quantization_config": {"quant_method": "evil", "load_in_8bit": True}},
    ]


@case("models", range(8))
def config_of_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    evil(folder)
    evil(place)
    config = json.loads((place / "config.json").read_text())
    texts = [
        lambda: json.dumps(config | rng.choice(config_changes(rng))),
        lambda: json.dumps(config | rng.choice(config_changes(rng))),
        lambda: json.dumps(config | rng.choice(config_changes(rng))),
        lambda: "[" * rng.randrange(1000, 500_000),
        lambda: '{"a":' * rng.randrange(1000, 500_000),
        lambda: '{"hidden_size": ' + "9" * 100_000 + "}",
        lambda: json.dumps(config)[:-1] + ', "x": "' + "a" * 200_000_000 + '"}',
        lambda: json.dumps(config)[:-1] + ', "x": [' + "0," * 40_000_000 + "0]}",
    ]
    (place / "config.json").write_text(texts[variant]())
    return [rng.choice(model_openers("model"))]


def model_copy(folder: Path, base: Path) -> Path:
    return Path(shutil.copytree(base / "model", folder / "model"))


def model_openers(name: str) -> list[Command]:
    return [
        ["generate", name, "--prompt", "1+1=", "--max-tokens", "2"],
        ["export", name, "--out", "exported"],
        ["eval", name, "--on", "calculator", "--tasks", "1"],
        ["rollout", name, "--env", "calculator"],
    ]


@case("models", range(12))
def tensors_of_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    file = place / "model.safetensors"
    whole = file.read_bytes()
    name = "model.embed_tokens.weight"
    one = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}

    def headed(header: Any, size: int | None = None, data: bytes = b"\0" * 64) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if size is None else size) + text + data

    overlapping = {
        f"t{n}": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for n in range(1000)
    }
    contents = [
        lambda: b"",
        lambda: whole[: len(whole) - 7],
        lambda: struct.pack("<Q", (1 << 64) - 1),
        lambda: headed(b"{}", 1 << 40),
        lambda: headed({name: one}),
        lambda: headed(overlapping),
        lambda: headed({name: {"dtype": "F32", "shape": [-4], "data_offsets": [0, 64]}}),
        lambda: headed({name: {"dtype": "EVIL", "shape": [16], "data_offsets": [0, 64]}}),
        lambda: headed(b'{"a":' * 100_000),
        lambda: headed({"__metadata__": {"x": "y" * 90_000_000}}),
        lambda: headed(
            {
                f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for n in range(600_000)
            }
        ),
        lambda: whole[:8] + bytes(b ^ (rng.random() < 0.01) for b in whole[8:2000]) + whole[2000:],
    ]
    file.write_bytes(contents[variant]())
    return [rng.choice(model_openers("model"))]


@case("models", range(6))
def index_of_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    """Shards that lie elsewhere."""
    place = model_copy(folder, base)
    (place / "model.safetensors").rename(folder / "outside.safetensors")
    places = [
        "../outside.safetensors",
        str(folder / "outside.safetensors"),
        "/etc/passwd",
        "/dev/zero",
    ]
    shard: Any = rng.choice([*places, "", ".", 7, ["a"], None, "a" * 10_000, "\0", "missing"])
    weights = {f"t{n}": shard for n in range(rng.choice([1, 100]))}
    index: Any = rng.choice([{"weight_map": weights}, {"weight_map": [1]}, {"weight_map": 3}, {}])
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return [rng.choice(model_openers("model"))]


@case("models", range(8))
def links_in_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    files = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
    file = place / rng.choice(
        [*files, "tokenizer_config.json", "chat_template.jinja", "actions.json"]
    )
    file.unlink(missing_ok=True)
    file.symlink_to(rng.choice(["/dev/zero", "/proc/self/mem", "loop", "/etc", "/dev/tty"]))
    (place / "loop").symlink_to("loop")
    return [rng.choice(model_openers("model"))]
