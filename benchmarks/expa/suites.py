"""What is compared: recipes of `recipes/expa`, and what a small model changes in them.

The toy runs from random weights on a CPU; `rare` goes on from its warm-up with examples that never
call, until the policy has all but forgotten to, and only then begins RL. The others train
SmolLM2-135M-Instruct on one GPU; such a model hardly ever writes a tag, so every method first imitates
the same number of examples in its own format: mostly plain text, a few with calls. SFT+GRPO imitates
gold calls alone.
"""

from __future__ import annotations

from benchmarks.methods import Suite

EARL = ("earl", "prompt-grpo", "prompt-cpo", "sft-grpo")

_SMALL = (
    "run.save_every=0", "run.eval_every=10", "run.eval_tasks=256", "run.log_episodes=0",
    "run.keep_last=1", "run.trackers=[]", "rollout.tasks=64", "rollout.samples=8",
    "train.minibatches=1", "train.lr=1e-5", "train.warmup=5", "sft.steps=120", "sft.batch=64",
    "sft.lr=1e-4", "sft.warmup=20",
    "train.tokens_per_micro=8192", "engine.kv_tokens=160000",  # several share a GPU
)  # fmt: skip


_DEMOS = dict.fromkeys(EARL, ("sft.demo_args={tool_rate: 0.02}",))
_GOLD = {"sft-grpo": ("sft.demo_args={tool_rate: 1.0}",)}
_TRIES = dict.fromkeys(EARL, ("sft.demo_args={tool_rate: 0.1, tries: 3}",))
_GOLD_TRIES = {"sft-grpo": ("sft.demo_args={tool_rate: 1.0, tries: 3}",)}
_SORTING = ("earl", "prompt-cpo")

SUITES: dict[str, Suite] = {
    "toy": Suite(("earl", "earl-grpo", "prompt-grpo", "prompt-cpo")),
    "warm": Suite(
        ("earl", "prompt-grpo"),
        ("train.steps=0", "run.eval_tasks=0", "run.eval_every=0"),
        recipe="toy-{method}",
    ),
    "rare": Suite(
        ("earl", "earl-grpo", "prompt-grpo", "prompt-cpo"),
        (
            "model.shape={}", "sft.steps=40", "sft.lr=1e-3", "sft.warmup=5",
            "sft.demo_args={tool_rate: 0.0}",
        ),
        recipe="toy-{method}",
        after="warm",
        after_method={"earl-grpo": "earl", "prompt-cpo": "prompt-grpo"},
    ),
    "arithmetic": Suite(
        EARL,
        (
            *_SMALL, "task.env=earl:arithmetic-digit", "task.args.digits=3",
            "task.args.operations=2", "task.eval_args={split: test, digits: 3, operations: 2}",
            "rollout.max_tokens=96", "rollout.max_context=448", "train.steps=50",
        ),
        {**_DEMOS, **_GOLD},
        needs_model=True,
    ),
    "countdown": Suite(
        EARL,
        (
            *_SMALL, "task.env=earl:countdown-0", "task.args.digits=1", "task.args.operations=2",
            "task.eval_args={split: test, digits: 1, operations: 2}",
            "rollout.max_tokens=160", "rollout.max_context=576", "rollout.tasks=48",
            # the teacher answers without closing <think>
            "train.steps=40", 'task.prefill="Let me solve this step by step.\\n"',
        ),
        {**_TRIES, **_GOLD_TRIES},
        needs_model=True,
    ),
    "order": Suite(
        _SORTING,
        (
            *_SMALL, "rollout.max_tokens=64", "rollout.max_context=512", "train.steps=15",
            "run.eval_tasks=128", "run.eval_every=15", "sft.steps=150", "rollout.branch=",
        ),
        needs_model=True,
    ),
    "sort": Suite(
        _SORTING,
        (
            *_SMALL, "task.env=earl:sort-4", "task.args.held_out=false", "rollout.max_tokens=64",
            "rollout.max_context=640", "rollout.tasks=48", "train.steps=30",
            "run.eval_tasks=96", "run.eval_every=15", "sft.steps=400", "sft.lr=3e-4",
        ),
        after="order",
    ),
}  # fmt: skip
