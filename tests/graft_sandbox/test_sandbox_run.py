"""What an honest program gets: stdin, its exit code, its output, a short traceback."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_sandbox import run_python
from graft_sandbox.run import modules_named
from graft_sandbox.running import ran_out_of_memory


def test_a_program_reads_stdin_and_prints(method: str):
    outcome = run_python("print(int(input()) + int(input()))", "40\n2", sandbox=method)
    assert (outcome.stdout, outcome.stderr, outcome.exit_code, outcome.ok) == ("42\n", "", 0, True)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('sorry')", 1),
        ("exit()", 0),
        ("1/0", 1),
        ("x = (", 1),
        ("import os; os._exit(7)", 7),
        ("import ctypes; ctypes.string_at(0)", -11),
        ("import atexit; atexit.register(lambda: 1/0)", 0),
        ("raise KeyboardInterrupt", 1),
    ],
)
def test_exit_codes(code: str, exit_code: int):
    outcome = run_python(code)
    assert (outcome.exit_code, outcome.ok) == (exit_code, exit_code == 0)


def test_an_abort_is_an_end_by_a_signal(method: str):
    """SIGABRT, where it can be sent. The first process of a pid namespace has no default action for
    it; abort() then executes an instruction that traps, and the machine decides which signal that
    is: SIGSEGV on x86, SIGTRAP on ARM, SIGILL elsewhere."""
    outcome = run_python("import os; print(1, flush=True); os.abort()", sandbox=method)
    by = signal.Signals(-outcome.exit_code)
    traps = {signal.SIGSEGV, signal.SIGTRAP, signal.SIGILL}
    assert by in {signal.SIGABRT} | (set() if method == "landlock" else traps)
    assert (outcome.ok, outcome.stdout, outcome.stderr) == (False, "1\n", "")


def test_a_traceback_shows_the_users_own_lines():
    code = "import json\ndef load(text):\n    return json.loads(text)\nload('{')"
    assert run_python(code).stderr == (
        "Traceback (most recent call last):\n"
        '  File "<python>", line 4, in <module>\n'
        "    load('{')\n"
        '  File "<python>", line 3, in load\n'
        "    return json.loads(text)\n"
        "           ^^^^^^^^^^^^^^^^\n"
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)\n"
    )


def test_causes_are_shown_with_own_lines_only():
    code = "try:\n    int('x')\nexcept ValueError as error:\n    raise KeyError('k') from error"
    stderr = run_python(code).stderr
    assert "ValueError: invalid literal" in stderr and stderr.endswith("KeyError: 'k'\n")
    assert "runner.py" not in stderr


def test_an_exception_that_cannot_be_printed_is_named():
    code = "class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad"
    assert "Bad" in run_python(code).stderr
    code = "import sys\nsys.stderr = None\nraise ValueError('x')"
    assert run_python(code).exit_code == 1


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"),
        ("x = 6\nx * 7", "42\n"),
        ("print('a')\n'b'", "a\n'b'\n"),
        ("None", ""),
        ("x = 1", ""),
        ("for n in range(2): n", ""),
        ("# nothing", ""),
        ("print(1);", "1\n"),
    ],
)
def test_the_last_value_is_printed_with_echo(code: str, shown: str):
    assert run_python(code, echo=True).stdout == shown
    assert run_python("1 + 1").stdout == ""


def test_it_is_the_main_program():
    code = (
        "from __future__ import annotations\n"
        "import sys, pickle\n"
        "class Point: pass\n"
        "assert type(pickle.loads(pickle.dumps(Point()))) is Point\n"
        "def f(x: Unknown): pass\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv, f.__annotations__)\n"
    )
    assert run_python(code).stdout == "[''] {'x': 'Unknown'}\n"
    # our own future imports do not leak into the code
    assert run_python("def f(x: int): pass\nprint(f.__annotations__)").stdout == (
        "{'x': <class 'int'>}\n"
    )


def test_threads_and_exit_functions_come_to_their_end():
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print('main')\n"
    )
    assert run_python(code).stdout == "main\nthread\nlast\n"


def test_the_same_code_prints_the_same():
    code = (
        "import random\n"
        "print(random.random(), {'a', 'b', 'c', 'd'}, hash('x'))\n"
        "import numpy\n"
        "print(numpy.random.rand())\n"
    )
    first = run_python(code)
    assert first.ok and first.stdout == run_python(code).stdout


def test_numpy_and_sympy_work():
    code = (
        "import numpy as np, sympy\n"
        "x = sympy.symbols('x')\n"
        "print(np.arange(3) @ np.arange(3), sympy.integrate(x**2, x))\n"
    )
    assert run_python(code, timeout=30.0).stdout == "5 x**3/3\n"


def test_hosts_with_modules_are_used_only_for_code_that_names_them():
    assert modules_named("import math") == ()
    assert modules_named("import sympy, numpyro") == ("sympy",)
    assert modules_named("from numpy import ones; import sympy") == ("numpy.random", "sympy")


def test_large_input_and_output_pass_whole(method: str):
    text = "x" * 300_000
    outcome = run_python(
        "import sys; sys.stdout.write(sys.stdin.read())", text, sandbox=method, max_output=400_000
    )
    assert outcome.stdout == text and outcome.ok


def test_the_scratch_folder_can_be_used(method: str):
    code = (
        "import os, tempfile\n"
        "open('a.txt', 'w').write('hello')\n"
        "os.mkdir('b'); os.rename('a.txt', 'b/a.txt')\n"
        "print(open('b/a.txt').read())\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    open(folder + '/x', 'w').write('y')\n"
        "with tempfile.NamedTemporaryFile('w') as file:\n"
        "    print(file.write('z'))\n"
    )
    outcome = run_python(code, sandbox=method)
    assert (outcome.stdout, outcome.stderr) == ("hello\n1\n", "")


def test_asyncio_and_pools_of_threads_work(method: str):
    code = (
        "import asyncio\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "async def main():\n"
        "    await asyncio.sleep(0.01)\n"
        "    return 1\n"
        "print(asyncio.run(main()), list(ThreadPoolExecutor(4).map(abs, [-1, 2])))\n"
    )
    assert run_python(code, sandbox=method).stdout == "1 [1, 2]\n"


def test_memory_errors_are_recognised():
    assert ran_out_of_memory("Traceback ...\nMemoryError\n")
    assert ran_out_of_memory("x\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate")
    assert not ran_out_of_memory("ValueError: MemoryError")
    assert not ran_out_of_memory("")


@given(st.text(max_size=60))
@settings(max_examples=15)
def test_any_text_is_answered(code: str):
    outcome = run_python(code, timeout=20.0, echo=True)
    assert isinstance(outcome.exit_code, int) and not outcome.is_timeout


@given(st.text(max_size=200))
@settings(max_examples=12)
def test_text_survives_the_way_in_and_out(text: str):
    code = f"import sys\nsys.stdout.buffer.write({text!r}.encode(errors='replace'))"
    given_text = text.encode(errors="replace").decode()
    assert run_python(code, timeout=20.0).stdout == given_text
    code = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert run_python(code, given_text, timeout=20.0).stdout == given_text


@pytest.mark.parametrize(
    "code",
    [
        "#" * 1_000_000,
        "(" * 100_000,
        "[" * 1000 + "]" * 1000,
        "\x00",
        "\ud800",
        "print('\ud800')",
        "-" * 50_000 + "1",
        "𝔘𝔫𝔦 = 1\nprint(Uni)",
    ],
)
def test_hostile_sources_are_answered(code: str):
    outcome = run_python(code, timeout=30.0)
    assert not outcome.is_timeout and (outcome.ok or outcome.stderr or outcome.exit_code < 0)


def test_a_number_too_large_ends_at_the_clock():
    assert run_python("9**9**9", timeout=0.3).is_timeout
