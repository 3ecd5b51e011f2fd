"""`data: [a, b]`: the rows of several files as one set, each with its own columns and its own name."""

import pytest

from graft.data.errors import DataError
from graft.envs import make
from graft.envs.dataset.base import num_rows
from tests.row_files import write_rows as write


def sums(*numbers, **columns):
    return [{"problem": f"{n}+{n}=", "answer": str(2 * n), **columns} for n in numbers]


def asked(env, count):
    """What is asked at seeds 0, 1, 2, ..., and of which source it is."""
    posed = [env.reset(seed) for seed in range(count)]
    return [(str(prompt)[:4], info.get("data_source")) for prompt, info in posed]


def test_files_alternate_in_proportion_and_name_their_rows(tmp_path):
    files = [
        write(tmp_path / "long.jsonl", sums(1, 2, 3, 4)),
        write(tmp_path / "short.jsonl", sums(7, 8)),
    ]
    env = make("math:GSM8K", data=files)
    assert num_rows(env) == 6
    first, second = "long", "short"
    expected = [
        ("1+1=", first),
        ("7+7=", second),
        ("2+2=", first),
        ("3+3=", first),
        ("8+8=", second),
    ]
    assert asked(env, 5) == expected
    assert env.reset(7)[0] == env.reset(1)[0] and env.step("\\boxed{14}").reward == 1.0
    assert make("math:GSM8K", data=files).table is env.table
    assert asked(make("math:GSM8K", data=files[0]), 1) == [("1+1=", None)]


def test_a_data_source_in_the_row_wins_and_equal_names_keep_their_folders(tmp_path):
    files = [
        write(tmp_path / "a" / "test.jsonl", sums(1, data_source="own")),
        write(tmp_path / "b" / "test.jsonl", sums(2)),
    ]
    assert asked(make("math:GSM8K", data=files), 2) == [("1+1=", "own"), ("2+2=", files[1])]


def test_each_file_of_prompts_has_its_own_layout_and_bad_rows(tmp_path):
    verl = [
        {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}},
        {"prompt": [], "reward_model": {"ground_truth": "4"}},
    ]
    plain = [{"question": "Capital of France?", "answer": "Paris"}]
    files = [write(tmp_path / "verl.jsonl", verl), write(tmp_path / "countdown.jsonl", plain)]
    with pytest.raises(DataError, match=r"verl\.jsonl, row 2: 'prompt'"):
        make("prompts", data=files)
    env = make("prompts", data=files, skip_bad=True)
    assert num_rows(env) == 2
    posed = [env.reset(seed) for seed in range(2)]
    assert [prompt[0]["content"] for prompt, _ in posed] == ["1+1=", "Capital of France?"]
    assert [info["data_source"] for _, info in posed] == ["verl", "countdown"]
    assert env.layout.name == "plain"
    # the name of a file is no rule of grading: this is not EARL's countdown
    assert env.step("<answer>Paris</answer>").reward == 1.0
    assert env.where == f"{files[1]}, row 1"


def test_a_split_is_divided_in_every_file(tmp_path):
    files = [
        write(tmp_path / "a.jsonl", sums(*range(100))),
        write(tmp_path / "b.jsonl", sums(*range(100, 200))),
    ]
    parts = {split: make("math:GSM8K", data=files, split=split) for split in ("train", "test")}
    asked_in = {
        split: {str(env.reset(idx=i)[0]) for i in range(num_rows(env))}
        for split, env in parts.items()
    }
    assert not asked_in["train"] & asked_in["test"]
    assert len(asked_in["train"] | asked_in["test"]) == 200


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "give a file or folder, or a list of them"),
        ([1], "give a file or folder, or a list of them"),
        (["a.jsonl", "a.jsonl"], "a file is listed twice"),
        (["missing.jsonl"], "no file or folder 'missing.jsonl'"),
    ],
)
def test_a_list_that_names_no_rows_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        make("math:GSM8K", data=data)


def test_a_column_that_one_file_lacks_names_that_file(tmp_path):
    files = [write(tmp_path / "a.jsonl", sums(1)), write(tmp_path / "b.jsonl", [{"q": "?"}])]
    with pytest.raises(DataError, match=r"b\.jsonl has no column 'problem'"):
        make("math:GSM8K", data=files)
