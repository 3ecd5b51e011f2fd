"""A decoder sharded over several processes: each holds a shard of every matrix.

The processes form a `mesh` with the dimensions "dp" and "tp". With 4 processes as 2 x 2, and
q_proj.weight with 8 rows, process (dp i, tp j) keeps two rows:

                    tp 0        tp 1
    dp 0            0 1         4 5         tp 0 and tp 1 compute one forest together, each with the
    dp 1            2 3         6 7         heads of its rows; dp 0 and dp 1 compute two forests

Over tp (tensor parallelism) a process computes with its own rows and columns only, and results are
summed at the ends of regions (`regions`, `vocabulary`). Over dp (FSDP2) the shards of one block are
gathered shortly before it is computed and freed after it; gradients are SUMMED over dp, not averaged: a
loss that is weighted by the whole batch gives the gradient of the whole batch.

Every parameter is one tensor of a Hugging Face checkpoint and a DTensor on the whole mesh, so a
checkpoint does not depend on the layout; the head also has the rows of actions (see `extra_actions`).

Functions marked "collective" wait until every process of the mesh has called them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from graft.models.decoder import Decoder, PackedTokens
from graft.models.extra_actions import random_rows
from graft.models.io.tensor_names import ACTION_ROWS, EMBEDDING, HEAD, hf_rows, own_name
from graft.models.io.tensors import ModelFileError
from graft.models.logprobs import likeliest, score_actions
from graft.models.ops import embed
from graft.models.parallel.block import ShardedBlock, ShardedNorm
from graft.models.parallel.joined_block import JoinedBlock
from graft.models.parallel.layout import (
    check_mesh,
    our_name,
    placement_of,
)
from graft.models.parallel.module import shard_unit
from graft.models.parallel.regions import TensorParallelGroup, enter
from graft.models.parallel.shards import (
    device_of,
    gather,
    local,
    local_slices,
    local_tensor,
    shard_range,
)
from graft.models.parallel.vocabulary import embed_rows, likeliest_sharded, score_sharded
from graft.models.shape import ModelShape

Read = Callable[[str], Tensor | None]
"""A whole tensor by its Hugging Face name; None, for ACTION_ROWS only: they are drawn at random."""


class ShardedDecoder(Decoder):
    """A sharded decoder; `shard` makes one. All processes of a tp group must get the same forest."""

    is_whole = False

    def __init__(
        self, shape: ModelShape, mesh: DeviceMesh, dtype: torch.dtype, offload: bool
    ) -> None:
        check_mesh(shape, mesh)
        tp = TensorParallelGroup(mesh.get_group("tp"), mesh["tp"].size(), mesh.get_local_rank("tp"))
        with torch.device("meta"):
            super().__init__(shape)
            self.is_joined = tp.size == 1
            blocks = (
                JoinedBlock(shape, i) if self.is_joined else ShardedBlock(shape, i, tp)
                for i in range(shape.layers)
            )
            self.blocks = nn.ModuleList(blocks)
            self.norm = ShardedNorm(shape.width, shape.norm_eps, shape.norm_offset)
        self.mesh, self.tp, self.compute_dtype, self.offload = mesh, tp, dtype, offload
        # during a forward pass FSDP replaces the parameters by gathered tensors
        self.sharded_parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.hf_parameters().items():
            module, _, kind = our_name(name, self.is_joined).rpartition(".")
            sharded = shard_over_tp(parameter, mesh, placement_of(name))
            sharded.requires_grad_(
                parameter.requires_grad
            )  # corrections of experts are not trained
            setattr(self.get_submodule(module), kind, sharded)

    @property
    def own_heads(self) -> tuple[int, int]:
        return self.shape.heads // self.tp.size, self.shape.kv_heads // self.tp.size

    @property
    def device(self) -> torch.device:
        """The device it computes on; offloaded parameters are elsewhere."""
        return device_of(self.mesh)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in; its parameters are fp32."""
        return self.compute_dtype

    def _look_up(self, tokens: Tensor) -> Tensor:
        weight = self.embed.weight
        if self.tp.size == 1:
            return embed(tokens, local_tensor(weight))
        return embed_rows(tokens, local_tensor(weight), self._first_row(weight), self.tp.group)

    def _score(self, hidden: Tensor, *of_actions: Any) -> tuple[Tensor, ...]:
        weight, group = local_tensor(self.head_weight), self.tp.group
        if self.tp.size == 1 or not len(hidden):
            return score_actions(hidden, weight, *of_actions, order=self.order)
        first = self._first_row(self.head_weight)
        return score_sharded(enter(hidden, group), weight, first, group, *of_actions)

    def _likeliest(
        self, hidden: Tensor, forest: PackedTokens, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight, args = local_tensor(self.head_weight), (forest.actions, forest.modes, allowed)
        if self.tp.size == 1:
            return likeliest(hidden, weight, *args)
        first = self._first_row(self.head_weight)
        return likeliest_sharded(hidden, weight, first, *args, self.tp.group)

    def _first_row(self, weight: Tensor) -> int:
        return shard_range(len(weight), self.tp.size, self.tp.index)[0]

    def initialise(self, seed: int) -> Decoder:
        raise ValueError(
            f"a decoder that is sharded over processes draws no weights (seed {seed}): "
            "give `shard` a `read` that returns them"
        )

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its Hugging Face name, in the order of the computation.

        The head, or a tied embedding, includes the rows of actions beyond the vocabulary.
        """
        return self.sharded_parameters or self._find_parameters()

    def _find_parameters(self) -> dict[str, nn.Parameter]:
        has_head = self.shape.tied or self.head is not None
        names = [name for name in hf_rows(self.shape) if has_head or name != HEAD]
        return {name: self.get_parameter(our_name(name, self.is_joined)) for name in names}

    def full(self, name: str) -> Tensor:
        """A whole parameter of `hf_parameters`, in every process, experts as rows; collective."""
        return gather(self.hf_parameters()[name])

    def hf_weights(self) -> Mapping[str, Tensor]:
        """The weights as `tensor_names.named_weights`; each is gathered when it is read.

        Collective: every process must read the same names in the same order, as `.items()` does.
        """
        return _GatheredWeights(self)


class _GatheredWeights(Mapping[str, Tensor]):
    def __init__(self, decoder: ShardedDecoder) -> None:
        self.decoder, self.shape = decoder, decoder.shape
        self.embedding = own_name(self.shape.family, EMBEDDING)
        self.head = self.embedding if self.shape.tied else HEAD
        names = [*decoder.hf_parameters()]
        self.names = [*names, ACTION_ROWS] if self.shape.extra and self.head in names else names
        self.rows = hf_rows(self.shape)

    def __getitem__(self, name: str) -> Tensor:
        vocab_size = self.shape.vocab_size
        if name == ACTION_ROWS:
            return self.decoder.full(self.head)[vocab_size : vocab_size + self.shape.extra]
        whole = self.decoder.full(name)
        if name in (self.embedding, HEAD):
            return whole[:vocab_size]
        return self.rows[name].shaped(whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def shard_over_tp(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    # src_data_rank=None: the parameter is on the meta device, so there is nothing to send
    sharded = distribute_tensor(parameter, mesh["tp"], [placement], src_data_rank=None)
    return nn.Parameter(sharded)


def _over_dp(parameter: nn.Parameter) -> Shard:
    """Shard by rows; by columns if tp does not divide the rows evenly, see `check_mesh`.

    torch cannot describe rows that are sharded twice and unevenly: a checkpoint would put some of
    them in the wrong position.
    """
    sharded = cast(DTensor, parameter)
    by_rows = sharded.placements[0].is_shard(0)
    return Shard(1 if by_rows and len(sharded) % sharded.device_mesh.size() else 0)


def apply_fsdp(root: nn.Module, decoder: ShardedDecoder, exact: Sequence[nn.Module] = ()) -> None:
    """Shard all parameters over dp, block by block, and allocate them; `exact` modules compute in fp32."""
    dtype = decoder.compute_dtype
    # no cast of inputs: on a GPU the stream is fp32, and a cast would round it in each block
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    for module in (*exact, *decoder.blocks, root):
        how = plain if module in exact else policy
        shard_unit(module, decoder.mesh, how, decoder.offload, _over_dp)
    root.register_forward_hook(_reshard_after_inference)
    root.to_empty(device="cpu" if decoder.offload else decoder.device)
    decoder.sharded_parameters = decoder._find_parameters()


def _reshard_after_inference(root: nn.Module, *_: object) -> None:
    """Free the gathered embedding and head after a forward pass without gradients.

    FSDP would reuse them in the next forward pass, even after an optimizer step.
    """
    if not torch.is_grad_enabled():
        cast(FSDPModule, root).reshard()


def shard(
    shape: ModelShape,
    mesh: DeviceMesh,
    read: Read,
    *,
    dtype: torch.dtype,
    offload: bool = False,
    recompute: bool = False,
) -> ShardedDecoder:
    """A decoder on the mesh, read tensor by tensor: a process holds at most one whole tensor.

    Parameters are fp32; `dtype` is what it computes in. `offload` keeps them on the CPU between uses,
    `recompute` is activation checkpointing of the blocks.
    """
    decoder = ShardedDecoder(shape, mesh, dtype, offload)
    decoder.recompute = recompute
    apply_fsdp(decoder, decoder)
    embedding, rows_of = own_name(shape.family, EMBEDDING), hf_rows(shape)
    head = embedding if shape.tied else HEAD
    for name, parameter in decoder.hf_parameters().items():
        size = list(parameter.shape)
        if name in (embedding, HEAD):
            size[0] = shape.vocab_size
        whole = read(name)
        whole = None if whole is None else rows_of[name].flat(whole)
        if whole is None or list(whole.shape) != size:
            found = "missing" if whole is None else f"{list(whole.shape)}"
            raise ModelFileError(f"{name} is {found}; the model's shape says {size}")
        local(parameter).zero_()
        _write(parameter, whole)
        if name == head and shape.extra:
            rows = read(ACTION_ROWS)
            rows = random_rows(shape.extra, shape.width) if rows is None else rows
            if tuple(rows.shape) != (shape.extra, shape.width):
                raise ModelFileError(
                    f"{ACTION_ROWS} is {list(rows.shape)}; the model's shape says "
                    f"{[shape.extra, shape.width]}"
                )
            _write(parameter, rows, shape.vocab_size)
    return decoder


def _write(parameter: Tensor, whole: Tensor, first: int = 0) -> None:
    """Write rows from `first` on into this process's shard, as far as they belong to it."""
    rows, *columns = local_slices(cast(DTensor, parameter))
    start, stop = max(rows.start, first), min(rows.stop, first + len(whole))
    if start < stop:
        here = local(parameter)[start - rows.start : stop - rows.start]
        here.copy_(whole[(slice(start - first, stop - first), *columns)])
