"""The python tool: answers like a notebook, and what goes wrong is text that begins with Error."""

from __future__ import annotations

import copy
import json
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.protocols import Tool
from graft.tools import TOOLS, is_error, make_tool
from graft.tools.calling import call_tool
from graft.trust import NotTrusted, Source, reading
from graft_envs.code.python_tool import NOTHING, RESTARTED, PythonTool
from graft_sandbox import SandboxOutcome
from graft_sandbox.choice import STRONGEST_FIRST, probe


@pytest.fixture
def notebook():
    tool = PythonTool(keep_state=True)
    yield tool
    tool.close()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("x = 6\nx * 7", "42"),
        ("print('a')", "a"),
        ("print('a')\n'b'", "a\n'b'"),
        ("x = 1", NOTHING),
        ("", NOTHING),
        ("import sys; print('w', file=sys.stderr); print('o')", "o\nw"),
        ("print(1, end='')", "1"),
        ("  print(1)\n", "Error: IndentationError: unexpected indent"),
        ("import math\nmath.factorial(10)", "3628800"),
    ],
)
def test_answers(code: str, answer: str):
    result = PythonTool()(code)
    assert result == answer if not is_error(answer) else result.startswith(answer)


def test_an_error_comes_first_then_the_output_then_the_traceback():
    assert PythonTool()("print('a')\n1/0") == (
        "Error: ZeroDivisionError: division by zero\n"
        "a\n"
        "Traceback (most recent call last):\n"
        '  File "<python>", line 2, in <module>\n'
        "    1/0\n"
        "    ~^~\n"
        "ZeroDivisionError: division by zero"
    )


def test_keep_error_last_line_drops_the_traceback():
    tool = PythonTool(keep_error_last_line=True)
    assert tool("print('a')\n1/0") == "Error: ZeroDivisionError: division by zero\na"


def test_exceeded_limits_are_named():
    assert PythonTool(timeout=0.3)("print(1)\nwhile True: pass") == (
        "Error: no end after 0.3 s, stopped\n1"
    )
    assert PythonTool(max_output=10)("print('x' * 100)") == (
        "Error: more than 10 bytes of output, stopped\nxxxxxxxxxx"
    )
    assert PythonTool(memory_mb=100)("x = bytearray(10**9)").startswith("Error: MemoryError")
    assert PythonTool()("import sys; sys.exit(3)") == "Error: exit code 3"
    assert PythonTool()("import ctypes; ctypes.string_at(0)") == "Error: ended by signal 11"


def test_it_is_a_tool_like_any_other():
    tool = make_tool("python", timeout=1.0)
    assert isinstance(tool, Tool) and tool.name == "python" and tool.blocking
    assert tool.parameters["required"] == ["code"]
    assert "python" in TOOLS
    json.dumps(tool.parameters)


def test_a_program_can_be_given_input():
    assert PythonTool().run("int(input()) + 1", "41").stdout == "42\n"


def test_without_state_calls_share_nothing_and_forks_are_the_tool_itself():
    tool = PythonTool()
    tool("x = 1")
    assert tool("x").startswith("Error: NameError")
    assert tool.fork() is tool and copy.deepcopy(tool) is tool and not tool.is_stateful


def test_with_state_names_stay(notebook: PythonTool):
    assert notebook("x = 20") == NOTHING
    assert notebook("x += 1; x * 2") == "42"
    assert notebook("x = 5; 1/0").startswith("Error: ZeroDivisionError")
    assert notebook("x") == "5"


def test_forks_have_the_same_names_and_are_independent(notebook: PythonTool):
    notebook("x = [1]")
    notebook("x.append(2); 1/0")  # it failed, but not before it changed something
    fork = notebook.fork()
    twin = copy.deepcopy(notebook)
    notebook("x.append(3)")
    assert (fork("x"), twin("x.append(9); x"), notebook("x")) == (
        "[1, 2]",
        "[1, 2, 9]",
        "[1, 2, 3]",
    )
    fork.close()
    twin.close()


def test_state_goes_through_json_and_comes_back(notebook: PythonTool):
    notebook("x = 1")
    notebook("x += 1")
    state = json.loads(json.dumps(notebook.get_state()))
    notebook("x = 100")
    notebook.set_state(state)
    assert notebook("x") == "2"
    notebook.reset()
    assert notebook("x").startswith("Error: NameError")
    assert RESTARTED not in notebook("x")


def test_after_a_timeout_the_names_are_gone_and_the_answer_has_a_note():
    tool = PythonTool(keep_state=True, timeout=0.5)
    tool("x = 1")
    assert tool("while True: pass") == "Error: no end after 0.5 s, stopped"
    assert tool.get_state() == {"cells": []}
    assert tool("y = 2\ny") == f"{RESTARTED}\n2"
    assert tool("y") == "2"
    fork = tool.fork()
    assert fork("y") == "2"
    tool.close()
    fork.close()


def test_a_closed_notebook_restores_its_names(notebook: PythonTool):
    notebook("x = 1")
    notebook.close()
    assert notebook("x") == "1"


def test_the_number_of_concurrent_calls_is_limited():
    tool = PythonTool(concurrency=1)
    running, most = 0, 0
    lock = threading.Lock()
    run = tool.run

    def counted(code: str) -> SandboxOutcome:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        outcome = run(code)
        with lock:
            running -= 1
        return outcome

    tool.run = counted
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda code: call_tool(tool, code), ["1", "2", "3", "4"])
        assert list(results) == ["1", "2", "3", "4"]
    assert most == 1


def test_a_sandbox_that_is_none_is_refused_when_the_tool_is_made():
    with pytest.raises(ValueError, match="unknown sandbox 'nope'; known: auto, bubblewrap"):
        PythonTool(sandbox="nope")


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"max_output": 0}, {"memory_mb": 0}, {"concurrency": 0}]
)
def test_limits_that_let_nothing_run_are_refused(options: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(options))):
        PythonTool(**options)


@given(st.text(max_size=50))
@settings(max_examples=12)
def test_any_text_is_answered_with_text(code: str):
    assert isinstance(PythonTool(timeout=20.0)(code), str)


@pytest.mark.parametrize("code", ["(" * 1_000_000, "x" * 1_000_000, "print(" * 90])
def test_huge_calls_are_answered(code: str):
    assert is_error(PythonTool(timeout=30.0)(code))


def test_a_number_without_end_is_answered():
    assert PythonTool(timeout=0.3)("9**9**9") == "Error: no end after 0.3 s, stopped"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with a package of its own, and with a copy of one that the policy may not see."""
    folder = tmp_path_factory.mktemp("environments") / "mine"
    folder.parent.parent.chmod(0o755)  # the sandbox may be another user
    folder.parent.chmod(0o755)
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "only_there.py").write_text("VALUE = 41\n")
    (site / "graft").mkdir()
    (site / "graft" / "__init__.py").write_text("SECRET = 1\n")
    return folder / "bin" / "python"


@pytest.mark.parametrize("sandbox", STRONGEST_FIRST)
@pytest.mark.parametrize("keep_state", [False, True])
def test_the_code_runs_in_the_interpreter_that_is_named(
    environment: Path, keep_state: bool, sandbox: str
):
    if not probe(sandbox).works:
        pytest.skip(probe(sandbox).why)
    tool = PythonTool(interpreter=str(environment), keep_state=keep_state, sandbox=sandbox)
    own = PythonTool(keep_state=keep_state)
    assert tool("import only_there\nonly_there.VALUE + 1") == "42"
    assert "No module named 'only_there'" in own("import only_there")
    assert tool("import graft\ngraft.SECRET").startswith("Error: ")
    assert tool("open('/etc/passwd')").startswith("Error: ")  # confined as any other
    for one in (tool, own):
        one.close()


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path):
    script = tmp_path / "old"
    script.write_text('#!/bin/sh\necho \'[[3, 9], "/x", ["/x"], []]\'\n')
    noise = tmp_path / "noise"
    noise.write_text("#!/bin/sh\necho hello\n")
    for one in (script, noise):
        one.chmod(0o755)
    for path, why in [
        (tmp_path / "none", "is no program"),
        (tmp_path, "is no program"),
        (noise, "is no Python"),
        (script, r"is Python 3\.9.*3\.11 or later"),
    ]:
        with pytest.raises(ValueError, match=f"interpreter=.*{path.name}.*{why}"):
            PythonTool(interpreter=str(path))


def test_a_stranger_may_not_name_an_interpreter(environment: Path):
    with reading(Source("run/config.yaml", "you did not start it")):
        with pytest.raises(NotTrusted, match="the interpreter"):
            PythonTool(interpreter=str(environment))
        PythonTool()
    typed = frozenset([str(environment)])
    with reading(Source("run/config.yaml", "you did not start it", typed)):
        PythonTool(interpreter=str(environment))
