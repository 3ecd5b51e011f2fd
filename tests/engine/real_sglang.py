"""A real SGLang server on a CPU, from the environment that `make .venv/sglang/.ready` installs.

    .venv/sglang/bin/python tests/engine/real_sglang.py --model-path FOLDER --port PORT ...

SGLang's own files run as they are on PyPI. What it lacks for a CPU there is defined here: its CPU kernels,
which are published only as sources and which plain PyTorch replaces (`torch_native`), and the operators of a
torchvision that is built for CUDA. SGLang starts its processes anew, and each reads this file first.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).parents[2] / ".venv" / "sglang" / "bin" / "python"
OPTIONS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
    "--dtype float32 --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup "
    "--max-total-tokens 8192 --host 127.0.0.1 --log-level warning"
)
START_SECONDS = 300.0


class RealSGLang:
    """The server on a port that stays the same."""

    def __init__(self, folder: Path, window: int) -> None:
        self.folder, self.window = folder, window
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder.parent / "sglang.log"

    def start(self) -> None:
        command = [PYTHON, __file__, "--model-path", self.folder, "--port", self.port]
        command += ["--context-length", self.window, *OPTIONS.split()]
        own = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=log,
                start_new_session=True,
                # the tests' own packages are not the server's
                env={name: os.environ[name] for name in os.environ.keys() - {"PYTHONPATH"}} | own,
            )
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=20).close()
                return
            except OSError:
                time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"SGLang did not start: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


class _MissingKernels(types.ModuleType):
    """`sgl_kernel`, of which a server for plain PyTorch imports names and calls none."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name}: this server has plain PyTorch only")

        return kernel


def _define_operators() -> None:
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
        )
    # called on ARM alone: threads stay where they are, and there is one process
    torch.library.define("sgl_kernel::init_cpu_threads_env", "(str cpus) -> str")
    torch.library.define("sgl_kernel::initialize", "(int size, int rank) -> ()")
    every = "CompositeExplicitAutograd"
    torch.library.impl("sgl_kernel::init_cpu_threads_env", every, lambda _: "")
    torch.library.impl("sgl_kernel::initialize", every, lambda *_: None)
    sys.modules["sgl_kernel"] = _MissingKernels("sgl_kernel")


if __name__ in ("__main__", "__mp_main__"):
    _define_operators()

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[1:]))
