"""A real container program and an image for it, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from graft_envs.terminal.container import container_program

APPLETS = (
    "cat", "chmod", "cmp", "cp", "echo", "env", "grep", "id", "ls", "mkdir", "printf", "rm", "sed", "seq",
    "sh", "sleep", "sort", "tee", "timeout", "touch", "tr", "wc", "wget",
)  # fmt: skip


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How a container is started here, with an image that holds a static busybox."""
    program, busybox = container_program(), shutil.which("busybox")
    if not program or not busybox:
        pytest.skip("docker or podman, and busybox-static, are not installed")
    folder = tmp_path_factory.mktemp("image")
    (folder / "bin").mkdir()
    for name in ("app", "tmp"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    shutil.copy(busybox, folder / "bin" / "busybox")
    for name in APPLETS:
        (folder / "bin" / name).symlink_to("busybox")
    archive = folder / "root.tar"
    subprocess.run(["tar", "-C", folder, "-cf", archive, "app", "bin", "tmp"], check=True)
    subprocess.run([program, "import", archive, "localhost/graft-test-busybox"], check=True)
    # some kernels offer only what these name
    global_options = " --runtime=runc --cgroup-manager=cgroupfs" if "podman" in program else ""
    limits = ["--ulimit=nofile=1024:4096", "--ulimit=nproc=100:200"]
    return {"program": program + global_options, "run_args": limits}
