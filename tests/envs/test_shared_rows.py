"""Held-out rows that are trained too are counted, whatever names them."""

import json
from pathlib import Path

import pytest

from graft.envs.dataset.prompts import PromptsEnv
from graft.envs.dataset.shared_rows import num_shared_rows
from graft.envs.table import make


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, start in (("a", 0), ("b", 100)):
        rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(start, start + 20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


def test_rows_of_the_same_file_are_shared_and_those_of_splits_and_other_files_are_not(files):
    a, b = files
    every = PromptsEnv(data=a)
    assert num_shared_rows(every, PromptsEnv(data=a), range(5)) == 5
    assert num_shared_rows(every, PromptsEnv(data=b), range(5)) == 0
    test = PromptsEnv(data=a, split="test")
    held = len(test.numbers)
    assert 0 < held < 20
    assert num_shared_rows(PromptsEnv(data=a, split="train"), test, range(held)) == 0
    assert num_shared_rows(every, test, range(held)) == held


def test_a_seed_beyond_the_rows_chooses_a_row_again_and_counts_it_once(files):
    one = PromptsEnv(data=files[0])
    assert num_shared_rows(one, one, range(50)) == 20


def test_of_several_files_only_the_rows_of_the_shared_one_count(files):
    a, b = files
    both = PromptsEnv(data=[a, b])  # their rows alternate
    assert num_shared_rows(PromptsEnv(data=b), both, range(6)) == 3
    assert num_shared_rows(both, PromptsEnv(data=b), range(6)) == 6


def test_tasks_that_are_drawn_have_no_rows():
    env = make("calculator")
    assert num_shared_rows(env, env, range(5)) == 0
