"""Task folders of Harbor: what is read, what is refused, what the files of rewards say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graft_envs.terminal.formats import read_tasks
from graft_envs.terminal.harbor import RewardFileVerifier, judge, read_rewards, without_canary
from graft_envs.terminal.machine import CommandResult
from graft_envs.terminal.task import NO_NETWORK, PUBLIC, TaskFileError, TerminalTask
from tests.graft_envs.terminal.terminal_kit import HARBOR, write_task


def tasks() -> dict[str, TerminalTask]:
    return {task.name: task for task in read_tasks(HARBOR)}


def changed(folder: Path, text: str, name: str = "count-lines") -> Path:
    """A copy of a task whose task.toml has another text."""
    shutil.copytree(HARBOR / name, folder)
    (folder / "task.toml").write_text(text)
    return folder


def test_the_keys_of_a_task_reach_its_machine_and_its_tests():
    task = tasks()["apply-fix"]
    assert task.machine.workdir == "/app/tool" and task.machine.network == NO_NETWORK
    assert task.machine.variables == {"GREETING": "hello", "LEVEL": "basic"}
    assert isinstance(task.verifier, RewardFileVerifier) and task.solution is not None
    assert task.verifier.script.variables == {"EXPECTED": "hello graft"}
    assert (task.verifier.script.seconds, task.agent_seconds) == (20.0, 60.0)
    assert task.solution.variables["WORD"] == "graft"
    limits = tasks()["sort-numbers"].machine
    assert (limits.cpus, limits.memory_mb) == (0.5, 128)
    health = tasks()["start-service"].machine.health
    assert health is not None and (health.interval, health.retries) == (0.1, 3)


def test_the_first_schema_is_read_too():
    task = tasks()["first-schema"]
    assert (task.machine.memory_mb, task.machine.network) == (256, NO_NETWORK)
    assert task.machine.build_seconds == 120.0
    assert task.instruction.startswith("Write the text of letter.txt")
    assert task.notes == ("environment.storage_mb is not enforced",)


def test_defaults_are_those_of_the_format(tmp_path):
    [task] = read_tasks(changed(tmp_path / "a", ""))
    assert (task.machine.network, task.agent_seconds) == (PUBLIC, None)
    assert (task.machine.cpus, task.machine.memory_mb, task.machine.build_seconds) == (0, 0, 600)
    assert isinstance(task.verifier, RewardFileVerifier)
    assert task.verifier.script.seconds == 600.0


def test_agent_and_tests_may_have_different_networks(tmp_path):
    text = '[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = "public"'
    [task] = read_tasks(changed(tmp_path / "a", text))
    assert (task.machine.network, task.machine.test_network) == (NO_NETWORK, PUBLIC)


def test_both_formats_may_lie_in_one_folder(tmp_path):
    write_task(tmp_path / "b")
    changed(tmp_path / "a", "")
    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b"]


def test_unknown_keys_are_named(tmp_path):
    text = 'colour = "red"\n[agent]\ntimout_sec = 3\n[metadata]\nanything = 1\n'
    [task] = read_tasks(changed(tmp_path / "a", text))
    assert task.notes == (
        "colour is no key of the format",
        "agent.timout_sec is no key of the format",
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('schema_version = "2.0"', "schema_version '2.0'"),
        ('[[steps]]\nname = "one"', "steps"),
        ('[environment]\nos = "Windows"', "environment.os"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]', "'allowlist'"),
        ('[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a"]', "'allowlist'"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment_mode"),
        ('[[verifier.collect]]\ncommand = "dump"', "verifier.collect"),
        ('[[environment.mcp_servers]]\nname = "a"', "environment.mcp_servers"),
        ('[environment]\ngpus = 1\ngpu_types = ["H100"]', "environment.gpu_types"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec is -1"),
        ('[environment]\nmemory = "lots"', "'lots'"),
        ('[verifier]\nenv = { KEY = "${GRAFT_TEST_SECRET}" }', "verifier.env.KEY"),
        ("[agent", "cannot be read"),
    ],
)
def test_what_a_task_asks_for_and_would_not_get_is_refused(tmp_path, text, key):
    with pytest.raises(TaskFileError) as caught:
        read_tasks(changed(tmp_path / "a", text))
    assert key in str(caught.value) and "task.toml" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["environment/docker-compose.yaml", "trajectory.json", "tests/.harborignore"]
)
def test_files_that_make_it_another_task_are_refused(tmp_path, name):
    folder = changed(tmp_path / "a", "")
    (folder / name).write_text("x")
    with pytest.raises(TaskFileError, match=name):
        read_tasks(folder)


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_files_that_lack_are_named(tmp_path, name):
    folder = changed(tmp_path / "a", "")
    (folder / name).unlink()
    with pytest.raises(TaskFileError, match=name):
        read_tasks(folder)


def test_a_variable_of_this_computer_is_read_only_if_that_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_TEST_SECRET", "s")
    text = '[verifier]\nenv = { KEY = "${GRAFT_TEST_SECRET}", B = "${GRAFT_TEST_SECRET:-b}" }'
    folder = changed(tmp_path / "a", text)
    with pytest.raises(TaskFileError, match="GRAFT_TEST_SECRET"):
        read_tasks(folder)
    [task] = read_tasks(folder, ["GRAFT_TEST_SECRET"])
    assert isinstance(task.verifier, RewardFileVerifier)
    assert task.verifier.script.variables == {"KEY": "s", "B": "s"}


@pytest.mark.parametrize(
    ("text", "reward", "names"),
    [
        ("1\n", 1.0, ["reward"]),
        (" 0.25 ", 0.25, ["reward"]),
        (".5", 0.5, ["reward"]),
        ('{"style": 0.5, "reward": 1}', 1.0, ["style", "reward"]),
        ('{"correct": 0.75}', 0.75, ["correct"]),
    ],
)
def test_a_reward_is_a_number_or_the_one_called_reward(text, reward, names):
    assert read_rewards(text) == (reward, dict.fromkeys(names, 0.0) | read_rewards(text)[1])
    assert list(read_rewards(text)[1]) == names


@pytest.mark.parametrize(
    "text", ["", "yes", "nan", "1e999", "[1]", '{"a": "1"}', '{"a": 1, "b": 2}', "{}"]
)
def test_what_is_no_reward_is_refused(text):
    with pytest.raises(ValueError):
        read_rewards(text)


def test_tests_that_came_to_no_result_are_told_from_a_reward_of_0():
    wrote = CommandResult("0\n", 0)
    assert judge(CommandResult("1 failed", 1), wrote).fault == ""
    assert "exit code 127" in judge(CommandResult("", 127), CommandResult("", 3)).fault
    assert "time limit" in judge(CommandResult("apt", 124, True), CommandResult("", 3)).fault
    for printed in (
        "/tests/test.sh: line 3: pytest: command not found",
        "/tests/test.sh: 3: uvx: not found",
        "sh: pytest: not found",
        "/usr/bin/python3: No module named pytest",
    ):
        assert printed in judge(CommandResult(printed, 1), wrote).fault
        assert judge(CommandResult(printed, 0), CommandResult("1\n", 0)).fault == ""


def test_marks_of_benchmarks_are_no_part_of_an_instruction():
    text = "<!-- a CANARY guid -->\n# canary too\n\nDo it.\n# canary stays\n"
    assert without_canary(text) == "Do it.\n# canary stays\n"
