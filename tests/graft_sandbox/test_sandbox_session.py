"""A session: names stay between runs, and the outcome reports when they are lost."""

from __future__ import annotations

import os
import signal
import time

import pytest

from graft_sandbox import SandboxSession, choose, hosts


def test_names_stay_between_runs(method: str):
    with SandboxSession(sandbox=method) as session:
        assert session.run("x = 20").stdout == ""
        assert session.run("x += 1\nx * 2").stdout == "42\n"
        assert session.run("def f(): return x").ok
        assert session.run("f()").stdout == "21\n"


def test_files_stay_between_runs(method: str):
    with SandboxSession(sandbox=method) as session:
        session.run("with open('a', 'w') as file: file.write('kept')")
        assert session.run("open('a').read()").stdout == "'kept'\n"


def test_an_error_keeps_the_names():
    with SandboxSession() as session:
        outcome = session.run("x = 1\n1/0")
        assert outcome.exit_code == 1 and 'File "<cell 1>", line 2' in outcome.stderr
        outcome = session.run("x")
        assert outcome.stdout == "1\n" and outcome.stderr == "" and not outcome.is_restarted
        assert session.run("import sys; sys.exit(5)").exit_code == 5
        assert session.run("x").stdout == "1\n"


@pytest.mark.parametrize(
    "end",
    ["while True: pass", "import os; os._exit(3)", "while True: print('x' * 1000)"],
)
def test_a_lost_interpreter_is_replaced_and_the_outcome_has_is_restarted(method: str, end: str):
    with SandboxSession(sandbox=method, timeout=0.5) as session:
        session.run("x = 1")
        assert not session.run(end).ok
        assert not session.is_alive
        outcome = session.run("x")
        assert outcome.is_restarted and "NameError" in outcome.stderr
        assert not session.run("1").is_restarted


def test_after_a_killed_host_the_outcome_has_is_restarted(method: str):
    with SandboxSession(sandbox=method) as session:
        session.run("x = 1")
        host = hosts.obtain(method)
        os.kill(host._process.pid, signal.SIGKILL)
        host._process.wait()
        outcome = session.run("2")
        deadline = time.monotonic() + 20
        while (
            not outcome.is_restarted and time.monotonic() < deadline
        ):  # its children are being killed
            time.sleep(0.05)
            outcome = session.run("2")
        assert outcome.stdout == "2\n" and outcome.is_restarted


def test_a_session_is_confined_like_a_program(method: str):
    with SandboxSession(sandbox=method) as session:
        assert "Error" in session.run("open('/etc/passwd')").stderr
        assert "PermissionError" in session.run("import socket; socket.socket()").stderr
        assert "MemoryError" in session.run("x = bytearray(2 << 30)").stderr
        assert session.run("1").stdout == "1\n"


def test_a_session_that_writes_to_its_control_socket_harms_only_itself(method: str):
    with SandboxSession(sandbox=method, timeout=0.5) as session:
        session.run("import os; os.write(3, b'nonsense\\n' * 3)")
        session.run("import os; os.close(3)")
        session.run("1")
        assert session.run("2").stdout in ("2\n", "")
    with SandboxSession(sandbox=method) as session:
        assert session.run("1").stdout == "1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.write(3, b'1' * 1000)",
        "import os\nwhile True: os.write(3, b'1\\n' * 1000)",
    ],
)
def test_a_session_that_floods_its_control_socket_is_stopped(code: str):
    with SandboxSession(timeout=1.0) as session:
        session.run(code)
        session.run("1")
        session.run("2")
        assert session.run("3").stdout in ("", "3\n")


def test_a_thread_that_continues_to_print_does_not_block_the_next_run():
    with SandboxSession(timeout=5.0) as session:
        code = (
            "import os, threading\n"
            "def flood():\n"
            "    while True: os.write(1, b'x' * 1000)\n"
            "threading.Thread(target=flood, daemon=True).start()\n"
        )
        assert session.run(code).seconds < 5.0
        assert len(session.run("1").stdout) <= 65536


@pytest.mark.skipif(choose() == "landlock", reason="there are no further processes")
def test_a_fork_inside_does_not_take_part():
    with SandboxSession(sandbox="auto") as session:
        session.run("import os\npid = os.fork()")
        assert session.run("print(pid > 0)").stdout.endswith("True\n")
        assert session.run("print(pid > 0)").stdout == "True\n"


def test_two_sessions_share_nothing():
    with SandboxSession() as first, SandboxSession() as second:
        first.run("x = 1")
        assert "NameError" in second.run("x").stderr


def test_code_of_a_megabyte_goes_through():
    with SandboxSession(timeout=30.0) as session:
        assert session.run(f"x = {'a' * 1_000_000!r}\nlen(x)").stdout == "1000000\n"


def test_a_closed_session_starts_again():
    session = SandboxSession()
    session.run("x = 1")
    session.close()
    outcome = session.run("1")
    assert outcome.stdout == "1\n" and not outcome.is_restarted
    session.close()
