"""Samples of what the calls in the sandbox use, taken from outside, as parts of their limits."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from graft_sandbox import hosts
from graft_sandbox.inside import usage
from graft_sandbox.running import DISK_MB, PROCESSES, SOCKET_BUFFER

MEGABYTE = 1 << 20
EVERY = 0.01
AGAIN = 0.05
"""Seconds after which threads that are counted by the host, not the kernel, are counted again."""
ALLOWED = 1.1


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def family(pid: int) -> list[usage.Process]:
    """A process and all below it."""
    found, pids = [], [pid]
    while pids:
        pid = pids.pop()
        try:
            found.append(usage.Process(pid))
            pids += children(pid)
        except OSError:
            continue  # ended meanwhile
    return found


class Sampler:
    """A thread that looks at every call of the hosts of one method until it is closed."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.most = {"memory": 0.0, "disk": 0.0, "processes": 0.0}
        """The largest part of each limit that was seen."""
        self.failures: list[str] = []
        self.num_samples = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:  # a bank that saw nothing has shown nothing
            self.failures.append(f"the samples ended with {type(error).__name__}: {error}")

    def _sample(self) -> None:
        while not self._is_closed:
            for host in [host for kind in list(hosts._hosts.values()) for host in kind]:
                if host.method == self.method:
                    try:
                        self._look_at(host)
                    except OSError:
                        continue  # a host or a call has ended
            time.sleep(EVERY)

    def _look_at(self, host: hosts.SandboxHost) -> None:
        pid = host._process.pid
        if self.method != "landlock":  # bwrap, or the process that started the namespaces
            pid = children(pid)[0]
        itself = usage.Process(pid)
        for call in children(pid):
            try:
                self._judge("memory", lambda call=call: self._memory(call, itself), 0.0)
                wait = AGAIN if self.method == "landlock" else 0.0
                self._judge("processes", lambda call=call: self._processes(call), wait)
                self._judge("disk", lambda call=call: self._disk(call, host), 0.0)
                self.num_samples += 1
            except OSError:
                continue

    def _judge(self, what: str, measure, wait: float) -> None:
        """A sample above the limit counts if the next one is above it too: processes are read one after
        another, and one may end while another grows."""
        part = measure()
        if part > ALLOWED:
            time.sleep(wait)
            part = min(part, measure())
        self.most[what] = max(self.most[what], part)
        if part > ALLOWED:
            self.failures.append(f"{part:.2f} of the limit of {what}")

    def _memory(self, call: int, host: usage.Process) -> float:
        _, _, line = Path(f"/proc/{call}/limits").read_text().partition("Max address space")
        hard = line.split()[1] if line else ""
        if not hard.isdigit():
            return 0.0  # it has not confined itself yet, or has ended
        limit = int(hard) - host.size
        if limit < MEGABYTE:
            return 0.0
        total, shared, sockets = 0, dict[bytes, int](), set[str]()
        for process in family(call):
            try:
                inherited = host.measure() if process.heap == host.heap else 0
                total += max(0, process.measure() - inherited)
                shared.update(usage.shared_memory(process.pid))
                links = [link.readlink() for link in Path(f"/proc/{process.pid}/fd").iterdir()]
                sockets |= {link.name for link in links if link.name.startswith("socket:")}
            except OSError:
                continue
        return (total + sum(shared.values()) + len(sockets) * SOCKET_BUFFER) / limit

    def _processes(self, call: int) -> float:
        return sum(process.num_threads for process in family(call)) / PROCESSES

    def _disk(self, call: int, host: hosts.SandboxHost) -> float:
        if self.method == "landlock":
            folder = str(Path(f"/proc/{call}/cwd").readlink()).removesuffix(" (deleted)")
            if not folder.startswith(f"{host.scratch}/"):
                return 0.0  # it has not confined itself yet, or is the process that cleans up
            folder = f"{host.scratch}/{folder.removeprefix(host.scratch).strip('/').split('/')[0]}"
            used = usage.held_files(call, Path(folder).stat().st_dev)
            for path, _, names in os.walk(folder):
                for name in names[: usage.MAX_FILES]:
                    used += os.lstat(f"{path}/{name}").st_blocks * 512
        else:
            disk = os.statvfs(f"/proc/{call}/root/scratch")
            used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            if disk.f_blocks * disk.f_frsize > 2 * DISK_MB * MEGABYTE:
                return 0.0  # its own disk is not mounted yet
        return used / (DISK_MB * MEGABYTE)
