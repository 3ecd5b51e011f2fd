"""Sabotage as an ordinary user: neither neighbours nor host nor caller is harmed, and limits hold."""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from graft_sandbox import hosts, run_python
from graft_sandbox.hosts import SandboxError, SandboxHost, hidden_below
from graft_sandbox.inside import cleanup
from graft_sandbox.running import run_in
from tests.graft_sandbox.ordinary_user import run_as_ordinary_user

SABOTAGE = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from graft_sandbox import run_python, hosts, choice
method = METHOD
if not choice.probe(method).works:
    sys.exit(f"{method} does not work here: {choice.probe(method).why}")
seen = {}
run_python("pass", sandbox=method)
first = hosts.obtain(method)
pool = ThreadPoolExecutor(2)

for number in (9, 19):
    code = "import time; time.sleep(0.3); print('ok')"
    neighbour = pool.submit(run_python, code, timeout=2, sandbox=method)
    time.sleep(0.1)
    run_python(f"import os; os.kill(0, {number})", timeout=2, sandbox=method)
    seen[f"neighbour of signal {number}"] = neighbour.result().stdout

deep = "import os\\nfor _ in range(3000):\\n    os.mkdir('d'); os.chdir('d')\\n"
closed = "import os\\nos.umask(0); os.mkdir('m', 0o300); open('m/f', 'w').write('x')"
for name, code in (("deep", deep), ("closed", closed)):
    run_python(code, sandbox=method)
    seen[f"after {name}"] = run_python("print('ok')", sandbox=method).stdout

files = "import os\\nfor n in range(120_000): os.close(os.open(str(n), os.O_CREAT))\\nprint('all')"
going = pool.submit(run_python, files, timeout=10, sandbox=method)
beside = [run_python("print('ok')", timeout=2, sandbox=method) for _ in range(10)]
seen["beside many files"] = sorted({(one.stdout, one.is_timeout) for one in beside})
seen["many files"] = going.result().ok

secret = "the program of another attempt"
run_python(f"x = '''{secret * 3000}'''", sandbox=method)
peek = (
    "import ctypes\\nlibc = ctypes.CDLL(None)\\nlibc.sbrk.restype = ctypes.c_void_p\\n"
    "heap = ctypes.string_at(libc.sbrk(0) - 500_000, 500_000)\\n"
    "print((b'the program of ' + b'another attempt') in heap)"
)
seen["earlier program"] = run_python(peek, sandbox=method).stdout
seen["same host"] = hosts.obtain(method) is first and first._process.poll() is None
print(json.dumps(seen))
"""


@pytest.mark.parametrize("name", ["bubblewrap", "namespaces", "landlock"])
def test_sabotage_does_not_pay(name: str):
    script = SABOTAGE.replace("METHOD", repr(name))
    assert json.loads(run_as_ordinary_user(script)) == {
        "neighbour of signal 9": "ok\n",
        "neighbour of signal 19": "ok\n",
        "after deep": "ok\n",
        "after closed": "ok\n",
        "beside many files": [["ok\n", False]],
        "many files": False,
        "earlier program": "False\n",
        "same host": True,
    }


BUFFERS = """
import socket, time
kept = [b"x" * (12 << 20)]
try:
    while True:
        for end in socket.socketpair():
            kept.append(end)
            end.setblocking(False)
            try:
                while True: end.send(bytes(4096))
            except BlockingIOError:
                pass
except OSError:
    time.sleep(20)
"""
DELETED = """
import os, time
kept = []
for number in range(30):
    kept.append(os.open(str(number), os.O_RDWR | os.O_CREAT))
    os.unlink(str(number))
    for _ in range(12): os.write(kept[-1], bytes(1 << 20))
time.sleep(20)
"""
MAPPED = """
import mmap, os, time
kept = []
for number in range(30):
    file = os.open(str(number), os.O_RDWR | os.O_CREAT)
    for _ in range(8): os.write(file, bytes(1 << 20))
    kept.append(mmap.mmap(file, 4096))
    os.unlink(str(number)); os.close(file)
    time.sleep(0.01)
time.sleep(20)
"""


@pytest.mark.parametrize("hog", [BUFFERS, DELETED, MAPPED], ids=["buffers", "deleted", "mapped"])
def test_what_no_limit_of_the_kernel_counts_is_counted_on_a_busy_host(method: str, hog: str):
    with ThreadPoolExecutor(2) as pool:
        going = pool.submit(run_python, hog, timeout=10.0, memory_mb=16, sandbox=method)
        while not going.done():  # the host always has another request
            assert run_python("print(1)", sandbox=method).stdout == "1\n"
    outcome = going.result()
    assert not outcome.ok and not outcome.is_timeout and outcome.seconds < 8
    assert outcome.is_out_of_memory == (hog is BUFFERS)


def test_processes_divide_the_memory_of_their_call(method: str):
    """200 MB, of which u are used, and 98 open files of 0.2 MB each: 20 MB. After the fork both may use
    u + (200 - 2u - 20) / 2 = 90 MB, which is 110 less."""
    if method == "landlock":
        pytest.skip("there are no further processes")
    code = (
        "import os, resource, time\n"
        "before = resource.getrlimit(resource.RLIMIT_AS)[0]\n"
        "pid = os.fork()\n"
        "now = resource.getrlimit(resource.RLIMIT_AS)[0]\n"
        "print(round((before - now) / 2**20), flush=True)\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "time.sleep(0.3)\n"
        "print(before == resource.getrlimit(resource.RLIMIT_AS)[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (before, before))\n"
    )
    outcome = run_python(code, memory_mb=200, sandbox=method)
    assert (outcome.stdout, outcome.stderr) == ("110\n110\nTrue\n", "")


def test_the_input_cannot_be_used_to_store_more(method: str):
    code = (
        "import os\n"
        "for act in (lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 1 << 20)):\n"
        "    try:\n"
        "        act()\n"
        "    except OSError:\n"
        "        print('refused')\n"
    )
    assert run_python(code, "input", sandbox=method).stdout == "refused\nrefused\n"


def test_packages_that_bring_environments_are_hidden_too(monkeypatch: pytest.MonkeyPatch):
    maze = EntryPoint("maze", "graft_maze.maze:Maze", "graft.envs")
    monkeypatch.setattr(
        hosts, "entry_points", lambda group: [maze] if group == "graft.envs" else []
    )
    assert hosts.task_packages() == {"graft_maze"}


def test_hidden_packages_cannot_be_imported_or_read(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "HIDDEN_PACKAGES", ("iniconfig",))
    folder = Path(__import__("iniconfig").__file__).parent
    code = (
        "import os\n"
        "for act in (lambda: __import__('iniconfig'), lambda: __import__('iniconfig.exceptions'),\n"
        f"            lambda: open({str(folder / 'exceptions.py')!r})):\n"
        "    try:\n"
        "        print(act())\n"
        "    except (ImportError, OSError):\n"
        "        print('refused')\n"
        "import pluggy\n"
        "print(pluggy.__name__)\n"
    )
    host = SandboxHost(method)
    try:
        outcome = run_in(host, code, timeout=20.0)
        assert (outcome.stdout, outcome.stderr) == ("refused\n" * 3 + "pluggy\n", "")
    finally:
        host.close()


def test_every_copy_of_a_package_that_makes_tasks_is_hidden(tmp_path: Path):
    root = tmp_path.resolve()
    site, system = root / "venv/site-packages", root / "usr/lib/python3.11/site-packages"
    for folder in (site, system):
        (folder / "reasoning_gym").mkdir(parents=True)
        (folder / "numpy").mkdir()
    (site / "gem.py").touch()
    (site / "textarena.cpython-311.so").touch()
    assert hidden_below([str(site), f"{root}/usr/lib"], [str(site)]) == [
        f"{system}/reasoning_gym",
        f"{site}/gem.py",
        f"{site}/reasoning_gym",
        f"{site}/textarena.cpython-311.so",
    ]


def test_a_hostile_tree_is_removed_without_recursion_and_without_following_links(tmp_path: Path):
    outside, folder = tmp_path / "outside", tmp_path / "scratch"
    if os.access("/dev/shm", os.W_OK):  # quicker: some disks take 2 ms to remove a folder
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "1").mkdir(parents=True)
    here = os.open(folder / "1", os.O_RDONLY)
    for depth in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        if depth % 500 == 0:
            os.symlink(outside, "link", dir_fd=here)
            os.mkfifo("pipe", dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (folder / "2/a").mkdir(parents=True)
    for number in range(200):
        (folder / f"2/a/{number}").touch()
    (folder / "2/a").chmod(0o300)
    (folder / "2").chmod(0)
    trash = cleanup.Trash(str(folder))
    trash.add("2")
    steps = 1
    while trash.step():
        steps += 1
    trash.close()
    assert (
        steps == 1 + 4 and not trash.has_failed
    )  # "2", then 200 entries by 64, the last 8 and the folder
    cleanup.remove(str(folder))
    assert not folder.exists() and [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "kept").exists()


def test_what_cannot_be_removed_is_reported_and_the_rest_goes_on(tmp_path: Path):
    trash = cleanup.Trash(str(tmp_path))
    (tmp_path / "other").mkdir()
    trash.add("other")
    trash.add("missing")
    while trash.step():
        pass
    trash.close()
    assert trash.has_failed and not list(tmp_path.iterdir())


@pytest.mark.parametrize("method_name", ["landlock", "none"])
def test_a_host_without_a_place_for_its_files_is_an_error_of_its_own(
    method_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(SandboxError, match="cannot start"):
        SandboxHost(method_name)


def test_a_host_whose_clean_up_fails_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hosts.close_all("none")
    try:
        # a folder that is gone before its host can remove it
        code = "import os, shutil; shutil.rmtree(os.getcwd())"
        assert run_python(code, sandbox="none").ok
        first = hosts.obtain("none")
        first._process.wait(timeout=20)
        assert run_python("print(1)", sandbox="none").stdout == "1\n"
        assert hosts.obtain("none") is not first
    finally:
        hosts.close_all("none")
    assert not list(tmp_path.iterdir())
