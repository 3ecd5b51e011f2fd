"""Environments over datasets: mathematics, questions, logic; one turn each (programs: graft_envs).

Every id here is a dataset of the hub. `data=` takes your own file or folder instead, with the same
columns or with `question_key=`, `answer_key=`, `test_key=`:

    make("math:GSM8K", data="my.jsonl", question_key="q", answer_key="a")
"""

from __future__ import annotations

from typing import Any

from graft.envs.entry import EnvEntry

MATHS = "graft.envs.dataset.maths:MathEnv"
GEOMETRY = "graft.envs.dataset.geometry:GeometryEnv"
QUESTIONS = "graft.envs.dataset.questions:QuestionEnv"


def entry(build: str, hub: str, hub_split: str | None = None, **args: Any) -> EnvEntry:
    return EnvEntry(build, {"hub": hub, "hub_split": hub_split, **args}, needs=(f"data:{hub}",))


DATASETS: dict[str, EnvEntry] = {
    "math:ASDiv2K": entry(MATHS, "axon-rl/ASDIV-2k"),
    "math:GSM8K": entry(MATHS, "axon-rl/GSM-8k"),
    "math:Math12K": entry(MATHS, "axon-rl/MATH-12k"),
    "math:Math8K-3to5": entry(MATHS, "axon-rl/MATH-lvl3to5-8k"),
    "math:Orz57K": entry(MATHS, "axon-rl/ORZ-57k"),
    "math:DeepScaleR40K": entry(MATHS, "axon-rl/DeepScaleR-40K"),
    "math:Geometry3K": entry(GEOMETRY, "axon-rl/geometry3k", "train"),
    "qa:NaturalQuestions": entry(
        QUESTIONS, "axon-rl/NaturalQuestions", "train", question_key="problem"
    ),
    "qa:HotpotQA": entry(QUESTIONS, "axon-rl/HotpotQA", "train", question_key="problem"),
    **{
        f"logic:RuleTaker-d{depth}": entry(
            QUESTIONS, f"axon-rl/RuleTaker-d{depth}-70k", "train", form="boxed"
        )
        for depth in (0, 1, 2, 3, 5)
    },
    **{
        f"eval:{name}": entry(MATHS, "axon-rl/math-eval", split, evaluation=True)
        for name, split in {
            "MATH500": "math",
            "AMC": "amc",
            "OlympiadBench": "olympiad_bench",
            "Minerva": "minerva",
            "AIME24": "aime24",
        }.items()
    },
    "eval:QaOpen": entry(
        QUESTIONS, "google-research-datasets/nq_open", "validation", evaluation=True
    ),
    **{
        f"eval:{name}": entry(QUESTIONS, "axon-rl/search-eval", split, evaluation=True)
        for name, split in {
            "2Wiki": "2wiki",
            "PopQA": "popqa",
            "TriviaQA": "tq",
            "HotpotQA": "hotpotqa",
            "Bamboogle": "bamboogle",
            "NaturalQuestions": "nq",
            "Musique": "musique",
        }.items()
    },
}
