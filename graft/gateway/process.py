"""One process of an agent: its output is bounded, and nothing of it is left when it or the run ends.

Without a thread for each: the event loop watches the end of the process (a pidfd on Linux) and its output.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from graft.gateway.reaper import MARK, kill_group, kill_marked, reaper
from graft.rollout.failure import RolloutFailure
from graft.rollout.user_calls import in_thread
from graft.trust.restricted_pickle import SECRET
from graft.types import Status

MOST_OUTPUT = 3_000
"""Bytes of a process's output that are kept: its end. A leaf's info has room for this much as JSON."""
POLL_SECONDS = 0.1
"""Where there are no pidfds, as on macOS."""


class EndedProcess(NamedTuple):
    code: int
    output: str
    """The end of what it wrote, standard error included."""


async def run_process(
    command: Callable[[str], Sequence[str]], variables: Mapping[str, str], task: Mapping[str, Any]
) -> EndedProcess:
    """Run a command to its end. It is killed with all its children when this is cancelled.

    command(folder) are its arguments; the folder is its own, holds the task as task.json, and is removed.
    """
    folder = tempfile.mkdtemp(prefix="graft-agent-")
    try:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task, ensure_ascii=False, default=str))
        own = {"GRAFT_FOLDER": folder, "GRAFT_TASK": str(file)}
        kept = {name: value for name, value in os.environ.items() if name != SECRET}
        return await _run(command(folder), {**kept, **variables, **own})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(words: Sequence[str], variables: dict[str, str]) -> EndedProcess:
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,  # a group of its own: Ctrl-C reaches the run alone, which ends it
        )
    except (OSError, ValueError) as error:
        raise RolloutFailure(
            Status.ENV_ERROR, f"the agent {words[0]!r} cannot be started: {error}"
        ) from error
    assert process.stdout is not None
    reaper().watch(process.pid, session := variables.get(MARK, ""), variables["GRAFT_FOLDER"])
    output, pipe, loop = bytearray(), process.stdout.fileno(), asyncio.get_running_loop()
    os.set_blocking(pipe, False)

    def read() -> None:
        with suppress(BlockingIOError):
            if not (piece := os.read(pipe, 65_536)):
                loop.remove_reader(pipe)
            output.extend(piece)
            del output[:-MOST_OUTPUT]

    loop.add_reader(pipe, read)
    try:
        await _ended(process)
        kill_group(process.pid)  # children that it has left
        read()
    finally:
        loop.remove_reader(pipe)
        process.stdout.close()
        if process.poll() is None:
            kill_group(process.pid)
            process.wait()  # killed: it ends at once
        if session:
            await asyncio.shield(in_thread(kill_marked, session))
        reaper().forget(process.pid)
    return EndedProcess(process.returncode, output.decode(errors="replace"))


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
