"""CI begins as a new user would: README's command, on a machine as it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lines() -> list[str]:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]


def test_nothing_is_installed_before_the_tests_of_a_new_machine():
    script = lines()
    first = script.index("run test")
    assert "make test " in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [line for line in script[:first] if "install" in line or "apt-get" in line]
    assert script[-1].startswith("run test-slow")  # whose verdict is the last line


def test_the_verdict_is_the_last_line_and_a_failure_keeps_its_status(tmp_path: Path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    run = next(line for line in lines() if line.startswith("run()"))
    (tmp_path / "Makefile").write_text("test:\n\t@echo '1 failed'; exit 1\nlint:\n\t@true\n")
    script = f"set -euo pipefail\n{run}\nrun lint\nrun test\necho never\n"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0, done.stdout) == (True, "1 failed\n")
