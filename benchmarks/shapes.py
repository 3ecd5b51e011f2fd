"""The shapes that benchmarks run, with random weights: speed does not depend on what was learned."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.fleet import hardware as fleet
from graft.models.decoder import Decoder
from graft.models.families.table import FAMILIES, make_shape
from graft.models.order_probe import find_order
from graft.models.recurrence import Recurrence
from graft.models.shape import Experts, ModelShape

SIZES = {
    "vocab_size": 8192, "width": 512, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "ff": 1024
}  # fmt: skip
EXPERTS = {"count": 16, "top_k": 4, "ff": 256}
PECULIARITIES: dict[str, dict[str, Any]] = {
    "mistral": {"windows": (300,) * 4},
    "ministral": {"windows": (300, 0, 300, 0)},
    "qwen2": {"qkv_bias": True},
    "glm4_moe": {
        "experts": {**EXPERTS, "shared_ff": 256, "scaling": 2.5, "groups": 2}, "dense_layers": (0,)
    },
    "olmoe": {"kv_heads": 8},
    "granitemoe": {
        "embedding_scale": 12.0, "residual_scale": 0.22, "query_scale": 0.125,
        "logits_divisor": 6.0,
    },
    "gpt_oss": {"windows": (128, 0, 128, 0)},
    "gemma3_text": {"windows": (300, 300, 300, 0)},
}  # fmt: skip
"""What a family has beside the common sizes, in a form in which it can go wrong."""


def small_shape(family: str) -> ModelShape:
    """Four layers of a family, to compare bits on."""
    experts = {"experts": EXPERTS} if FAMILIES[family].has_experts else {}
    return make_shape({"family": family, **SIZES, **experts, **PECULIARITIES.get(family, {})})


SHAPES = {
    **{
        name: fleet.SHAPES[name]
        for name in ("0.5B", "0.6B", "1.5B", "1.7B", "3B", "4B", "7B", "8B", "135M")
    },
    "30B-A3B": ModelShape(  # Qwen3's
        "qwen3_moe", 151_936, 2048, 48, 32, 4, 128, 6144, tied=False, rope_theta=1e6,
        max_positions=40_960, experts=Experts(128, top_k=8, ff=768, renormalise=True),
    ),
    "7B-A1B": ModelShape(  # OLMoE's sizes, with the layers of Qwen3
        "qwen3_moe", 50_304, 2048, 16, 16, 16, 128, 1024, tied=False,
        experts=Experts(64, top_k=8, ff=1024),
    ),
    "next-24": ModelShape(  # Qwen3-Next's layers, of which three of four carry a state
        "qwen3_next", 151_936, 2048, 24, 16, 2, 256, 512, tied=False, rope_theta=1e7, rotary_share=0.25,
        max_positions=40_960, experts=Experts(
            64, top_k=10, ff=512, renormalise=True, shared_ff=512, shared_gate=True
        ),
        recurrence=Recurrence("delta", 4, 16, 128, 32, 128, by_key_head=True),
        recurrent_layers=tuple(layer for layer in range(24) if (layer + 1) % 4),
        attention_gate=True, norm_offset=True,
    ),
    "270M": ModelShape(  # Gemma 3's: windows, heads of 256
        "gemma3_text", 262_144, 640, 18, 4, 1, 256, 2048, rope_theta=1e6, local_theta=1e4,
        max_positions=32_768, windows=(512, 512, 512, 512, 512, 0) * 3, activation="gelu_tanh",
        norm_offset=True, sandwich=True, scales_embedding=True,
    ),
    "small": ModelShape(  # the quickstart's, with a larger vocabulary
        vocab_size=4096, width=192, layers=3, heads=6, kv_heads=6, head_dim=32, ff=384
    ),
    "tiny": ModelShape(  # to try the benchmark itself, on a CPU
        vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ff=128
    ),
    "tiny-experts": ModelShape(
        "qwen3_moe", 512, 64, 2, 4, 2, 16, 128, experts=Experts(8, top_k=2, ff=32)
    ),
    **{f"small-{family}": small_shape(family) for family in FAMILIES},
}  # fmt: skip


def asked_kernels(decoder: Decoder) -> bool | None:
    """An engine's `kernels` argument: on a GPU it has to be asked for those of recurrent layers."""
    return True if decoder.shape.recurrence is not None and decoder.device.type == "cuda" else None


def activation_bytes(shape: ModelShape) -> int:
    """About what a training step keeps per token in bf16: rows of norms, q|k|v, heads' outputs, gate|up."""
    block = 2 * shape.width + 2 * shape.q_size + 2 * shape.kv_size + 2 * shape.ff
    return 2 * shape.layers * block


@torch.no_grad()
def random_decoder(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, seed: int = 0, kv: str = "model"
) -> Decoder:
    """A new model, which computes as with `model.exact`, the default; `kv` as `engine.kv`."""
    decoder = Decoder.empty(shape, dtype, device).initialise(seed)
    decoder.use_order(find_order(decoder))
    if kv == "fp8":
        decoder.round_kv()
    return decoder
