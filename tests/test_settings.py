"""Settings in which runs differ, in short, and runs that differ in the seed alone."""

from __future__ import annotations

from graft.runs.settings import LONGEST_IN_SHORT, differing, flat, in_short, seed_groups

CALM = {"run": {"name": "calm", "seed": 0}, "train": {"lr": 2e-4, "steps": 40}}
HOT = {"run": {"name": "hot", "seed": 0}, "train": {"lr": 2e-3, "steps": 40}}
HOT1 = {"run": {"name": "hot1", "seed": 1, "save_every": 5}, "train": {"lr": 2e-3, "steps": 40}}


def test_settings_that_differ_are_found_at_any_depth_and_names_do_not_count():
    calm = {"run": {"name": "calm", "seed": 0}, "train": {"lr": 2e-4, "betas": [0.9, 0.95]}}
    hot = {"run": {"name": "hot", "seed": 0}, "train": {"lr": 2e-3, "betas": [0.9, 0.95]}}
    assert differing([calm, hot]) == {"train.lr": ["0.0002", "0.002"]}
    deep = {"task": {"args": {"operands": [2, 4]}}}
    assert differing([deep, {"task": {"args": {}}}, {}]) == {
        "task.args.operands": ["[2, 4]", None, None],
        "task.args": [None, "{}", None],
    }
    assert differing([hot]) == {}


def test_values_keep_their_types_under_dotted_names():
    assert flat({"task": {"args": {"operands": [2, 4]}, "env": "calc"}, "sft": {}}) == {
        "task.args.operands": [2, 4],
        "task.env": "calc",
        "sft": {},
    }


def test_each_run_is_named_by_the_settings_in_which_it_differs():
    assert in_short([CALM, HOT, HOT1]) == [
        "lr 0.0002, seed 0",
        "lr 0.002, seed 0",
        "lr 0.002, seed 1, save_every 5",
    ]
    assert in_short([HOT]) == [""] and in_short([]) == []


def test_what_changes_nothing_that_is_learned_comes_last():
    one = {"run": {"save_every": 1}, "task": {"wrappers": []}}
    two = {"run": {"save_every": 2}, "task": {"wrappers": ["concat"]}}
    assert in_short([one, two])[0] == "wrappers [], save_every 1"


def test_keys_that_end_alike_keep_their_section_and_the_rest_is_counted():
    one = {"sft": {"lr": 1.0, **{f"k{n}": 0 for n in range(9)}}, "train": {"warmup": 1}}
    two = {
        "sft": {"lr": 2.0, **{f"k{n}": 1 for n in range(9)}},
        "train": {"warmup": 2},
        "a": {"lr": 1},
    }
    first, second = in_short([one, two])
    assert first.startswith("sft.lr 1.0, k0 0,") and first.endswith("k4 0, 5 more")
    assert second.endswith("k4 1, 6 more")


def test_a_long_value_keeps_its_end():
    texts = in_short([{"model": {"path": "x" * 60 + "/base"}}, {"model": {"path": ""}}])
    assert texts[1] == 'model ""'
    assert texts[0].endswith("/base") and len(texts[0]) == len("model ") + LONGEST_IN_SHORT


def test_runs_that_differ_in_the_seed_alone_are_found():
    assert seed_groups([CALM, HOT, HOT1]) == [[0], [1, 2]]
    assert seed_groups([{}, {}]) == [[0], [1]]  # without settings nothing is known to be equal
    longer = {**HOT1, "train": {"lr": 2e-3, "steps": 80}}
    assert seed_groups([HOT1, longer, HOT]) == [[0, 2], [1]]
