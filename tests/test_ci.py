"""CI begins as a new user would: README's command, on a machine as it is; workflows call the same targets."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def lines() -> list[str]:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]


def test_nothing_is_installed_before_the_tests_of_a_new_machine():
    script = lines()
    first = next(place for place, line in enumerate(script) if line.startswith("run test "))
    assert "make test " in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [line for line in script[:first] if "install" in line or "apt-get" in line]
    assert script[-1].startswith("run test-slow")  # whose verdict is the last line
    aside = [line for line in script if line.endswith("&")]
    assert aside and all(">build/" in line for line in aside)  # nothing is printed behind it


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


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist_on_every_supported_python(path: Path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    called = [
        word
        for job in jobs.values()
        for step in job["steps"]
        for command in re.findall(r"^make (.+)$", step.get("run", ""), re.M)
        for word in command.split()
        if "=" not in word
    ]
    assert called and set(called) <= targets
    matrices = [job["strategy"]["matrix"] for job in jobs.values() if "strategy" in job]
    assert [matrix["python"] for matrix in matrices] == [versions]
    assert all(any("arm" in system for system in matrix["os"]) for matrix in matrices)


def test_a_release_reads_the_version_where_the_wheel_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    path = project["tool"]["hatch"]["version"]["path"]
    assert re.search(r'^__version__ = "[\d.]+"$', (ROOT / path).read_text(encoding="utf-8"), re.M)
    for file in ("scripts/release.sh", ".github/workflows/release.yml"):
        assert path in (ROOT / file).read_text(encoding="utf-8"), file
