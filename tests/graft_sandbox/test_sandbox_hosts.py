"""The hosts: replaced when they are killed, and ended with their caller."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graft_sandbox import SandboxUnavailable, choice, hosts, methods, run_python
from graft_sandbox.choice import NONE, STRONGEST_FIRST, Method, choose
from graft_sandbox.hosts import SandboxError, SandboxHost, python_view
from graft_sandbox.running import Running
from tests.graft_sandbox.ordinary_user import run_as_ordinary_user
from tests.held import open_files

ROOT = Path(__file__).resolve().parents[2]


def children_of(pid: int) -> list[int]:
    """The processes below one, from the kernel's own list."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children_of(child)]
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def host_processes(method: str) -> list[int]:
    """The process we started and those below it: the keeper or bwrap, then the host."""
    started = hosts.obtain(method)._process.pid
    return [started, *children_of(started)]


def test_a_second_call_costs_no_second_process(method: str):
    run_python("pass", sandbox=method)
    before = host_processes(method)
    run_python("pass", sandbox=method)
    assert host_processes(method) == before


@pytest.mark.parametrize("which", [0, -1])
def test_a_host_killed_between_calls_is_replaced(method: str, which: int):
    assert run_python("print(1)", sandbox=method).stdout == "1\n"
    before = host_processes(method)
    os.kill(before[which], signal.SIGKILL)
    assert run_python("print(2)", sandbox=method).stdout == "2\n"
    hosts.close_all(method)
    assert wait_until_gone(before) == []


@pytest.mark.parametrize("which", [0, -1])
def test_a_host_killed_during_a_call_runs_it_again(method: str, which: int):
    run_python("pass", sandbox=method)
    before = host_processes(method)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(run_python, "import time; time.sleep(0.3); print(3)", sandbox=method)
        time.sleep(0.1)
        os.kill(before[which], signal.SIGKILL)
        assert call.result(timeout=60).stdout == "3\n"


def test_programs_end_with_their_host(method: str):
    run_python("pass", sandbox=method)
    host = hosts.obtain(method)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_python, "import time; time.sleep(0.5)", sandbox=method)
        time.sleep(0.1)
        below = children_of(host._process.pid)
        os.kill([host._process.pid, *below][0 if method == "landlock" else 1], signal.SIGKILL)
        assert wait_until_gone(below) == []


CALLER = """
import sys, threading
from graft_sandbox import run_python
run_python("pass", sandbox={method!r})
threading.Thread(target=run_python, args=("import time; time.sleep(60)",),
                 kwargs=dict(timeout=60, sandbox={method!r}), daemon=True).start()
import time; time.sleep(0.3)
print("ready", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_a_caller_that_is_killed(method: str):
    script = CALLER.format(method=method)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as caller:
        assert caller.stdout is not None and caller.stdout.readline() == "ready\n"
        below = children_of(caller.pid)
        assert len(below) >= 2  # a host and a program at least
        caller.kill()
    assert wait_until_gone(below) == []


def test_nothing_is_left_of_a_caller_that_ends(method: str):
    script = (
        f"from graft_sandbox import run_python, hosts\n"
        f"run_python('pass', sandbox={method!r})\n"
        f"print(hosts.obtain({method!r})._process.pid, hosts.obtain({method!r}).scratch)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, cwd=ROOT
    )
    pid, _, scratch = done.stdout.strip().partition(" ")
    assert done.returncode == 0 and done.stderr == ""
    assert not is_running(int(pid))
    assert method != "landlock" or not Path(scratch).exists()


def test_a_fork_of_the_caller_gets_its_own_hosts():
    script = (
        "import os\n"
        "from graft_sandbox import run_python, hosts\n"
        "run_python('pass')\n"
        "if pid := os.fork():\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    assert run_python('print(1)').stdout == '1\\n'\n"
        "else:\n"
        "    assert run_python('print(2)').stdout == '2\\n'\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_ends_does_not_take_the_host_along(method: str):
    """The kernel's signal at a parent's death is really at the death of the thread that forked."""
    hosts.close_all(method)
    starter = threading.Thread(target=run_python, args=("pass",), kwargs={"sandbox": method})
    starter.start()
    starter.join()
    before = host_processes(method)
    time.sleep(0.1)
    assert run_python("print(1)", sandbox=method).stdout == "1\n"
    assert host_processes(method) == before


def test_many_threads_get_each_their_own_answer(method: str):
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda n: run_python(f"print({n} * {n})", sandbox=method).stdout, range(64))
        )
    assert answers == [f"{n * n}\n" for n in range(64)]


def test_another_host_is_started_only_when_all_are_busy(method: str):
    hosts.close_all(method)
    for _ in range(2 * hosts.BUSY):
        run_python("pass", sandbox=method)
    assert len(hosts._hosts[method, (), hosts.PYTHON]) == 1
    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(
                lambda _: run_python("import time; time.sleep(0.1)", sandbox=method), range(32)
            )
        )
    assert 1 < len(hosts._hosts[method, (), hosts.PYTHON]) <= hosts.MAX_HOSTS
    assert all(not host.running for host in hosts._hosts[method, (), hosts.PYTHON])


def test_a_fork_bomb_does_not_harm_another_call(method: str):
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(run_python, bomb, timeout=0.6, sandbox=method)
        time.sleep(0.2)
        code = "import threading\nthreading.Thread(target=print, args=(1,)).start()"
        assert run_python(code, timeout=30.0, sandbox=method).stdout == "1\n"
        assert going.result().is_timeout


CONFINED = """
import os
from graft_sandbox import run_python
code = '''
import os, socket
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
def bomb():
    for _ in range(5000):
        if os.fork() == 0: __import__('time').sleep(9)
print(refused(lambda: open('/etc/passwd')), refused(lambda: socket.socket()),
      refused(lambda: os.kill(PARENT, 0)), refused(bomb))
'''.replace('PARENT', str(os.getpid()))
print(run_python(code, sandbox=METHOD).stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("name", STRONGEST_FIRST)
def test_an_ordinary_user_gets_the_same_confinement(name: str):
    shown = run_as_ordinary_user(CONFINED.replace("METHOD", repr(name)))
    assert shown == "True True True True\n\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_ordinary_user_gets_a_copy_of_what_only_root_may_read(tmp_path: Path):
    """As in a checkout below /root: an import from the folder itself is refused."""
    shutil.copytree(ROOT / "graft_sandbox", tmp_path / "private/graft_sandbox")
    (tmp_path / "private").chmod(0o700)
    script = "import graft_sandbox\nprint(graft_sandbox.__file__)"
    place = Path(run_as_ordinary_user(script, tmp_path / "private").strip())
    assert place.parts[-2:] == ("graft_sandbox", "__init__.py") and not place.exists()


def test_methods_are_listed_strongest_first():
    tried = methods()
    assert [method.name for method in tried] == list(STRONGEST_FIRST)
    assert all(method.why for method in tried)
    working = [method.name for method in tried if method.works]
    if working:
        assert choose() == working[0]


def test_a_sandbox_that_is_installed_beside_what_it_shows_works_too(
    monkeypatch: pytest.MonkeyPatch,
):
    """The trial opened its own module: with `pip install graft-rl` a file of the Python installation."""
    working = [method.name for method in methods() if method.works]
    monkeypatch.setattr(choice, "__file__", os.__file__)
    monkeypatch.setattr(choice, "_tried", {})
    assert [method.name for method in methods() if method.works] == working


def test_a_method_that_shows_files_does_not_work(monkeypatch: pytest.MonkeyPatch):
    name = next((method.name for method in methods() if method.works), None)
    if name is None:
        pytest.skip("no method works here")
    monkeypatch.setattr(choice, "_tried", {})
    monkeypatch.setattr(choice.os.path, "realpath", lambda _: os.__file__)
    method = choice.probe(name)
    assert not method.works and os.__file__ in method.why


def test_without_isolation_code_is_refused(monkeypatch: pytest.MonkeyPatch):
    missing = {name: Method(name, False, f"no {name} here") for name in STRONGEST_FIRST}
    monkeypatch.setattr(choice, "_tried", missing)
    with pytest.raises(
        SandboxUnavailable, match=r"no landlock here.*sandbox=\"none\" runs it unpro"
    ):
        run_python("print(1)")
    with pytest.raises(SandboxUnavailable, match="'bubblewrap' does not work here: no bubblewrap"):
        run_python("print(1)", sandbox="bubblewrap")


def not_installed(*_: object) -> list[str]:
    raise SandboxError("bwrap is not installed")


FAILURES = {
    "bwrap is not installed": not_installed,
    "cannot start": lambda *_: ["/nowhere/bwrap"],
    "no namespaces here": lambda *_: [
        sys.executable,
        "-c",
        "raise SystemExit('no namespaces here')",
    ],
}
"""The error of a method that is not available -> how its host is started."""


@pytest.mark.parametrize("name", [*STRONGEST_FIRST, NONE])
@pytest.mark.parametrize("why", FAILURES)
def test_a_method_that_cannot_be_had_leaves_nothing_open(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hosts, "_command", FAILURES[why])
    monkeypatch.setattr(hosts, "_hosts", {})  # not one that was started by another test
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_files()
    with pytest.raises(SandboxError, match=why) as caught:
        SandboxHost(name)
    assert open_files() == before, caught.value  # which still holds the frame that failed
    assert choice._try(name) == Method(name, False, str(caught.value))
    assert open_files() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", ["pass", None])
def test_a_program_whose_host_has_ended_leaves_nothing_open(code: str | None):
    host = SandboxHost(NONE)
    host.close()
    before = open_files()
    with pytest.raises(hosts.HostDied, match="the none sandbox has ended") as caught:
        Running(host, code)
    assert open_files() == before, caught.value
    assert not host.running


def test_a_program_for_which_no_descriptors_are_left_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
):
    host = SandboxHost(NONE)
    try:
        before, made, pipe = open_files(), [], os.pipe

        def one_pipe() -> tuple[int, int]:
            if made:
                raise OSError(24, "Too many open files")
            made.append(pipe())
            return made[0]

        monkeypatch.setattr(os, "pipe", one_pipe)
        with pytest.raises(SandboxError, match="Too many open files") as caught:
            Running(host, "pass")
        assert open_files() == before, caught.value
        assert not host.running
    finally:
        host.close()


def test_sandbox_none_is_used_only_by_name():
    assert run_python("print(1)", sandbox="none").stdout == "1\n"
    with pytest.raises(ValueError, match="unknown sandbox 'off'; known: auto, bubblewrap"):
        run_python("print(1)", sandbox="off")


def test_unprotected_code_still_ends_in_time():
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"
    began = time.monotonic()
    outcome = run_python(code, timeout=0.5, sandbox="none")
    assert outcome.is_timeout and time.monotonic() - began < 20


def test_of_a_virtual_environment_only_the_packages_are_seen():
    view = python_view()
    assert not any(str(ROOT) == path for path in view.readable)
    assert all(Path(path).exists() for path in view.readable)
    assert all(
        not str(one).startswith(f"{other}/") for one in view.readable for other in view.readable
    )


REFUSED_CALLS = """
import resource, sys
from graft_sandbox.hosts import SandboxError, SandboxHost
from graft_sandbox.inside import kernel, seccomp
calls = {calls}
numbers = [kernel.NUMBERS.get(name) or seccomp.CHECKED[kernel.machine][name] for name in calls]
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
refusing = [seccomp.NUMBER, *seccomp.refuse_all(numbers), seccomp.back(seccomp.ALLOW)]
kernel.install_filter(seccomp.assemble(refusing))
resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))
try:
    SandboxHost("bubblewrap").close()
    print("started")
except SandboxError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("calls", "files", "result"),
    [
        (["unshare"], 1024, "started"),  # restricted by Landlock instead
        (["landlock_create_ruleset"], 1024, "started"),  # by namespaces
        (
            ["unshare", "landlock_create_ruleset"],
            1024,
            "may not create namespaces here, and there is no",
        ),
        ([], 64, "only 64 open files are allowed here (ulimit -Hn); 252 are needed"),
    ],
)
def test_bubblewrap_is_refused_where_nothing_keeps_calls_apart(calls, files, result):
    if not all(choice.probe(name).works for name in ("bubblewrap", "landlock")):
        pytest.skip("bubblewrap and landlock do not both work here")
    code = REFUSED_CALLS.format(calls=calls, files=files)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result in done.stdout, done.stderr
