"""What is imported before the first line of a command and the first step of a run: only what it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = {"sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"}
"""torch's, which takes longer to import than all the rest. `to_empty` and `torch.optim` import it."""
TABLES = {"transformers", "pyarrow", "pandas", "matplotlib", "datasets", "gguf", "tensorboard"}


def modules_after(code: str) -> set[str]:
    """The modules of a process of its own that ran `code`."""
    show = f"{code}\nimport json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", show], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """The folder of a small run, and what its process imported."""
    folder = tmp_path_factory.mktemp("runs")
    settings = [
        f"run.dir={folder}", "run.trackers=[]", "run.eval_tasks=2", "model.device=cpu",
        "sft.steps=1", "sft.batch=2", "train.steps=1", "rollout.tasks=1", "rollout.samples=2",
    ]  # fmt: skip
    imported = modules_after(f"import graft; graft.train('quickstart', *{settings!r})")
    return folder / "quickstart", imported


def test_training_imports_no_compiler(trained: tuple[Path, set[str]]) -> None:
    folder, imported = trained
    assert "torch.nn" in imported and (folder / "summary.json").is_file()
    assert not (COMPILER | TABLES) & imported


def test_commands_that_show_something_import_no_numbers(
    trained: tuple[Path, set[str]],
) -> None:
    commands = [
        ["--version"], ["train", "--help"], ["recipes"], ["envs"], ["config", "quickstart"],
        ["explain", "loss"], ["runs", str(trained[0].parent)],
        ["watch", str(trained[0])],
    ]  # fmt: skip
    run = (
        f"import graft.cli\nfor words in {commands!r}: graft.cli.app(words, standalone_mode=False)"
    )
    assert not ({"torch", "numpy"} | TABLES) & modules_after(run)


def test_rows_and_pictures_are_shown_without_torch(
    trained: tuple[Path, set[str]], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+3=", "answer": "5"}\n' * 3)
    commands = [["data", "show", str(rows)], ["report", str(trained[0])]]
    run = (
        f"import graft.cli\nfor words in {commands!r}: graft.cli.app(words, standalone_mode=False)"
    )
    assert not ({"torch"} | TABLES) & modules_after(run)
