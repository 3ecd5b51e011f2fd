"""GEM's and EARL's claims about tools: whether they help, how they are called, what they lead to."""

from __future__ import annotations

from benchmarks.evidence.claim import Arm, Claim, small_model
from benchmarks.evidence.tasks import letters, shelf

TOOLS = Claim(
    name="tools",
    title="Tools help",
    source="GEM",
    recipe="quickstart",
    settings=(
        "task.env=benchmarks.evidence.tasks.sums:Sums",
        "task.args={operands: [2, 2], digits: [1, 1], operators: +-*}",
    ),
    warm_up=(*small_model("", 96), "sft.steps=300", "sft.stop_at=1", "sft.batch=32"),
    rl=("train.lr=1e-3", "train.warmup=0"),
    arms=(
        Arm("with the tool", ("task.args.tool=true",), ("sft.demo_args={tool_rate: 0.5}",)),
        Arm("without", ("task.args.tool=false",), ("sft.demo_args={tool_rate: 0.5}",)),
        Arm(
            "without, answers alone before",
            ("task.args.tool=false",),
            ("sft.demo_args={tool_rate: 0.0}",),
        ),
    ),
    tokens=20_000,
    tasks=300,
    refuted_by="an arm without the tool as high as the one with it, in any seed",
    verdict=(
        "Holds for sums that were not trained on, in every seed: 0.92 with the tool, 0.06 and 0.20 without. "
        "Without it the sums of training are memorised (reward 0.89 to 0.94 at the end of training, after "
        "a warm-up on answers alone), which says little about others. The held-out sums are few: the 300 "
        "attempts are made at 23 sums."
    ),
    scale=(
        "two numbers up to 9 and one of + - *, 220 sums to train on and 23 held out, in single characters; a "
        "model of 2 layers and width 64 from random weights, after 300 steps of SFT on right answers, half "
        "of them by the calculator"
    ),
)

NAMES = Claim(
    name="names",
    title="Expanded actions and counterfactual credit learn rare calls of tools with long names sooner",
    source="EARL",
    recipe="expa/toy-earl",
    settings=("task.env=benchmarks.evidence.tasks.shelf:Shelf", "task.args={}"),
    warm_up=(
        *(*small_model("", 64), "sft.steps=300", "sft.batch=32", "algo.name=earl_grpo"),
        "sft.demo_args={tool_rate: 0.05}",
    ),
    rl=("rollout.tasks=32", "rollout.samples=4", "train.lr=1e-3", "train.warmup=0"),
    arms=(
        Arm(
            "actions, CPO",
            ("algo.name=cpo",),
            _ACTIONS := ("task.args.syntax=actions", f"actions.file={shelf.ACTION_FILE}"),
        ),
        Arm("actions, GRPO", ("algo.name=earl_grpo",), _ACTIONS),
        Arm("tags, GRPO", ("algo.name=earl_grpo",), ("task.args.syntax=tags", "actions.file=")),
    ),
    tokens=60_000,
    tasks=300,
    refuted_by="tags with GRPO as high as actions; actions with GRPO as high as with CPO",
    columns=(("malformed calls", "tools/failure_frequency"),),
    scale=(
        "five tools with names of 4 to 8 characters and nested arguments, in single characters; a model of 2 "
        "layers and width 64 from random weights, after 300 steps of SFT on examples of which 5% call"
    ),
)

SORT = Claim(
    name="sort",
    title="Sorting by comparing is found by RL",
    source="EARL",
    recipe="expa/toy-earl",
    settings=(
        "task.env=benchmarks.evidence.tasks.letters:LetterSort",
        "task.args={count: 3}",
        f"actions.file={letters.ACTION_FILE}",
    ),
    warm_up=(*small_model("", 160), "sft.steps=80", "sft.batch=32", "sft.demo_args={}"),
    rl=(
        *("rollout.tasks=16", "rollout.samples=8", "train.lr=1e-3", "train.warmup=0"),
        *("rollout.max_turns=12", "rollout.max_context=144"),
    ),
    arms=(
        Arm("CPO", ("algo.name=cpo",)),
        Arm("GRPO", ("algo.name=earl_grpo",)),
    ),
    tokens=80_000,
    tasks=300,
    reward="benchmarks.evidence.tasks.letters:is_sorted",
    refuted_by=(
        "a share of sorted items no higher than luck allows, 1 in 6; GRPO as high as CPO in any seed"
    ),
    verdict=(
        "Does not, at this scale: 0.15 to 0.18 of the items end sorted, which is luck, with either credit, "
        "after 21 to 27 steps. Attempts go on to their limit of turns, with mostly compares or mostly swaps."
    ),
    columns=(("compares", "tools/compare/calls"), ("swaps", "tools/swap/calls")),
    scale=(
        "three hidden items, in single characters; a model of 2 layers and width 64 from random weights, "
        "after 80 steps of SFT on compares and swaps of random pairs; the reward is EARL's, the score the "
        "share of sorted items"
    ),
)

CLAIMS = (TOOLS, NAMES, SORT)
