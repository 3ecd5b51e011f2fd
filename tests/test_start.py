"""What is imported before the first step of a run: seconds, so nothing that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMPILER = {"sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"}
"""torch's, which takes longer to import than all the rest. `to_empty` and `torch.optim` import it."""
OTHERS = {"transformers", "pyarrow", "pandas", "matplotlib", "datasets", "gguf", "tensorboard"}


def modules_after(code: str) -> set[str]:
    """The modules of a process of its own that ran `code`."""
    show = f"{code}\nimport json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", show], timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_training_imports_no_compiler(tmp_path: Path) -> None:
    settings = [
        f"run.dir={tmp_path}", "run.trackers=[]", "run.eval_tasks=2", "model.device=cpu",
        "sft.steps=1", "sft.batch=2", "train.steps=1", "rollout.tasks=1", "rollout.samples=2",
    ]  # fmt: skip
    code = f"import graft; graft.train('quickstart', *{settings!r})"
    imported = modules_after(code)
    assert "torch.nn" in imported and (tmp_path / "quickstart" / "summary.json").is_file()
    assert not (COMPILER | OTHERS) & imported
