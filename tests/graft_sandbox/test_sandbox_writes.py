"""Files of a call without a disk of its own: what can be written fits, also while nobody counts."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from graft_sandbox import SandboxOutcome, choice
from graft_sandbox.hosts import SandboxHost
from graft_sandbox.inside import usage
from graft_sandbox.inside.writes import SMALLEST, WriteGate
from graft_sandbox.running import DISK_MB, run_in

MB = 1 << 20
is_here = pytest.mark.skipif(
    not choice.probe("landlock").works, reason="landlock does not work here"
)


def test_all_that_can_be_written_fits(tmp_path: Path):
    gate = WriteGate(os.getpid(), str(tmp_path), 64 * MB, None)

    def fit(used: int, count: int = 0, *files: tuple[int, int]) -> tuple[int, int]:
        limit, grants = gate._fit(used * MB, count, [(a * MB, b * MB) for a, b in files])
        return limit // MB, grants

    assert fit(0) == (16, 4)
    assert fit(40) == (16, 1)
    assert fit(49) == (12, 1)  # 15 are left
    assert fit(40, 4, (10, 0), (10, 0)) == (12, 1)  # 40 + 2 * 2 + 12
    assert fit(40, 4, (10, 16)) == (16, 1)  # 40 + 6 + 16
    assert fit(40, 4, (10, 16), (10, 16)) == (12, 1)  # 40 + 2 * 6 + 12: they keep what they had
    assert fit(64) == (0, 0)
    assert fit(usage.UNKNOWN) == (0, 0)
    assert fit(16, 320) == (2, 22)  # a 16th of 320 at least: 20 * 2.85 do not fit, 22 * 2.14 do
    assert fit(4, 4095)[1] == 1
    assert fit(4, 4096) == (0, 0)
    assert gate._fit(64 * MB - SMALLEST + 1, 0, []) == (0, 0)


def test_open_files_are_found_with_their_names_and_sizes(tmp_path: Path):
    gate = WriteGate(os.getpid(), str(tmp_path), 64 * MB, None)
    for name in ("read", "kept", "deleted", "sparse"):
        (tmp_path / name).write_bytes(b"x" * 10_000)
    with (
        (tmp_path / "read").open("rb"),
        (tmp_path / "kept").open("ab") as kept,
        (tmp_path / "deleted").open("rb") as deleted,
        (tmp_path / "sparse").open("r+b") as sparse,
    ):
        (tmp_path / "deleted").unlink()
        sparse.truncate(5 * MB)
        found = {inode: named for (_, inode), named in gate._writable_files().items()}
        inodes = [os.fstat(file.fileno()).st_ino for file in (kept, deleted, sparse)]
        assert (tmp_path / "read").stat().st_ino not in found
        assert [found[inode][1] for inode in inodes] == [True, False, True]
        assert found[inodes[2]][0] == 5 * MB  # what it has when its hole is filled
        assert 10_000 <= found[inodes[0]][0] < 20_000


def test_a_tree_is_counted_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(MB))
    listed = os.scandir

    def scandir(path: str):
        if path.endswith("/b"):
            raise FileNotFoundError
        return listed(path)

    monkeypatch.setattr(usage.os, "scandir", scandir)
    total, count = usage.files_below(str(tmp_path))
    assert 2 * MB <= total < 3 * MB and count == 5


BURSTS = {
    "many": "for n in range(40):\n    with open(str(n), 'wb') as file: file.write(bytes(8 << 20))",
    "opened before": (
        "files = [open(str(n), 'wb', 0) for n in range(30)]\nready()\n"
        "for file in files: file.write(bytes(16 << 20))"
    ),
    "deleted": (
        "files = []\nfor n in range(30):\n    files.append(open(str(n), 'wb', 0)); os.unlink(str(n))\n"
        "    files[-1].write(bytes(16 << 20))"
    ),
    "moved": (
        "for n in range(30):\n    os.makedirs(f'{n}/b'); open(f'{n}/b/f', 'wb').write(bytes(8 << 20))\n"
        "    os.rename(f'{n}/b', f'{n}/c')"
    ),
    "in threads, closed meanwhile": (
        "def write(n):\n    file = os.open(str(n), os.O_WRONLY | os.O_CREAT)\n"
        "    threading.Thread(target=os.close, args=(file,)).start(); os.write(file, content)\n"
        "content = bytes(16 << 20)\n"
        "for n in range(20): threading.Thread(target=write, args=(n,)).start()"
    ),
}
PROLOGUE = """
import os, resource, sys, threading, time
threading.excepthook = sys.excepthook = lambda *_: None
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))  # without effect
waited = []
def ready():
    open('ready', 'w').close(); time.sleep(0.15); waited.append(1)
"""


def slow_but(quick: str, programs: dict[str, str]) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.slow if one != quick else ()) for one in programs]


@is_here
@pytest.mark.parametrize("name", slow_but("many", BURSTS))
def test_the_disk_is_not_exceeded_while_the_host_is_late(name: str):
    code = BURSTS[name]
    start = "" if "ready()" in code else "ready()\n"
    code = f"{PROLOGUE}{start}try:\n    exec({code!r})\nexcept OSError: pass\ntime.sleep(0.5)"
    host = SandboxHost("landlock")
    outcomes: list[SandboxOutcome] = []
    try:
        run_in(host, "pass")
        call = threading.Thread(
            target=lambda: outcomes.append(run_in(host, code, timeout=3.0, memory_mb=512))
        )
        call.start()
        folder = Path(host.scratch) / "2"
        until = time.monotonic() + 3
        while not (folder / "ready").exists() and time.monotonic() < until:
            time.sleep(0.002)
        os.kill(host._process.pid, signal.SIGSTOP)
        most, until = 0, time.monotonic() + 0.5
        while time.monotonic() < until:
            most = max(most, used_in(folder))
            time.sleep(0.01)
        os.kill(host._process.pid, signal.SIGCONT)
        while call.is_alive():
            most = max(most, used_in(folder))
            time.sleep(0.01)
        call.join()
    finally:
        host.close()
    assert outcomes[0].stderr == ""
    assert 8 * MB <= most <= DISK_MB * MB


def used_in(folder: Path) -> int:
    """Bytes on the disk, with deleted files of the process that has this folder."""
    total = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").readlink() == folder:
                total += usage.held_files(int(process.name), folder.stat().st_dev)
        except OSError:
            continue
    return total + usage.files_below(str(folder))[0]


HONEST = {
    "many open": "files = [open(str(n), 'w') for n in range(20)]\nfor f in files: f.write('x' * 100_000)",
    "written again": "for n in range(8): open('x', 'wb').write(bytes(12 << 20))",
    "a pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def write(n): open(str(n), 'w').write('x' * 1_000_000)\n"
        "list(ThreadPoolExecutor(8).map(write, range(40)))"
    ),
    "beside a busy thread": (
        "import threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True)"
        ".start()\nfor n in range(10): open(str(n), 'w').write('x' * 100_000)"
    ),
    "moved and removed": (
        "import os, shutil, tempfile\nfor n in range(20):\n    d = tempfile.mkdtemp()\n"
        "    open(d + '/a', 'w').write('x' * 10**6); os.replace(d + '/a', d + '/b'); shutil.rmtree(d)"
    ),
}


@is_here
@pytest.mark.parametrize("name", slow_but("many open", HONEST))
def test_honest_programs_write_their_files(name: str):
    host = SandboxHost("landlock")
    try:
        outcome = run_in(host, HONEST[name] + "\nprint('done')", timeout=20.0)
    finally:
        host.close()
    assert (outcome.stdout, outcome.stderr) == ("done\n", "")
