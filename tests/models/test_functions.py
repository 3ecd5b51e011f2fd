from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F

from graft.models.angles import Angles, HeadRotation
from graft.models.decoder import Decoder, causal
from graft.models.ops import (
    add_norm,
    clamped_gate,
    elementwise,
    gate_product,
    gather_rows,
    qk_rotate,
)
from graft.models.shape import ModelShape


def check(mine, theirs, inputs):
    """Values and gradients of two functions of the same inputs."""
    a, b = mine(*inputs), theirs(*inputs)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(a)
    got = torch.autograd.grad((a * weight).sum(), inputs)
    want = torch.autograd.grad((b * weight).sum(), inputs)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def random(*shape):
    return torch.randn(*shape, requires_grad=True)


def plain_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def test_rms_norm():
    torch.manual_seed(0)
    check(lambda x, w: add_norm(x, None, w, 1e-5)[1], plain_norm, (random(5, 3, 16), random(16)))


def test_rms_norm_of_a_non_contiguous_slice():
    torch.manual_seed(0)
    check(
        lambda x, w: add_norm(x[:, 2:5], None, w, 1e-6)[1],
        lambda x, w: F.rms_norm(x[:, 2:5], (16,), eps=1e-6) * w,
        (random(5, 7, 16), random(16)),
    )


def test_the_norm_of_a_sum_and_the_sum_itself():
    torch.manual_seed(0)
    check(
        lambda x, delta, w: torch.cat(add_norm(x, delta, w, 1e-5)),
        lambda x, delta, w: torch.cat([x + delta, plain_norm(x + delta, w)]),
        (random(5, 16), random(5, 16), random(16)),
    )
    x = random(5, 16)
    assert add_norm(x, None, torch.ones(16), 1e-5)[0] is x


def test_rms_norm_in_bf16_sums_in_fp32():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    y = add_norm(x, None, torch.ones(4096, dtype=torch.bfloat16), 1e-6)[1]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, torch.ones_like(y))


@pytest.mark.parametrize("is_normed", [True, False])
def test_queries_and_keys_are_normed_and_turned_and_values_are_not(is_normed):
    torch.manual_seed(0)
    angle = torch.rand(5, 4) * 6
    cos, sin = angle.cos(), angle.sin()

    def mine(qkv, q_weight, k_weight):
        weights = (q_weight, k_weight) if is_normed else (None, None)
        return torch.cat(qk_rotate(qkv, HeadRotation(*weights, 1e-5, cos, sin, 4, 2)), 1)

    def plain(qkv, q_weight, k_weight):
        q, k, v = qkv.view(5, 8, 8).split([4, 2, 2], 1)
        turned = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            x = plain_norm(x, weight) if is_normed else x
            left, right = x.chunk(2, -1)
            c, s = cos[:, None], sin[:, None]
            turned.append(torch.cat([left * c - right * s, right * c + left * s], -1))
        return torch.cat([*turned, v], 1) + 0 * (q_weight + k_weight)

    def with_weights(qkv, q_weight, k_weight):
        return mine(qkv, q_weight, k_weight) + 0 * (q_weight + k_weight)

    check(with_weights, plain, (random(5, 64), random(8), random(8)))


def test_a_quarter_turn():
    qkv = torch.tensor([[1.0, 0.0, 0.0, 1.0, 5.0, 6.0]])  # one head each of q, k and v
    how = HeadRotation(None, None, 1e-6, torch.zeros(1, 1), torch.ones(1, 1), 1, 1)
    q, k, v = qk_rotate(qkv, how)
    assert q.flatten().tolist() == [0.0, 1.0]
    assert k.flatten().tolist() == [-1.0, 0.0]
    assert v.flatten().tolist() == [5.0, 6.0]


gelu_gate = partial(gate_product, activation="gelu_tanh")


def test_silu_gate():
    torch.manual_seed(0)
    check(gate_product, lambda x: F.silu(x[:, :6]) * x[:, 6:], (random(5, 12),))


def test_gelu_gate():
    torch.manual_seed(0)
    gelu = partial(F.gelu, approximate="tanh")
    check(gelu_gate, lambda x: gelu(x[:, :6]) * x[:, 6:], (random(5, 12),))


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def cuts(count, most=100_000):
    """Parts of `count`: small ones, ones that a thread takes alone, and ones that threads share."""
    rng = Random(0)
    for _ in range(40):
        size = rng.randint(1, min(count, rng.choice([300, most // 3, most])))
        start = rng.randint(0, count - size)
        yield slice(start, start + size)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "function", [torch.sigmoid, F.silu, F.softplus, partial(F.gelu, approximate="tanh")]
)
def test_a_number_has_the_same_bits_at_every_place(function):
    torch.manual_seed(0)
    x = torch.randn(100_001, 2) * 3
    strided, whole = x[:, 0], elementwise(function, x[:, 0].clone())
    for part in cuts(len(x)):
        assert torch.equal(elementwise(function, strided[part]), whole[part])
        assert torch.equal(elementwise(function, strided[part].clone()), whole[part])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 20, 50, 96, 128])
@pytest.mark.parametrize(
    "gate", [gate_product, gelu_gate, partial(clamped_gate, alpha=1.7, limit=7.0)]
)
def test_a_gated_row_has_the_same_bits_beside_any_others(gate, width):
    torch.manual_seed(0)
    x = torch.randn(100_001 // width, 2 * width) * 3
    whole = gate(x)
    for part in cuts(len(x), len(x)):
        assert torch.equal(gate(x[part]), whole[part])


def test_gathered_rows_add_their_gradients_up():
    torch.manual_seed(0)
    index = torch.tensor([2, 0, 2, 2])
    check(lambda x: gather_rows(x, index), lambda x: x[index], (random(4, 3, 2),))


def test_angles_read_from_the_table_are_the_computed_ones():
    shape = ModelShape(head_dim=8, rope_scaling={"rope_type": "linear", "factor": 2.0})
    angles = Angles(shape)
    positions = torch.tensor([7, 0, 60_000, 7])
    for table, computed in zip(angles.look_up(positions), angles.compute(positions), strict=True):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table, computed, atol=0, rtol=0)


def test_angles_do_not_depend_on_the_dtype_of_the_weights():
    decoder = Decoder(ModelShape(width=8, heads=1, kv_heads=1, head_dim=8, ff=8, layers=1))
    positions = torch.arange(4)
    before = decoder.angles.look_up(positions)
    decoder.to(torch.bfloat16)
    assert decoder.angles.look_up(positions)[0].dtype == torch.float32
    assert torch.equal(decoder.angles.look_up(positions)[1], before[1])
    assert decoder.rope(positions)[0].dtype == torch.bfloat16  # without kernels, as the weights
    assert not any("angles" in name for name in decoder.state_dict())


@pytest.mark.parametrize("biased", [True, False])
def test_a_decoder_that_drops_activations_computes_them_again(biased):
    """The same gradients with and without activation checkpointing, in both ways to add."""
    shape = ModelShape(
        width=16, heads=2, kv_heads=1, head_dim=8, ff=24, layers=2, out_bias=biased, mlp_bias=biased
    )
    decoder = Decoder(shape).initialise(0)
    tokens, positions = torch.arange(6), torch.arange(6)
    grads = []
    for decoder.recompute in (False, True):
        loss = decoder(tokens, positions, causal).square().sum()
        grads.append(torch.autograd.grad(loss, list(decoder.parameters())))
    for kept, again in zip(*grads, strict=True):
        torch.testing.assert_close(kept, again, atol=0, rtol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_rows_of_the_last_block_are_those_of_all_rows_with_their_gradients(recompute):
    size = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 24}
    shape = ModelShape(family="qwen3", vocab_size=9, **size)
    decoder, rows = Decoder(shape).initialise(0), torch.tensor([3, 1, 3])  # 3 is read twice
    decoder.recompute = recompute
    tokens, positions = torch.tensor([1, 5, 2, 7, 0]), torch.arange(5)
    weights = [*decoder.parameters()]
    some = decoder(tokens, positions, causal, rows=rows)
    whole = decoder(tokens, positions, causal)[rows]
    torch.testing.assert_close(some, whole, atol=1e-6, rtol=0)
    factor = torch.randn(some.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((some * factor).sum(), weights)
    want = torch.autograd.grad((whole * factor).sum(), weights)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
