"""ARPO's thirteen benchmarks, and SimpleQA: mathematics, questions over several documents, deep search.

The rows that ARPO asks are samples of its own for most of them (the first 500 of GSM8K, 200 of
HotpotQA, ...); where only a published file has these, the dataset of the hub is the larger set that
they were drawn from, and `data=` takes the file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graft.config import ConfigError
from graft.envs.wrappers import listed_wrappers
from graft.evaluate.benchmarks.arpo_prompts import NamedPrompt
from graft.evaluate.benchmarks.benchmark import SYSTEM, Benchmark, tools_of
from graft.evaluate.task_set import TaskSet, brings_tools


def tool(name: str, max_uses: int, **options: Any) -> dict[str, Any]:
    """A tool in ARPO's tags, with a limit of its own; the system prompt explains it."""
    use = {"use": [{name: options}], "format": "arpo", "max_uses": max_uses, "instructions": ""}
    return {"tools": use}


PYTHON = tool("python", 5, timeout=120)
SEARCH = tool("search", 10, topk=10, form="pages", max_chars=1000, timeout=60)
BY_NAME = {"python": PYTHON, "search": SEARCH}
JUDGE = {"judge": {"strict": True}}
"""An answer without a verdict is a failed attempt, not a wrong one."""

SAMPLED = (
    "temperature 0.6, top-p 0.95, repetition penalty 1.1, 4,096 tokens between calls, at most 5 python "
    "and 10 search calls, 1,500 s a question; five passes, pass@1 and pass@5"
)
MATHEMATICS = f"{SAMPLED}; python and snippets of a web search; graded by Qwen2.5-72B as a judge"
KNOWLEDGE = f"{SAMPLED}; python and the snippets of 10 pages of a web search; word F1 of the box"
DEEP_SEARCH = (
    f"{SAMPLED}; python and a web search whose pages are read by a second model (up to 6,000 tokens); "
    "graded by Qwen2.5-72B as a judge"
)


def mathematics(name: str, title: str, hub: str, **more: Any) -> Benchmark:
    shared: dict[str, Any] = {
        "split": "test",
        "question_key": "problem|question",
        "answer_key": "answer",
        "reward": "math_answer",
        "wrappers": (PYTHON, SYSTEM),
        "published": MATHEMATICS,
    }
    return Benchmark(name=name, title=title, hub=hub, **shared | more)


def knowledge(
    name: str, title: str, rows: int, hub_rows: int | None, unconfirmed: str
) -> Benchmark:
    return Benchmark(
        name=name,
        title=title,
        hub="axon-rl/search-eval",
        split=name,
        question_key="question|problem",
        answer_key="answer|golden_answers",
        reward="f1",
        rows=rows,
        hub_rows=hub_rows,
        wrappers=(PYTHON, SEARCH, SYSTEM),
        published=KNOWLEDGE,
        unconfirmed=unconfirmed,
    )


def deep_search(name: str, title: str, hub: str, **more: Any) -> Benchmark:
    shared: dict[str, Any] = {
        "answer_key": "answer",
        "reward": JUDGE,
        "wrappers": (PYTHON, SEARCH, SYSTEM),
        "published": DEEP_SEARCH,
    }
    return Benchmark(name=name, title=title, hub=hub, **shared | more)


ARPO: tuple[Benchmark, ...] = (
    mathematics("aime24", "AIME 2024", "HuggingFaceH4/aime_2024", split="train", rows=30),
    mathematics(
        "aime25", "AIME 2025", "math-ai/aime25", rows=30, unconfirmed="columns of the hub's file"
    ),
    mathematics(
        "math500", "MATH-500", "HuggingFaceH4/MATH-500", rows=500, args={"source_key": "level"}
    ),
    mathematics(
        "math",
        "MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        answer_key="answer|solution",
        hub_rows=5000,
        part="data",
        args={"source_key": "level"},
        unconfirmed="how many rows ARPO asks; folders of the hub's dataset",
    ),
    mathematics(
        "gsm8k",
        "GSM8K",
        "openai/gsm8k",
        question_key="question|problem",
        rows=500,
        hub_rows=1319,
        part="main",
        unconfirmed="which 500 of the 1,319 rows are asked",
    ),
    knowledge("hotpotqa", "HotpotQA", 200, 512, "which 200 rows are asked"),
    knowledge("2wiki", "2WikiMultihopQA", 200, 512, "which 200 rows are asked"),
    knowledge("musique", "MuSiQue", 200, 512, "which 200 rows are asked"),
    knowledge("bamboogle", "Bamboogle", 125, None, "rows of the hub's split"),
    deep_search(
        "simpleqa",
        "SimpleQA",
        "basicv8vc/SimpleQA",
        split="test",
        question_key="problem|question",
        reward={"judge": {"strict": True, "prompt": "simpleqa"}},
        rows=500,
        hub_rows=4326,
        published=f"{DEEP_SEARCH}; SimpleQA itself is graded correct, incorrect or not attempted",
        unconfirmed="which 500 rows are asked; columns of the hub's file",
    ),
    deep_search(
        "webwalker",
        "WebWalkerQA",
        "callanwu/WebWalkerQA",
        split="main",
        question_key="question|Question",
        answer_key="answer|Answer",
        rows=200,
        hub_rows=680,
        args={"source_key": "info.difficulty_level|Info.Difficulty_Level"},
        unconfirmed="which 200 rows are asked; whether columns are capitalised (both are read)",
    ),
    deep_search(
        "gaia",
        "GAIA",
        "gaia-benchmark/GAIA",
        split="validation",
        question_key="Question|question",
        answer_key="Final answer|answer",
        rows=103,
        hub_rows=165,
        part="2023/validation/metadata.parquet",
        args={"source_key": "Level|level", "empty_key": "file_name"},
        published=f"{DEEP_SEARCH}; questions that are text alone",
        unconfirmed="which 103 of the rows without a file are asked; rows of the hub's file",
    ),
    deep_search(
        "hle",
        "Humanity's Last Exam",
        "cais/hle",
        split="test",
        question_key="question|Question",
        hub_rows=2500,
        args={"source_key": "category", "empty_key": "image"},
        unconfirmed="how many and which rows ARPO asks",
    ),
    deep_search(
        "xbench",
        "xbench-DeepSearch",
        "xbench/DeepSearch",
        split="train",
        question_key="prompt|question",
        rows=100,
        args={"cipher_key": "canary"},
    ),
)


def with_prompt(tasks: TaskSet, prompt: NamedPrompt) -> TaskSet:
    """The set with a system prompt, and with the tools that this prompt names, in ARPO's tags.

    Tools of the set stay as they are if they are the ones that the prompt names.
    """
    wrappers = [one for one in tasks.wrappers if one != SYSTEM]
    if prompt.tools is not None and set(tools_of(wrappers)) != set(prompt.tools):
        others: list[Any] = [
            {name: args} for name, args in listed_wrappers(wrappers) if not brings_tools(name)
        ]
        wrappers = [*(BY_NAME[name] for name in prompt.tools), *others]
    if prompt.tools and not tasks.has_tools:
        raise ConfigError(
            f"--no-tools, and the prompt names the tools {', '.join(prompt.tools)}; use --prompt base"
        )
    system = {SYSTEM: {"text": prompt.text}}
    return replace(tasks, wrappers=(*wrappers, system), shows_answers=True)
