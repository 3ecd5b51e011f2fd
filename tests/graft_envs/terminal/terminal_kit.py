"""Tasks in terminal-bench's format, written into a folder, and six in Harbor's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HARBOR = Path(__file__).parent / "harbor_tasks"
AGENT = Path(__file__).parent / "agent"
SOLVING = {
    "apply-fix": "sed -i s/echo/echo\\ $GREETING/ greet.sh",
    "count-lines": "wc -l < data.txt > count.txt",
    "first-schema": "tr a-z A-Z < letter.txt > loud.txt",
    "ready-image": "echo yes > answer.txt",
    "sort-numbers": "seq 2 2 8 | grep -v 6 > even.txt; printf '1\\n5\\n7\\n' > odd.txt",
    "start-service": "sh worker.sh > /dev/null 2>&1 &",
}
"""A command of a policy that solves each task of HARBOR."""
RUN_TESTS = """#!/bin/sh
check() {
    if [ "$2" = "$3" ]; then echo "PASSED tests/test_outputs.py::$1"
    else echo "FAILED tests/test_outputs.py::$1 - $2"; fi
}
echo "==== short test summary info ===="
check test_exists "$(ls count.txt)" count.txt
check test_count "$(cat count.txt)" 12
"""
TESTS = """
def test_exists(): ...
def test_count(): ...
"""


def write_task(folder: Path, *, weights: dict[str, float] | None = None, **changes: Any) -> Path:
    """A task: write the number of lines of data.txt to count.txt. None removes a key of task.yaml."""
    folder.mkdir(parents=True)
    keys = {
        "instruction": "Write the number of lines of data.txt to count.txt.",
        "parser_name": "pytest",
        "max_test_timeout_sec": 20,
        **changes,
    }
    keys = {name: value for name, value in keys.items() if value is not None}
    (folder / "task.yaml").write_text(yaml.safe_dump(keys))
    (folder / "Dockerfile").write_text(
        "FROM localhost/graft-test-busybox\nWORKDIR /app\nCOPY data.txt /app/data.txt\n"
    )
    (folder / "data.txt").write_text("".join(f"{n}\n" for n in range(12)))
    (folder / "run-tests.sh").write_text(RUN_TESTS)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_outputs.py").write_text(TESTS)
    (folder / "solution.sh").write_text("wc -l < data.txt | tr -d ' ' | tee count.txt\n")
    if weights is not None:
        (folder / "test_weights.json").write_text(json.dumps(weights))
    return folder
