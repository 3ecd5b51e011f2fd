"""Rewards of other frameworks, and the reward that a recipe names."""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from graft.registry import UnknownName
from graft.rewards import REWARDS, make_reward
from graft.rewards.answers import exact_match, f1
from graft.rewards.deep_research import deep_research
from graft.rewards.judge import Judge
from graft.rewards.plugins import adapt
from graft.types import Author, Episode, Leaf, Span, Task, Trajectory


def attempt() -> tuple[Task, Trajectory]:
    task = Task(
        "t",
        "toy",
        prompt=({"role": "system", "content": "Be brief. "}, {"role": "user", "content": "2+3?"}),
        answer=["5", "five"],
        data_source="sums",
        meta={"index": 7, "level": "easy"},
    )
    episode = Episode(task)
    tip = episode.append(Span(None, Author.TASK, [], text="2+3?"))
    for author, text in [(Author.POLICY, "[2+3]"), (Author.ENV, "5;"), (Author.POLICY, "5")]:
        tip = episode.append(Span(tip, author, [], text=text))
    episode.leaves.append(Leaf((tip,), info={"moves": 3}))
    return task, next(episode.trajectories())


def test_verls_signature_is_called_by_keyword_with_the_whole_response():
    seen: list[tuple[Any, ...]] = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": 0.25, "reason": "so"}

    task, trajectory = attempt()
    assert adapt(compute_score)(task, trajectory) == 0.25
    assert seen == [
        ("sums", "[2+3]5;5", ["5", "five"], {"index": 7, "level": "easy", "env_info": {"moves": 3}})
    ]
    seen[0][3]["index"] = seen[0][3]["env_info"]["moves"] = (
        8  # it is a copy: the task is not the plug-in's to change
    )
    assert task.meta["index"] == 7 and trajectory.info == {"moves": 3}


def test_arpos_documented_form_gets_a_list_of_one_row():
    def compute_score(data, worth=1.0):
        seen.extend(data)
        return [worth * (one["output"][-1] in one["answer"]) for one in data]

    seen: list[dict[str, Any]] = []
    task, trajectory = attempt()
    assert adapt(compute_score)(task, trajectory) == 1.0
    (row,) = seen
    assert row["output"] == "[2+3]5;5"
    assert (row["answer"], row["data_source"], row["level"]) == (["5", "five"], "sums", "easy")
    assert adapt(partial(compute_score, worth=0.5))(task, trajectory) == 0.5


def test_a_function_gets_what_it_has_names_for():
    def short(solution_str, ground_truth):
        return solution_str[-1:] in ground_truth

    def shuffled(ground_truth, *, solution_str, **rest):
        return len(rest)

    assert adapt(short)(*attempt()) == 1.0
    assert adapt(shuffled)(*attempt()) == 2.0  # data_source and extra_info


def test_trls_signature_is_a_batch_of_one():
    seen: list[dict[str, Any]] = []

    def all_of(completions, **columns):
        seen.append({"completions": completions, **columns})
        return [0.5]

    def some(prompts, completions, answer, level):
        return [float(completions[0][-1] in answer[0] and level == ["easy"])]

    assert adapt(all_of)(*attempt()) == 0.5
    assert seen == [
        {
            "completions": ["[2+3]5;5"],
            "prompts": ["Be brief. 2+3?"],
            "answer": [["5", "five"]],
            "ground_truth": [["5", "five"]],
            "data_source": ["sums"],
            "index": [7],
            "level": ["easy"],
            "env_info": [{"moves": 3}],
        }
    ]
    assert adapt(some)(*attempt()) == 1.0


def test_a_column_that_is_not_there_is_named():
    def wants(completions, solution):
        return [1.0]

    with pytest.raises(
        ValueError, match=r"wants\(completions, solution\).*'t'.*'solution'.*available are"
    ):
        adapt(wants)(*attempt())


@pytest.mark.parametrize(
    ("result", "score"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (False, 0.0), ({"score": 2}, 2.0), ([3.0], 3.0)],
)
def test_numbers_come_in_several_forms(result: Any, score: float):
    def compute_score(solution_str):
        return result

    assert adapt(compute_score)(*attempt()) == score


@pytest.mark.parametrize(
    "result",
    [None, "1.0", float("nan"), float("inf"), {"reward": 1}, {"score": None}, [], [1, 2], 10**400],
)
def test_what_is_no_finite_number_is_refused_with_the_name_of_the_function(result: Any):
    def compute_score(solution_str):
        return result

    with pytest.raises(ValueError, match=r"compute_score returned .*finite number"):
        adapt(compute_score)(*attempt())


def trl(result: Any):
    def fluent(completions, **columns):
        return result

    return fluent


def arpo(result: Any):
    def documented(data):
        return result

    return documented


@pytest.mark.parametrize("form", [trl, arpo])
@pytest.mark.parametrize(
    "result", [[0.5], (0.5,), [True], numpy.array([0.5]), [numpy.float32(0.5)], torch.tensor([0.5])]
)
def test_a_function_of_lists_returns_a_list_of_one(form: Any, result: Any):
    assert adapt(form(result))(*attempt()) in (0.5, 1.0)


@pytest.mark.parametrize("form", [trl, arpo])
@pytest.mark.parametrize(
    "result",
    [
        0.5, 1, True, None, "0.5", {"score": 0.5}, numpy.float32(0.5), numpy.array(0.5), torch.tensor(0.5),
        [], [0.5, 0.5], numpy.array([0.5, 0.5]), torch.tensor([0.5, 0.5]), [None], ["0.5"], [float("nan")],
        [[0.5, 0.5]], numpy.array([numpy.nan]), [torch.tensor([0.5, 0.5])],
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_from_a_function_of_lists_is_refused(form: Any, result: Any):
    with pytest.raises(ValueError, match=r"reward .*\.(fluent|documented) returned"):
        adapt(form(result))(*attempt())


@pytest.mark.parametrize(
    "result",
    [numpy.float32(0.5), numpy.array(0.5), torch.tensor(0.5), {"score": torch.tensor(0.5)}],
    ids=repr,
)
def test_numbers_of_numpy_and_torch_are_numbers(result: Any):
    def compute_score(solution_str):
        return result

    assert adapt(compute_score)(*attempt()) == 0.5


def test_a_graft_reward_is_returned_unchanged():
    assert adapt(f1) is f1
    judge = Judge("http://localhost:1/v1")
    assert adapt(judge) is judge


def test_an_unknown_signature_is_refused_at_once():
    with pytest.raises(ValueError, match=r"<lambda>\(a, b, c\) has an unknown form"):
        adapt(lambda a, b, c: 1.0)
    with pytest.raises(ValueError, match="reward int cannot be called"):
        adapt(3)  # type: ignore[arg-type]

    async def later(solution_str):
        return 1.0

    with pytest.raises(ValueError, match="later is async"):
        adapt(later)


# the reward that a recipe names


class Grader:
    """Counts how often it is made."""

    blocking = True
    made = 0

    def __init__(self, worth: float = 1.0) -> None:
        Grader.made += 1
        self.worth = worth

    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        return self.worth


class VerlGrader:
    blocking = True

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return float(data_source == "sums")


def scaled(task: Task, trajectory: Trajectory, worth: float = 1.0) -> float:
    return worth


def demanding(task: Task, trajectory: Trajectory, worth: float) -> float:
    return worth


def compute_score(data_source, solution_str, ground_truth, extra_info=None, worth=1.0):
    return worth


def columns(completions, level, worth=1.0):
    return [worth if level == ["easy"] else 0.0]


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch):
    """This file by a short name, as a user's module in the working folder would have."""
    module = types.ModuleType("my_rewards")
    for one in (Grader, VerlGrader, scaled, demanding, compute_score, columns):
        setattr(module, one.__name__, one)
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rewards", module)


def test_a_bundled_reward_by_name():
    assert make_reward("deep_research") is deep_research
    assert make_reward({"exact_match": None}) is exact_match
    assert make_reward({"exact_match": {}}) is exact_match


def test_every_name_in_the_table_makes_a_reward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_URL", "http://localhost:1/v1")
    for name in REWARDS:
        assert callable(make_reward(name)), name
    assert isinstance(make_reward("judge"), Judge)


def test_keywords_reach_functions_and_classes():
    assert make_reward({"judge": {"url": "http://h:1/v1", "concurrency": 5}}).concurrency == 5  # type: ignore
    assert make_reward("my_rewards:scaled")(*attempt()) == 1.0
    assert make_reward({"my_rewards:scaled": {"worth": 3.0}})(*attempt()) == 3.0
    assert make_reward({"my_rewards:demanding": {"worth": 3.0}})(*attempt()) == 3.0
    assert make_reward("my_rewards:Grader")(*attempt()) == 1.0
    assert make_reward({"my_rewards:Grader": {"worth": 2.0}})(*attempt()) == 2.0


def test_keywords_reach_plug_ins_too():
    assert make_reward("my_rewards:compute_score")(*attempt()) == 1.0
    assert make_reward({"my_rewards:compute_score": {"worth": 4}})(*attempt()) == 4.0
    assert make_reward({"my_rewards:columns": {"worth": 5}})(*attempt()) == 5.0
    assert make_reward("my_rewards:VerlGrader")(*attempt()) == 1.0


def test_a_class_is_made_once():
    before = Grader.made
    reward = make_reward("my_rewards:Grader")
    reward(*attempt())
    reward(*attempt())
    assert Grader.made == before + 1


def test_blocking_can_be_seen_from_outside(monkeypatch: pytest.MonkeyPatch):
    def blocks(spec: Any) -> bool:
        return getattr(make_reward(spec), "blocking", False)

    assert not blocks("f1") and not blocks("my_rewards:compute_score")
    assert blocks({"judge": {"url": "http://h:1/v1"}})
    assert blocks("my_rewards:Grader") and blocks("my_rewards:VerlGrader")
    monkeypatch.setattr(scaled, "blocking", True, raising=False)
    monkeypatch.setattr(compute_score, "blocking", True, raising=False)
    assert blocks({"my_rewards:scaled": {"worth": 2.0}})
    assert blocks({"my_rewards:compute_score": {"worth": 2.0}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_mach", "unknown reward 'exact_mach'; did you mean 'exact_match'?"),
        ("", "unknown reward ''"),
        ("my_rewards:scald", "did you mean 'scaled'?"),
        ("nowhere:f", "cannot import 'nowhere'"),
        ({}, "must be a name, {name"),
        ({"f1": {}, "judge": {}}, "must be a name, {name"),
        ([], "name at least one reward"),
        (
            {"f1": 1.0, "exact_match": 0.5},
            "[{f1: {}, weight: 1.0}, {exact_match: {}, weight: 0.5}]",
        ),
        ({"f1": {}, "weight": 0.5}, "or a list of these"),
        ([{"name": "f1", "weight": 0.5}], "did you mean [{f1: {}, weight: 0.5}]?"),
        ([{"f1": 0.5}], "did you mean [{f1: {}, weight: 0.5}]?"),
        ([{"f1": {}, "wieght": 0.5}], "are written [f1, {exact_match: {}, weight: 0.5}]"),
        ([{"f1": {"weight": 0.5}}], "beside the name, in a list: [{f1: {}, weight: 0.5}]"),
        ([{"f1": {}, "weight": "much"}], "reward 'f1': weight 'much'"),
        ([{"f1": {}, "weight": 0}], "weight 0"),
        (["f1", {"f2": {}, "weight": 1}], "unknown reward 'f2'"),
        ({3: {}}, "3 is not a name"),
        ({"f1": 2}, "keywords must be written {keyword: value}, not 2"),
        ({"f1": {"worth": 1}}, "reward 'f1' has no argument 'worth'"),
        ({"my_rewards:scaled": {"wort": 1}}, "did you mean 'worth'?"),
        ({"my_rewards:scaled": {"task": 1}}, "has no argument 'task'"),
        ({"my_rewards:compute_score": {"solution_str": "x"}}, "has no argument 'solution_str'"),
        ("my_rewards:demanding", "needs worth="),
        ({"my_rewards:Grader": {"wurth": 1}}, "did you mean 'worth'?"),
        ({"judge": {"modle": "x"}}, "did you mean 'model'?"),
        ("judge", "$JUDGE_URL"),
        ("my_rewards:number", "is a int, not a function"),
    ],
)
def test_a_reward_that_cannot_be_built_names_the_reason(
    spec: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    with pytest.raises(ValueError) as caught:
        make_reward(spec)
    assert message in str(caught.value)


def test_a_list_is_the_weighted_sum_of_its_rewards():
    spec = ["exact_match", {"f1": None, "weight": 0.5}, {"my_rewards:scaled": {"worth": 3.0}}, "f1"]
    total = make_reward(spec)
    task, trajectory = attempt()
    alone = [make_reward(each)(task, trajectory) for each in ("exact_match", "f1", spec[2], "f1")]
    assert alone[0] == alone[1] == 1.0 and alone[2] != 0.0
    assert total(task, trajectory) == alone[0] + 0.5 * alone[1] + alone[2] + alone[3]
    assert trajectory.leaf.metrics == dict(
        zip(("reward/exact_match", "reward/f1", "reward/scaled", "reward/f1_2"), alone, strict=True)
    )
    assert not total.blocking
    assert make_reward(["f1", {"judge": {"url": "http://h:1/v1"}, "weight": 2}]).blocking


def test_an_unknown_name_is_the_registrys_error():
    with pytest.raises(UnknownName):
        make_reward("nothing_like_it")
