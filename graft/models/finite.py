"""Tensors that a model or an optimizer cannot compute with: NaN, inf, and second moments below 0.

One reduction per tensor where it lies, and one transfer for all of them. Of a tensor that is split only
this process's part is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from graft.models.parallel.shards import is_sharded, local

SECOND_MOMENT = "exp_avg_sq"
"""In the names of AdamW's second moments, which are means of squares."""


@torch.no_grad()
def find_unusable(tensors: Mapping[str, Tensor]) -> str:
    """The first of these that cannot be computed with, and why; "": all can.

    >>> find_unusable({"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])})
    'b holds NaN'
    """
    parts = {name: local(one) if is_sharded(one) else one for name, one in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.numel()}
    by_device: dict[torch.device, list[str]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.device, []).append(name)
    bounds: dict[str, list[float]] = {}
    for names in by_device.values():
        # minimum and maximum of a tensor with a NaN are NaN
        extremes = [torch.stack(torch.aminmax(parts[name].detach())).float() for name in names]
        bounds |= dict(zip(names, torch.stack(extremes).tolist(), strict=True))
    for name in parts:
        least, most = bounds[name]
        if not (math.isfinite(least) and math.isfinite(most)):
            return f"{name} holds {'NaN' if math.isnan(least) else 'inf'}"
        if least < 0 and SECOND_MOMENT in name:
            return f"{name} holds {least:g}, and a mean of squares is never negative"
    return ""
