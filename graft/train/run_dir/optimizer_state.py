"""The state of AdamW in safetensors files, under names that do not depend on the layout.

One process holds q|k|v as one matrix, four processes hold quarters of q, k and v. In a checkpoint each
tensor has the name of its weight in a Hugging Face model, and its whole size.

    policy/exp_avg/model.layers.0.self_attn.q_proj.weight     [1024, 1024]

Each process writes one file with its shards; the header says where each of them lies:

    part-00001.safetensors    {"policy/exp_avg/...": {"shape": [1024, 1024], "start": [512, 0]}, ...}

A resuming process reads the parts that it needs from the files that hold them: a run saved by four
processes can resume in one, and the other way round. Nothing in the files is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from graft.files import new_file
from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.finite import find_unusable
from graft.models.io.tensor_names import whole_views
from graft.models.parallel.shards import as_sharded, is_sharded, local, local_slices
from graft.train.errors import RunStopped
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer

PLACES = "places"
"""Entry of a file's header: name -> the shape of the whole tensor, and where the shard starts in it."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Names of safetensors."""


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    """All tensors of a checkpoint beside the policy's weights; writing into them restores the learner."""
    module = learner.lora or learner.rows or learner.policy
    found = _moments("policy", learner.optimizer, module)
    if learner.critic is not None and learner.critic_optimizer is not None:
        found |= _moments("critic", learner.critic_optimizer, learner.critic)
        weights = {name: weight.detach() for name, weight in learner.critic.named_parameters()}
        named = layout_free(learner.critic, weights)
        found |= {f"critic/weight/{name}": tensor for name, tensor in named.items()}
    if learner.reference is not None and learner.reference_moved:
        frozen = {name: weight.detach() for name, weight in learner.reference.named_parameters()}
        named = layout_free(learner.reference, frozen)
        found |= {f"reference/weight/{name}": tensor for name, tensor in named.items()}
    return found


def find_unusable_state(learner: Learner, anchor: Mapping[str, Tensor]) -> str:
    """What of this process's part of a checkpoint is NaN, inf or a negative second moment; "": nothing."""
    weights: dict[str, Tensor] = dict(learner.policy.named_parameters())
    if learner.lora is not None:
        weights |= dict(learner.lora.named_parameters())
    anchored = {f"anchor/{name}": tensor for name, tensor in anchor.items()}
    return find_unusable({**tensors_of(learner), **weights, **anchored})


def _moments(owner: str, optimizer: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    by_kind: dict[str, dict[str, Tensor]] = {}
    for name, kinds in optimizer.moments().items():
        parameter = parameters[name]
        for kind, tensor in kinds.items():
            whole = as_sharded(tensor, parameter) if is_sharded(parameter) else tensor
            by_kind.setdefault(kind, {})[name] = whole
    return {
        f"{owner}/{kind}/{name}": tensor
        for kind, tensors in by_kind.items()
        for name, tensor in layout_free(module, tensors).items()
    }


def layout_free(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter name -> the same tensors or views of them, under names of any layout."""
    if hasattr(module, "hf_parameters"):  # split: each parameter is a tensor of a checkpoint
        names = {id(p): name for name, p in cast(Any, module).hf_parameters().items()}
        owners = dict(module.named_parameters())
        return {names[id(owners[name])]: tensor for name, tensor in tensors.items()}
    if isinstance(module, Critic):
        body = {n.removeprefix("body."): t for n, t in tensors.items() if n.startswith("body.")}
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("body.")}
        return layout_free(module.body, body) | rest
    if isinstance(module, Decoder):
        bias = {name: tensor for name, tensor in tensors.items() if name == "action_bias"}
        return whole_views(module.shape, tensors) | bias
    return dict(tensors)


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Write this process's shards as one file, a tensor at a time; whole tensors are written by rank 0.

    Not a collective operation: the checkpoint is complete when all processes have written.
    """
    folder.mkdir(exist_ok=True)
    shards = {name: tensor for name, tensor in tensors.items() if _is_ours(tensor, rank)}
    # the largest elements first, which keeps all of them aligned in the file
    shards = dict(sorted(shards.items(), key=lambda item: -item[1].element_size()))
    places = {
        name: {"shape": list(tensor.shape), "start": [part.start for part in _slices(tensor)]}
        for name, tensor in shards.items()
    }
    header: dict[str, Any] = {"__metadata__": {PLACES: json.dumps(places)}}
    end = 0
    for name, tensor in shards.items():
        start, shard = end, local(tensor)
        end = start + shard.numel() * shard.element_size()
        offsets = [start, end]
        header[name] = {"dtype": DTYPES[shard.dtype], "shape": shard.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with new_file(folder / f"part-{rank:05d}.safetensors") as aside, aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shards.values():
            flat = local(tensor).cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().data)


def _slices(tensor: Tensor) -> tuple[slice, ...]:
    return local_slices(tensor) if is_sharded(tensor) else tuple(slice(0, n) for n in tensor.shape)


def _is_ours(tensor: Any, rank: int) -> bool:
    """Whether this process writes its shard: the first of those that hold the same one."""
    if not is_sharded(tensor):
        return rank == 0
    mesh, placements = tensor.device_mesh, tensor.placements
    copies = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    return not any(mesh.get_local_rank(axis) for axis in copies) and bool(local(tensor).numel())


def load_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill them from a checkpoint of any layout; fp32 masters that it does not have are left unchanged."""
    with ExitStack() as opened:
        stored: dict[str, list[StoredShard]] = {}
        for path in sorted(folder.glob("part-*.safetensors")):
            for name, shard in _stored_in(path, opened):
                stored.setdefault(name, []).append(shard)
        refuse_missing(tensors, stored, folder)
        for name, tensor in tensors.items():
            if name in stored:
                _fill(name, tensor, stored[name], folder)


def refuse_missing(tensors: Iterable[str], stored: Container[str], folder: Path) -> None:
    missing = [name for name in tensors if name not in stored and "/master/" not in name]
    if missing:
        raise RunStopped(
            f"{folder} lacks {missing[0]} and {len(missing) - 1} more of what the optimizer needs: it "
            "was written for another model or algorithm. Give this run another run.name, or remove "
            "the checkpoint"
        )


class StoredShard(NamedTuple):
    """A box of a tensor in an open file."""

    file: Any
    shape: list[int]
    """Of the whole tensor."""
    start: list[int]
    size: list[int]


def _stored_in(path: Path, opened: ExitStack) -> Iterator[tuple[str, StoredShard]]:
    try:
        file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
        places = json.loads((file.metadata() or {})[PLACES])
        for name in file.keys():  # noqa: SIM118 - a file is no dict
            size = file.get_slice(name).get_shape()
            shape, start = places[name]["shape"], places[name]["start"]
            if not len(shape) == len(start) == len(size):
                raise ValueError(f"{name} has {len(size)} dimensions, and its place {len(start)}")
            yield name, StoredShard(file, shape, start, size)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise RunStopped(
            f"{path} does not hold the state of a trainer ({type(error).__name__}: {error}); remove its "
            "checkpoint to resume from the one before"
        ) from error


@torch.no_grad()
def _fill(name: str, tensor: Tensor, shards: Sequence[StoredShard], folder: Path) -> None:
    """Copy the parts of `shards` that lie in this process's part of a tensor."""
    ours, target, filled = _slices(tensor), local(tensor), 0
    for shard in shards:
        if tuple(shard.shape) != tuple(tensor.shape):
            raise RunStopped(
                f"{folder} has {name} with the size {list(shard.shape)}, and the model needs "
                f"{list(tensor.shape)}: it was written for another model"
            )
        axes = list(zip(ours, shard.start, shard.size, strict=True))
        both = [(max(o.start, at), min(o.stop, at + size)) for o, at, size in axes]
        if any(first >= last for first, last in both):
            continue
        there = tuple(
            slice(first - at, last - at)
            for (first, last), (_, at, _) in zip(both, axes, strict=True)
        )
        here = tuple(
            slice(first - o.start, last - o.start)
            for (first, last), o in zip(both, ours, strict=True)
        )
        part = shard.file.get_slice(name)[there] if there else shard.file.get_tensor(name)
        target[here].copy_(part)
        filled += part.numel()
    if filled != target.numel():
        raise RunStopped(
            f"{folder} holds {filled} of {target.numel()} numbers of {name}: the file of a process is "
            "missing or damaged. Remove the checkpoint to resume from the one before"
        )


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, which are written while training continues."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
