import pytest
import torch
import torch.nn.functional as F

from graft.models.functions import gather_rows, rms_norm, rotate, silu_gate


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


@pytest.mark.parametrize("weight_shape", [(16,), (3, 16)])
def test_rms_norm(weight_shape):
    torch.manual_seed(0)

    def plain(x, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w

    check(lambda x, w: rms_norm(x, w, 1e-5), plain, (random(5, 3, 16), random(*weight_shape)))


def test_rms_norm_of_a_non_contiguous_slice():
    torch.manual_seed(0)
    base = random(5, 7, 16)
    check(
        lambda x, w: rms_norm(x[:, 2:5], w, 1e-6),
        lambda x, w: F.rms_norm(x[:, 2:5], (16,), eps=1e-6) * w,
        (base, random(3, 16)),
    )


def test_rms_norm_in_bf16_sums_in_fp32():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    y = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, torch.ones_like(y))


def test_rotation_turns_pairs_and_its_gradient_turns_back():
    torch.manual_seed(0)
    angle = torch.rand(5, 1, 4) * 6
    cos, sin = angle.cos(), angle.sin()

    def plain(x):
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    check(lambda x: rotate(x, cos, sin), plain, (random(5, 3, 8),))
    quarter = rotate(torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    assert quarter.flatten().tolist() == [0.0, 1.0]


def test_silu_gate():
    torch.manual_seed(0)
    check(silu_gate, lambda x: F.silu(x[:, :6]) * x[:, 6:], (random(5, 12),))


def test_gathered_rows_add_their_gradients_up():
    torch.manual_seed(0)
    index = torch.tensor([2, 0, 2, 2])
    check(lambda x: gather_rows(x, index), lambda x: x[index], (random(4, 3, 2),))
