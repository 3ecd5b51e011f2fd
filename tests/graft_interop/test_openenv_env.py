"""An OpenEnv server as a graft env: the real server and client, in a venv of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRIAL = Path(__file__).with_name("openenv_trial.py")
PYTHON = Path(
    os.environ.get("GRAFT_OPENENV_PYTHON") or ROOT / ".venv" / "openenv" / "bin" / "python"
)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(port: int, server: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + 180  # of a machine that is busy with other tests
    while time.monotonic() < ends and server.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    server.kill()
    raise AssertionError(f"the OpenEnv server did not start: {server.communicate()[0]}")


@pytest.mark.peer
@pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"needs a Python with OpenEnv: {PYTHON} (another one: GRAFT_OPENENV_PYTHON)",
)
def test_a_real_server_is_played_through_its_own_client():
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [PYTHON, TRIAL, "serve", str(port)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(port, server)
        done = subprocess.run(
            [PYTHON, TRIAL, "play", f"http://127.0.0.1:{port}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        server.kill()
        server.communicate()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reset"] == "start 7"
    texts = [turn[0] for turn in result["turns"]]
    rewards = [turn[1] for turn in result["turns"]]
    assert texts == ["total 10", "total 10", "end 10"] and rewards == [0.5, 0.5, 10.0]
    assert [turn[2] for turn in result["turns"]] == [False, False, True]
    assert result["same state"] == ["total 6", "TOTAL 6"]
    assert result["whole"]["text"] == "start 2"
    assert result["flags"] == [True, False]


def test_without_the_library_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from graft_interop.openenv import OpenEnvClient

    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ImportError, match=r"graft-rl\[openenv\]"):
        OpenEnvClient("http://localhost:1")
