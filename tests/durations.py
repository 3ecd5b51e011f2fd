"""The time of tests: one that takes too much of the processor fails, and all of it is written on demand.

    make test ARGS="--durations-file=build/durations.json"      # {test: {"wall": s, "cpu": s}}

Seconds of the processor, of the test and of the processes it started, since a busy machine stretches
the clock but not these. What only waits is ended by pytest's `timeout`.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Generator, Iterator
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pytest

LIMIT = 30.0 * float(os.environ.get("GRAFT_TEST_SLOWNESS", "1"))
"""Seconds of the processor for a test that is not marked slow; the variable is for a slow machine."""
UNLIMITED = ("slow", "vllm", "gpu", "net")
_CPU = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", metavar="FILE", help="write the seconds of tests as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--durations-file")
    if file and not hasattr(config, "workerinput"):  # a worker of xdist sends its reports
        config.pluginmanager.register(Recorder(Path(file)))


class Recorder:
    """Adds up the phases of each test, and writes them at the end."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.seconds.setdefault(report.nodeid, {"wall": 0.0, "cpu": 0.0})
        test["wall"] += report.duration
        test["cpu"] += getattr(report, "cpu", 0.0)

    def pytest_sessionfinish(self) -> None:
        rounded = {
            test: {key: round(value, 3) for key, value in seconds.items()}
            for test, seconds in self.seconds.items()
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def _measure(item: pytest.Item) -> Iterator[None]:
    before = processor_seconds()
    try:
        return (yield)
    finally:
        item.stash[_CPU] = processor_seconds() - before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item):
    return (yield from _measure(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item):
    return (yield from _measure(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item):
    return (yield from _measure(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cpu = item.stash.get(_CPU, 0.0)
    report.cpu = cpu  # travels with the report
    limited = report.when == "call" and not any(map(item.get_closest_marker, UNLIMITED))
    if limited and report.passed and cpu > LIMIT:
        report.outcome = "failed"
        report.longrepr = (
            f"it took {cpu:.1f} s of the processor, and a quick test may take {LIMIT:g}: "
            "make it smaller, or mark it slow"
        )
    return report


def processor_seconds() -> float:
    """Seconds of this process, of children that ended, and of commands that a fork server ran."""
    ours, ended = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    seconds = ours.ru_utime + ours.ru_stime + ended.ru_utime + ended.ru_stime
    return seconds + _of_process(getattr(_forkserver, "_forkserver_pid", None))


def _of_process(pid: int | None) -> float:
    """Seconds of a process and of its children that ended; 0 on a system without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
