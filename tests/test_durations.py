"""A quick test that takes too much of the processor fails; waiting and slow tests do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.command_line import python
from tests.durations import processor_seconds

BURN = "import time\nwhile time.process_time() < 0.4: pass"
TESTS = f"""
import subprocess, sys, time
import pytest

def burn():
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass

def test_computes():
    burn()

def test_lets_a_child_compute():
    subprocess.run([sys.executable, "-S", "-c", {BURN!r}], check=True)

def test_waits():
    time.sleep(0.4)

@pytest.mark.slow
def test_is_slow():
    burn()
"""


def test_the_processor_is_limited_not_the_clock(tmp_path: Path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes longer\n")
    options = ["-q", "-p", "tests.durations", "-p", "no:cacheprovider", "--durations-file"]
    words = [str(tmp_path / "test_some.py"), *options, str(tmp_path / "build" / "all.json")]
    variables = {"GRAFT_TEST_SLOWNESS": str(0.2 / 30), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    seconds = json.loads((tmp_path / "build" / "all.json").read_text())
    assert len(seconds) == 4 and all(test["wall"] > 0.35 for test in seconds.values())
    waits = {name.rpartition("::")[2] for name, test in seconds.items() if test["cpu"] < 0.2}
    assert waits == {"test_waits"}


def test_commands_of_the_fork_server_are_counted():
    assert python("pass").returncode == 0
    before = processor_seconds()
    assert python(BURN).returncode == 0
    assert processor_seconds() - before > 0.35
