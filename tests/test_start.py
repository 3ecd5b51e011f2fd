"""The first second of a command, in processes of its own: a word before torch loads, and Ctrl-C meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLOW = """
import os, sys, time
sys.stderr.write("swallowing\\n"); sys.stderr.flush()
try:
    time.sleep(60)
except KeyboardInterrupt:  # as numpy's C code does, which then is half a module
    pass
raise SystemExit("went on")
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """graft with a torch that takes a minute to import and swallows Ctrl-C."""
    (folder / "torch.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{Path(__file__).parent.parent}"}
    return subprocess.Popen(
        [sys.executable, "-m", "graft", *arguments],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_training_says_a_word_before_torch_and_ends_at_ctrl_c_while_it_loads(tmp_path: Path):
    with start(tmp_path, "train", "quickstart") as running:
        assert running.stderr is not None and running.stdout is not None
        assert running.stderr.readline() == "graft train: loading libraries\n"
        assert running.stderr.readline() == "swallowing\n"
        running.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert running.wait(30) == 130
        assert time.monotonic() - began < 20
        assert running.stderr.read() == "graft: interrupted while libraries were loading\n"
        assert running.stdout.read() == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [("config", "--keys"), ("train", "--help")])
def test_quick_commands_say_no_such_word(tmp_path: Path, arguments: tuple[str, ...]):
    with start(tmp_path, *arguments) as running:
        out, errors = running.communicate(timeout=60)
    assert running.returncode == 0 and errors == "" and out


def test_the_installed_command_is_the_one_that_is_tested():
    """A script of an installed graft goes the same way as `python -m graft`."""
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    assert 'graft = "graft.__main__:main"' in pyproject.read_text(encoding="utf-8")
