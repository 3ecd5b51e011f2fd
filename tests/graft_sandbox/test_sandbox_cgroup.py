"""Control groups: where they can be made, what they allow, and that none stays behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_sandbox import cgroup, choice, hosts, run_python
from graft_sandbox.cgroup import find_parent, own_parent, remove_abandoned
from graft_sandbox.choice import STRONGEST_FIRST, Method, described
from graft_sandbox.inside.cgroup import KERNEL_MEMORY, CallGroup, CallGroups, count, room
from graft_sandbox.inside.confinement import TRIAL, Limits
from graft_sandbox.running import run_in

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1 << 20


def group(path: Path, controllers: str = "", **files: str) -> Path:
    """A folder as the kernel makes it."""
    path.mkdir(parents=True)
    (path / "cgroup.procs").touch()
    (path / "cgroup.subtree_control").write_text(f"{controllers}\n")
    for name, text in {"memory.max": "max\n", "memory.high": "max\n", **files}.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """The tree of a systemd user session, in which run.scope has processes."""
    group(tmp_path / "user@7.service", "cpu memory pids")
    group(tmp_path / "user@7.service/app.slice", "memory pids")
    group(tmp_path / "user@7.service/app.slice/run.scope")
    return tmp_path


def mounts(where: Path, root: str = "/") -> str:
    return (
        "24 30 0:22 / /proc rw,relatime - proc proc rw\n"
        "31 24 0:27 / /sys/fs/cgroup/pids rw shared:9 - cgroup cgroup rw,pids\n"
        f"35 24 0:30 {root} {where} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    )


OWN = "9:pids:/\n0::/user@7.service/app.slice/run.scope\n"


def test_the_nearest_folder_with_both_controllers_is_found(session: Path):
    app = session / "user@7.service/app.slice"
    assert find_parent(OWN, mounts(session)) == app
    (app / "cgroup.subtree_control").write_text("memory\n")
    assert find_parent(OWN, mounts(session)) == app.parent
    (app.parent / "cgroup.subtree_control").write_text("cpu pids\n")
    assert find_parent(OWN, mounts(session)) is None


def test_a_part_of_the_tree_may_be_mounted(session: Path):
    part = mounts(session / "user@7.service", root="/user@7.service")
    assert find_parent(OWN, part) == session / "user@7.service/app.slice"
    assert find_parent("0::/other.service\n", part) is None


def test_folders_above_the_mount_are_not_looked_at(session: Path):
    group(session / "user@7.service/app.slice/container")
    inside = mounts(session / "user@7.service/app.slice/container")
    assert find_parent("0::/\n", inside) is None
    assert find_parent("0::/../run.scope\n", inside) is None


def test_a_folder_that_is_not_the_users_is_passed_over(
    session: Path, monkeypatch: pytest.MonkeyPatch
):
    app, access = session / "user@7.service/app.slice", os.access
    for name in ("", "cgroup.procs", "cgroup.subtree_control"):
        monkeypatch.setattr(
            os,
            "access",
            lambda path, mode, foreign=app / name: path != foreign and access(path, mode),
        )
        assert find_parent(OWN, mounts(session)) == app.parent


@pytest.mark.parametrize("limit", ["memory.max", "memory.high"])
def test_a_limit_around_the_run_keeps_holding_for_its_calls(session: Path, limit: str):
    (session / "user@7.service/app.slice/run.scope" / limit).write_text("34359738368\n")
    assert find_parent(OWN, mounts(session)) is None


def test_without_version_2_there_is_none(session: Path):
    assert find_parent("4:memory:/a\n1:cpu:/\n", mounts(session)) is None
    assert find_parent(OWN, mounts(session).replace("cgroup2", "cgroup")) is None
    assert find_parent("", "") is None


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@settings(max_examples=25)
@given(NAMES, NAMES)
def test_any_text_of_the_kernel_is_read(membership: str, mountinfo: str):
    assert find_parent(f"0::/{membership}", f"{mountinfo}\n1 2 3 / /nowhere x - cgroup2 ") is None


def test_only_groups_that_nobody_holds_are_removed(tmp_path: Path):
    for name in ("graft-dead/1", "graft-dead/2", "graft-held/1", "another.scope"):
        (tmp_path / name).mkdir(parents=True)
    held = os.open(tmp_path / "graft-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another.scope", "graft-held"]
    os.close(held)
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["another.scope"]


def test_groups_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "graft-other").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned(tmp_path)
    assert (tmp_path / "graft-other").exists()


def test_a_group_that_does_not_end_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cgroup, "REMOVE_SECONDS", 0.02)
    busy = tmp_path / "graft-busy"
    (busy / "1").mkdir(parents=True)
    (busy / "1/process").touch()  # rmdir fails, as with a process in it
    remove_abandoned(tmp_path)
    (busy / "1/process").unlink()
    remove_abandoned(tmp_path)
    assert not busy.exists()


def test_without_the_kernels_files_no_group_is_made(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(cgroup, "own_parent", lambda: tmp_path)  # a folder, but no control group
    assert cgroup.open_group() is None
    assert not list(tmp_path.iterdir())


def test_a_call_may_have_its_memory_its_disk_and_a_copy_of_the_interpreter_per_process():
    limits = Limits(cpu=1, memory=100 * MEGABYTE, disk=64 * MEGABYTE, processes=64, files=32)
    assert KERNEL_MEMORY == 16 * MEGABYTE
    assert room(limits, 8 * MEGABYTE, 1) == (100 + 10 + 64 + 16 + 8) * MEGABYTE
    assert room(limits, 8 * MEGABYTE, 3) == (100 + 10 + 64 + 16 + 24) * MEGABYTE


def test_events_are_counted():
    events = "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 1\n"
    assert (count(events, "oom_kill"), count(events, "max"), count(events, "new")) == (1, 12, 0)
    assert count("oom_kill\noom_kill x\n", "oom_kill") == 0


def test_the_method_is_described_with_its_control_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "_grouped", {"namespaces"})
    assert [described(name) for name in STRONGEST_FIRST] == [
        "bubblewrap",
        "namespaces + cgroup",
        "landlock",
    ]


# from here on: on machines where this user may make control groups


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[hosts.SandboxHost]:
    """A new host of the method that the test names."""
    if own_parent() is None:
        pytest.skip("this user may not make control groups here")
    made = hosts.SandboxHost(request.param)
    yield made
    made.close()


every_method = pytest.mark.parametrize("host", [*STRONGEST_FIRST, choice.NONE], indirect=True)


def folder_of(host: hosts.SandboxHost) -> Path:
    assert host.has_groups and host._group is not None
    return host._group.path


def calls_in(folder: Path) -> list[Path]:
    """The groups that have processes."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # a file, or just removed
            found += [path] if (path / "cgroup.procs").read_text() else []
    return found


def seen_during(host: hosts.SandboxHost, code: str, files: list[str], **limits) -> tuple:
    """The outcome of a program, and what the files of its group had before they were removed."""
    seen: dict[str, str] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for path in calls_in(folder_of(host)):
                with contextlib.suppress(OSError):
                    seen.update({name: (path / name).read_text() for name in files})
            time.sleep(0.01)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        return run_in(host, code, **limits), seen
    finally:
        ended.set()
        looking.join()


@every_method
def test_a_call_is_in_a_group_with_its_limits(host: hosts.SandboxHost):
    files = ["memory.max", "pids.max", "memory.oom.group", "memory.current"]
    outcome, seen = seen_during(
        host, "import time; time.sleep(0.5); print(1)", files, timeout=60, memory_mb=100
    )
    assert outcome.stdout == "1\n"
    assert int(seen["memory.max"]) >= room(Limits(0, 100 * MEGABYTE, 64 * MEGABYTE, 64, 49), 0, 1)
    assert int(seen["memory.max"]) < 300 * MEGABYTE
    assert 0 < int(seen["memory.current"]) < 50 * MEGABYTE
    assert (seen["pids.max"], seen["memory.oom.group"]) == ("64\n", "1\n")
    assert not calls_in(folder_of(host))
    folder = folder_of(host)
    host.close()
    assert not folder.exists()


@every_method
def test_a_group_serves_the_next_call_only_after_a_quiet_end(host: hosts.SandboxHost):
    def names() -> list[str]:
        return sorted(path.name for path in folder_of(host).iterdir() if path.is_dir())

    for memory_mb in (64, 96):
        assert run_in(host, "print(1)", timeout=60, memory_mb=memory_mb).stdout == "1\n"
    kept = [] if host.method == choice.NONE else ["1"]  # what it left could be in the group
    assert names() == kept
    assert run_in(host, "import os; os.abort()", timeout=60).exit_code < 0
    assert run_in(host, "print(1)", timeout=60).stdout == "1\n"
    assert names() == ([] if host.method == choice.NONE else ["2"])


def test_a_group_that_was_killed_is_not_used_again(monkeypatch: pytest.MonkeyPatch):
    """A call may end by itself at the moment in which it is killed."""
    made: list[str] = []
    monkeypatch.setattr(CallGroup, "__init__", lambda self, name, _: self.__dict__.update(NEW))
    for method in ("limit", "_write"):
        monkeypatch.setattr(CallGroup, method, lambda *_: None)
    monkeypatch.setattr(CallGroup, "remove", lambda self: not made.append("removed"))
    groups = CallGroups(0)
    quiet, killed = groups.open(TRIAL), groups.open(TRIAL)
    killed.kill()
    groups.close(quiet, is_empty=True)
    groups.close(killed, is_empty=True)
    assert (groups.free, made) == ([quiet], ["removed"])


NEW = {"is_killed": False}
HOG = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        x = b'x' * (30 << 20)
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize("host", [choice.NONE], indirect=True)
def test_the_kernel_ends_a_call_whose_processes_need_too_much_together(host: hosts.SandboxHost):
    outcome = run_in(host, HOG, timeout=60, memory_mb=32)
    assert (outcome.exit_code, outcome.is_out_of_memory, outcome.is_timeout) == (-9, True, False)
    assert run_in(host, "print(1)", timeout=60).stdout == "1\n"
    assert not calls_in(folder_of(host))  # the processes in sessions of their own have ended too


@pytest.mark.parametrize("host", ["landlock"], indirect=True)
def test_the_kernel_limits_the_threads_of_a_call(host: hosts.SandboxHost):
    code = (
        "import threading, time\n"
        "for _ in range(100):\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    outcome, seen = seen_during(host, code, ["pids.events"], timeout=60)
    assert "can't start new thread" in outcome.stderr
    assert count(seen["pids.events"], "max") > 0


@pytest.mark.parametrize("host", [choice.NONE], indirect=True)
def test_what_a_call_has_left_behind_is_killed(host: hosts.SandboxHost):
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)"
    assert run_in(host, code, timeout=60).ok
    deadline = time.monotonic() + 30
    while calls_in(folder_of(host)) and time.monotonic() < deadline:
        run_in(host, "pass", timeout=60)  # the next call removes the group
    assert not calls_in(folder_of(host))


@pytest.mark.parametrize("host", ["landlock"], indirect=True)
def test_a_thread_of_a_call_can_signal_the_first_one(host: hosts.SandboxHost):
    """The C library keeps the id of the first thread, which its own fork would have renewed."""
    code = (
        "import signal, threading\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('caught'))\n"
        "first = threading.get_ident()\n"
        "other = threading.Thread(target=signal.pthread_kill, args=(first, signal.SIGUSR1))\n"
        "other.start(); other.join()"
    )
    assert run_in(host, code, timeout=60).stdout == "caught\n"


KILLED = """
import os, signal
from graft_sandbox import hosts
from graft_sandbox.running import run_in
host = hosts.SandboxHost("landlock")
run_in(host, "pass", timeout=60)
print(host._group.path, flush=True)
os.kill(host._process.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("host", ["landlock"], indirect=True)
def test_the_next_start_removes_the_group_of_a_caller_that_was_killed(host: hosts.SandboxHost):
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = Path(done.stdout.strip())
    assert left.parent == folder_of(host).parent
    hosts.SandboxHost("landlock").close()
    assert not left.exists()
    assert folder_of(host).exists()  # that of a living process stays


def test_the_probe_tells_of_control_groups():
    if own_parent() is None:
        assert all("control group" not in method.why for method in choice.methods())
        pytest.skip("this user may not make control groups here")
    name = choice.choose()
    why = (
        "a trial program could neither read a file nor open a socket; each call has a control group"
    )
    assert choice.probe(name) == Method(name, True, why)
    assert described(name) == f"{name} + cgroup"
    assert run_python("print(1)", timeout=60).stdout == "1\n"
