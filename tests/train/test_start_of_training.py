"""What a first step of training imports: torch's compiler takes seconds of every process."""

from __future__ import annotations

import subprocess
import sys

import torch

from graft.train.optimizer import Optimizer, schedule

STEP = """
import sys, torch
from torch import nn
from graft.train.optimizer import Optimizer, schedule
layer = nn.Linear(3, 2)
optimizer = Optimizer([layer], lr=0.1, schedule=schedule("constant", 0, 1, 0.0))
layer(torch.ones(3)).sum().backward()
optimizer.step()
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_step_does_not_import_the_compiler():
    subprocess.run([sys.executable, "-c", STEP], check=True)


def test_it_is_the_step_of_torch_to_the_bit():
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 4), torch.nn.Linear(5, 4)
    theirs.load_state_dict(ours.state_dict())
    optimizer = Optimizer(
        [ours],
        lr=0.1,
        schedule=schedule("constant", 0, 1, 0.0),
        weight_decay=0.3,
        max_grad_norm=0.0,
    )
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.3},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for x in torch.randn(3, 5):
        ours(x).square().sum().backward()
        theirs(x).square().sum().backward()
        optimizer.step()
        adam.step()
        adam.zero_grad()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
