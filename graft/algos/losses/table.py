"""The losses by name."""

from __future__ import annotations

from graft.algos.distillation import distillation, sampled_kl
from graft.algos.losses.clipped import balanced_clip, cispo, clip, dppo, sapo
from graft.algos.losses.covariance import clip_cov, kl_cov
from graft.algos.losses.plain import dro, reinforce, sft
from graft.algos.losses.rows import gmpo, gspo, luspo, vespo
from graft.plugins import Table

LOSSES = Table(
    "graft.losses",
    {
        "reinforce": reinforce,
        "dro": dro,
        "clip": clip,
        "balanced_clip": balanced_clip,
        "cispo": cispo,
        "sapo": sapo,
        "dppo": dppo,
        "gspo": gspo,
        "luspo": luspo,
        "gmpo": gmpo,
        "vespo": vespo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "sft": sft,
        "sampled_kl": sampled_kl,
        "distillation": distillation,
    },
)
