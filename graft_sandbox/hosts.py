"""The pool of sandbox hosts, warm processes that fork one child per call."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from graft_sandbox.cgroup import HostGroup, open_group
from graft_sandbox.inside import HEAD, READY, READY_WITH_GROUPS
from graft_sandbox.inside.cleanup import remove
from graft_sandbox.interpreter import (
    PACKAGE_FOLDERS,
    Interpreter,
    inspect_interpreter,
    own_interpreter,
)

INSIDE = Path(__file__).parent / "inside"
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from inside.host import main; main()"
FLAGS = ("-S", "-s", "-P", "-B", "-X", "utf8")  # no site, no user folder, nothing written
START_SECONDS = 60.0
"""How long a host may take to start; importing the preloaded modules is the slow part."""
SEND_SECONDS = 30.0
"""How long a request may wait for a host that does not read."""
BUSY = 4
"""Programs at a time in one host before another host is started."""
MAX_HOSTS = max(4, min(16, (os.cpu_count() or 1) // 2))
"""Hosts of one kind. Several are faster even on few processors, since a host serves one call at a time."""
SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
PROGRAMS = (*SYSTEM, "/bin", "/sbin", "/usr", "/etc/alternatives")
WRITABLE = (
    "/app", "/data", "/home", "/logs", "/output", "/root", "/solution", "/tests", "/work", "/workspace",
)  # fmt: skip
PYTHON, SHELL = "python", "shell"
SCRATCH = "/scratch"
TMP = "/tmp"
GRAFT = ("graft", "graft_envs", "graft_interop", "graft_search")
HIDDEN_PACKAGES = (*GRAFT, "reasoning_gym", "gem", "textarena")
"""Packages that make tasks: code that can import them can make a task again, with its answer."""
SHARED_PREFIXES = ("/", "/usr", "/usr/local")  # hold far more than Python
DEVICES = ("null", "zero", "full", "random", "urandom")

CAPABILITIES = (
    "CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL",
    "CAP_SYS_PTRACE",  # to measure children, which are other users
)  # fmt: skip

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/scratch",
    "TMPDIR": "/scratch",
    "PYTHONHASHSEED": "0",  # the same code prints the same
    # a host with threads could not be forked safely
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each reserves 64 MB of address space, which is limited
}


class SandboxError(RuntimeError):
    """The sandbox failed; the code that it ran is not the cause."""


class SandboxUnavailable(SandboxError):
    """No kind of isolation works on this machine; the message lists what was tried."""


class HostDied(SandboxError):
    """The host ended during a call; the call can be repeated in another host."""


class SandboxHost:
    """One warm process behind one method, with some modules already imported."""

    def __init__(self, method: str, preload: tuple[str, ...] = (), view: str = PYTHON) -> None:
        self.method = method
        self.running: set[object] = set()
        """The programs that run now; sessions, which mostly wait, are not counted."""
        self.scratch = "/scratch" if method == "bubblewrap" else ""  # inside
        self.has_groups = False
        """Whether every call has a control group."""
        self._group: HostGroup | None = None
        try:
            self._open(preload, view)
        except OSError as error:  # no processes, descriptors or disk left
            raise SandboxError(f"cannot start {method}: {error}") from error
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _open(self, preload: tuple[str, ...], view: str) -> None:
        with contextlib.ExitStack() as files:  # all are closed if the host cannot be started
            if self.method in ("landlock", "none"):
                self.scratch = tempfile.mkdtemp(prefix="graft-scratch-")
                files.callback(remove, self.scratch)
                # root's children are other users, each with a folder
                Path(self.scratch).chmod(0o711)
            if group := open_group():
                self._group = group
                files.callback(group.close)
            self._errors: BinaryIO = files.enter_context(tempfile.TemporaryFile())
            self._requests, theirs = socket.socketpair()
            files.enter_context(self._requests)
            with theirs:
                self._process = self._start(theirs.fileno(), preload, view_named(view))
            self._files = files.pop_all()

    def _start(
        self, requests: int, preload: tuple[str, ...], view: View
    ) -> subprocess.Popen[bytes]:
        # lets the host see that this process ended, also if a fork still holds the socket
        caller = os.pidfd_open(os.getpid())
        group = None if self._group is None else self._group.descriptor
        config = {
            "method": self.method,
            "requests": requests,
            "caller": caller,
            "group": group,
            "preload": preload,
            "readable": view.readable,
            "links": view.links,
            "site": view.site,
            "hidden": view.hidden,
            "users": secrets.randbits(22),
            "scratch": self.scratch,
        }
        try:
            return subprocess.Popen(
                _command(self.method, view, config),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[requests, caller, *([] if group is None else [group])],
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )
        finally:
            os.close(caller)

    def send(self, head: bytes, descriptors: list[int]) -> None:
        """Request a child with these limits and descriptors; HostDied if the host has ended."""
        try:
            socket.send_fds(self._requests, [head.ljust(HEAD)], descriptors)
        except OSError as error:
            raise HostDied(f"the {self.method} sandbox has ended: {error}") from error

    def close(self) -> None:
        """End the process and everything it runs."""
        self._requests.close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._files.close()

    def forget(self) -> None:
        """Close the sockets in a fork of this process; the host belongs to the parent."""
        self._process.returncode = 0
        self._requests.close()
        self._errors.close()
        if self._group is not None:
            self._group.forget()

    def _await_ready(self) -> None:
        self._requests.settimeout(START_SECONDS)
        try:
            answer = self._requests.recv(1)
        except OSError as error:
            raise SandboxError(f"{self.method} did not start: {error}") from error
        self._requests.settimeout(SEND_SECONDS)
        self.has_groups = answer == READY_WITH_GROUPS
        if answer not in (READY, READY_WITH_GROUPS):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise SandboxError(lines[-1] if lines else f"{self.method} ended without a message")


class View(NamedTuple):
    readable: list[str]
    """Folders and files, none below another."""
    links: dict[str, str]
    """Symbolic links that must exist too: path -> target."""
    site: list[str]
    """The folders of installed packages."""
    hidden: list[str]
    """Folders and files below `readable` that must not be seen."""
    executable: str


def view_named(name: str) -> View:
    """The view of a name in `VIEWS`, or for the interpreter at a path."""
    return VIEWS[name]() if name in VIEWS else _view(SYSTEM, inspect_interpreter(name))


def python_view() -> View:
    """The view for the running interpreter. Of a virtual environment only its packages are visible."""
    return _view(SYSTEM, own_interpreter())


def shell_view() -> View:
    """Show also the machine's programs, and folders of a usual root that lead to the scratch disk."""
    view = _view(PROGRAMS, own_interpreter())
    taken = _folders_above([*view.readable, *view.links])  # Python may be installed in /root
    folders = {path: f"{SCRATCH}{path}" for path in WRITABLE if path not in taken}
    return view._replace(links={**folders, **view.links})


def _view(system: Sequence[str], python: Interpreter) -> View:
    executable, prefixes, packages = python
    wanted = [*system, executable, *packages]
    for prefix in prefixes:
        if prefix in SHARED_PREFIXES:
            wanted += [f"{prefix}/lib", f"{prefix}/lib64"]
        else:
            wanted.append(prefix)
    readable: set[str] = set()
    links: dict[str, str] = {}
    for path in wanted:
        if not os.access(path, os.R_OK):
            continue
        real = os.path.realpath(path)
        readable.add(real)
        if real != path:
            links[path] = real
    outermost = sorted(path for path in readable if not _is_below(path, readable))
    links = {path: real for path, real in links.items() if not _is_below(path, {*outermost})}
    if not any(path.startswith(f"{TMP}/") for path in (*outermost, *links)):
        links[TMP] = SCRATCH  # else Python is installed there, and /tmp is a real folder
    hidden = hidden_below(outermost, packages, prefixes[0])
    return View(outermost, links, packages, hidden, executable)


def hidden_below(
    readable: list[str], packages: list[str], prefix: str = sys.base_prefix
) -> list[str]:
    """The paths of `HIDDEN_PACKAGES` and of others that bring tasks, in every folder of packages that can be
    read, and the other environments and downloads of a conda installation, which may hold them too."""
    folders = {os.path.realpath(path) for path in packages}
    for root in readable:
        for name in PACKAGE_FOLDERS:
            for pattern in (name, f"python3*/{name}", f"lib/python3*/{name}", f"*/python3*/{name}"):
                folders.update(map(str, Path(root).glob(pattern)))
    names = {*HIDDEN_PACKAGES, *task_packages()}
    found = [path for folder in folders for path in packages_in(folder, names)]
    conda = [f"{prefix}/{name}" for name in ("envs", "pkgs")]
    found += [path for path in conda if os.path.isdir(path) and not _holds(path, packages)]  # noqa: PTH112
    return sorted({path for path in map(os.path.realpath, found) if _is_below(path, {*readable})})


def task_packages() -> set[str]:
    """Installed packages whose environments graft finds by their entry points."""
    listed = chain(entry_points(group="graft.envs"), entry_points(group="graft.env_tables"))
    return {entry.module.partition(".")[0] for entry in listed}


def packages_in(folder: str, names: Collection[str]) -> list[str]:
    """The folder, module or compiled module of each of these packages."""
    stems = {*names, *(f"{name}.py" for name in names)}
    try:
        entries = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    return [
        f"{folder}/{entry}"
        for entry in entries
        if entry in stems or (entry.endswith(".so") and entry.partition(".")[0] in names)
    ]


def _holds(folder: str, paths: list[str]) -> bool:
    return any(_is_below(os.path.realpath(path), {os.path.realpath(folder)}) for path in paths)


def _is_below(path: str, folders: set[str]) -> bool:
    return any(str(parent) in folders for parent in Path(path).parents)


VIEWS = {PYTHON: python_view, SHELL: shell_view}


def _command(method: str, view: View, config: dict[str, Any]) -> list[str]:
    """The command that starts a host; bwrap builds the file tree that `inside.rootfs` builds otherwise."""
    python = [view.executable, *FLAGS, "-c", BOOT]
    if method != "bubblewrap":
        return [*python, str(INSIDE.parent), json.dumps(config)]
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed")
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if os.geteuid() != 0:
        command += ["--unshare-user", "--uid", "0", "--gid", "0"]
    # the host needs them to create each child's namespaces; the children drop them
    command += [word for cap in CAPABILITIES for word in ("--cap-add", cap)]
    for folder in _folders_above([*view.readable, *view.links, "/dev/null", "/graft/inside"]):
        command += ["--perms", "0755", "--dir", folder]  # bwrap's default would let only root pass
    for path in view.readable:
        command += ["--ro-bind", path, path]
    for path in view.hidden:
        if os.path.isdir(path):  # noqa: PTH112
            command += ["--perms", "0755", "--tmpfs", path]
            command += ["--ro-bind", str(INSIDE / "hidden.py"), f"{path}/__init__.py"]
            command += ["--remount-ro", path]
        else:
            command += ["--ro-bind", "/dev/null", path]
    for path, target in view.links.items():
        command += ["--symlink", target, path]
    for name in DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--ro-bind", str(INSIDE), "/graft/inside", "--proc", "/proc", "--dir", "/empty"]
    command += ["--tmpfs", "/scratch", "--remount-ro", "/"]
    return [*command, "--as-pid-1", "--", *python, "/graft", json.dumps(config)]


def _folders_above(paths: list[str]) -> list[str]:
    """["/a/b/c"] -> ["/a", "/a/b"]: the parent folders of the paths, in order."""
    return sorted({str(folder) for path in paths for folder in Path(path).parents} - {"/"})


Kind = tuple[str, tuple[str, ...], str]
"""The method, the modules that the host has imported, and the name of its view."""

_hosts: dict[Kind, list[SandboxHost]] = {}
_locks: dict[Kind, threading.Lock] = {}
_guard = threading.Lock()


def obtain(method: str, preload: tuple[str, ...] = (), view: str = PYTHON) -> SandboxHost:
    """The least busy host of this kind; a new one if there is none, or if all are busy and there are
    fewer than MAX_HOSTS."""
    kind = (method, preload, view)
    host = _least_busy(kind)
    if host is not None and (len(host.running) < BUSY or len(_hosts.get(kind, ())) >= MAX_HOSTS):
        return host
    with _guard:
        lock = _locks.setdefault(kind, threading.Lock())
    if not lock.acquire(blocking=host is None):
        return host or obtain(method, preload, view)  # another thread is starting one
    try:
        if host is None and (host := _least_busy(kind)):
            return host  # another thread has started it
        host = SandboxHost(method, preload, view)
        with _guard:
            _hosts.setdefault(kind, []).append(host)
        return host
    finally:
        lock.release()


def _least_busy(kind: Kind) -> SandboxHost | None:
    return min(_hosts.get(kind, ()), key=lambda host: len(host.running), default=None)


def discard(host: SandboxHost) -> None:
    """Remove a host that has died, so that the next call gets a new one."""
    with _guard:
        known = [hosts for hosts in _hosts.values() if host in hosts]
        for hosts in known:
            hosts.remove(host)
    if known:  # of several callers that noticed it, one cleans up
        host.close()


def close_all(method: str | None = None) -> None:
    """End every host, or those of one method."""
    for host in [host for hosts in _hosts.values() for host in hosts]:
        if method in (None, host.method):
            discard(host)


def _after_fork() -> None:
    global _guard
    for host in [host for hosts in _hosts.values() for host in hosts]:
        host.forget()
    _hosts.clear()
    _locks.clear()
    _guard = threading.Lock()  # a thread of the parent may have held it


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork)
