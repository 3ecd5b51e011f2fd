"""Where Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter; no secrets
remembered from one test to the next."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest_plugins = ["tests.durations"]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before imports

# runs are signed with a key of the user: tests have one of their own
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="graft-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

# a shell lets what it starts in the background ignore Ctrl-C, and children inherit that: tests that
# interrupt a child would wait for nothing
is_main = threading.current_thread() is threading.main_thread()
if is_main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


RAY = ("tests/cluster/test_cluster.py", "tests/gateway/test_agent_processes.py")
APART = "tests/models/test_compiled_sizes.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With --dist loadfile, the tests of a file run in one process, which builds their fixtures once. Those
    that start Ray follow each other; those that take minutes and share nothing do not."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file == APART else "ray" if file in RAY else file

    return ByFile(config, log)  # type: ignore[arg-type]


def pytest_collection_finish() -> None:
    """Leave what exists now, 700,000 objects, out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short key of one test must not be masked in the messages of the next."""
    monkeypatch.setattr("graft.trust.masking._known", {})


@pytest.fixture
def kernel_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device whose tensors kernels take here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    _repair_interpreter(monkeypatch)
    with warnings.catch_warnings():  # of numpy, about -inf - -inf, where a GPU does not warn
        warnings.simplefilter("ignore", RuntimeWarning)
        yield torch.device("cpu")


def _repair_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter lacks: loops of a loaded length (3.6 with numpy 2.4), products of
    bfloat16, whose bits it multiplies as if they were integers (3.6 and 3.9), and rows of a product that
    do not depend on their number."""
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(self, a, b, *others):
        with monkeypatch.context() as context:
            context.setattr(interpreter.np, "matmul", row_by_row)
            return dot(self, *(wide(x) for x in (a, b)), *others)

    def row_by_row(a, b, dtype):  # as on a GPU, and unlike a library's, a row has bits of its own
        return np.dot(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    def wide(x):
        if x.dtype.scalar.name != "bf16":
            return x
        data = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)
