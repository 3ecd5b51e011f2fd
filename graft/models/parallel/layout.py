"""The parameters of a sharded decoder: their names, how each is split over tp, and which sizes can be split.

model.layers.0.self_attn.q_proj.weight   blocks.0.q_proj.weight      by rows
model.layers.0.mlp.down_proj.weight      blocks.0.down_proj.weight   by columns
model.layers.0.mlp.gate.weight           blocks.0.mlp.gate.weight    whole in each process: a router
model.norm.weight                        norm.weight                 whole in each process
"""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from graft.models.io.tensor_names import EXPERT_NAMES, OWN_NAMES
from graft.models.parallel.joined_block import attribute_of
from graft.models.parallel.shards import shard_range
from graft.models.shape import ModelShape, UnsupportedModel

BY_ROWS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")
OUR_NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "model.embedding_norm": "norm",
    "backbone.embeddings": "embed",
    "backbone.norm_f": "norm",
    "lm_head": "head",
}
"""Names of modules in a checkpoint -> ours, where they differ."""
COMPUTED = {
    *("family", "vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ff", "tied"),
    *("qk_norm", "qkv_bias", "out_bias", "mlp_bias", "norm_eps", "max_positions", "rope_theta"),
    *("rope_scaling", "rotary_share", "local_theta", "query_scale", "experts", "dense_layers"),
    *("windows", "activation", "norm_offset", "sandwich", "scales_embedding"),
    *("extra", "extra_bias"),
}
"""Fields of a shape whose layers can be split over tp; another one has its default there."""


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
    if tp > 1 and (parts := not_over_tp(shape)):
        raise UnsupportedModel(
            f"layers of a {shape.family} model ({', '.join(parts)}) cannot be split by tensor "
            "parallelism; leave parallel.tp and engine.tp at 1: parallel.shard (FSDP2) splits them"
        )
    sizes = {"heads": shape.heads, "KV heads": shape.kv_heads, "MLP columns": shape.ff}
    if shape.experts is not None:
        sizes["columns of an expert"] = shape.experts.ff
        if shape.experts.shared_ff:
            sizes["columns of the shared expert"] = shape.experts.shared_ff
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


def not_over_tp(shape: ModelShape) -> list[str]:
    """What of a shape no layer of `parallel.block` computes: FSDP2 alone can split such a model."""
    plain = ModelShape()
    others = [name for name in ModelShape.__dataclass_fields__ if name not in COMPUTED]
    parts = [name for name in others if getattr(shape, name) != getattr(plain, name)]
    if shape.family in OWN_NAMES:
        return [*parts, "names of their tensors"]
    return [*parts, "experts in one tensor"] if shape.family in EXPERT_NAMES else parts


def our_name(name: str, is_joined: bool = False) -> str:
    """The parameter of a ShardedDecoder, perhaps of joined blocks, that has this name in a checkpoint."""
    if is_joined and name.startswith(("model.layers.", "backbone.layers.")):
        _, _, index, tensor = name.split(".", 3)
        return f"blocks.{index}.{attribute_of(tensor)}"
    module, kind = name.rsplit(".", 1)
    if module in OUR_NAMES:
        return f"{OUR_NAMES[module]}.{kind}"
    _, _, index, part, *inside = module.split(".")  # model.layers.0.self_attn.q_proj
    if part == "mlp" and (len(inside) > 1 or inside == ["gate"]):  # a part of experts
        path = ".".join(["mlp", *inside]).replace("mlp.experts", "mlp.all_experts")
        return f"blocks.{index}.{path}.{kind}"
    return f"blocks.{index}.{inside[-1] if inside else part}.{kind}"


def placement_of(name: str) -> Placement:
    """How a parameter is sharded over tp."""
    *_, module, kind = name.split(".")
    if module in BY_ROWS:
        return Shard(0)
    return Shard(1) if module in BY_COLUMNS and kind == "weight" else Replicate()
