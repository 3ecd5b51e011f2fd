"""The shapes that benchmarks run, with random weights: speed does not depend on what was learned."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.fleet import hardware as fleet
from graft.models.decoder import Decoder
from graft.models.order_probe import find_order
from graft.models.shape import ModelShape

SHAPES = {
    **{
        name: fleet.SHAPES[name]
        for name in ("0.5B", "0.6B", "1.5B", "1.7B", "3B", "4B", "7B", "8B", "135M")
    },
    "small": ModelShape(  # the quickstart's, with a larger vocabulary
        vocab_size=4096, width=192, layers=3, heads=6, kv_heads=6, head_dim=32, ff=384
    ),
    "tiny": ModelShape(  # to try the benchmark itself, on a CPU
        vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ff=128
    ),
}


def kv_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_size * dtype.itemsize


def activation_bytes(shape: ModelShape) -> int:
    """About what a training step keeps per token in bf16: rows of norms, q|k|v, heads' outputs, gate|up."""
    block = 2 * shape.width + 2 * shape.q_size + 2 * shape.kv_size + 2 * shape.ff
    return 2 * shape.layers * block


@torch.no_grad()
def random_decoder(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Decoder:
    """As `Decoder.initialise`, but drawn where the weights live: 4B normals take a CPU a minute. It
    computes as with `model.exact`, the default."""
    with torch.device(device):
        decoder = Decoder(shape).to(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, module in decoder.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        scale = 1 / math.sqrt(module.weight.shape[1])
        if name.endswith((".out", ".down")):
            scale /= math.sqrt(2 * shape.layers)
        module.weight.normal_(0.0, scale, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
    decoder.use_order(find_order(decoder))
    return decoder
