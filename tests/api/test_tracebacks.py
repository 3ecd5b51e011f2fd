"""Errors in a real IPython shell: short where the user can act on the sentence, whole elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
{before}
shell.run_cell("import graft")
shell.run_cell({cell!r})
print("DEBUGGER HAS", len(__import__("traceback").extract_tb(__import__("sys").last_traceback)))
"""


def printed(cell: str, before: str = "", **variables: str) -> str:
    pytest.importorskip("IPython")
    code = SHELL.format(cell=cell, before=before)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    return re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)


def test_a_mistake_is_the_line_of_the_cell_and_one_sentence():
    text = printed("x = 1\ngraft.load_recipe('quikstart')")
    assert "----> 2 graft.load_recipe('quikstart')" in text
    assert "ConfigError: " in text and "quickstart" in text
    shown, _, frames = text.partition("DEBUGGER HAS")
    assert len(shown.strip().splitlines()) <= 8 and "graft/config" not in shown
    assert int(frames) > 2  # %debug goes down to where it was raised


def test_a_plain_error_that_graft_raises_on_purpose_is_short_too():
    text = printed("from graft.viewer.runs import open_runs\nopen_runs(['nowhere'])")
    assert "ValueError: no run 'nowhere'" in text and len(text.strip().splitlines()) <= 9


def test_debug_an_error_of_ones_own_and_another_handler_keep_the_whole_traceback():
    cell = "graft.load_recipe('quikstart')"
    assert printed(cell, GRAFT_DEBUG="1").count("graft/") > 1
    own = printed("def reward():\n    return {}['nowhere']\nreward()")
    assert "KeyError" in own and "in reward()" in own
    other = "shell.set_custom_exc((KeyError,), lambda *given, **more: print('theirs'))"
    assert printed(cell, other).count("graft/") > 1
    assert "theirs" in printed("{}['nowhere']", other)
