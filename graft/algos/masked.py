"""Sums over tokens under a mask and over entries of a segment. Empty ones give 0, never NaN.

N rows, T tokens, M entries in K segments (segment_M says which)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from graft.row_sums import add_rows


def keep(x_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """x where the mask is true, 0 elsewhere, whatever x is there.

    A product with the mask would turn -inf or NaN at a masked token into NaN; a choice does not,
    and its gradient there is exactly 0.
    """
    return torch.where(mask_NT, x_NT, torch.zeros((), dtype=x_NT.dtype, device=x_NT.device))


def masked_mean(x_NT: Tensor, mask_NT: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the unmasked entries, of all or along `dim`; 0 where there are none."""
    if dim is None:
        return keep(x_NT, mask_NT).sum() / mask_NT.sum().clamp(min=1)
    return keep(x_NT, mask_NT).sum(dim) / mask_NT.sum(dim).clamp(min=1)


def masked_whiten(x_NT: Tensor, mask_NT: Tensor, eps: float = 1e-6) -> Tensor:
    """(x - mean) / (std + eps) over the unmasked entries, population std; 0 elsewhere."""
    x_M = x_NT[mask_NT]
    white_NT = torch.zeros_like(x_NT)
    white_NT[mask_NT] = standardise(x_M, torch.zeros_like(x_M, dtype=torch.long), 1, eps)
    return white_NT


def segment_sum(x_M: Tensor, segment_M: Tensor, num_segments: int) -> Tensor:
    """[K]"""
    return add_rows(x_M.new_zeros(num_segments), segment_M, x_M)


def segment_count(segment_M: Tensor, num_segments: int) -> Tensor:
    """[K] long"""
    return torch.bincount(segment_M, minlength=num_segments)


def segment_mean(x_M: Tensor, segment_M: Tensor, num_segments: int) -> Tensor:
    """[K] means, 0 for an empty segment. Equal entries have exactly themselves as their mean.

    Measured from each segment's least entry, for that reason: the mean of three times 0.1 summed
    plainly is off by a rounding, and dividing by a std of that size makes advantages of the noise.
    """
    least_K = x_M.new_zeros(num_segments).scatter_reduce(
        0, segment_M, x_M, "amin", include_self=False
    )
    above_K = segment_sum(x_M - least_K[segment_M], segment_M, num_segments)
    return least_K + above_K / segment_count(segment_M, num_segments).clamp(min=1)


def segment_std(
    x_M: Tensor, segment_M: Tensor, num_segments: int, unbiased: bool = False
) -> Tensor:
    """[K] in two passes: mean first, then squares of the differences, so it is never negative."""
    centred_M = x_M - segment_mean(x_M, segment_M, num_segments)[segment_M]
    squares_K = segment_sum(centred_M.square(), segment_M, num_segments)
    count_K = segment_count(segment_M, num_segments) - int(unbiased)
    return (squares_K / count_K.clamp(min=1)).sqrt()


def first_of(segment_M: Tensor, num_segments: int) -> Tensor:
    """[K] the index of each segment's first entry. Segments 0 0 1: 0, 2"""
    index_M = torch.arange(segment_M.numel(), device=segment_M.device)
    start_K = index_M.new_zeros(num_segments)
    return start_K.scatter_reduce(0, segment_M, index_M, "amin", include_self=False)


def standardise(
    x_M: Tensor, segment_M: Tensor, num_segments: int, eps: float, unbiased: bool = False
) -> Tensor:
    """[M] each entry in stds from the mean of its segment."""
    mean_K = segment_mean(x_M, segment_M, num_segments)
    std_K = segment_std(x_M, segment_M, num_segments, unbiased)
    return (x_M - mean_K[segment_M]) / (std_K[segment_M] + eps)


def number(ids: Tensor) -> tuple[Tensor, int]:
    """Any ids as 0..K-1 in ascending order, and K. [7, 3, 7] -> [1, 0, 1], 2"""
    unique = cast("Callable[..., tuple[Tensor, Tensor]]", torch.unique)  # pyright: ignore
    distinct, numbers = unique(ids, return_inverse=True)
    return numbers, distinct.numel()
