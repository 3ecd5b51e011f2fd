"""verl's FSDP checkpoints: a model sharded into one pickle per process, read as whole tensors.

global_step_10/actor/model_world_size_2_rank_0.pt        rows 0 and 1 of a [3, 4] weight
global_step_10/actor/model_world_size_2_rank_1.pt        row 2
global_step_10/actor/huggingface/                        config and tokenizer, no weights
global_step_10/actor/lora_adapter/adapter_config.json    with LoRA: its alpha

Each pickle has a mesh of processes, [0, 1] above, and a placement for each axis of the mesh: Shard(0) is
by rows, Replicate is a copy. A tensor without a placement is whole if it has the config's size, and else
sharded by rows. torch reads the files with weights_only, and the classes of torch.distributed that they
name are replaced by records that only store their arguments: no code of a file runs, shards of any torch
version can be read, and no process group is needed.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.models.io.load import (
    StoredModel,
    drop_tied_head,
    read_config,
    read_json,
    shape_of,
)
from graft.models.io.tensor_names import EMBEDDING, HEAD, hf_sizes, own_name
from graft.models.io.tensors import ModelFileError
from graft.models.lora.files import ADAPTER_CONFIG
from graft.models.lora.merging import Adapter, make_adapter
from graft.models.lora.training import PREFIX
from graft.models.shape import UnsupportedModel

NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
STANDARD = "torch.distributed."
"""A shard may name classes of these modules; a record stands in for them."""
WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
LORA_META = "lora_train_meta.json"


class ShardRecord:
    """Stands in for a class that a pickle names: stores its arguments, runs nothing."""

    def __new__(cls, *args: Any) -> ShardRecord:
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any) -> None:
        self.args: tuple[Any, ...] = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)
        else:
            self.args = (*self.args, state)


def entry(record: Any, *names: str) -> Any:
    """The first of these attributes that a record has (torch has renamed some), or None."""
    known = vars(record) if isinstance(record, ShardRecord) else {}
    return next((known[name] for name in names if name in known), None)


class ShardedTensorRecord(Tensor):
    """Stands in for DTensor, which torch builds as a tensor; nothing is computed with it."""

    _local_tensor: Tensor
    _spec: ShardRecord

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} of a tensor that is still sharded")


@contextmanager
def open_shards(folder: Path, base: Path | None = None) -> Iterator[StoredModel]:
    """The whole model of a verl checkpoint; each tensor is joined when it is read.

    `base` is the Hugging Face folder it was trained from; without one the `huggingface` folder that
    verl writes beside the shards gives the config.
    """
    files = find_shards(folder)
    config_folder = find_base(folder, base)
    config = read_config(config_folder)
    shape = shape_of(config, config_folder / "config.json")
    ranks = [read_shard(file) for file in files]
    names = [list(shard) for shard in ranks]
    if any(set(other) != set(names[0]) for other in names[1:]):
        odd = sorted(set(names[0]).symmetric_difference(*names[1:]))
        raise ModelFileError(
            f"the shards in '{folder}' hold different tensors ({', '.join(odd[:3])}); "
            f"are they of the same step?"
        )
    whole = {
        plain_name(name): _Joined(name, [shard[name] for shard in ranks], folder)
        for name in names[0]
        if not name.endswith("rotary_emb.inv_freq")  # the decoder computes it
    }
    adapter = _take_adapter(whole, folder)
    wanted = hf_sizes(shape)
    embedding = own_name(shape.family, EMBEDDING)
    wanted.setdefault(HEAD, wanted[embedding])  # a tied head may be stored too
    sizes = {name: joined.size(wanted.get(name)) for name, joined in whole.items()}
    if adapter is not None:
        adapter.check(sizes)
    if any(name.startswith(("score.", "v_head.", "value_head.")) for name in sizes):
        raise UnsupportedModel(
            f"'{folder}' holds a critic (a value head), not a language model; pass the folder of "
            f"the actor"
        )

    def read(name: str) -> Tensor:
        tensor = whole[name].join(sizes[name])
        return tensor if adapter is None else adapter.merge(name, tensor)

    if shape.tied:
        drop_tied_head(sizes, read, embedding, f"'{folder}' with '{config_folder}'")
    kind = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, str(kind), None)
    if not isinstance(dtype, torch.dtype):
        dtype = torch.bfloat16
    yield StoredModel(shape, sizes, read, dtype, f"'{folder}'")


def find_shards(folder: Path) -> list[Path]:
    """The files of all ranks in order; a folder that lacks one is refused."""
    if not folder.is_dir():
        raise ModelFileError(f"no verl checkpoint at '{folder}': there is no such folder")
    found = {
        (int(match[1]), int(match[2])): file
        for file in folder.iterdir()
        if (match := NAME.fullmatch(file.name))
    }
    if not found:
        deeper = sorted(folder.glob("**/model_world_size_*_rank_0.pt"))
        hint = f"; did you mean '{deeper[-1].parent}'?" if deeper else ""
        raise ModelFileError(
            f"'{folder}' holds no model_world_size_N_rank_R.pt, so it is no FSDP checkpoint of "
            f"verl{hint}"
        )
    worlds = sorted({world for world, _ in found})
    if len(worlds) > 1:
        raise ModelFileError(
            f"'{folder}' holds shards of {' and '.join(map(str, worlds))} processes; keep those of "
            f"one run"
        )
    world = worlds[0]
    if missing := [rank for rank in range(world) if (world, rank) not in found]:
        listed = ", ".join(f"model_world_size_{world}_rank_{rank}.pt" for rank in missing[:4])
        raise ModelFileError(
            f"'{folder}' lacks {len(missing)} of its {world} shards ({listed}); copy them from the "
            f"machines that wrote them"
        )
    return [found[world, rank] for rank in range(world)]


def find_base(folder: Path, base: Path | None) -> Path:
    """The folder whose config and tokenizer belong to the shards."""
    if base is not None:
        return base
    beside = folder / "huggingface"
    if (beside / "config.json").exists():
        return beside
    raise ModelFileError(
        f"'{folder}' has no huggingface/config.json, and the shards do not name the model they "
        f"are; pass --base, the Hugging Face folder that was trained"
    )


def read_shard(file: Path) -> dict[str, Tensor]:
    """Tensor names -> what this rank holds, mapped from the disk; no code of the file is run."""
    serialization = torch.serialization
    held = serialization.get_safe_globals()
    serialization.clear_safe_globals()  # else the real classes would be built, which need a process group
    try:
        named = serialization.get_unsafe_globals_in_checkpoint(file)
        if unexpected := sorted(name for name in named if not name.startswith(STANDARD)):
            raise ModelFileError(
                f"'{file}' is refused: it is a pickle that names {', '.join(unexpected[:4])}, and "
                f"tensors need no such thing; reading it could run code. Nothing of it was run"
            )
        with serialization.safe_globals([(_stand_in(name), name) for name in named]):
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except ModelFileError:
        raise
    except pickle.UnpicklingError as error:
        first = str(error).partition("\n")[0]
        raise ModelFileError(
            f"'{file}' is refused: it holds more than tensors ({first}). Nothing of it was run"
        ) from error
    except (RuntimeError, ValueError, EOFError, OSError, LookupError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise ModelFileError(
            f"'{file}' ({file.stat().st_size} bytes) is not a whole shard ({first}); copy it again"
        ) from error
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(held)
    if not isinstance(content, Mapping):
        raise ModelFileError(
            f"'{file}' holds a {type(content).__name__}, not tensors by name; is it a model's shard?"
        )
    odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if odd:
        raise ModelFileError(
            f"'{file}': {odd[0]} is a {type(content[odd[0]]).__name__}, not a tensor; only tensors "
            f"and DTensors are read (FSDP with a device mesh, as verl has it)"
        )
    return dict(content)


def _stand_in(name: str) -> type:
    is_tensor = name.endswith(".DTensor")
    return ShardedTensorRecord if is_tensor else type(name.rpartition(".")[2], (ShardRecord,), {})


def plain_name(name: str) -> str:
    """Hugging Face's name of a tensor, without what wrappers put into it.

    >>> plain_name("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


class _Joined:
    """The shards of one tensor, in the order of the ranks."""

    def __init__(self, name: str, shards: Sequence[Tensor], folder: Path) -> None:
        self.name, self.folder = name, folder
        self.shards: Sequence[Any] = shards
        kinds = {isinstance(shard, ShardedTensorRecord) for shard in shards}
        if len(kinds) > 1:
            raise self._fault("is a DTensor in some shards and a plain tensor in others")
        self.has_placements = kinds == {True}

    def size(self, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
        """The size of the whole tensor; `wanted` is its size by the config, if that has this name."""
        first = self.shards[0]
        if self.has_placements:
            return tuple(first.shape)  # a DTensor's own size is that of the whole
        local = {tuple(shard.shape) for shard in self.shards}
        if local == {tuple(first.shape)} and wanted == tuple(first.shape):
            return tuple(first.shape)  # every rank has all of it
        rows = sum(shard.shape[0] if shard.ndim else 1 for shard in self.shards)
        return (rows, *first.shape[1:])

    def join(self, size: tuple[int, ...]) -> Tensor:
        try:
            whole = self._by_mesh() if self.has_placements else self._by_rows(size)
        except (RuntimeError, TypeError, LookupError, AttributeError) as error:  # shards do not fit
            raise self._fault(f"cannot be joined ({error})") from error
        if tuple(whole.shape) != size:
            raise self._fault(
                f"adds up to {list(whole.shape)}, and by its shards it is {list(size)}"
            )
        return whole

    def _by_rows(self, size: tuple[int, ...]) -> Tensor:
        first = self.shards[0]
        if tuple(first.shape) != size or len(self.shards) == 1:
            return torch.cat([shard.detach() for shard in self.shards])
        if not all(torch.equal(first, other) for other in self.shards[1:]):
            raise self._fault("is whole in every shard, but not the same")
        return first.detach()

    def _by_mesh(self) -> Tensor:
        spec = getattr(self.shards[0], "_spec", None)
        mesh = mesh_of(entry(spec, "mesh"))
        if mesh is None:
            raise self._fault("does not name the processes it was sharded over")
        # copies along a replicated axis are equal: the first is used
        local = [shard._local_tensor.detach() for shard in self.shards]
        if any(not 0 <= rank < len(local) for rank in mesh.flatten().tolist()):
            raise self._fault(
                f"is spread over ranks {mesh.tolist()}, and there are {len(local)} shards"
            )
        return self._join_axes(mesh, list(entry(spec, "placements") or ()), local)

    def _join_axes(self, mesh: Tensor, placements: list[Any], local: list[Tensor]) -> Tensor:
        """Join from the outermost axis of the mesh inwards: Shard joins, Replicate takes the first."""
        if mesh.ndim == 0:
            return local[int(mesh)]
        if not placements:
            raise self._fault("has fewer placements than its mesh has axes")
        kind = type(placements[0]).__name__
        if kind == "Replicate":
            return self._join_axes(mesh[0], placements[1:], local)
        if kind != "Shard":
            raise UnsupportedModel(
                f"{self.name} in '{self.folder}' is placed as {kind}; only Shard and Replicate are "
                f"joined (FSDP, with or without copies; no tensor parallelism inside it)"
            )
        dim = entry(placements[0], "dim")
        dim = int(placements[0].args[0] if dim is None else dim)
        return torch.cat([self._join_axes(part, placements[1:], local) for part in mesh], dim)

    def _fault(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.name} in '{self.folder}' {what}; the shards are damaged or of different steps"
        )


def mesh_of(mesh: Any) -> Tensor | None:
    """Ranks as an array: stored as one, or by later torch as a list of ranks and its layout."""
    ranks = entry(mesh, "mesh", "_mesh")
    if isinstance(ranks, Tensor):
        return ranks
    ranks, layout = entry(mesh, "_rank_map"), entry(mesh, "_layout")
    axes = entry(layout, "axes")  # one layout for each axis, or else one for all
    layouts = [layout] if axes is None else list(axes)
    sizes = _flat([entry(one, "shape") for one in layouts])
    strides = _flat([entry(one, "stride") for one in layouts])
    return torch.as_strided(ranks, sizes, strides) if isinstance(ranks, Tensor) else None


def _flat(value: Any) -> list[int]:
    """
    >>> _flat([(2,), 3])
    [2, 3]
    """
    if isinstance(value, int):
        return [value]
    return [number for part in value or () for number in _flat(part)]


def _take_adapter(whole: dict[str, _Joined], folder: Path) -> Adapter | None:
    """Take LoRA's tensors out of the model's; None: there are none."""
    halves = {name: whole.pop(name) for name in list(whole) if ".lora_" in name}
    if not halves:
        return None
    files = (folder / "lora_adapter" / ADAPTER_CONFIG, folder / LORA_META)
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise ModelFileError(
            f"'{folder}' was trained with LoRA ({len(halves)} adapter tensors), and neither "
            f"lora_adapter/{ADAPTER_CONFIG} nor {LORA_META} has its alpha; write one of them, such "
            f'as {{"r": 32, "lora_alpha": 64}}. Without the adapters it would be the base model'
        )
    tensors = {name: joined.join(joined.size(None)) for name, joined in halves.items()}
    return make_adapter(tensors, read_json(file), f"'{folder}'")
