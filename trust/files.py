"""Hostile files through the real commands: no code runs, memory stays under 1 GB, errors are named.

A child process imports graft once and forks for every command, so that the growth of memory beside an idle
graft is measured. A command must end in time, with a result or with one line that begins with "graft: ".
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trust.bank import Row
from trust.file_cases import CANARY, KINDS, SECRET, FileCase, chosen
from trust.file_cases.gguf import write_model

SMALL, FULL = len(KINDS), 300
MAX_MEMORY = 1 << 30
"""Bytes beside an idle graft."""
MAX_SECONDS = 60.0
"""Of the processor, for one command."""
PATIENCE = 600.0
"""Seconds until a command that waits for something is ended."""
ADDRESS_SPACE = 6 << 30
"""Bytes that a command may map beside an idle graft: it protects the machine, not graft."""

RECIPE: dict[str, Any] = {
    "model": {"shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ff": 32}},
    "task": {"env": "calculator"},
    "rollout": {"tasks": 2, "samples": 2, "max_tokens": 4, "max_context": 64},
    "train": {"steps": 2},
    "run": {"name": "run", "eval_tasks": 0, "save_every": 1, "keep_last": 3},
}


def run(count: int, seed: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="graft-files-") as where:
        root = Path(where)
        with Opener(root) as opener:
            yield from measured(list(chosen(count, seed)), opener)


def measured(cases: list[tuple[FileCase, Any]], opener: Opener) -> Iterator[Row]:
    for group in dict.fromkeys(case.group for case, _ in cases):
        row = Row("files", group, 0)
        most, slowest = 0.0, 0.0
        for number, (case, rng) in enumerate(cases):
            if case.group != group:
                continue
            row.count += 1
            folder = opener.root / f"case-{number}"
            folder.mkdir()
            folder.chmod(0o777)  # others can write to it, so that no recipe in it is the user's own
            try:
                commands = case.make(folder, rng, opener.base, case.variant)
                planted = set(folder.rglob("*.safetensors"))
                for command in commands:
                    found = opener.open(folder, command)
                    most, slowest = max(most, found["memory"]), max(slowest, found["seconds"])
                    if fault := fault_of(found, folder) or written_fault(folder, planted):
                        text = f"{case.name}: graft {' '.join(command)}: {fault}"
                        row.failures.append(text)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        row.measured = {"most memory, MB": round(most / 1e6), "slowest, s": round(slowest, 1)}
        yield row


def fault_of(found: dict[str, Any], folder: Path) -> str:
    """What is wrong with the way a command ended; "": nothing."""
    tail = found["text"][-600:].strip()
    if list(folder.rglob(CANARY)):
        return "code of the file ran"
    if found["seconds"] > MAX_SECONDS or found["is_late"]:
        return f"no end: {found['seconds']:.0f} s of the processor"
    if found["memory"] > MAX_MEMORY:
        return f"{found['memory'] / 1e6:,.0f} MB: {tail[-200:]}"
    if found["signal"]:
        return f"killed by signal {found['signal']}: {tail}"
    if "Traceback (most recent" in found["text"] or "a fault in graft" in found["text"]:
        return f"not a named error: {tail}"
    if found["code"] not in (0, 1, 2):
        return f"exit code {found['code']}: {tail}"
    if found["code"] and not found["text"].strip():
        return f"exit code {found['code']} without a word"
    return ""


def written_fault(folder: Path, planted: set[Path]) -> str:
    """What is wrong with what a command wrote: a copy of the user's file, weights that are no numbers."""
    from safetensors.torch import load_file

    for path in folder.rglob("*"):
        is_own = path.is_symlink() or not path.is_file() or path.is_relative_to(folder / "home")
        if not is_own and SECRET.encode() in path.read_bytes():
            return f"a file that a link leads to was copied into {path.relative_to(folder)}"
    for path in set(folder.rglob("*.safetensors")) - planted:
        for name, tensor in load_file(path).items():
            if not tensor.isfinite().all() or ("exp_avg_sq" in name and (tensor < 0).any()):
                return f"{path.relative_to(folder)} was written with {name} that is no number"
    return ""


class Opener:
    """The process that forks a command of graft for each file."""

    def __init__(self, root: Path) -> None:
        self.root, self.base = root, root / "base"

    def __enter__(self) -> Opener:
        settings = {"XDG_CONFIG_HOME": str(self.root / "config"), "OMP_NUM_THREADS": "1"}
        settings |= {"HF_HUB_OFFLINE": "1", "GRAFT_CACHE": str(self.root / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trust.files", str(self.base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )
        self._answer()
        return self

    def open(self, folder: Path, command: list[str]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), command]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that opens the files has ended")
        return json.loads(line)

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def serve(base: Path) -> None:
    """Make the run to start from, then answer lines of [folder, command] until there is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what graft prints is not an answer
    _prepare(base)
    print(json.dumps({}), file=answers, flush=True)
    idle = _forked(base, ["config", "--keys"])["memory"]
    for line in sys.stdin:
        folder, command = json.loads(line)
        print(json.dumps(_forked(Path(folder), command, idle)), file=answers, flush=True)


def _prepare(base: Path) -> None:
    import yaml

    import graft
    import graft.cli
    import graft.doctor.recipe
    import graft.evaluate.run
    import graft.replay.replay
    import graft.viewer.saved

    with contextlib.suppress(ImportError):
        import gguf
        import pyarrow.parquet
        import transformers

        assert gguf and pyarrow and transformers
    base.mkdir(parents=True)
    run = RECIPE["run"] | {"dir": str(base)}
    (base / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"run": run}))
    graft.train(str(base / "recipe.yaml"), progress=False)
    last = max((base / "run" / "checkpoints").iterdir())
    shutil.copytree(last, base / "model", ignore=shutil.ignore_patterns("trainer*", "state.json"))
    with contextlib.suppress(ImportError):
        write_model(last, base / "model.gguf")


def _command(words: list[str]) -> int:
    import graft.cli

    sys.argv = ["graft", *words]
    try:
        graft.cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _forked(folder: Path, words: list[str], idle: int = 0) -> dict[str, Any]:
    """Run a command in a child; `idle` is the memory of one that does nothing."""
    output = folder.with_suffix(".out")
    began, is_late = time.monotonic(), False
    child = os.fork()
    if not child:
        os.setsid()  # no terminal to ask on; all that it starts can be ended
        os.chdir(folder)
        end = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(end, 1), os.dup2(end, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(MAX_SECONDS) + 1,) * 2)
        code = 70
        try:
            code = _command(words)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if is_late := time.monotonic() - began > PATIENCE:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started
    text = output.read_bytes()[-20_000:].decode(errors="replace")
    output.unlink()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "memory": max(0, used.ru_maxrss * 1024 - idle),
        "seconds": used.ru_utime + used.ru_stime,
        "is_late": is_late,
        "text": text,
    }


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
