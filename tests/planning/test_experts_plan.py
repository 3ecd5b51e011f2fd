"""The plan of a model with experts: all of them are stored, those of a token are computed."""

from __future__ import annotations

import pytest
import torch

from graft.config import load_config
from graft.models.shape import Experts, ModelShape
from graft.planning.step_time import (
    active_parameters,
    decode_step_bytes,
    forward_flops,
    learn_flops,
    optimizer_bytes,
    read_parameters,
)
from graft.train.memory.footprint import activation_bytes, num_parameters
from graft.train.memory.workload import Workload

A3B = ModelShape(
    family="qwen3_moe",
    vocab_size=151_936,
    width=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ff=6144,
    tied=False,
    experts=Experts(128, 8, 768, renormalise=True),
)
"""Qwen3-30B-A3B."""

ATTENTION = 2048 * (2 * 32 * 128 + 2 * 4 * 128)  # 18,874,368: q and out, k and v
ROUTER = 2048 * 128
EXPERT = 3 * 2048 * 768  # 4,718,592
NORMS = 48 * (2 * 2048 + 2 * 128) + 2048
HEAD = 151_936 * 2048


def test_all_experts_are_stored() -> None:
    """30.5B, as its name says."""
    body = 48 * (ATTENTION + ROUTER + 128 * EXPERT) + NORMS
    assert num_parameters(A3B) == body + 2 * HEAD == 30_532_122_624
    assert optimizer_bytes(A3B, torch.bfloat16) == 34 * 30_532_122_624


def test_eight_experts_of_a_token_are_computed() -> None:
    """2.7B in the body, 3.35B with embedding and head."""
    active = 48 * (ATTENTION + ROUTER + 8 * EXPERT) + NORMS
    assert active_parameters(A3B) == active == 2_730_702_848
    assert A3B.num_active_params == active - NORMS + 2 * HEAD
    # one token without others: two operations a weight, and nothing to attend to
    assert forward_flops(A3B, 1.0, 0.0) == 2 * active


@pytest.mark.parametrize(("rows", "experts"), [(1, 8.0), (2, 15.5), (64, 128 * (1 - 0.9375**64))])
def test_a_step_reads_the_experts_that_its_rows_choose(rows: int, experts: float) -> None:
    """The second of two rows shares 8 * 8 / 128 = half an expert with the first."""
    rest = 48 * (ATTENTION + ROUTER) + NORMS
    assert read_parameters(A3B, rows) == pytest.approx(rest + 48 * experts * EXPERT, rel=1e-6)
    moved = decode_step_bytes(A3B, torch.bfloat16, rows, 0)
    logits = 2 * rows * 151_936 * 2
    assert moved == pytest.approx(2 * (read_parameters(A3B, rows) + HEAD) + logits)


def test_a_token_keeps_the_rows_of_its_experts() -> None:
    """With kernels a block keeps the inputs of two norms, q|k|v, attention's output, gate|up of 8 experts,
    and for each of them 4 rows of the width."""
    work = Workload(groups=1, samples=1, prompt=1, sampled=1)
    tokens = 1000
    both, one = (activation_bytes(A3B, torch.bfloat16, n, work, fused=True) for n in (2000, tokens))
    heads = 2 * 4096 + 2 * 512
    block = 2 * (2 * 2048 + 2 * 8 * 768 + heads + 4 * 8 * 2048) + 4 * (2 + 36 + 32)
    ends = 2 * (3 * 2048 + 128)
    space = 2 * (max(4 * 8 * 768, 3 * 4096 + 4 * 512 + 4096 + 1024) + 2 * 2048)
    assert both - one == tokens * (48 * block + ends + space)


def test_counting_for_the_balance_is_a_pass() -> None:
    work = Workload(groups=1, samples=1, prompt=1, sampled=1)
    plain = load_config("quickstart", [])
    counted = load_config("quickstart", ["train.router_balance=0.001"])
    more = learn_flops(counted, A3B, work, False) - learn_flops(plain, A3B, work, False)
    assert more == pytest.approx(plain.train.epochs * 2 * 2 * active_parameters(A3B), rel=1e-3)
