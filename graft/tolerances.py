"""How far apart two computations of the same log-probs may be, by the dtype of the weights.

Measured between graft's own engine and learner (see docs/performance.md, "The log-prob gap"): float32
1e-6 on average, 1e-5 at most; bfloat16 on a GPU 7e-3 on average, 5e-2 at most, and 1.6e-2 on average
with the real weights that round worst. A limit lies above what rounding does and below what a wrong
temperature, other weights or a missing adapter do, which is 0.1 and more.

    tolerances("bfloat16").mean_gap        0.05
    tolerances(learner.policy.dtype)       a torch dtype is known by its name
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerances:
    mean_gap: float
    """Mean |engine - learner| over sampled tokens: alarms, and the check before the first step.
    100 times the rounding of float32, 3 times that of bfloat16 with real weights."""
    max_gap: float
    """The largest such gap of one token: 10 and 20 times the mean's limit, since one unlikely token
    of a small probability is enough."""
    probe_gap: float
    """The same mean over 48 random tokens before training; they are unlikely, so they round worse."""
    transformers_gap: float
    """Mean gap between a packed tree and separate sequences in a model of transformers: the same
    weights in the same library, so it is the rounding of other shapes alone."""
    relative: float
    """Relative difference of metrics and tensors in a replay on another machine: rounding after the
    sums of a whole step."""
    micro: float
    """Relative difference of loss and gradient norm between two ways of cutting a batch."""


TOLERANCES = {
    "float32": Tolerances(
        mean_gap=1e-3,
        max_gap=1e-2,
        probe_gap=1e-3,
        transformers_gap=1e-4,
        relative=1e-4,
        micro=1e-3,
    ),
    "bfloat16": Tolerances(
        mean_gap=5e-2,
        max_gap=1.0,
        probe_gap=0.1,
        transformers_gap=5e-2,
        relative=2e-2,
        micro=5e-2,
    ),
    # stored weights alone: nothing is trained in it. Its mantissa has three bits more than bfloat16's
    "float16": Tolerances(
        mean_gap=5e-2,
        max_gap=1.0,
        probe_gap=0.1,
        transformers_gap=1e-2,
        relative=2e-2,
        micro=5e-2,
    ),
}


def tolerances(dtype: object) -> Tolerances:
    """Those of a dtype, by its name or torch's own object; bfloat16's for a dtype not listed."""
    return TOLERANCES.get(str(dtype).removeprefix("torch."), TOLERANCES["bfloat16"])
