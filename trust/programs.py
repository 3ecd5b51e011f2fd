"""Hostile and fuzzed programs through everything that runs a policy's code, as an ordinary user.

Each program runs by one of four ways: `run_python`, a session, the python tool, the code reward. Honest
programs run beside them and after each of them. What counts as a failure: an exception that is no
ToolError, a call that does not return, a wrong answer of an honest program, a limit passed by more than
a tenth, a program that reached what it must not reach, a reward that was paid, anything left behind.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graft.tools.errors import ToolError
from graft_envs.code.grading import score_tests
from graft_envs.code.python_tool import PythonTool
from graft_sandbox import SandboxSession, choose, described, hosts, methods, run_python
from trust.bank import Row
from trust.cells import Sampler
from trust.hostile import GOT, PROGRAMS

SMALL, FULL = 60, 10_000
"""Programs per method."""

TIMEOUT = 0.4
MEMORY_MB = 64
HANG = 60.0
WORKERS = 6
NOBODY = 61_234
"""A user id that owns nothing, for a bank that is started as root."""
ROOT = Path(__file__).resolve().parent.parent


def programs(count: int, seed: int) -> Iterator[tuple[str, bool]]:
    """The base list in random order, then mutations and combinations of it. True with those that were
    edited: what they print proves nothing."""
    rng = random.Random(seed)
    base = [code for group in PROGRAMS.values() for code in group]
    rng.shuffle(base)
    for code in base[:count]:
        yield code, False
    for _ in range(count - len(base)):
        mutation = rng.choice(MUTATIONS)
        yield mutation(rng, base), mutation in (edited, spliced, noise)


def in_a_row(rng: random.Random, base: list[str]) -> str:
    parts = [f"try: exec({code!r})\nexcept BaseException: pass" for code in rng.sample(base, 3)]
    return "\n".join(parts)


def in_threads(rng: random.Random, base: list[str]) -> str:
    return (
        f"import threading\nfor code in {rng.sample(base, 4)!r}:\n"
        "    threading.Thread(target=exec, args=(code, {})).start()"
    )


def in_processes(rng: random.Random, base: list[str]) -> str:
    return (
        f"import os, time\nfor code in {rng.sample(base, 4)!r}:\n"
        "    if os.fork() == 0:\n        exec(code, {})\n        os._exit(0)\ntime.sleep(0.2)"
    )


def in_a_loop(rng: random.Random, base: list[str]) -> str:
    return f"while True:\n    try: exec({rng.choice(base)!r}, {{}})\n    except BaseException: pass"


def edited(rng: random.Random, base: list[str]) -> str:
    """Some characters removed, repeated or replaced."""
    code = rng.choice(base)[:5000]
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(code) + 1)
        new = rng.choice(["", code[at : at + 9] * 2, chr(rng.randrange(1, 0x2FFF)), "\n", "0", "("])
        code = code[:at] + new + code[at + rng.randint(0, 3) :]
    return code


def spliced(rng: random.Random, base: list[str]) -> str:
    """The beginning of one, the end of another, cut at lines."""
    one, other = (rng.choice(base)[:5000].split("\n") for _ in range(2))
    return "\n".join(one[: rng.randint(0, len(one))] + other[rng.randint(0, len(other)) :])


def noise(rng: random.Random, _: list[str]) -> str:
    return "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)])) for _ in range(200))


MUTATIONS: list[Callable[[random.Random, list[str]], str]] = [
    in_a_row, in_threads, in_processes, in_a_loop, edited, edited, edited, spliced, spliced, noise,
]  # fmt: skip


def by_run_python(code: str, method: str) -> str:
    outcome = run_python(
        code, "input\n", timeout=TIMEOUT, memory_mb=MEMORY_MB, sandbox=method, echo=True
    )
    return outcome.stdout


def by_session(code: str, method: str) -> str:
    with SandboxSession(timeout=TIMEOUT, memory_mb=MEMORY_MB, sandbox=method) as session:
        first = session.run(code).stdout
        return first + session.run("1 + 1").stdout


def by_tool(code: str, method: str) -> str:
    tool = PythonTool(
        timeout=TIMEOUT, memory_mb=MEMORY_MB, sandbox=method, keep_state=len(code) % 2 == 1
    )
    try:
        return tool(code) + tool("1 + 1")
    finally:
        tool.close()


def by_reward(code: str, method: str) -> str:
    secret = f"{random.SystemRandom().random()}"
    tests = {"inputs": ["a", "b"], "outputs": [secret, secret]}
    paid = score_tests(code, tests, timeout=TIMEOUT, sandbox=method)
    return f"{GOT}: a reward of {paid}" if paid else ""


WAYS = [by_run_python, by_session, by_tool, by_reward]


class Neighbours:
    """Honest programs that run all the time, in the same hosts: a program, and a session with names."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.failures: list[str] = []
        self.count = 0
        self.longest = 0.0
        self._is_closed = False
        self._threads = [threading.Thread(target=run) for run in (self._programs, self._session)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_closed = True
        for thread in self._threads:
            thread.join()

    def _programs(self) -> None:
        number = 0
        while not self._is_closed:
            number += 1
            self.check(number)
            time.sleep(0.05)

    def check(self, number: int) -> None:
        """An honest program gives its answer."""
        began = time.monotonic()
        try:
            outcome = run_python(f"print({number} * 7)", timeout=HANG / 2, sandbox=self.method)
            if (outcome.stdout, outcome.stderr, outcome.ok) != (f"{number * 7}\n", "", True):
                self.failures.append(f"an honest program ended with {outcome}")
        except Exception as error:
            self.failures.append(f"an honest program: {type(error).__name__}: {error}")
        self.count += 1
        self.longest = max(self.longest, time.monotonic() - began)

    def _session(self) -> None:
        with SandboxSession(timeout=HANG / 2, sandbox=self.method) as session:
            session.run("x = 0")
            number = 0
            while not self._is_closed:
                number += 1
                try:
                    outcome = session.run("x += 1\nx")
                    if (outcome.stdout, outcome.is_restarted) != (f"{number}\n", False):
                        self.failures.append(f"an honest session, run {number}: {outcome}")
                        break
                except Exception as error:
                    self.failures.append(f"an honest session: {type(error).__name__}: {error}")
                    break
                self.count += 1
                time.sleep(0.05)


def attack(method: str, count: int, seed: int) -> Row:
    """Run `count` programs against one method in this process."""
    row = Row("programs", f"{described(choose(method))}, uid {os.geteuid()}", count)
    neighbours, sampler = Neighbours(method), Sampler(method)
    num_errors, longest = [0], [0.0]

    def one(numbered: tuple[int, tuple[str, bool]]) -> None:
        number, (code, is_edited) = numbered
        way = WAYS[number % len(WAYS)]
        where = f"{number} by {way.__name__[3:]}: {code[:300]!r}"
        began = time.monotonic()
        try:
            if GOT in (text := way(code, method)) and not is_edited:
                row.failures.append(f"{text[text.index(GOT) :][:200]}: {where}")
        except ToolError as error:
            num_errors[0] += 1
            if "died" in str(error):
                row.failures.append(f"a host ended: {error}: {where}")
        except BaseException as error:
            row.failures.append(f"{type(error).__name__}: {error}: {where}")
        took = time.monotonic() - began
        calls = 2 if way is not by_run_python else 1
        longest[0] = max(longest[0], took / calls)
        if took > HANG:
            row.failures.append(f"{took:.0f} s: {where}")
        neighbours.check(number)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, enumerate(programs(count, seed))))
    neighbours.close()
    sampler.close()
    row.failures += neighbours.failures + sampler.failures
    row.failures += left_behind(method)
    row.measured = {
        "most memory, of the limit": round(sampler.most["memory"], 2),
        "most disk, of the limit": round(sampler.most["disk"], 2),
        "most processes, of the limit": round(sampler.most["processes"], 2),
        "longest call, s": round(longest[0], 2),
        "tool errors": num_errors[0],
        "honest programs beside": neighbours.count,
        "longest of them, s": round(neighbours.longest, 2),
        "samples": sampler.num_samples,
    }
    return row


def left_behind(method: str) -> list[str]:
    """Processes and folders that remain after the hosts are closed."""
    started = [h._process.pid for kind in hosts._hosts.values() for h in kind if h.method == method]
    hosts.close_all(method)
    found = [f"process {pid} is left" for pid in started if Path(f"/proc/{pid}").exists()]
    folder = Path(tempfile.gettempdir())
    return found + [f"{path} is left" for path in folder.glob("graft-scratch-*")]


def run(count: int, seed: int) -> Iterator[Row]:
    """One row per method that works here. Root becomes a user that owns nothing."""
    for method in methods():
        if method.works:
            yield as_stranger(method.name, count, seed)


def as_stranger(method: str, count: int, seed: int) -> Row:
    python, user = sys.executable, {}
    if os.geteuid() == 0:
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        try:
            subprocess.run([python, "-c", ""], check=True, capture_output=True, **user)
        except (OSError, subprocess.CalledProcessError):  # it may be in root's home
            python = "/usr/bin/python3"
    packages = [path for path in sys.path if path.endswith("-packages")]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), *packages]),
            "TMPDIR": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [python, "-m", "trust.programs", method, str(count), str(seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd="/", env=env, **user)
    if done.returncode:
        return Row("programs", method, count, [f"the run ended with {done.returncode}"])
    return Row(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(vars(attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
