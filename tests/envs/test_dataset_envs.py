"""Dataset environments on small made files: the same episodes from every format."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from graft.data.errors import DataError
from graft.data.hub import locate
from graft.envs import ENVS, make
from graft.envs.dataset import DATASETS
from graft.envs.dataset.base import shuffled
from graft.envs.dataset.geometry import image_url
from graft.envs.splits import split_of
from graft.evaluate.benchmarks.questions import BenchmarkQuestions
from graft.text.template import CHATML, PLAIN, TemplateError, render
from graft.types import Task
from graft_envs.code.grading import table_of
from tests.row_files import write_rows as write

MATH_ROWS = [{"problem": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(12)]
QA_ROWS = [
    {"question": "Capital of France?", "answer": ["Paris", "Paris, France"]},
    {"question": "The tower?", "answer": ["The Eiffel Tower"]},
    {"question": "How much?", "answer": ["3.5"]},
]
LOGIC_ROWS = [
    {"question": "Bob is red. Is Bob red?", "answer": "True"},
    {"question": "Bob is red. Is Bob blue?", "answer": "False"},
]
CODE_ROWS = [
    {
        "problem": "Print the sum of two numbers.",
        "tests": json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}),
    }
]


def test_the_table_has_every_id_and_names_what_it_needs():
    assert len(DATASETS) == 27
    families = [env_id.partition(":")[0] for env_id in DATASETS]
    assert {family: families.count(family) for family in set(families)} == {
        "math": 7,
        "qa": 2,
        "logic": 5,
        "eval": 13,
    }
    assert ENVS["math:GSM8K"].needs == ("data:axon-rl/GSM-8k",)
    assert ENVS["eval:CodeContest"].needs == ("data:axon-rl/CodeContest", "sandbox")
    assert ENVS["eval:AMC"].args["hub_split"] == "amc"
    assert callable(locate)


@pytest.mark.parametrize(
    ("env_id", "rows", "action"),
    [
        ("math:GSM8K", MATH_ROWS, "\\boxed{4}"),
        ("qa:HotpotQA", [{"problem": r["question"], "answer": r["answer"]} for r in QA_ROWS], "x"),
        ("eval:QaOpen", QA_ROWS, "<answer>paris</answer>"),
        ("logic:RuleTaker-d1", LOGIC_ROWS, "\\boxed{True}"),
        ("code:Taco8k", CODE_ROWS, "no program"),
    ],
)
def test_parquet_and_jsonl_give_identical_episodes(
    tmp_path: Path, env_id: str, rows: list[dict[str, Any]], action: str
):
    traces: list[Any] = []
    sources = ({"rows": rows}, *({"data": write(tmp_path / f"rows{e}", rows)} for e in ENDINGS))
    for source in sources:
        env = make(env_id, **source)
        trace: list[Any] = []
        for seed in (0, 1, 2**53 - 1, None, None, None):
            trace += [env.reset(seed), env.task(), env.step(action), env.get_state()]
        traces.append(trace)
        json.dumps([trace[0], trace[2], trace[3]])
        assert Task.from_json(json.loads(json.dumps(env.task().to_json()))) == env.task()
    assert traces[0] == traces[1] == traces[2]


ENDINGS = (".parquet", ".jsonl")


def test_a_seed_names_a_row_and_seeds_in_order_are_the_whole_set():
    env = make("math:GSM8K", rows=MATH_ROWS)
    assert [env.reset(seed)[1]["answer"] for seed in range(13)] == [
        *(row["answer"] for row in MATH_ROWS),
        "0",
    ]
    assert env.task().id == "math:GSM8K:train:12"
    assert env.task().meta == {"idx": 0}


def test_an_index_names_a_row_and_is_checked():
    env = make("eval:AMC", rows=MATH_ROWS)
    assert env.reset(idx=5)[1]["answer"] == "10"
    assert env.task().id == "eval:AMC:amc:5"
    with pytest.raises(ValueError, match="idx=12: rows are numbered 0 to 11"):
        env.reset(idx=12)
    with pytest.raises(ValueError, match="give one"):
        env.reset(seed=1, idx=1)
    with pytest.raises(ValueError, match="seed=-1"):
        env.reset(-1)


def test_a_walk_meets_every_row_once_per_pass_and_is_shuffled_anew():
    env = make("math:GSM8K", rows=MATH_ROWS)
    env.reset(7)
    passes = [[env.reset()[1]["answer"] for _ in MATH_ROWS] for _ in range(2)]
    every = [row["answer"] for row in MATH_ROWS]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(every)
    assert passes[0] != passes[1]
    assert passes[0] != every
    again = make("math:GSM8K", rows=MATH_ROWS)
    again.reset(7)
    assert [[again.reset()[1]["answer"] for _ in MATH_ROWS] for _ in range(2)] == passes
    other = make("math:GSM8K", rows=MATH_ROWS)
    other.reset(8)
    assert [other.reset()[1]["answer"] for _ in MATH_ROWS] != passes[0]


def test_an_evaluation_walks_in_order():
    env = make("math:GSM8K", rows=MATH_ROWS, evaluation=True)
    assert [env.reset()[1]["answer"] for _ in range(13)] == [*(r["answer"] for r in MATH_ROWS), "0"]
    env.reset(3)
    assert env.reset()[1]["answer"] == "8"


def test_envs_on_the_same_file_share_its_rows(tmp_path: Path):
    data = write(tmp_path / "rows.jsonl", MATH_ROWS)
    env = make("math:GSM8K", data=data)
    assert env.table is make("math:Math12K", data=data).table is env.fork().table


def test_a_folder_has_splits_and_a_file_is_divided(tmp_path: Path):
    many = [{"problem": f"{n}?", "answer": n} for n in range(200)]
    write(tmp_path / "train.jsonl", many)
    everything = make("math:GSM8K", data=str(tmp_path))
    train = make("math:GSM8K", data=str(tmp_path), split="train")
    test = make("math:GSM8K", data=str(tmp_path), split="test")
    assert len(everything.numbers) == 200
    assert sorted([*train.numbers, *test.numbers]) == list(range(200))
    assert [n for n in range(200) if split_of(f"{n}?") == "test"] == list(test.numbers)
    write(tmp_path / "test.parquet", MATH_ROWS)
    assert len(make("math:GSM8K", data=str(tmp_path), split="train").numbers) == 200
    assert len(make("math:GSM8K", data=str(tmp_path), split="test").numbers) == 12
    assert len(make("code:Taco8k", data=str(tmp_path), test_key="answer").numbers) == 200
    with pytest.raises(DataError, match="several splits"):
        make("math:GSM8K", data=str(tmp_path))
    with pytest.raises(DataError, match="no split 'amc'; it has test, train"):
        make("eval:AMC", data=str(tmp_path))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = write(tmp_path / "rows.jsonl", [{"q": "1+1?", "a": 2}])
    with pytest.raises(DataError, match=r"no column 'problem' \(found: q, a\)"):
        make("math:GSM8K", data=data)
    env = make("math:GSM8K", data=data, question_key="q", answer_key="a")
    env.reset(0)
    assert env.step("\\boxed{2.0}").reward == 1.0
    with pytest.raises(DataError, match="rows is empty: it has no rows"):
        make("math:GSM8K", rows=[])
    with pytest.raises(DataError, match=r"row 1: 'answer' holds .* an answer is a text, a number"):
        make("math:GSM8K", rows=[{"problem": "?", "answer": {"x": 1}}]).reset(0)
    with pytest.raises(DataError, match="row 1: 'problem' holds int, not text"):
        make("math:GSM8K", rows=[{"problem": 3, "answer": 1}]).reset(0)
    with pytest.raises(ValueError, match="give data="):
        make("graft.envs.dataset.maths:MathEnv")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr("graft.data.hub._is_worth_trying", lambda hub_id: False)
    with pytest.raises(DataError, match="hf download --repo-type dataset axon-rl/GSM-8k"):
        make("math:GSM8K")


def test_what_makes_no_sense_together_is_refused(tmp_path: Path):
    data = write(tmp_path / "rows.jsonl", MATH_ROWS)
    with pytest.raises(ValueError, match=r"rows= and data=.*: keep one"):
        make("math:GSM8K", data=data, rows=MATH_ROWS)
    for source in ({"data": data}, {"rows": MATH_ROWS}):
        with pytest.raises(ValueError, match=r"split='dev': .* has no splits, .*dev\.jsonl"):
            make("math:GSM8K", split="dev", **source)
    train = [row for row in MATH_ROWS if split_of(row["problem"]) == "train"][:2]
    with pytest.raises(DataError, match="2 rows, has none for split='test'; one row in ten"):
        make("math:GSM8K", rows=train, split="test")
    for rows, kind in (([1], "row 1 is a int"), ({"a": 1}, "is a dict"), ("abc", "is a str")):
        with pytest.raises(ValueError, match=kind):
            make("math:GSM8K", rows=rows)


def test_an_error_names_the_row_of_the_file_and_not_of_the_split(tmp_path: Path):
    rows: list[dict[str, Any]] = [{"problem": f"{n}?", "answer": str(n)} for n in range(200)]
    number = next(n for n in range(50, 200) if split_of(f"{n}?") == "test")
    rows[number]["answer"] = None
    env = make("math:GSM8K", data=write(tmp_path / "rows.jsonl", rows), split="test")
    with pytest.raises(DataError, match=rf"rows\.jsonl, row {number + 1}: 'answer' holds 'None'"):
        env.reset(idx=env.numbers.index(number))


def test_numbers_of_every_library_are_answers_and_json():
    for number in (numpy.int64(3), numpy.float32(3.0), Decimal("3.00")):
        env = make("math:GSM8K", rows=[{"problem": "?", "answer": number}])
        _, info = env.reset(0)
        json.dumps(info)
        assert env.step("\\boxed{3}").reward == 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000])
def test_a_shuffle_meets_every_place_once_and_another_key_shuffles_otherwise(size: int):
    orders = [[shuffled(place, size, key) for place in range(size)] for key in ("7 0", "7 1")]
    assert [sorted(order) for order in orders] == [list(range(size))] * 2
    if size > 5:
        assert orders[0] != orders[1]


def test_many_walks_over_many_rows_hold_no_order_in_memory():
    places = [shuffled(place, 10**9, "key") for place in range(200)]
    assert len(set(places)) == 200
    assert 4e8 < sum(places) / 200 < 6e8  # spread over all of them


def test_a_local_copy_of_the_hub_dataset_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "axon-rl" / "math-eval"
    folder.mkdir(parents=True)
    write(folder / "amc-00000-of-00001.parquet", MATH_ROWS)
    write(folder / "aime24-00000-of-00001.parquet", MATH_ROWS[:2])
    monkeypatch.setenv("GRAFT_DATA", str(tmp_path))
    assert locate("axon-rl/math-eval") == folder
    assert len(make("eval:AMC").numbers) == 12
    assert len(make("eval:AIME24").numbers) == 2


# scores


@pytest.mark.parametrize(
    ("answer", "action", "reward"),
    [
        ("0.5", "so \\boxed{1} no, \\boxed{\\frac{1}{2}}.", 1.0),
        (["7", "\\boxed{8}"], "\\boxed{8}", 1.0),
        (18, "\\boxed{18.0}", 1.0),
        ("She has 3 + 4 = 7\n#### 7", "\\boxed{7}", 1.0),
        ("8", "\\boxed{9}", 0.0),
        ("8", "the answer is 8", -0.1),
        ("8", "\\boxed{8", -0.1),
        ("8", "\\boxed{}", 0.0),
        ("8", "\\boxed{9^{9^{9^9}}}", 0.0),
        ("8", "\\boxed{" + "{" * 100_000, -0.1),
    ],
)
def test_mathematics_is_compared_by_meaning(answer: Any, action: str, reward: float):
    env = make("math:GSM8K", rows=[{"problem": "?", "answer": answer}], format_reward=-0.1)
    env.reset(0)
    turn = env.step(action)
    assert (turn.reward, turn.terminated, turn.truncated) == (reward, True, False)
    assert turn.info == {"correct": reward == 1.0, "has_answer": reward >= 0.0}
    env.reset(0)
    ((_, answer),) = env.demonstrate(random.Random(0))
    assert env.step(answer).reward == 1.0


@pytest.mark.parametrize(
    ("seed", "action", "reward", "f1"),
    [
        (0, "<think>?</think><answer> paris </answer>", 1.0, 1.0),
        (0, "<answer>Paris, France!</answer>", 1.0, 1.0),
        (0, "<answer>Lyon</answer><answer>Paris</answer>", 1.0, 1.0),
        (0, "<answer>the city of Paris</answer>", 0.0, 0.5),
        (0, "<answer>Lyon</answer>", 0.0, 0.0),
        (0, "Paris", 0.0, 0.0),
        (0, "\\boxed{Paris}", 0.0, 0.0),
        (1, "<answer>Eiffel tower</answer>", 1.0, 1.0),
        (2, "<answer>35</answer>", 0.0, 1.0),  # F1 drops the point as SQuAD does, the score not
    ],
)
def test_questions_are_compared_as_text(seed: int, action: str, reward: float, f1: float):
    env = make("eval:QaOpen", rows=QA_ROWS)
    prompt, _ = env.reset(seed)
    assert "<answer>" in prompt
    assert "boxed" not in prompt
    turn = env.step(action)
    assert (turn.reward, turn.info["correct"], turn.info["f1"]) == (reward, reward == 1.0, f1)


def test_logic_answers_stand_in_a_box():
    env = make("logic:RuleTaker-d0", rows=LOGIC_ROWS)
    for seed, gold in ((0, "True"), (1, "False")):
        prompt, _ = env.reset(seed)
        assert "<answer>" not in prompt
        assert env.step(f"\\boxed{{{gold.lower()}}}").reward == 1.0
        env.reset(seed)
        assert env.step(f"\\boxed{{\\text{{ {gold} }}}}").reward == 1.0
        env.reset(seed)
        assert env.step(f"<answer>{gold}</answer>").reward == 0.0
        env.reset(seed)
        assert env.step(f"\\boxed{{not {gold}}}").reward == 0.0
    with pytest.raises(ValueError, match="form='braces'"):
        make("logic:RuleTaker-d0", rows=LOGIC_ROWS, form="braces")


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the grader; it finds programs that print a sum right."""
    calls: list[Any] = []

    def score_tests(code: str, tests: Any, **options: Any) -> float:
        calls.append((code, tests, options))
        return float("sum" in code)

    monkeypatch.setattr("graft_envs.code.programs.score_tests", score_tests)
    return calls


def test_the_last_block_is_run_against_the_tests(graded: list[Any]):
    env = make("code:Taco8k", rows=CODE_ROWS, max_tests=5)
    env.reset(0)
    turn = env.step("```python\nprint(1)\n```\nor better\n```python\nprint(sum([1]))\n```")
    assert (turn.reward, turn.info) == (1.0, {"correct": True, "has_answer": True})
    tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
    assert graded == [("print(sum([1]))\n", tests, {"max_tests": 5, "sandbox": "auto"})]
    env.reset(0)
    assert env.step(env.sample_random_action()).reward == 0.0
    env.reset(0)
    turn = env.step("print(sum([1]))")
    assert (turn.reward, turn.info) == (-0.1, {"correct": False, "has_answer": False})
    assert len(graded) == 2


def test_tests_come_in_several_forms():
    assert table_of([{"input": "1", "output": "2"}]) == {"inputs": ["1"], "outputs": ["2"]}
    form = {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}
    assert table_of(form) == form
    assert "fn_name" not in table_of({**form, "fn_name": None})
    for bad in ("{", "3", None, {}, [], {"inputs": ["1"], "outputs": []}, [{"input": "1"}]):
        with pytest.raises(ValueError):
            table_of(bad)
    with pytest.raises(DataError, match="row 1: 'tests' is text but not JSON"):
        make("code:Taco8k", rows=[{"problem": "?", "tests": "{"}]).reset(0)


PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000049454e44ae426082"
)


def test_pictures_become_text_and_survive_json(tmp_path: Path):
    rows = [{"problem": "Find x.", "answer": "3", "images": [{"bytes": PIXEL, "path": "a.png"}]}]
    see = partial(make, "math:Geometry3K", pictures=True)
    env = see(data=write(tmp_path / "train.parquet", rows))
    observation, _ = env.reset(0)
    picture, text = observation[0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert text["text"].startswith("Find x.\n\n")
    task = env.task()
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    restored = see(data=str(tmp_path / "train.parquet"))
    restored.set_state(json.loads(json.dumps(env.get_state())))
    assert restored.step("\\boxed{x=3}").reward == 1.0
    # every item occurs, none is skipped
    two = see(rows=[*rows, {**rows[0], "answer": "4"}], evaluation=True)
    assert [two.reset()[1]["answer"] for _ in range(4)] == ["3", "4", "3", "4"]
    with pytest.raises(DataError, match="no column 'images'"):
        see(rows=MATH_ROWS)
    with pytest.raises(DataError, match="'images' holds a int"):
        see(rows=[{**rows[0], "images": [7]}]).reset(0)


SEEN: dict[str, Any] = {
    "bytes": [{"bytes": PIXEL, "path": None}],
    "a path": ["figures/1.png"],
    "one": {"path": "1.jpg"},
    "an address": "https://host/a/b.webp?w=3",
    "a data uri": "data:image/png;base64,iVBORw0KGgo",
    "base64": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB" * 10,
    "raw": PIXEL,
}


@pytest.mark.parametrize(
    ("kind", "column"),
    [*((kind, "images") for kind in SEEN), *(("bytes", c) for c in ("image", "video", "audio"))],
)
def test_a_row_with_a_picture_is_refused_wherever_rows_are_read(kind: str, column: str):
    """Text alone reaches the model: a run on geometry without the figure learns to guess."""
    row = {"problem": "Find x.", "question": "Find x.", "answer": "3", "tests": []}
    row[column] = SEEN[kind]
    message = rf"row 2: '{column}' holds more than text: only text is read"
    for env_id in ("math:GSM8K", "qa:HotpotQA", "code:Taco8k", "eval:MATH500"):
        with pytest.raises(DataError, match=message):
            make(env_id, rows=[{**row, column: None}, row])
    plain = {"prompt": "?", "answer": "3"}
    with pytest.raises(DataError, match=message):
        make("prompts", rows=[plain, {**row, **plain}])
    with pytest.raises(DataError, match=message):
        BenchmarkQuestions(rows=[{**row, column: ""}, row])
    assert len(BenchmarkQuestions(rows=[{**row, column: ""}, row], empty_key=column).numbers) == 1


@pytest.mark.parametrize("value", [None, [], "", "python:3.11", {"bytes": None, "path": None}])
def test_a_column_of_that_name_without_a_picture_is_no_reason(value: Any):
    row = {"problem": "2+3?", "prompt": "2+3?", "answer": "5", "image": value, "images": value}
    assert make("math:GSM8K", rows=[row]).reset(0)
    assert make("prompts", rows=[row], layout="trl-prompt").reset(0)


def test_geometry_is_refused_unless_pictures_are_enabled():
    """A run on it would go on without its pictures."""
    with pytest.raises(ValueError, match=r"asks about pictures \(column 'images'\).*pictures=True"):
        make("math:Geometry3K", rows=[])


def test_a_part_that_is_no_text_stops_the_template():
    """A user's environment may show pictures too."""
    env = make("math:Geometry3K", pictures=True, rows=[{**MATH_ROWS[0], "images": ["1.png"]}])
    for template in (PLAIN, CHATML, "{% for m in messages %}{{ m.content[1].text }}{% endfor %}"):
        with pytest.raises(TemplateError, match=r"message 1 .user. has a part of type 'image_url'"):
            render(template, env.reset(0)[0])
    text = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"text": "3="}]}]
    assert render(CHATML, text) == "<|im_start|>user\n2+3=<|im_end|>\n"


def test_a_picture_may_be_a_path_or_bytes():
    assert image_url("figures/1.png") == "figures/1.png"
    assert image_url({"bytes": None, "path": "figures/1.png"}) == "figures/1.png"
    assert image_url(b"\xff\xd8\xff0") == "data:image/jpeg;base64,/9j/MA=="
    assert image_url(None) is None
