"""Numbers of tools, wrappers and files of rows that cannot work are refused by name, before a run begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import graft
from graft.envs.dataset.prompts import PromptsEnv
from graft.tools import make_tools

ROWS = [{"prompt": "1?", "answer": "1"}]


def wrapped(**arguments: Any) -> object:
    return graft.make("game:GuessTheNumber-v0-easy", wrappers=[{"python_tool": arguments}])


REFUSED: dict[str, Callable[[], object]] = {
    "max_operations=-1": lambda: make_tools([{"calculator": {"max_operations": -1}}]),
    "concurrency=-1": lambda: make_tools([{"fetch": {"concurrency": -1}}]),
    "concurrency=0": lambda: make_tools([{"python": {"concurrency": 0}}]),
    "timeout=-1": lambda: PromptsEnv(rows=ROWS, timeout=-1),
    "skip_bad=-1": lambda: PromptsEnv(rows=ROWS, skip_bad=-1),
    "skip_bad=2": lambda: PromptsEnv(rows=ROWS, skip_bad=2),
    "max_tool_reward=-1": lambda: wrapped(max_tool_reward=-1),
    "max_uses=-1": lambda: wrapped(max_uses=-1),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_number_that_cannot_work_is_refused_by_name(argument: str):
    with pytest.raises(ValueError, match=argument) as error:
        REFUSED[argument]()
    assert "\n" not in str(error.value)


def test_what_is_usual_goes_through():
    make_tools([{"calculator": {"max_operations": 1}}, {"fetch": {"concurrency": 2}}])
    PromptsEnv(rows=ROWS, timeout=0.5, skip_bad=True)
    PromptsEnv(rows=ROWS, skip_bad=False)
    wrapped(max_tool_reward=0, tool_reward=-0.1)
