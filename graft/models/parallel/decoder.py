"""A decoder that several processes hold together: each has a part of every matrix.

The processes form a grid, `mesh`, with the dimensions "dp" and "tp". Of 4 processes as 2 x 2, and of
q_proj.weight with 8 rows, process (dp i, tp j) keeps two rows:

                    tp 0        tp 1
    dp 0            0 1         4 5         together tp 0 and tp 1 compute one forest, each with the
    dp 1            2 3         6 7         heads that its rows make; dp 0 and dp 1 compute two forests

Over tp (tensor parallelism) a process computes with nothing but its own rows and columns, and what is
known is added up at the borders (`regions`, `vocabulary`). Over dp (FSDP2) the parts of one block are
brought together shortly before it is computed and let go behind it; gradients are ADDED UP over dp, not
averaged: a loss that is weighted by the whole batch gives the gradient of the whole batch.

Every parameter is one tensor of a Hugging Face checkpoint and a DTensor on the whole grid, so a
checkpoint of it knows no layout. The one exception are actions beyond the vocabulary: they are further
rows of the head, as in any decoder (see `extra`).

All functions that are called collective here wait until every process of the grid has called them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from graft.models.decoder import Attend, Decoder, Norm
from graft.models.extra_actions import ACTION_ROWS, SEED, extra_rows
from graft.models.io.fill import ModelFileError
from graft.models.io.tensor_names import hf_names, hf_rows
from graft.models.kv_slots import KVSlots
from graft.models.logprobs import likeliest, score_actions
from graft.models.ops import add_linear, add_norm, embed, linear, norm_linear, qk_rotate
from graft.models.parallel.parts import bounds, device_of, gather, local, part
from graft.models.parallel.regions import enter, leave
from graft.models.parallel.vocabulary import (
    embed_rows,
    likeliest_shared,
    score_nothing,
    score_shared,
)
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
"""Modules that are called otherwise in a checkpoint; the others have its names."""

Read = Callable[[str], Tensor | None]
"""A whole tensor by its Hugging Face name. Of ACTION_ROWS alone there may be None: they are drawn."""


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """The processes that compute one forest together, and which of them this one is."""

    group: ProcessGroup
    size: int
    index: int


class ShardedNorm(Norm):
    """The weight of a norm, the same in every process of a team."""

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, own(self.weight), self.eps)


class ShardedBlock(nn.Module):
    """A `decoder.Block` with a team's share of heads and of the MLP's width, its matrices apart."""

    def __init__(self, shape: ModelShape, index: int, team: ShardGroup) -> None:
        super().__init__()
        self.index, self.shape, self.team = index, shape, team
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
                "a decoder that is split over processes cannot keep keys and values in an engine's "
                "pages; sample from a plain decoder that `copy_to` writes the weights into"
            )
        x, qkv = self._into(x, delta, self.attn_norm, self.q_proj, self.k_proj, self.v_proj)
        x, delta = self._out(x, self._see(qkv, cos, sin, attend), self.o_proj)
        x, gate_up = self._into(x, delta, self.mlp_norm, self.gate_proj, self.up_proj)
        return self._out(x, gate_up, self.down_proj, gate=True)

    def _into(
        self, x: Tensor, delta: Tensor | None, norm: Norm, *linears: nn.Linear
    ) -> tuple[Tensor, Tensor]:
        """The stream with delta added to it, and the products of its norm, side by side."""
        scale = own(norm.weight)
        weight = torch.cat([own(each.weight) for each in linears])
        has_bias = linears[0].bias is not None
        bias = torch.cat([own(each.bias) for each in linears]) if has_bias else None
        if self.team.size == 1:
            return norm_linear(x, delta, scale, norm.eps, weight, bias)
        # apart: the norm is everybody's, and its gradient must be whole when it gets there
        x, normed = add_norm(x, delta, scale, norm.eps)
        return x, linear(enter(normed, self.team.group), weight, bias)

    def _out(
        self, x: Tensor, y: Tensor, to: nn.Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias = own(to.weight), None if to.bias is None else own(to.bias)
        if self.team.size == 1:
            return add_linear(x, y, weight, bias, gate)
        delta = leave(linear(y, weight, None, gate), self.team.group)
        return x, delta if bias is None else delta + bias

    def _see(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, H*d]: what the heads that are here found."""
        shape, size = self.shape, self.team.size
        heads, kv_heads = shape.heads // size, shape.kv_heads // size
        weights = self._head_norm(self.q_norm), self._head_norm(self.k_norm)
        q, k, v = qk_rotate(qkv, *weights, shape.norm_eps, cos, sin, heads, kv_heads)
        return attend(self.index, q, k, v).reshape(len(qkv), heads * shape.head_dim)

    def _head_norm(self, norm: Norm | None) -> Tensor | None:
        if norm is None or self.team.size == 1:
            return None if norm is None else own(norm.weight)
        return enter(own(norm.weight), self.team.group)  # each sees the gradient of its heads


def own(parameter: Tensor) -> Tensor:
    """What this process computes with, once FSDP has brought a parameter together; with autograd."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ShardedDecoder(Decoder):
    """A decoder of parts; `shard` makes one. The processes of a team must be given the same forest."""

    is_whole = False

    def __init__(
        self, shape: ModelShape, mesh: DeviceMesh, dtype: torch.dtype, offload: bool
    ) -> None:
        check_split(shape, mesh)
        team = ShardGroup(mesh.get_group("tp"), mesh["tp"].size(), mesh.get_local_rank("tp"))
        with torch.device("meta"):
            super().__init__(shape)
            self.blocks = nn.ModuleList(ShardedBlock(shape, i, team) for i in range(shape.layers))
            self.norm = ShardedNorm(shape.width, shape.norm_eps)
        self.mesh, self.team, self.compute_dtype, self.offload = mesh, team, dtype, offload
        # while it computes, FSDP puts what it brought together in the place of parameters
        self.held: dict[str, nn.Parameter] = {}
        for name, parameter in self.hf_parameters().items():
            _set(self, _our_name(name), over_tp(parameter, mesh, _placement(name)))

    @property
    def own_heads(self) -> tuple[int, int]:
        return self.shape.heads // self.team.size, self.shape.kv_heads // self.team.size

    @property
    def device(self) -> torch.device:
        """Where it computes, wherever its parameters wait meanwhile."""
        return device_of(self.mesh)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in; its parameters are fp32."""
        return self.compute_dtype

    def _embed(self, tokens: Tensor) -> Tensor:
        weight = self.embed.weight
        if self.team.size == 1:
            return embed(tokens, own(weight))
        return embed_rows(tokens, own(weight), self._first_row(weight), self.team.group)

    def _score(
        self,
        hidden: Tensor,
        actions: Tensor,
        modes: Tensor,
        allowed: Tensor | None,
        temperature: float,
        vocab_size: int | None,
    ) -> tuple[Tensor, ...]:
        weight, group = own(self.head_weight), self.team.group
        how = actions, modes, allowed, temperature, vocab_size
        if not len(actions):
            return score_nothing(hidden, weight, vocab_size)
        if self.team.size == 1:
            return score_actions(hidden, weight, *how)
        first = self._first_row(self.head_weight)
        return score_shared(enter(hidden, group), weight, first, *how, group)

    def _likeliest(
        self, hidden: Tensor, actions: Tensor, modes: Tensor, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight, group = own(self.head_weight), self.team.group
        if self.team.size == 1:
            return likeliest(hidden, weight, actions, modes=modes, allowed=allowed)
        first = self._first_row(self.head_weight)
        return likeliest_shared(hidden, weight, first, actions, modes, allowed, group)

    def _first_row(self, weight: Tensor) -> int:
        return part(len(weight), self.team.size, self.team.index)[0]

    def initialise(self, seed: int) -> Decoder:
        raise ValueError(
            f"a decoder that is split over processes draws no weights (seed {seed}): "
            "give `shard` a `read` that returns them"
        )

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its Hugging Face name, in the order of the computation.

        The head has rows of actions beyond the vocabulary, if the shape has such; so does a tied
        embedding.
        """
        return self.held or self._find_parameters()

    def _find_parameters(self) -> dict[str, nn.Parameter]:
        is_there = self.shape.tied or self.head is not None
        names = [name for name in hf_rows(self.shape) if is_there or name != HEAD]
        return {name: cast(nn.Parameter, _get(self, _our_name(name))) for name in names}

    def full(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole parameter of `hf_parameters`, in every process; collective."""
        return gather(self.hf_parameters()[name], dtype)

    def hf_weights(self, dtype: torch.dtype | None = None) -> Mapping[str, Tensor]:
        """What a Hugging Face checkpoint holds; a tensor is brought together when it is asked for.

        Collective: every process asks for the same names in the same order, as `.items()` does.
        """
        return _Whole(self, dtype)

    def extra_rows(self, dtype: torch.dtype | None = None) -> Tensor:
        """[extra, D]: the head's rows of actions beyond the vocabulary; collective."""
        vocab_size, extra = self.shape.vocab_size, self.shape.extra
        whole = self.full(EMBEDDING if self.shape.tied else HEAD, dtype)
        return whole[vocab_size : vocab_size + extra]

    @torch.no_grad()
    def copy_to(self, decoder: Decoder | None) -> None:
        """Write all weights into a plain decoder of the same shape, in its own dtype; collective.

        None in a process that keeps no such decoder: it only takes part.
        """
        if decoder is not None and decoder.shape != self.shape:
            raise ValueError(
                f"weights of {self.shape} cannot be written into a decoder of {decoder.shape}"
            )
        views = {} if decoder is None else hf_names(decoder)
        head = EMBEDDING if self.shape.tied else HEAD
        for name in self.hf_parameters():
            whole = self.full(name)
            if decoder is None:
                continue
            views[name].copy_(whole[: len(views[name])])
            if name == head and self.shape.extra:
                rows = extra_rows(decoder)
                rows.copy_(whole[self.shape.vocab_size :][: len(rows)])


class _Whole(Mapping[str, Tensor]):
    def __init__(self, decoder: ShardedDecoder, dtype: torch.dtype | None) -> None:
        self.decoder, self.dtype = decoder, dtype

    def __getitem__(self, name: str) -> Tensor:
        whole = self.decoder.full(name, self.dtype)
        return whole[: self.decoder.shape.vocab_size] if name in (EMBEDDING, HEAD) else whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.decoder.hf_parameters())

    def __len__(self) -> int:
        return len(self.decoder.hf_parameters())


def check_split(shape: ModelShape, mesh: DeviceMesh) -> None:
    """Raise unless this grid can compute this shape."""
    if mesh.mesh_dim_names != ("dp", "tp"):
        raise ValueError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}; a decoder is split over "
            "('dp', 'tp'), in that order; either may be 1"
        )
    check_sizes(shape, *mesh.shape)


def check_sizes(shape: ModelShape, dp: int, tp: int) -> None:
    """Raise unless `tp` processes can split a layer of this shape, and `dp` groups of them its weights."""
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
        start, stop = part(rows, tp, tp - 1)
        if start == stop:
            raise UnsupportedModel(
                f"tp={tp} leaves a process without any of the {rows} rows of the vocabulary; use a "
                "smaller tp"
            )
        if rows % tp and shape.width % dp:
            raise UnsupportedModel(
                f"tp={tp} does not divide the {rows} rows of the vocabulary, nor dp={dp} the width "
                f"{shape.width}: one of the two must, or no checkpoint of it could be resumed; "
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
    """How a parameter is split over tp."""
    *_, module, kind = name.split(".")
    if module in BY_ROWS:
        return Shard(0)
    return Shard(1) if module in BY_COLUMNS and kind == "weight" else Replicate()


def over_tp(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    # no process has anything to send: there are no numbers yet
    return nn.Parameter(distribute_tensor(parameter, mesh["tp"], [placement], src_data_rank=None))


def _over_dp(parameter: nn.Parameter) -> Shard:
    """By rows; where tp could not divide them evenly by columns, see `check_split`.

    torch has no true name for rows that are split twice and unevenly: a checkpoint would put some
    of them in the wrong place.
    """
    split = cast(DTensor, parameter)
    by_rows = split.placements[0].is_shard(0)
    return Shard(1 if by_rows and len(split) % split.device_mesh.size() else 0)


def _get(module: nn.Module, name: str) -> Tensor:
    owner, _, kind = name.rpartition(".")
    return getattr(module.get_submodule(owner), kind)


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, kind = name.rpartition(".")
    setattr(module.get_submodule(owner), kind, parameter)


def spread(root: nn.Module, decoder: ShardedDecoder, exact: Sequence[nn.Module] = ()) -> None:
    """Split everything over dp, block by block, and give it memory; `exact` ones compute in fp32."""
    mesh, dtype = decoder.mesh["dp"], decoder.compute_dtype
    # the stream comes in as it is: on a GPU it is fp32, and a cast would round it in each block
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    waiting = CPUOffloadPolicy(pin_memory=decoder.device.type != "cpu") if decoder.offload else None
    for module in (*exact, *decoder.blocks, root):
        split = fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=_over_dp,
            mp_policy=plain if module in exact else policy,
            offload_policy=waiting or OffloadPolicy(),
        )
        split.set_gradient_divide_factor(1.0)  # a sum
        split.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing on the way
    root.register_forward_hook(_let_go)
    root.to_empty(device="cpu" if decoder.offload else decoder.device)
    decoder.held = decoder._find_parameters()


def _let_go(root: nn.Module, *_: object) -> None:
    """After a forward pass without gradients embedding and head are not kept for a backward pass.

    FSDP would use them as they are in the next forward pass, even if a step was taken meanwhile.
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
    """A decoder over the grid, filled tensor by tensor: no process ever holds more than one whole.

    Parameters are fp32; `dtype` is what it computes in. `offload` keeps them on the CPU between uses,
    `recompute` keeps no activations inside of blocks.
    """
    decoder = ShardedDecoder(shape, mesh, dtype, offload)
    decoder.recompute = recompute
    spread(decoder, decoder)
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
            rows = _drawn(shape) if rows is None else rows
            if tuple(rows.shape) != (shape.extra, shape.width):
                raise ModelFileError(
                    f"{ACTION_ROWS} is {list(rows.shape)}; the model's shape says "
                    f"{[shape.extra, shape.width]}"
                )
            _write(parameter, rows, shape.vocab_size)
    return decoder


def _drawn(shape: ModelShape) -> Tensor:
    """Rows of actions that start from no token, as `extra.extend` draws them."""
    generator = torch.Generator().manual_seed(SEED)
    bound = 1 / math.sqrt(shape.width)
    return torch.empty(shape.extra, shape.width).uniform_(-bound, bound, generator=generator)


def _write(parameter: Tensor, whole: Tensor, first: int = 0) -> None:
    """Put what is here of the rows from `first` on into this process's part."""
    rows, *columns = bounds(cast(DTensor, parameter))
    start, stop = max(rows.start, first), min(rows.stop, first + len(whole))
    if start < stop:
        here = local(parameter)[start - rows.start : stop - rows.start]
        here.copy_(whole[(slice(start - first, stop - first), *columns)])
