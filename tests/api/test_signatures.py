"""Every public callable of `import graft` answers arguments that do not fit with what fits."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import graft
from graft.signatures import explain_arguments
from graft.spelling import nearest

PUBLIC = [name for name in graft.__all__ if name != "__version__"]
OPEN = {"make", "make_vec", "register", "tool"}
"""They hand unknown arguments on: to the environment, or to the options of a tool."""


def parameters_of(name: str) -> list[inspect.Parameter]:
    """The named ones."""
    listed = inspect.signature(getattr(graft, name)).parameters.values()
    return [one for one in listed if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def fill(name: str) -> dict[str, Any]:
    """A value for each required parameter."""
    return {one.name: None for one in parameters_of(name) if one.default is one.empty}


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in OPEN])
def test_an_unknown_argument_is_named_with_those_there_are(name: str):
    with pytest.raises(TypeError) as error:
        getattr(graft, name)(**fill(name), zzzz=1)
    assert f"{name}()" in str(error.value) and "'zzzz'" in str(error.value)
    assert [one.name for one in parameters_of(name) if one.name not in str(error.value)] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in OPEN])
def test_a_misspelt_argument_is_answered_with_the_one_that_was_meant(name: str):
    known = [one.name for one in parameters_of(name)]
    if not known:
        assert name == "BaseEnv"
        return
    meant = max(known, key=len)
    misspelt = meant[:-2] + meant[-1]  # the last letter but one is missing
    assert nearest(misspelt, known) == meant
    options = {key: value for key, value in fill(name).items() if key != meant}
    with pytest.raises(TypeError) as error:
        getattr(graft, name)(**options, **{misspelt: 1})
    assert repr(misspelt) in str(error.value) and f"did you mean {meant!r}?" in str(error.value)


@pytest.mark.parametrize("name", [name for name in PUBLIC if fill(name)])
def test_a_missing_argument_is_named_in_a_call_to_write(name: str):
    first = next(iter(fill(name)))
    with pytest.raises(TypeError) as error:
        getattr(graft, name)()
    assert first in str(error.value) and f"write {name}({first}" in str(error.value)


@pytest.mark.parametrize("name", sorted(OPEN))
def test_what_is_handed_on_is_checked_where_it_arrives(name: str):
    given = {"make": ["calculator"], "make_vec": ["calculator"], "tool": [lambda: None]}
    if name == "register":  # the arguments are checked when the environment is made
        graft.register("signatures-test", "graft.envs.calculator:Calculator", zzzz=1)
        name, given = "make", {"make": ["signatures-test"]}
    with pytest.raises(ValueError, match=r"'zzzz'.*known"):
        getattr(graft, name)(*given[name], zzzz=1)


def test_too_many_and_doubled_arguments_are_answered_with_names():
    with pytest.raises(TypeError, match=r"takes 2 arguments.*3 were given.*max_tokens="):
        graft.generate("a", "b", 8)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"engine twice.*engine="):
        graft.collect("a", engine="b")  # type: ignore[misc, arg-type]


def test_an_argument_of_another_function_is_sent_there():
    import torch  # noqa: F401  # as a loaded policy does

    with pytest.raises(TypeError, match=r"'temperature'; collect\(\).*generate\(\) have it"):
        graft.Engine(None, temperature=0.7)  # type: ignore[call-arg, arg-type]


def test_an_error_inside_a_function_is_its_own():
    @explain_arguments
    def add(a, b):
        return a + b

    with pytest.raises(TypeError, match="unsupported operand"):
        add(1, "2")
    assert add(1, b=2) == 3 and str(inspect.signature(add)) == "(a, b)"


def test_types_answer_without_torch():
    """Its import takes seconds, and a task needs none of it."""
    code = (
        "import sys, graft\n"
        "try: graft.Task('a', 'b', zzzz=1)\n"
        "except TypeError as error: print('zzzz' in str(error), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
