"""Models of several families in kernels and without: log-probs and the gradient of every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graft.models.decoder import Decoder
from graft.models.shape import Experts, ModelShape
from graft.models.tree.attention import attention_over
from graft.models.tree.packing import TokenRun

pytest.importorskip("triton")

RUNS = [TokenRun(0, 9, []), TokenRun(9, 14, [(0, 9)]), TokenRun(14, 18, [(0, 9)])]
ENDS = torch.tensor([18] * 9 + [14] * 5 + [18] * 4)
POSITIONS = torch.tensor([*range(9), *range(9, 14), *range(9, 13)])

FAMILIES: dict[str, dict[str, Any]] = {
    "windows": {"family": "mistral", "qk_norm": False, "windows": (4, 4)},
    "partly rotated": {"family": "llama", "qk_norm": False, "rotary_share": 0.25},
    "gemma": {
        "family": "gemma3_text",
        "windows": (5, 0),
        "local_theta": 100.0,
        "query_scale": 0.7,
        "activation": "gelu_tanh",
        "norm_offset": True,
        "sandwich": True,
        "scales_embedding": True,
    },
    "olmoe": {"family": "olmoe", "joint_norm": True, "experts": Experts(4, 2, 24)},
    "granite": {
        "family": "granitemoe",
        "experts": Experts(4, 2, 24, renormalise=True),
        "qk_norm": False,
        "query_scale": 0.3,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logits_divisor": 6.0,
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "experts": Experts(4, 2, 24, renormalise=True, biased=True, swiglu_limit=0.5),
        "sinks": True,
        "windows": (5, 0),
        "qk_norm": False,
        "qkv_bias": True,
        "out_bias": True,
    },
}


def small(changes: dict[str, Any]) -> Decoder:
    sizes = {"vocab_size": 17, "width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 24}
    decoder = Decoder(ModelShape(**{**sizes, **changes})).initialise(0)
    torch.manual_seed(1)
    for name, weight in decoder.named_parameters():
        if "norm" in name or weight.ndim == 1:  # else an offset or a bias could be forgotten
            weight.data += 0.3 * torch.randn_like(weight)
    return decoder


def scored(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of a small forest, and the gradients of all weights."""
    device = decoder.device
    attend = attention_over(RUNS, ENDS, 2, 1, device, windows=decoder.shape.windows)
    tokens, positions = (POSITIONS * 5 % 17).to(device), POSITIONS.to(device)
    logits = decoder.logits(decoder(tokens, positions, attend))
    loss = (logits.log_softmax(-1) ** 2).mean()
    return [logits, *torch.autograd.grad(loss, [*decoder.parameters()])]


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_compute_what_plain_pytorch_does(
    name: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small(FAMILIES[name])
    want = scored(decoder)
    for module in ("ops", "decoder", "layers.experts", "tree.attention"):
        monkeypatch.setattr(f"graft.models.{module}.has_kernels", lambda _: True)
    for mine, other in zip(scored(decoder.to(kernel_device)), want, strict=True):
        torch.testing.assert_close(mine.cpu(), other, atol=2e-5, rtol=2e-4)
