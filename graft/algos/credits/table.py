"""Every credit by its name."""

from __future__ import annotations

from graft.algos.credits.baselines import RoleBaseline, remax
from graft.algos.credits.best_of_k import grpo_passk, pass_at_k
from graft.algos.credits.critic import gae, gae_returns
from graft.algos.credits.groups import cpo, dr_grpo, gpg, grpo, maxrl, opo, rloo
from graft.algos.credits.parts import gdpo
from graft.algos.credits.returns import discounted, reinforce
from graft.algos.credits.scaling import entropy_aware, rebn, whiten
from graft.algos.credits.states import gigpo
from graft.algos.credits.token_baseline import optimal_token_baseline
from graft.algos.credits.trees import share_over_spans, treerpo
from graft.algos.distillation import teacher_kl
from graft.plugins import Table

CREDITS = Table(
    "graft.credits",
    {
        # from the rewards of the batch; what came before is ignored
        "reinforce": reinforce,
        "discounted": discounted,
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "opo": opo,
        "gpg": gpg,
        "maxrl": maxrl,
        "grpo_passk": grpo_passk,
        "pass_at_k": pass_at_k,
        "gdpo": gdpo,
        "gigpo": gigpo,
        "remax": remax,
        "rae": RoleBaseline,
        "cpo": cpo,
        "treerpo": treerpo,
        "optimal_token_baseline": optimal_token_baseline,
        "gae": gae,
        "gae_returns": gae_returns,
        # a change of what came before
        "rebn": rebn,
        "whiten": whiten,
        "share_over_spans": share_over_spans,
        "entropy_aware": entropy_aware,
        "teacher_kl": teacher_kl,
    },
)

FROM_ADVANTAGES = ("rebn", "whiten", "share_over_spans", "entropy_aware", "teacher_kl")
"""Those that change what came before; the others compute advantages from rewards and ignore it."""
