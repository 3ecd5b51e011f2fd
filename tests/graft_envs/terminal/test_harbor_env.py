"""Tasks of Harbor: graded in the sandbox, and end to end in real containers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graft.cli import app
from graft.doctor.tasks import as_check, can_check, task_checks
from graft.envs import make
from graft.envs.task_check import TaskCheck
from graft_envs.terminal import sandboxed
from graft_envs.terminal.machine import MachineError
from graft_envs.terminal.sandboxed import is_available
from tests.docs.pages import BLOCKS, write_files
from tests.graft_envs.terminal.terminal_kit import HARBOR, SOLVING

needs_sandbox = pytest.mark.skipif(
    not is_available(), reason="no sandbox with processes works here"
)


def played(command: str, **options: Any) -> Any:
    """The turn that ends an episode of one command."""
    env = make("terminal", **options)
    try:
        env.reset(seed=0)
        if command:
            env.step(f"<bash>{command}</bash>")
        return env.step("Done.")
    finally:
        env.close()


def with_tests(folder: Path, script: str) -> Path:
    """A copy of a task whose tests are another script."""
    shutil.copytree(HARBOR / "ready-image", folder)
    (folder / "tests" / "test.sh").write_text(script)
    return folder


@needs_sandbox
def test_the_number_that_the_tests_write_is_the_reward(tmp_path):
    options = {"data": HARBOR / "ready-image", "program": "sandbox"}
    turn = played(SOLVING["ready-image"], **options)
    assert (turn.reward, turn.terminated) == (1.0, True)
    assert (turn.info["rewards"], turn.info["exit_code"]) == ({"correct": 1.0}, 0)
    assert played("", **options).reward == 0.0
    half = with_tests(tmp_path / "half", "#!/bin/sh\necho 0.5 > /logs/verifier/reward.txt\n")
    assert played("", data=half, program="sandbox").reward == 0.5
    assert played("", data=half, program="sandbox", grade="all").reward == 0.0


@needs_sandbox
def test_tests_come_after_the_policy_and_count_no_reward_that_it_wrote(tmp_path):
    script = "#!/bin/sh\n[ -f seen.txt ] || echo 1 > /logs/verifier/reward.txt\n"
    folder = with_tests(tmp_path / "forged", script)
    command = "ls /tests/* && touch seen.txt; echo 7 > /logs/verifier/reward.json"
    assert played(command, data=folder, program="sandbox").reward == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho soon; exit 1\n", "soon"),
        ("#!/no/such/program\n", "exit code 127"),
        ("#!/bin/sh\nPATH=/nowhere pytest -q || echo 0 > /logs/verifier/reward.txt\n", "pytest"),
    ],
)
def test_tests_that_cannot_run_are_an_error_and_no_reward(tmp_path, script, said):
    folder = with_tests(tmp_path / "untested", script)
    with pytest.raises(MachineError) as caught:
        played("", data=folder, program="sandbox")
    assert "untested" in str(caught.value) and said in str(caught.value)


@needs_sandbox
def test_a_policy_that_keeps_the_tests_from_running_earns_nothing(tmp_path):
    script = "#!/bin/sh\n[ ! -f broken ] && echo 1 > /logs/verifier/reward.txt\n"
    folder = with_tests(tmp_path / "kept", script)
    assert played("touch broken", data=folder, program="sandbox").reward == 0.0


@needs_sandbox
def test_a_machine_that_does_not_become_healthy_is_an_error(tmp_path):
    folder = with_tests(tmp_path / "ill", "#!/bin/sh\n")
    check = '[environment.healthcheck]\ncommand = "echo ill; false"\ninterval_sec = 0.01\n'
    with (folder / "task.toml").open("a") as file:
        file.write(check)
    with pytest.raises(MachineError, match=r"3 tries of .*ill"):
        make("terminal", data=folder, program="sandbox").reset(seed=0)


@needs_sandbox
def test_what_the_sandbox_leaves_out_is_said_once(caplog):
    sandboxed._note_left_out.cache_clear()
    with caplog.at_level(logging.WARNING, "graft"):
        for _ in range(2):
            played("", data=HARBOR / "ready-image", program="sandbox")
    assert [one.message for one in caplog.records].count(sandboxed.LEFT_OUT) == 1


@needs_sandbox
def test_doctor_tries_the_solution_and_nothing(tmp_path):
    assert can_check("terminal") and not can_check("calculator") and not can_check("quickstart")
    shutil.copytree(HARBOR / "apply-fix", tmp_path / "good")
    with_tests(tmp_path / "lazy", "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    with_tests(tmp_path / "untested", "#!/bin/sh\necho late\n")
    with_tests(tmp_path / "wrong", "#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n")
    rows = list(task_checks("terminal", [f"data={tmp_path}", "program=sandbox"]))
    found = {
        row.data["task"]: (row.verdict, row.data["oracle"], row.data["nop"])
        for row in rows
        if row.data
    }
    assert found == {
        "good": ("pass", 1.0, 0.0),
        "lazy": ("fail", 1.0, 1.0),
        "untested": ("fail", None, None),
        "wrong": ("fail", 0.0, 0.0),
    }
    assert "late" in str(rows[2])


@needs_sandbox
def test_the_command_of_the_page_prints_what_the_page_shows(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in BLOCKS if block.text == "graft doctor terminal data=lines\n"]
    done = CliRunner().invoke(app, ["doctor", "terminal", "data=lines", "program=sandbox"])
    assert (done.exit_code, done.stdout) == (0, block.output)


def test_a_task_without_a_solution_is_a_warning():
    assert as_check(TaskCheck("a", nop=0.0)).verdict == "warn"


def test_a_solution_of_one_file_is_a_demonstration():
    env = make("terminal", data=HARBOR / "ready-image", program="sandbox")
    assert "echo yes > answer.txt" in env.unwrapped.tasks["ready-image"].solution_text()
    with pytest.raises(ValueError, match="2 files"):
        make("terminal", data=HARBOR / "apply-fix").unwrapped.tasks["apply-fix"].solution_text()


@pytest.mark.slow
def test_solution_earns_1_and_nothing_0_in_real_containers(podman):
    env = make("terminal", data=HARBOR, **podman)
    rows = list(env.unwrapped.check_tasks())
    assert rows == [TaskCheck(name, 1.0, 0.0) for name in sorted(SOLVING)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOLVING))
def test_a_policy_solves_a_task_in_a_real_container(podman, name):
    turn = played(SOLVING[name], data=HARBOR / name, **podman)
    assert turn.reward == 1.0


@pytest.mark.slow
def test_part_of_the_work_earns_part_of_the_reward_in_a_real_container(podman):
    turn = played("seq 2 2 8 | grep -v 6 > even.txt", data=HARBOR / "sort-numbers", **podman)
    assert turn.reward == 0.5
    assert turn.info["rewards"] == {"reward": 0.5, "even": 0.5, "odd": 0.0}


@pytest.mark.slow
def test_users_are_those_of_the_task_in_a_real_container(podman, tmp_path):
    wanted = "[ $(id -u) = 0 ] && [ $(cat user.txt) = 1000 ]"
    script = f"#!/bin/sh\n{wanted} && echo 1 > /logs/verifier/reward.txt\n"
    folder = with_tests(tmp_path / "users", script)
    file = folder / "task.toml"
    file.write_text(file.read_text().replace("[agent]", "[agent]\nuser = 1000"))
    assert played("id -u > user.txt", data=folder, **podman).reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [False, True])
def test_a_machine_has_the_network_of_its_task_unless_told_otherwise(podman, is_open):
    env = make("terminal", data=HARBOR / "count-lines", **podman, network=is_open or None)
    env.reset(seed=0)
    shown = env.step("<bash>ls /sys/class/net</bash>").observation
    assert ("eth0" in shown) == is_open
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [False, True])
def test_the_network_changes_when_the_tests_begin(podman, tmp_path, is_open):
    modes = ("public", "no-network") if is_open else ("no-network", "public")
    script = "#!/bin/sh\n(cat before.txt; ls /sys/class/net) | grep -c eth0 > /logs/verifier/reward.txt\n"
    folder = with_tests(tmp_path / "phases", script)
    text = (folder / "task.toml").read_text()
    for phase, mode in zip(("agent", "verifier"), modes, strict=True):
        text = text.replace(f"[{phase}]", f'[{phase}]\nnetwork_mode = "{mode}"')
    (folder / "task.toml").write_text(text)
    env = make("terminal", data=folder, **podman)
    env.reset(seed=0)
    shown = env.step("<bash>ls /sys/class/net | tee before.txt</bash>").observation
    assert ("eth0" in shown) == is_open
    assert env.step("Done.").reward == 1.0  # in one of the two
    env.close()


@pytest.mark.slow
def test_a_runner_that_is_not_in_the_image_is_an_error_in_a_real_container(podman, tmp_path):
    script = "#!/bin/sh\nif pytest -q; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    folder = with_tests(tmp_path / "untested", script)
    with pytest.raises(MachineError, match="pytest: not found"):
        played("", data=folder, **podman)
