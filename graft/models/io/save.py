"""Models to a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` opens.

Every file is written under a temporary name, flushed and renamed: a file is complete or absent. For an
atomic folder, save into a temporary one and rename it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from graft.files import new_file, sync, write_json
from graft.models.decoder import Decoder
from graft.models.extra_actions import ACTIONS, BIAS, ROWS
from graft.models.families.table import check_described, config_of
from graft.models.families.text_part import text_part
from graft.models.finite import find_unusable
from graft.models.io.load import INDEX, WEIGHTS, ModelFileError, read_config, read_json
from graft.models.io.tensor_names import ACTION_BIAS, ACTION_ROWS, hf_sizes, named_weights
from graft.models.shape import ModelShape
from graft.text.tokenizer import FastTokenizer

SHARD_BYTES = 5_000_000_000
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
NOT_CARRIED = ("auto_map", "quantization_config", "transformers_version")
"""Entries of the source's config.json that are not true of our files: code that we do not copy, a
quantisation that we undid, the library that wrote the old file."""

TokenIds = Mapping[str, int | Sequence[int]]


def save_model(
    decoder: Decoder,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    special: TokenIds | None = None,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Write config, generation config and weights (not the tokenizer) of a whole decoder.

    `special` maps bos_token_id, eos_token_id, pad_token_id to ids. `source` is the folder the model
    came from: what its configs say beyond the shape is kept. A GGUF source has no such folder.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    dtype, weights = dtype or decoder.dtype, named_weights(decoder)
    save_weights(decoder.shape, weights, Path(folder), dtype, special or {}, source, shard_bytes)


def save_weights(
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    special: TokenIds,
    source: str | os.PathLike[str] | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `named_weights`, one at a time and in their order, and the configs.

    Actions beyond the vocabulary are no part of the model's weights and get a file of their own.
    """
    write_weights(
        hf_sizes(shape), weights.__getitem__, folder, dtype=dtype, shard_bytes=shard_bytes
    )
    rows = weights[ACTION_ROWS].to(dtype) if shape.extra else None
    save_rows(rows, folder, weights[ACTION_BIAS].to(dtype) if shape.extra_bias else None)
    save_configs(shape, folder, dtype, special, source)


def save_rows(rows: Tensor | None, folder: Path, bias: Tensor | None = None) -> None:
    """Rows [extra, D] and bias [extra] of actions beyond the vocabulary, in their own file."""
    if rows is not None:
        save_tensors({ROWS: rows} | ({} if bias is None else {BIAS: bias}), folder / ACTIONS)
    else:  # left from an earlier save they would be read as those of this model
        (folder / ACTIONS).unlink(missing_ok=True)


def write_weights(
    sizes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    folder: Path,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors that `read(name)` returns, in `dtype`: one file, or numbered shards and their index.

    At most one shard is in memory at a time; older weights in the folder are removed.
    """

    def converted(name: str) -> Tensor:
        tensor = read(name).to("cpu", dtype)
        if why := find_unusable({name: tensor}):
            limit = torch.finfo(dtype).max
            raise ModelFileError(
                f"{why} as {dtype}, which ends at {limit:.6g}; nothing was written to '{folder}'. Take "
                "another dtype, such as bfloat16, or weights of an earlier checkpoint"
            )
        return tensor

    num_bytes = {name: math.prod(size) * dtype.itemsize for name, size in sizes.items()}
    write_shards(num_bytes, converted, folder, shard_bytes)


def write_shards(
    num_bytes: Mapping[str, int], read: Callable[[str], Tensor], folder: Path, shard_bytes: int
) -> None:
    """Write tensors, each in the dtype that `read(name)` returns; `num_bytes` are their sizes."""
    shards = split_shards(num_bytes, shard_bytes)
    count = len(shards)
    files = {
        WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, start=1)
    }
    for file, names in files.items():
        save_tensors({name: read(name) for name in names}, folder / file)
    written = set(files)
    if count > 1:
        written.add(INDEX)
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": where}
        write_json(folder / INDEX, index)
    # a model.safetensors left from an earlier save would be read in place of new shards
    for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if stale.name not in written:
            stale.unlink(missing_ok=True)
    sync(folder)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """One whole safetensors file at `path`."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with new_file(path) as aside:
        try:
            save_file(stored, aside, {"format": "pt", **metadata})
        except SafetensorError as error:  # such as a full disk
            raise _os_error(error, path) from error


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """Make an error with the number that Rust writes as "(os error 28)": a full disk is known by it."""
    text = f"safetensors could not write {path.name}: {error}"
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), text) if number else OSError(text)


def split_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, split before a shard would exceed its bytes; a larger tensor is a shard of its own.

    >>> split_shards({"a": 3, "b": 3, "c": 9, "d": 1}, shard_bytes=6)
    [['a', 'b'], ['c'], ['d']]
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be 1 or more")
    shards: list[list[str]] = []
    free = 0
    for name, size in sizes.items():
        if not shards or size > free:
            shards.append([])
            free = shard_bytes
        shards[-1].append(name)
        free -= size
    return shards


def save_configs(
    shape: ModelShape,
    folder: Path,
    dtype: torch.dtype,
    special: TokenIds,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """config.json and generation_config.json; a shape that loading would not get from them is refused.

    Both are the source's beyond the shape; eos ids in `special` that it does not name are added to
    its own, the other ids fill gaps.
    """
    if unknown := sorted(set(special) - set(SPECIAL)):
        raise ValueError(f"special has unknown entries {unknown}; known: {', '.join(SPECIAL)}")
    config, generation = _carried(source)
    kind = str(dtype).removeprefix("torch.")
    written = {
        **dict.fromkeys(SPECIAL),  # null rather than absent: some families default to ids 1 and 2
        **config,
        **config_of(shape),
        **with_ids(config, special),
        "dtype": kind,
        "torch_dtype": kind,  # the same for readers older than transformers 5
    }
    check_described(shape, written)
    if generation:
        generation = generation | with_ids(generation, special, only=("eos_token_id",))
    else:
        generation = {name: written[name] for name in SPECIAL if written[name] is not None}
    write_json(folder / "config.json", written)
    write_json(folder / "generation_config.json", generation)
    sync(folder)


def ids_of(tokenizer: FastTokenizer, turn_ends: Iterable[int] = ()) -> TokenIds:
    """The special ids of a tokenizer as in `config.json`; every token that ends a turn is an eos id.

    eos "<|endoftext|>" 0, and "<|im_end|>" 2 ends a turn: {"eos_token_id": [0, 2], ...}
    """
    ends = list(dict.fromkeys([*tokenizer.eos_ids, *turn_ends]))
    ids: dict[str, int | Sequence[int] | None] = {
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def with_ids(
    given: Mapping[str, Any], special: TokenIds, only: Sequence[str] = SPECIAL
) -> dict[str, Any]:
    """Those of `given` where it has any; eos ids that it lacks are added behind its own.

    >>> with_ids({"eos_token_id": 5, "pad_token_id": 1}, {"eos_token_id": [7, 5], "pad_token_id": 0})
    {'eos_token_id': [5, 7], 'pad_token_id': 1}
    """
    found = {name: special[name] for name in only if name in special}
    found |= {name: given[name] for name in only if given.get(name) is not None}
    lists = [listed(source.get("eos_token_id")) for source in (given, special)]
    if set(lists[1]) - set(lists[0]):
        ends = list(dict.fromkeys([*lists[0], *lists[1]]))
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def listed(ids: int | Sequence[int] | None) -> list[int]:
    """[] from null, [5] from 5, [5, 7] from [5, 7]."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _carried(source: str | os.PathLike[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of the source's config.json and generation_config.json that are kept."""
    if source is None or Path(source).suffix == ".gguf":
        return {}, {}
    folder = Path(source)
    if not folder.is_dir():
        raise ModelFileError(f"source '{folder}' is not a folder, so its config cannot be kept")
    whole = text_part(read_config(folder))  # what is written is a text model
    config = {k: v for k, v in whole.items() if k not in NOT_CARRIED}
    generation = folder / "generation_config.json"
    return config, read_json(generation) if generation.exists() else {}
