"""Rows with the same index are added from first to last."""

from __future__ import annotations

import torch

from graft.row_sums import add_rows


def test_rows_are_added_in_their_order() -> None:
    """In float32 1e8 + 1 - 1e8 is 0 in this order, and 1 in another."""
    rows = torch.tensor([[1e8], [7.0], [1.0], [-1e8]])
    total = add_rows(torch.zeros(2, 1), torch.tensor([0, 1, 0, 0]), rows)
    assert total.tolist() == [[0.0], [7.0]]


def test_gradients_go_through() -> None:
    rows = torch.arange(3.0, requires_grad=True)
    total = add_rows(torch.zeros(2), torch.tensor([1, 0, 1]), rows)
    (total * torch.tensor([2.0, 3.0])).sum().backward()
    assert rows.grad is not None and rows.grad.tolist() == [3.0, 2.0, 3.0]
