"""Weights by file: a Hugging Face folder for each version, whole or absent.

    exchange/1f3a-000001/   config.json, tokenizer.json, model-00001-of-00001.safetensors, index
    exchange/1f3a-000002/   the next; the previous one is removed once the servers have loaded it

Tensors are read once and in order, with at most one shard in memory: a mapping may gather each from
many processes. Config and tokenizer files are copies of those in the model's folder.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.engine.errors import EngineError
from graft.files import new_folder

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 2_000_000_000
INDEX = "model.safetensors.index.json"
COPIED = (".json", ".model", ".txt", ".jinja", ".py")
"""Suffixes of the files that are copied."""
NOT_TRAINED = ("inv_freq", "vision", "visual", "audio", "multi_modal_projector", "mtp.")
"""Parts of the names of tensors that a text model lacks or does not train: they keep their values."""
STATE = "state.json"
"""The state of a run in its checkpoints, which is not copied."""
HEAD = "lm_head.weight"
"""Optional in a model whose head is its embedding."""


class WeightFolder:
    """The folder that the servers read from; `name` separates our versions from those of other processes."""

    def __init__(self, folder: Path, model_folder: Path, name: str) -> None:
        self.folder, self.model_folder, self.name = folder.absolute(), model_folder, name
        self.count = 0
        # read now: the checkpoint that the run resumes from may be deleted before the next version
        self.expected = names_in(model_folder)
        self.beside = {
            file.name: file.read_bytes()
            for file in model_folder.iterdir()
            if file.suffix in COPIED and file.name not in (INDEX, STATE)
        }

    def write(self, weights: Mapping[str, Any], shard_bytes: int = SHARD_BYTES) -> Path:
        """Write the next version; its folder appears when it is complete."""
        self.count += 1
        done = self.folder / f"{self.name}-{self.count:06d}"
        try:
            with new_folder(done, is_durable=False) as aside:
                for file, content in self.beside.items():
                    (aside / file).write_bytes(content)
                self.check(write_shards(weights.items(), aside, shard_bytes))
        except OSError as error:
            raise EngineError(
                f"cannot write the weights of the engine to '{self.folder}' ({error}); "
                "engine.exchange must be a folder that the servers can read, with space for two models"
            ) from None
        return done

    def check(self, names: Iterable[str]) -> None:
        """EngineError unless these are the names of the model's weights."""
        check_names(names, self.expected, self.model_folder)

    def keep_only(self, folder: Path) -> None:
        """Remove our earlier versions."""
        for old in self.folder.glob(f"{self.name}-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self.keep_only(self.folder)


def write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write safetensors files of about `shard_bytes` and their index; the names of the tensors."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        save_file(shard, folder / f"shard-{len(shards)}", {"format": "pt"})
        shards.append(list(shard))
        shard, size = {}, 0

    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
        # a copy: views of one storage cannot be in one file
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    if shard:
        flush()
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return list(where)


def names_in(folder: Path) -> set[str]:
    """Names of the tensors in a model's folder; empty where it has no safetensors."""
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        if file.name.startswith("model"):
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                names |= set(json.loads(stream.read(length))) - {"__metadata__"}
    return names


def check_names(given: Iterable[str], expected: set[str], model_folder: Path) -> None:
    """EngineError unless these are the weights `expected` of a model: all that are trained, no others."""
    unknown = sorted(set(given) - expected - {HEAD})
    kept = {HEAD, *(name for name in expected if any(part in name for part in NOT_TRAINED))}
    missing = sorted(expected - set(given) - kept)
    if expected and (unknown or missing):
        raise EngineError(
            f"these weights are not those of the model in '{model_folder}': missing {missing[:4]}, "
            f"unknown {unknown[:4]} (of {len(missing)} and {len(unknown)})"
        )
