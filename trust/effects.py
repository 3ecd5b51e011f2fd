"""What a command did to the world: it runs in a process of its own, and everything it touches is noted.

    outcome = observe(world, ["eval", "theirs", "--tasks", "1"])
    outcome.effects            ["open /.../private/rows.jsonl", "socket.connect ('127.0.0.1', 9)", ...]

`world` is a folder with `private` (files of the user: none may be opened, by any path), `home` (the user's
settings) and `work`, where the command runs. Python's audit events tell what is opened, started and
connected to; code of a stranger leaves a file; what other libraries write is found by comparing private and
home.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trust.file_cases import CANARY

MARK = "graft-canary"
"""In every command that a hostile file names."""
OWN_HOSTS = (None, "127.0.0.1", "localhost")
"""What a server of this machine looks up to listen; a connection is an event of its own."""
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")
PATIENCE = 30.0
"""Seconds for an interrupted command to end."""


def watch(world: Path, note: Callable[[str], None]) -> None:
    """Note every effect of this process from now on; an audit hook stays until it ends."""
    private = str((world / "private").resolve())

    def touched(path: Any) -> str:
        try:
            text = os.fsdecode(path)
        except TypeError:  # a descriptor
            return ""
        return text if os.path.realpath(text).startswith(private) else ""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "sqlite3.connect", "os.listdir", "os.scandir") and args:
            if where := touched(args[0]):
                note(f"{event} {where}")
        elif event in ("socket.connect", "socket.sendto"):
            note(f"{event} {args[-1]}")
        elif event == "socket.getaddrinfo" and args[0] not in OWN_HOSTS:
            note(f"{event} {args[0]}")
        elif event in STARTS and MARK in repr(args):
            note(f"{event} {args[:2]!r}")

    sys.addaudithook(hook)


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    text: str
    effects: list[str]


def observe(world: Path, words: list[str], seconds: float = 60.0) -> Outcome:
    """`graft WORDS` in world/work, interrupted after some seconds: servers wait for ever."""
    before = _contents(world)
    log = world / "effects.txt"
    log.write_text("")
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=_run, args=(str(world), words, seconds))
    child.start()
    child.join(seconds + PATIENCE)
    effects = log.read_text().splitlines()
    if child.is_alive():
        child.kill()
        child.join()
        effects.append("no end")
    if any((world / "work").rglob(CANARY)):
        effects.append("code of the stranger ran")
    after = _contents(world)
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    text = (world / "output.txt").read_text(errors="replace")
    return Outcome(child.exitcode or 0, text, [*effects, *(f"write {path}" for path in changed)])


def _run(world: str, words: list[str], seconds: float) -> None:
    import graft.cli

    folder = Path(world)
    os.environ.update(XDG_CONFIG_HOME=str(folder / "home"), HF_HUB_OFFLINE="1", COLUMNS="200")
    os.environ.update(HOME=str(folder / "private"), GRAFT_CACHE=str(folder / "cache"))
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    log = (folder / "effects.txt").open("a")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "rw"[n > 0], closefd=False) for n in range(3))
    os.chdir(folder / "work")
    sys.path.insert(0, str(folder / "work"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    sys.argv = ["graft", *words]
    watch(folder, lambda text: print(text, file=log, flush=True))
    try:
        graft.cli.main()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.flush()
        sys.stderr.flush()


def _contents(world: Path) -> dict[str, bytes]:
    """Every file that is the user's: two of these differ if anything was written, made or removed."""
    found: dict[str, bytes] = {}
    for path in (file for name in ("private", "home") for file in (world / name).rglob("*")):
        found[str(path)] = path.read_bytes() if path.is_file() else b""
    return found
