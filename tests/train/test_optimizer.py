"""AdamW's steps are those of torch's own class, bit by bit."""

from __future__ import annotations

import torch

from graft.train.optimizer import AdamW


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(7, 5), torch.randn(5), torch.randn(3, 4).T, torch.randn(2, 2)]
    theirs = [tensor.clone().requires_grad_() for tensor in ours]
    adam = AdamW(ours, 0.1, (0.9, 0.95))
    groups = [
        {"params": [t for t in theirs if t.ndim == 2], "weight_decay": 0.1},
        {"params": [t for t in theirs if t.ndim == 1], "weight_decay": 0.0},
    ]
    want = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for number in range(4):
        for one, other in zip(ours, theirs, strict=True):
            # the last has its first gradient late, and none in the end
            is_idle = one is ours[-1] and number in (0, 3)
            grad = torch.randn_like(one)
            one.grad, other.grad = (None, None) if is_idle else (grad, grad.clone())
        adam.step(0.01 * (number + 1))
        for group in want.param_groups:
            group["lr"] = 0.01 * (number + 1)
        want.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            if state := want.state[other]:
                for name, tensor in adam.moments(one)._asdict().items():
                    assert torch.equal(tensor, state[name])
    assert [int(adam.moments(one).step) for one in ours] == [4, 4, 4, 2]
