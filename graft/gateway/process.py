"""One process of an agent: its output is bounded, and nothing of it is left when it or the run ends.

Without a thread for each: the event loop watches the end of the process (a pidfd on Linux) and its output.
It gets the variables of ALLOWED alone, those that its recipe names, and those of its session: the tokens and
keys of the run are not its business, nor that of a policy that may run `env` in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from graft.gateway import supervision
from graft.gateway.reaper import kill_group, kill_marked, new_mark, reaper
from graft.gateway.supervisor import CGROUP, remove_cgroup
from graft.rollout.failure import RolloutFailure
from graft.rollout.user_calls import in_thread
from graft.types import Status

MAX_OUTPUT = 3_000
"""Bytes of a process's output that are kept: its end. A leaf's info has room for this much as JSON."""
MAX_REWARD_BYTES = 65_536
"""Of the file with a reward."""
POLL_SECONDS = 0.1
"""Where there are no pidfds, as on macOS."""
END_SECONDS = 10.0
"""For a program that is stopped to end with all its children."""
ALLOWED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ",
    "TMPDIR", "TMP", "TEMP", "XDG_*", "PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED",
    "PYTHONIOENCODING", "PYTHONUTF8", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "NODE_PATH", "NVM_DIR", "JAVA_HOME", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS", "NO_PROXY", "no_proxy",
)  # fmt: skip
"""Variables of the run that every program gets: what programs need to start, and no secret."""


class EndedProcess(NamedTuple):
    code: int
    output: str
    """The end of what it wrote, standard error included."""
    reward: str | None
    """What it wrote into its file for the reward; None: nothing."""


async def run_process(
    command: Callable[[str], Sequence[str]],
    variables: Mapping[str, str],
    task: Mapping[str, Any],
    named: Sequence[str] = (),
) -> EndedProcess:
    """Run a command to its end. It is killed with all its children when this is cancelled.

    command(folder) are its arguments; the folder is its own, holds the task as task.json, and is removed.
    The file for its reward is in another one, which an agent that works in the first does not come across.
    named: variables of the run that it gets besides ALLOWED.
    """
    folder, private = (tempfile.mkdtemp(prefix=f"graft-{name}-") for name in ("agent", "reward"))
    try:
        file, earned = Path(folder, "task.json"), Path(private, "reward.json")
        file.write_text(json.dumps(task, default=str))
        own = {"GRAFT_FOLDER": folder, "GRAFT_TASK": str(file), "GRAFT_REWARD_FILE": str(earned)}
        code, output = await _run(command(folder), {**inherited(named), **variables, **own})
        return EndedProcess(code, output, read_reward(earned))
    finally:
        for one in (folder, private):
            shutil.rmtree(one, ignore_errors=True)


def inherited(named: Sequence[str]) -> dict[str, str]:
    """The variables of the run that a program gets; names may end with a star."""
    return selected((*ALLOWED, *named))


def selected(patterns: Sequence[str]) -> dict[str, str]:
    """The variables of the run whose names fit one of these patterns."""
    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch(name, pattern) for pattern in patterns)
    }


def read_reward(file: Path) -> str | None:
    """The text of a file that the program wrote; None without one."""
    try:
        # a link would read another file, and a pipe would wait for ever
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _bad_reward(f"cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _bad_reward("is no plain file")
        text = os.read(descriptor, MAX_REWARD_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_REWARD_BYTES:
        raise _bad_reward(
            f"has more than {MAX_REWARD_BYTES} bytes; write a number, or a short object"
        )
    return text.decode(errors="replace")


def _bad_reward(why: str) -> RolloutFailure:
    return RolloutFailure(Status.ENV_ERROR, f"the agent's $GRAFT_REWARD_FILE {why}")


async def _run(words: Sequence[str], variables: dict[str, str]) -> tuple[int, str]:
    method, mark = supervision.choose(), new_mark()
    cgroup = supervision.make_cgroup() if method == CGROUP else ""
    try:
        process = subprocess.Popen(
            supervision.command(method, cgroup, mark, words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,  # a group of its own: Ctrl-C reaches the run alone, which ends it
        )
    except (OSError, ValueError) as error:
        remove_cgroup(cgroup)
        raise RolloutFailure(
            Status.ENV_ERROR, f"the agent {words[0]!r} cannot be started: {error}"
        ) from error
    assert process.stdout is not None
    folders = [str(Path(variables[name]).parent) for name in ("GRAFT_TASK", "GRAFT_REWARD_FILE")]
    reaper().watch(process.pid, mark, *folders)
    output, pipe, loop = bytearray(), process.stdout.fileno(), asyncio.get_running_loop()
    os.set_blocking(pipe, False)

    def read() -> None:
        with suppress(BlockingIOError):
            if not (piece := os.read(pipe, 65_536)):
                loop.remove_reader(pipe)
            output.extend(piece)
            del output[:-MAX_OUTPUT]

    loop.add_reader(pipe, read)
    try:
        await _ended(process)
        read()
    finally:
        loop.remove_reader(pipe)
        process.stdout.close()
        await asyncio.shield(in_thread(_end, process, mark, cgroup))
        reaper().forget(process.pid)
    return process.returncode, output.decode(errors="replace")


def _end(process: subprocess.Popen[bytes], mark: int, cgroup: str) -> None:
    """End the supervisor, which ends the program, and what is left where the program has killed it."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    kill_group(process.pid)
    process.wait()
    kill_marked(mark)
    remove_cgroup(cgroup)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process."""
    if not hasattr(os, "pidfd_open"):
        while process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)
        return
    descriptor, loop = os.pidfd_open(process.pid), asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()
