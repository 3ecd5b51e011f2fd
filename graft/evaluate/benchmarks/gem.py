"""The sets that GEM evaluates on: its `eval:` environments, with its tools and without a reward for calls.

gem-math500     eval:MATH500 and python_tool_no_int_reward
eval:MATH500    the environment alone, inside the wrappers of a recipe
"""

from __future__ import annotations

from graft.envs import ENVS
from graft.evaluate.benchmarks.benchmark import Benchmark

SAMPLED = "temperature 0.6, top-p 0.95, mean over the attempts (avg@n)"
BY_TOOL = {
    "python_tool_no_int_reward": (
        f"{SAMPLED}; with and without python, 5 calls; math grader on the box"
    ),
    "search_tool_no_int_reward": (
        f"{SAMPLED}; with and without search over Wikipedia of 2018, 3 documents, 5 calls; exact match"
    ),
    "": f"{SAMPLED}; all tests of a problem must pass",
}


def benchmark(name: str, tool: str, rows: int | None, unconfirmed: str) -> Benchmark:
    """The benchmark around eval:NAME."""
    known = ENVS[f"eval:{name}"].args
    is_code, is_math = not tool, tool.startswith("python")
    return Benchmark(
        name=f"gem-{name.lower()}",
        title=f"{name} as in GEM",
        hub=known["hub"],
        split=known["hub_split"],
        question_key="problem" if is_code or is_math else "question",
        answer_key="tests" if is_code else "answer",
        reward="",
        rows=rows,
        env=f"eval:{name}",
        wrappers=(tool,) if tool else (),
        published=BY_TOOL[tool],
        unconfirmed=unconfirmed,
    )


ROWS = {
    "python_tool_no_int_reward": {
        "AIME24": (30, ""),
        "AMC": (83, "the number of rows"),
        "MATH500": (500, ""),
        "Minerva": (272, "the number of rows"),
        "OlympiadBench": (675, "the number of rows"),
    },
    "search_tool_no_int_reward": {
        "NaturalQuestions": (512, ""),
        "TriviaQA": (512, ""),
        "PopQA": (512, ""),
        "HotpotQA": (512, ""),
        "2Wiki": (512, ""),
        "Musique": (512, ""),
        "Bamboogle": (125, "the number of rows"),
        "QaOpen": (3610, "the number of rows"),
    },
    "": {"CodeContest": (None, "the number of rows")},
}
"""Tool -> set -> the number of its rows, and what of it is not confirmed."""

GEM = tuple(
    benchmark(name, tool, *rows)
    for tool, sets in ROWS.items()
    for name, rows in sets.items()
    if f"eval:{name}" in ENVS  # programs come with graft_envs
)
