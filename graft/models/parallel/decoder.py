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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from graft.models.decoder import Attend, Decoder, Norm, PackedTokens
from graft.models.extra_actions import ACTION_ROWS, random_rows
from graft.models.head_rotation import HeadRotation
from graft.models.io.tensor_names import hf_rows
from graft.models.io.tensors import ModelFileError
from graft.models.kv_slots import KVSlots
from graft.models.logprobs import likeliest, score_actions
from graft.models.ops import (
    add_linear,
    add_norm,
    embed,
    linear,
    norm_linear,
    qk_rotate,
)
from graft.models.parallel.module import shard_unit
from graft.models.parallel.regions import enter, leave
from graft.models.parallel.shards import device_of, gather, local, local_slices, shard_range
from graft.models.parallel.vocabulary import embed_rows, likeliest_sharded, score_sharded
from graft.models.shape import ModelShape, UnsupportedModel

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BY_ROWS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")
OUR_NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
}
"""Names of modules in a checkpoint -> ours, where they differ."""

Read = Callable[[str], Tensor | None]
"""A whole tensor by its Hugging Face name; None, for ACTION_ROWS only: they are drawn at random."""


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """The processes that compute one forest together, and the index of this one."""

    group: ProcessGroup
    size: int
    index: int


class ShardedNorm(Norm):
    """The weight of a norm, replicated over tp."""

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, own(self.weight), self.eps)


class ShardedBlock(nn.Module):
    """A `decoder.Block` with this process's share of heads and MLP width, and separate matrices."""

    def __init__(self, shape: ModelShape, index: int, tp: TensorParallelGroup) -> None:
        super().__init__()
        self.index, self.shape, self.tp = index, shape, tp
        width = shape.width
        self.attn_norm = ShardedNorm(width, shape.norm_eps)
        self.q_proj = nn.Linear(width, shape.q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.q_norm = ShardedNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = ShardedNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.o_proj = nn.Linear(shape.q_size, width, bias=shape.out_bias)
        self.mlp_norm = ShardedNorm(width, shape.norm_eps)
        self.gate_proj = nn.Linear(width, shape.ff, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(width, shape.ff, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.ff, width, bias=shape.mlp_bias)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        kv_slots: KVSlots | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if kv_slots is not None:
            raise ValueError(
                "a decoder that is sharded over processes cannot write keys and values to an engine's "
                "pages; sample from a plain decoder with the same weights (`policy.host_copy`)"
            )
        x, qkv = self._norm_project(x, delta, self.attn_norm, self.q_proj, self.k_proj, self.v_proj)
        x, delta = self._project_out(x, self._attend(qkv, cos, sin, attend), self.o_proj)
        x, gate_up = self._norm_project(x, delta, self.mlp_norm, self.gate_proj, self.up_proj)
        return self._project_out(x, gate_up, self.down_proj, gate=True)

    def _norm_project(
        self, x: Tensor, delta: Tensor | None, norm: Norm, *linears: nn.Linear
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the concatenated projections of its norm."""
        scale = own(norm.weight)
        weight = torch.cat([own(each.weight) for each in linears])
        has_bias = linears[0].bias is not None
        bias = torch.cat([own(each.bias) for each in linears]) if has_bias else None
        if self.tp.size == 1:
            return norm_linear(x, delta, scale, norm.eps, weight, bias)
        # not fused: the norm is replicated, and its gradient must be summed before it
        x, normed = add_norm(x, delta, scale, norm.eps)
        return x, linear(enter(normed, self.tp.group), weight, bias)

    def _project_out(
        self, x: Tensor, y: Tensor, to: nn.Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias = own(to.weight), None if to.bias is None else own(to.bias)
        if self.tp.size == 1:
            return add_linear(x, y, weight, bias, gate)
        delta = leave(linear(y, weight, None, gate), self.tp.group)
        return x, delta if bias is None else delta + bias

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, H*d]: the output of this process's heads."""
        shape, size = self.shape, self.tp.size
        heads, kv_heads = shape.heads // size, shape.kv_heads // size
        weights = self._head_norm(self.q_norm), self._head_norm(self.k_norm)
        how = HeadRotation(*weights, shape.norm_eps, cos, sin, heads, kv_heads)
        return attend(self.index, *qk_rotate(qkv, how)).reshape(len(qkv), heads * shape.head_dim)

    def _head_norm(self, norm: Norm | None) -> Tensor | None:
        if norm is None or self.tp.size == 1:
            return None if norm is None else own(norm.weight)
        # each process has the gradient of its heads only
        return enter(own(norm.weight), self.tp.group)


def own(parameter: Tensor) -> Tensor:
    """The tensor this process computes with, after FSDP has gathered a parameter; with autograd."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


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
            self.blocks = nn.ModuleList(ShardedBlock(shape, i, tp) for i in range(shape.layers))
            self.norm = ShardedNorm(shape.width, shape.norm_eps)
        self.mesh, self.tp, self.compute_dtype, self.offload = mesh, tp, dtype, offload
        # during a forward pass FSDP replaces the parameters by gathered tensors
        self.sharded_parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.hf_parameters().items():
            module, _, kind = _our_name(name).rpartition(".")
            sharded = shard_over_tp(parameter, mesh, _placement(name))
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

    def _embed(self, tokens: Tensor) -> Tensor:
        weight = self.embed.weight
        if self.tp.size == 1:
            return embed(tokens, own(weight))
        return embed_rows(tokens, own(weight), self._first_row(weight), self.tp.group)

    def _score(self, hidden: Tensor, *of_actions: Any) -> tuple[Tensor, ...]:
        weight, group = own(self.head_weight), self.tp.group
        if self.tp.size == 1 or not len(hidden):
            return score_actions(hidden, weight, *of_actions)
        first = self._first_row(self.head_weight)
        return score_sharded(enter(hidden, group), weight, first, group, *of_actions)

    def _likeliest(
        self, hidden: Tensor, forest: PackedTokens, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight, args = own(self.head_weight), (forest.actions, forest.modes, allowed)
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
        return {name: self.get_parameter(_our_name(name)) for name in names}

    def full(self, name: str) -> Tensor:
        """A whole parameter of `hf_parameters`, in every process; collective."""
        return gather(self.hf_parameters()[name])

    def hf_weights(self) -> Mapping[str, Tensor]:
        """The weights as `io.save.named_weights`; each is gathered when it is read.

        Collective: every process must read the same names in the same order, as `.items()` does.
        """
        return _GatheredWeights(self)


class _GatheredWeights(Mapping[str, Tensor]):
    def __init__(self, decoder: ShardedDecoder) -> None:
        self.decoder, self.shape = decoder, decoder.shape
        self.head = EMBEDDING if self.shape.tied else HEAD
        names = [*decoder.hf_parameters()]
        self.names = [*names, ACTION_ROWS] if self.shape.extra and self.head in names else names

    def __getitem__(self, name: str) -> Tensor:
        vocab_size = self.shape.vocab_size
        if name == ACTION_ROWS:
            return self.decoder.full(self.head)[vocab_size : vocab_size + self.shape.extra]
        whole = self.decoder.full(name)
        return whole[:vocab_size] if name in (EMBEDDING, HEAD) else whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def check_mesh(shape: ModelShape, mesh: DeviceMesh) -> None:
    """Raise unless a decoder of this shape can be sharded over the mesh."""
    if mesh.mesh_dim_names != ("dp", "tp"):
        raise ValueError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}; a decoder is sharded over "
            "('dp', 'tp'), in that order; either may be 1"
        )
    check_sizes(shape, *mesh.shape)


def check_sizes(shape: ModelShape, dp: int, tp: int) -> None:
    """Raise unless `tp` processes can share a layer of this shape, and `dp` groups its weights."""
    sizes = {"heads": shape.heads, "KV heads": shape.kv_heads, "MLP columns": shape.ff}
    for what, size in sizes.items():
        if size % tp:
            most = math.gcd(*sizes.values())
            fitting = [n for n in range(1, most + 1) if most % n == 0]
            raise UnsupportedModel(
                f"tp={tp} does not divide the model's {size} {what}, and each process needs whole "
                f"ones of its own; tp may be {', '.join(map(str, fitting))}"
            )
    for rows in {shape.vocab_size, shape.head_rows}:
        start, stop = shard_range(rows, tp, tp - 1)
        if start == stop:
            raise UnsupportedModel(
                f"tp={tp} leaves a process without any of the {rows} rows of the vocabulary; use a "
                "smaller tp"
            )
        if rows % tp and shape.width % dp:
            raise UnsupportedModel(
                f"tp={tp} does not divide the {rows} rows of the vocabulary, nor dp={dp} the width "
                f"{shape.width}: one of the two must, or a checkpoint could not be resumed; "
                "change either number"
            )


def _our_name(name: str) -> str:
    """The parameter of a ShardedDecoder that has this name in a checkpoint."""
    module, kind = name.rsplit(".", 1)
    if module in OUR_NAMES:
        return f"{OUR_NAMES[module]}.{kind}"
    _, _, index, *inside = module.split(".")  # model.layers.0.self_attn.q_proj
    return f"blocks.{index}.{OUR_NAMES.get(inside[-1], inside[-1])}.{kind}"


def _placement(name: str) -> Placement:
    """How a parameter is sharded over tp."""
    *_, module, kind = name.split(".")
    if module in BY_ROWS:
        return Shard(0)
    return Shard(1) if module in BY_COLUMNS and kind == "weight" else Replicate()


def shard_over_tp(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    # src_data_rank=None: the parameter is on the meta device, so there is nothing to send
    return nn.Parameter(distribute_tensor(parameter, mesh["tp"], [placement], src_data_rank=None))


def _over_dp(parameter: nn.Parameter) -> Shard:
    """By rows; by columns where tp does not divide the rows evenly, see `check_mesh`.

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
    """After a forward pass without gradients, free the gathered embedding and head.

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
    head = EMBEDDING if shape.tied else HEAD
    for name, parameter in decoder.hf_parameters().items():
        size = list(parameter.shape)
        if name in (EMBEDDING, HEAD):
            size[0] = shape.vocab_size
        whole = read(name)
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
