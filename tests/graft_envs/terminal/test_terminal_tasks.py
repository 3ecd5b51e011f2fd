"""Task folders of terminal-bench: what is read, what is refused, how results are scored."""

from __future__ import annotations

import pytest

from graft_envs.terminal.formats import read_tasks
from graft_envs.terminal.machine import OutputKeeper
from graft_envs.terminal.summary import defined_tests, outcomes, score
from graft_envs.terminal.task import TaskFileError
from graft_envs.terminal.terminal_bench import PytestVerifier
from tests.graft_envs.terminal.terminal_kit import write_task

SUMMARY = """
noise PASSED tests/a.py::test_before_the_summary
=========================== short test summary info ============================
PASSED ../tests/test_outputs.py::test_a
PASSED ../tests/test_outputs.py::test_p[1]
FAILED ../tests/test_outputs.py::test_p[2] - assert 1 == 2
FAILED ../tests/test_outputs.py::TestIt::test_b - AssertionError
ERROR ../tests/test_outputs.py::test_c
XFAIL ../tests/test_outputs.py::test_d - known
========================= 2 failed, 2 passed in 0.02s ==========================
"""


def test_results_are_those_of_the_last_summary():
    assert outcomes(SUMMARY) == {
        "test_a": True,
        "test_p": False,
        "test_b": False,
        "test_c": False,
        "test_d": True,
    }
    assert outcomes(SUMMARY + "=== short test summary info ===\n") == {}
    assert outcomes("bash: pytest: command not found") == {}


def test_a_test_without_a_result_has_failed():
    assert score({"a": True, "b": False}, {"a": 1, "b": 1}) == 0.5
    assert score({"a": True}, {"a": 3, "b": 1}) == 0.75
    assert score({"a": True, "c": True}, {"a": 1, "b": 1}) == 0.5
    assert score({}, {}) == 0.0


def test_names_of_tests_come_from_their_files(tmp_path):
    (tmp_path / "test_outputs.py").write_text(
        "def helper(): ...\nclass TestIt:\n    def test_b(self): ...\nasync def test_a(): ...\n"
    )
    (tmp_path / "test_broken.py").write_text("def test_(:")
    (tmp_path / "notes.py").write_text("def test_not_collected(): ...")
    assert sorted(defined_tests(tmp_path)) == ["test_a", "test_b"]


def test_a_folder_is_one_task_or_holds_several(tmp_path):
    first = write_task(tmp_path / "b", weights={"test_count": 3, "test_exists": 1})
    write_task(tmp_path / "a", max_test_timeout_sec=None)
    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b"]
    [task] = read_tasks(first)
    verifier, other = task.verifier, read_tasks(tmp_path)[0].verifier
    assert isinstance(verifier, PytestVerifier) and isinstance(other, PytestVerifier)
    assert verifier.weights == {"test_count": 3.0, "test_exists": 1.0}
    assert (verifier.script.seconds, other.script.seconds) == (20.0, 180.0)
    assert task.instruction.startswith("Write the number") and "wc -l" in task.solution_text()


def test_the_first_version_of_the_format_has_descriptions(tmp_path):
    write_task(
        tmp_path / "a", instruction=None, descriptions=[{"key": "base", "description": "Do it."}]
    )
    assert read_tasks(tmp_path)[0].instruction == "Do it."


def test_the_image_depends_on_the_machine_and_not_on_the_tests(tmp_path):
    folder = write_task(tmp_path / "a")
    before = read_tasks(folder)[0].machine.digest
    (folder / "tests" / "test_outputs.py").write_text("def test_other(): ...")
    assert read_tasks(folder)[0].machine.digest == before
    (folder / "data.txt").write_text("other\n")
    assert read_tasks(folder)[0].machine.digest != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": None}, "has no instruction"),
        ({"parser_name": "swebench"}, "parser_name 'swebench' is not supported; .* pytest"),
        ({"max_test_timeout_sec": -1}, "max_test_timeout_sec is -1"),
        ({"weights": {"test_count": -1}}, "weights of 0 or more"),
        ({"weights": {"test_count": 0}}, "no weight above 0"),
    ],
)
def test_what_a_task_lacks_is_named(tmp_path, change, message):
    write_task(tmp_path / "a", **change)
    with pytest.raises(TaskFileError, match=message):
        read_tasks(tmp_path)


def test_broken_files_and_several_machines_are_refused(tmp_path):
    with pytest.raises(TaskFileError, match="no such folder"):
        read_tasks(tmp_path / "nowhere")
    with pytest.raises(TaskFileError, match=r"task\.yaml .* task\.toml"):
        read_tasks(tmp_path)
    folder = write_task(tmp_path / "a")
    (folder / "docker-compose.yaml").write_text("services: {client: {}, database: {}}")
    with pytest.raises(TaskFileError, match="services client, database"):
        read_tasks(tmp_path)
    (folder / "docker-compose.yaml").write_text("services: {client: {}}")
    (folder / "Dockerfile").unlink()
    with pytest.raises(TaskFileError, match="has no Dockerfile"):
        read_tasks(tmp_path)
    (folder / "task.yaml").write_text("a: [")
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_tasks(tmp_path)


def test_a_long_output_keeps_its_ends_in_bounded_memory():
    kept = OutputKeeper(limit=20)
    for n in range(100_000):
        kept.add(b"%d," % (n % 10))
    assert kept.text == "0,1,2,3,4,\n[... 199,980 bytes left out ...]\n5,6,7,8,9,"
    assert len(kept.tail) < 100
    short = OutputKeeper(limit=20)
    short.add(b"\xffhello")
    assert short.text == "\ufffdhello"
