"""What is compared: one recipe, three ways to spend the same number of attempts.

Methods differ in the branch and, for AEPO, in credit and loss; everything else, the warmed-up policy
included, is the same. `cost` takes its steps with a learning rate of next to nothing, so that all
methods pose the same questions to the same policy.
"""

from __future__ import annotations

from benchmarks.methods import Suite

METHODS = ("grpo", "arpo", "aepo")


def own(tokens: int) -> dict[str, tuple[str, ...]]:
    """What a method changes in ARPO's recipe; entropy is measured over `tokens` tokens."""
    return {
        "grpo": ("rollout.branch=independent",),
        "aepo": ("algo.name=aepo", f"rollout.branch={{aepo: {{tokens: {tokens}}}}}"),
    }


WARM = dict.fromkeys((*METHODS, "arpo_hard"), "sft")

_WARM_UP = ("train.steps=0", "run.eval_tasks=0", "run.eval_every=0")
_GO_ON = ("model.shape={}", "sft.steps=0", "run.trackers=[]", "run.log_episodes=0")
_STILL = (
    "train.lr=1e-12",
    "train.warmup=0",
    "train.steps=6",
    "run.eval_tasks=0",
    "run.eval_every=0",
)
_SHARED = ("train.tokens_per_micro=8192", "engine.kv_tokens=160000")  # several share a GPU

SUITES: dict[str, Suite] = {
    "warm": Suite(("sft",), _WARM_UP, recipe="toy"),
    "toy": Suite(METHODS, _GO_ON, own(4), recipe="toy", after="warm", after_method=WARM),
    "cost": Suite(
        ("grpo", "arpo"), (*_GO_ON, *_STILL), own(4), recipe="toy", after="warm", after_method=WARM
    ),
    "smol-warm": Suite(("sft",), (*_WARM_UP, *_SHARED), recipe="hops", needs_model=True),
    "smol": Suite(
        METHODS, (*_GO_ON, *_SHARED), own(20), recipe="hops", after="smol-warm", after_method=WARM
    ),
    "smol-cost": Suite(
        ("grpo", "arpo"),
        (*_GO_ON, *_STILL, "rollout.tasks=32"),
        own(20),
        recipe="hops",
        after="smol-warm",
        after_method=WARM,
    ),
}
