r"""The system prompts that ARPO's released checkpoints are evaluated with, by ARPO's names.

    code_search     wikipedia search and python; also the system message of its training rows
    search, math    one of the two tools
    base            no tool
    code_search_cn  code_search in Chinese

The wording is ARPO's: a checkpoint was trained with it, and scores lower with another.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from graft.config import ConfigError
from graft.spelling import suggestion

MAX_FILE = 2**20  # bytes

_THOUGHT = "<think> This is the reasoning process. </think>"
_TOOLS = {
    "search": (
        "wikipedia search tool",
        "to search",
        "<search> search query here </search> <result> search result here </result>",
    ),
    "python": (
        "python interpreter tool",
        "to calculate the math problem",
        "<python> python code here </python> <result> python interpreter result here </result>",
    ),
}
"""Tool -> its name in the prompt, its purpose, and the example of a call."""


class NamedPrompt(NamedTuple):
    text: str
    tools: tuple[str, ...] | None
    """The tools that the text names; None: not known, so those of the set stay."""


def in_english(*tools: str) -> NamedPrompt:
    known = [_TOOLS[tool] for tool in tools]
    named = " and ".join(name for name, _, _ in known)
    uses = " and ".join(f"{name} {purpose}" for name, purpose, _ in known)
    helped = f" with the help of the {named}" if known else ""
    invoke = (
        f"During thinking, you can invoke the {uses} for fact information about specific topics if "
        "needed. "
    )
    query_tags = (
        ", and the search query and result are enclosed within <search> </search> and <result> </result> "
        "tags respectively"
    )
    example = " ".join(f"{_THOUGHT} {call}" for *_, call in known) + (" " if known else "")
    text = (
        f"You are a helpful assistant that can solve the given question step by step{helped}. "
        "Given a question, you need to first think about the reasoning process in the mind and then "
        f"provide the answer. {invoke if known else ''}"
        "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags "
        f"respectively{query_tags if 'search' in tools else ''}. "
        f"For example, {example}{_THOUGHT} "
        r"<answer> The final answer is \[ \boxed{answer here} \] </answer>. "
        r"In the last part of the answer, the final exact answer is enclosed within \boxed{} with latex "
        "format."
    )
    return NamedPrompt(text, tools)


CHINESE = r"""你是一个乐于助人的助手，能够借助 Wikipedia 搜索工具和 Python 解释器工具，逐步解决给定的问题。
给定一个问题后，你需要先在头脑中进行推理过程，然后再提供答案。
在思考过程中，你可以调用 Wikipedia 搜索工具来搜索特定主题的事实信息，也可以使用 Python 解释器工具来计算数学问题（如有需要）。
推理过程和答案分别用 <think> 和 </think>，以及 <answer> 和 </answer> 标签括起来；
搜索查询和结果分别用 <search> 和 </search>，以及 <result> 和 </result> 标签括起来。
例如：
<think> 这是推理过程。 </think> <search> 这里是搜索查询 </search> <result> 这里是搜索结果 </result>
<think> 这是推理过程。 </think> <python> 这里是 Python 代码 </python> <result> 这里是 Python 解释器的结果 </result>
<think> 这是推理过程。 </think> <answer> 最终答案是 \[ \boxed{这里是答案} \] </answer>"""  # noqa: E501

PROMPTS: dict[str, NamedPrompt] = {
    "code_search": in_english("search", "python"),
    "search": in_english("search"),
    "math": in_english("python"),
    "base": in_english(),
    "code_search_cn": NamedPrompt(CHINESE, ("search", "python")),
}


def read_prompt(name: str) -> NamedPrompt:
    """A prompt by its name, or the text of a file."""
    if name in PROMPTS:
        return PROMPTS[name]
    file = Path(name).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"--prompt {name!r} is neither a file nor a known prompt;{suggestion(name, PROMPTS)} known: "
            f"{', '.join(PROMPTS)}"
        )
    try:
        if file.stat().st_size > MAX_FILE:
            raise ConfigError(f"--prompt {name}: over {MAX_FILE} bytes; is it a prompt?")
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt {name} cannot be read as text: {error}") from error
    if not text:
        raise ConfigError(f"--prompt {name}: the file is empty")
    return NamedPrompt(text, None)
