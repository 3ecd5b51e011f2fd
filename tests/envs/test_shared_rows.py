"""Held-out rows that are trained too are found, whatever file or order they come in."""

import json
from pathlib import Path

import pytest

from graft.data.tables import RowTable
from graft.envs.dataset import shared_rows as module
from graft.envs.dataset.prompts import PromptsEnv
from graft.envs.dataset.shared_rows import RowSet, shared_rows
from graft.envs.table import make


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, start in (("a", 0), ("b", 100)):
        rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(start, start + 20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


def num_shared(trained: PromptsEnv, held_out: PromptsEnv, seeds: range) -> int:
    rows, scored = RowSet.of_env("trained", trained), RowSet.of_env("scored", held_out, seeds)
    assert rows is not None and scored is not None
    [found] = shared_rows([scored], rows)
    return len(found)


def test_rows_of_the_same_file_are_shared_and_those_of_splits_and_other_files_are_not(files):
    a, b = files
    every = PromptsEnv(data=a)
    assert num_shared(every, PromptsEnv(data=a), range(5)) == 5
    assert num_shared(every, PromptsEnv(data=b), range(5)) == 0
    test = PromptsEnv(data=a, split="test")
    held = len(test.numbers)
    assert 0 < held < 20
    assert num_shared(PromptsEnv(data=a, split="train"), test, range(held)) == 0
    assert num_shared(every, test, range(held)) == held


def test_a_copy_of_a_file_has_the_same_rows(files, tmp_path: Path):
    a, _ = files
    rows = [json.loads(line) for line in Path(a).read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], **row} for row in rows[::-2]]
    (tmp_path / "copy.jsonl").write_text("\n".join(map(json.dumps, chats)))
    assert (
        num_shared(PromptsEnv(data=str(tmp_path / "copy.jsonl")), PromptsEnv(data=a), range(20))
        == 10
    )


def test_a_seed_beyond_the_rows_chooses_a_row_again_and_counts_it_once(files):
    one = PromptsEnv(data=files[0])
    assert num_shared(one, one, range(50)) == 20


def test_of_several_files_only_the_rows_of_the_shared_one_count(files):
    a, b = files
    both = PromptsEnv(data=[a, b])  # their rows alternate
    assert num_shared(PromptsEnv(data=b), both, range(6)) == 3
    assert num_shared(both, PromptsEnv(data=b), range(6)) == 6


def test_rows_are_known_by_the_columns_of_a_template():
    rows = [{"first": i, "city": f"town {i}", "answer": "x"} for i in range(8)]
    env = PromptsEnv(rows=rows, template="Describe {city}.", prompt_key="city", answer_key="answer")
    assert num_shared(env, env, range(8)) == 8


def test_tasks_that_are_drawn_have_no_rows():
    assert RowSet.of_env("drawn", make("calculator")) is None


def test_of_a_large_set_a_part_is_compared_and_that_is_said(monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 10)
    table = RowTable([{"question": f"what is number {i}"} for i in range(100)])
    large, small = RowSet("large", table, range(100)), RowSet("small", table, range(5, 15))
    assert large.sampling == "10 of the 100 rows of large" and not small.sampling
    [found] = shared_rows([small], large)
    assert found == {5}  # row 10 is every tenth row's only one among 5 to 14
