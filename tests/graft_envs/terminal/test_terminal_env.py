"""A shell on a machine of its own: in graft's sandbox, and in real containers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from graft.envs import make
from graft_envs.terminal import terminal_bench
from graft_envs.terminal.machine import MachineError
from graft_envs.terminal.sandboxed import is_available
from tests.graft_envs.terminal.terminal_kit import write_task

needs_sandbox = pytest.mark.skipif(
    not is_available(), reason="no sandbox with processes works here"
)


@pytest.fixture
def env(tmp_path):
    write_task(tmp_path / "count", weights={"test_exists": 1, "test_count": 3})
    env = make("terminal", data=tmp_path, program="sandbox")
    env.reset(seed=0)
    yield env
    env.close()


def output(env: Any, command: str) -> str:
    text = env.step(f"<bash>{command}</bash>").observation
    return text.removeprefix("<result>").removesuffix("</result>")


@needs_sandbox
def test_the_weight_of_passed_tests_is_the_reward(env):
    assert output(env, "echo wrong > count.txt") == ""
    right, wrong = env.fork(), env
    assert output(right, "cat count.txt; wc -l < data.txt > count.txt") == "wrong\n"
    turn = wrong.step("Done.")
    assert (turn.reward, turn.terminated) == (0.25, True)
    assert turn.info["tests"] == {"test_exists": True, "test_count": False}
    turn = right.step("Done.")
    assert turn.reward == 1.0 and turn.info["tests_passed"] == 2
    right.close()


@needs_sandbox
@pytest.mark.parametrize("probe", ["false", "true"])
def test_a_task_whose_tests_cannot_run_is_an_error_and_no_reward(tmp_path, monkeypatch, probe):
    """Before the first attempt if pytest is not there; after it if another program lacks."""
    monkeypatch.setattr(terminal_bench, "HAS_PYTEST", probe)
    folder = write_task(tmp_path / "untested")
    (folder / "run-tests.sh").write_text("no-such-runner -rA /tests/test_outputs.py\n")
    env = make("terminal", data=folder, program="sandbox")
    if probe == "true":
        env.reset(seed=0)
        assert output(env, "wc -l < data.txt > count.txt") == ""
    with pytest.raises(MachineError) as caught:
        env.step("Done.") if probe == "true" else env.reset(seed=0)
    assert "untested" in str(caught.value) and "no-such-runner: command not found" in str(
        caught.value
    )
    env.close()


@needs_sandbox
def test_a_policy_that_breaks_the_tests_earns_nothing(tmp_path):
    folder = write_task(tmp_path / "broken")
    runner = folder / "run-tests.sh"
    runner.write_text(f"[ -f data.txt ] || exit 1\n{runner.read_text()}")
    env = make("terminal", data=folder, program="sandbox")
    env.reset(seed=0)
    assert output(env, "rm data.txt") == ""
    turn = env.step("Done.")
    assert (turn.reward, turn.info["tests_failed"]) == (0.0, 2)
    env.close()


@needs_sandbox
def test_the_shell_of_the_policy_is_not_that_of_the_tests(env):
    assert output(env, "wc -l < data.txt > count.txt; mkdir x; cd x; export PATH=/nowhere") == ""
    assert env.step("Done.").reward == 1.0


@needs_sandbox
def test_a_task_may_want_its_tests_in_the_shell_of_the_policy(tmp_path):
    folder = write_task(tmp_path / "same", run_tests_in_same_shell=True)
    env = make("terminal", data=folder, program="sandbox")
    env.reset(seed=0)
    assert output(env, "mkdir x; wc -l < data.txt > x/count.txt; cd x") == ""
    assert env.step("Done.").reward == 1.0
    env.close()


@needs_sandbox
def test_folder_and_variables_are_kept_and_processes_go_on(env):
    assert output(env, "cd /tmp; export NAME=graft; sleep 60 &") == ""
    assert output(env, "pwd; echo $NAME; jobs; kill -0 $!").startswith("Error: exit code")
    assert output(env, "exit 3") == "Error: exit code 3\n"
    assert output(env, "echo $NAME") == "graft\n"


@needs_sandbox
def test_a_command_that_does_not_end_is_stopped_and_a_long_output_is_cut(env):
    text = env.step('<bash>{"command": "echo begun; sleep 60", "timeout": 0.5}</bash>').observation
    assert text == "<result>Error: stopped after 0.5 s\nbegun\n</result>"
    text = output(env, "seq 100000")
    assert text.startswith("1\n2\n") and text.endswith("\n100000\n") and len(text) < 9_000


@needs_sandbox
def test_the_machine_cannot_reach_the_computer(env):
    assert "Error" in output(env, f"cat {Path(__file__).resolve()}")
    assert "Error" in output(env, "echo x > /usr/lib/x")
    assert "Error" in output(env, "exec 3<>/dev/tcp/127.0.0.1/22")
    assert output(env, "ls /app") == "data.txt\n"


@needs_sandbox
def test_after_too_many_failures_no_command_is_run(tmp_path):
    write_task(tmp_path / "count")
    env = make("terminal", data=tmp_path, program="sandbox", max_failures=2, grade="all")
    env.reset(seed=0)
    for _ in range(2):
        assert output(env, "false") == "Error: exit code 1\n"
    assert output(env, "touch count.txt") == "Error: 2 commands have failed; no more are run"
    turn = env.step("Done.")
    assert turn.reward == 0.0 and turn.info["tests_failed"] == 2


@needs_sandbox
@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM x\nWORKDIR /usr/games", "/usr/games is read-only in the sandbox"),
        ("FROM x\nRUN apt-get install -y nothing", "RUN apt-get install -y nothing failed"),
        ("FROM x\nCOPY ../secret /app/", "there is no such file"),
        ("FROM x\nCOPY --from=y /a /app/", "needs a container"),
    ],
)
def test_what_needs_an_image_is_refused(tmp_path, dockerfile, message):
    folder = write_task(tmp_path / "count")
    (folder / "Dockerfile").write_text(dockerfile)
    with pytest.raises(MachineError, match=message):
        make("terminal", data=tmp_path, program="sandbox").reset(seed=0)


@needs_sandbox
@pytest.mark.parametrize("options", [{"network": True}, {"run_args": ["--gpus=all"]}])
def test_options_of_containers_are_refused_in_the_sandbox(tmp_path, options):
    write_task(tmp_path / "count")
    with pytest.raises(MachineError, match="network and run_args"):
        make("terminal", data=tmp_path, program="sandbox", **options).reset(seed=0)


@needs_sandbox
def test_a_dockerfile_is_followed(tmp_path):
    folder = write_task(tmp_path / "count")
    (folder / "Dockerfile").write_text(
        "FROM python:3.13-slim  # the sandbox has this computer's programs\n"
        "ENV A=1 B='two words'\nWORKDIR /app/sub\nCOPY data.txt ./\nCOPY tests /data/tests\n"
        'RUN wc -l < data.txt \\\n    > lines.txt\nCMD ["bash"]\n'
    )
    env = make("terminal", data=tmp_path, program="sandbox")
    env.reset(seed=0)
    assert output(env, "echo $A $B; cat lines.txt; ls /data/tests; ls") == (
        "1 two words\n12\ntest_outputs.py\ndata.txt\nlines.txt\n"
    )
    env.close()


@pytest.mark.slow
def test_a_task_is_done_in_a_real_container(podman, tmp_path):
    write_task(tmp_path / "count")
    env = make("terminal", data=tmp_path, **podman)
    env.reset(seed=0)
    assert output(env, "cd /tmp; ls /app") == "data.txt\n"
    assert output(env, "echo $PWD") == "/tmp\n"
    text = env.step('<bash>{"command": "echo begun; sleep 60", "timeout": 1}</bash>').observation
    assert text.startswith("<result>Error: stopped after 1 s\nbegun")
    assert output(env, "cd /app; wc -l < data.txt > count.txt") == ""
    other = env.fork()
    assert env.step("Done.").reward == 1.0
    assert output(other, "ls") == "count.txt\ndata.txt\n"
    other.close()
    left = subprocess.run(
        [podman["program"].split()[0], "ps", "-q"], capture_output=True, check=True
    )
    assert left.stdout == b""
