"""EARL's calculator tasks: sizes, splits, rewards, the chat with its calculator, the mix."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from graft.data.errors import DataError
from graft.envs import ENVS, make
from graft.envs.splits import split_of
from graft.text.parse import first_answer, first_marked
from graft.tools.calculator import evaluate, work
from graft_envs.earl.calc import TASKS
from graft_envs.earl.count import Count
from graft_envs.earl.countdown import ExpressionCountdown
from graft_envs.earl.gsm import GsmRewrite
from tests.graft_envs.earl.earl_rows_kit import follow

DRAWN = [name for name in TASKS if name != "calc-gsm8k"]
THREE = ["calc-arithmetic", "calc-countdown", "calc-count"]
every_task = pytest.mark.parametrize("name", DRAWN)


def question(env: Any, seed: int) -> str:
    messages, _ = env.reset(seed)
    assert [message["role"] for message in messages] == ["system", "user"]
    return messages[-1]["content"]


@every_task
def test_splits_are_kept_apart_by_the_instance(name: str):
    def instances(split: str) -> set[str]:
        env = make(f"earl:{name}", split=split)
        seen: set[str] = set()
        for seed in range(60):
            env.reset(seed)
            instance = env.unwrapped.current
            match instance:
                case Count():
                    seen.add(f"{instance.digit} in {instance.number}")
                case ExpressionCountdown():
                    numbers, target = instance.answer["numbers"], instance.answer["target"]
                    seen.add(f"{sorted(numbers)} {target}")
                case _:
                    seen.add(instance.expression)
        return seen

    train, test = instances("train"), instances("test")
    assert len(train) > 45 and len(test) > 45
    assert not train & test
    if name.startswith("arithmetic"):
        assert {split_of(one) for one in train} == {"train"}
        assert {split_of(one) for one in test} == {"test"}


@pytest.mark.parametrize(
    ("name", "split", "digits", "operands", "language"),
    [
        ("arithmetic-digit", "train", 4, 4, 0.0),
        ("arithmetic-digit", "test", 4, 6, 0.0),
        ("arithmetic-lang1", "train", 4, 5, 0.5),
        ("arithmetic-lang1", "test", 4, 7, 0.5),
        ("arithmetic-lang2", "train", 4, 4, 0.05),
        ("arithmetic-lang2", "test", 4, 7, 0.7),
        ("arithmetic-lang3", "train", 3, 6, 0.05),
        ("arithmetic-lang3", "test", 4, 6, 0.7),
        ("calc-arithmetic", "train", 5, 5, 0.1),
        ("calc-arithmetic", "test", 5, 7, 0.7),
    ],
)
def test_arithmetic_has_the_originals_sizes(
    name: str, split: str, digits: int, operands: int, language: float
):
    env = make(f"earl:{name}", split=split)
    n, longest, worded = 80, 0, 0
    for seed in range(n):
        env.reset(seed)
        inner = env.unwrapped.current
        numbers = re.findall(r"\d+", inner.expression)
        assert len(numbers) == operands
        assert len(inner.expression + inner.answer) < 98
        assert Fraction(inner.answer) < 10**9
        longest = max(longest, *map(len, numbers))
        worded += inner.form != "digits"
    assert longest == digits
    assert abs(worded - n * language) <= 4 * (n * language * (1 - language)) ** 0.5


@pytest.mark.parametrize(
    ("name", "digits", "operands"),
    [("countdown-0", 2, 4), ("countdown-1", 4, 4), ("countdown-2", 3, 5), ("calc-countdown", 4, 4)],
)
def test_countdown_has_the_originals_sizes(name: str, digits: int, operands: int):
    env = make(f"earl:{name}")
    targets: list[float] = []
    lengths: Counter[int] = Counter()
    for seed in range(150):
        text = question(env, seed)
        inner = env.unwrapped.current
        numbers = inner.answer["numbers"]
        assert f"the numbers {numbers}" in text
        assert sorted(work(inner.solution).numbers) == sorted(numbers)
        assert evaluate(inner.solution) == Fraction(str(inner.answer["target"]))
        assert len(numbers) == operands
        lengths.update(len(str(number)) for number in numbers)
        targets.append(inner.answer["target"])
    assert max(lengths) == digits
    assert min(lengths.values()) > 150 * operands / digits / 3  # lengths are uniform, or nearly
    assert any(target < 0 for target in targets)
    has_decimals = any(not isinstance(target, int) for target in targets)
    assert has_decimals == (name == "calc-countdown")


def test_the_numbers_are_not_shown_in_the_order_of_the_solution():
    env = ExpressionCountdown()
    shuffled = 0
    for seed in range(100):
        env.reset(seed)
        shuffled += [int(n) for n in work(env.solution).numbers] != env.answer["numbers"]
    assert shuffled > 80  # 23 in 24


def test_count_draws_lengths_and_digits_evenly_and_words_nine_times_in_ten():
    env = Count()
    lengths: Counter[int] = Counter()
    digits: Counter[int] = Counter()
    worded = 0
    for seed in range(2000):
        text, _ = env.reset(seed)
        lengths[len(env.number)] += 1
        digits[env.digit] += 1
        worded += env.form == "numbers"
        assert (f"the number {env.number}," in str(text)) == (env.form == "digits")
        assert env.answer == str(env.number.count(str(env.digit)))
        assert not env.number.startswith("0")
    assert set(lengths) == set(range(1, 21))
    assert all(61 <= count <= 139 for count in lengths.values())  # 100, four deviations of 9.7
    assert all(146 <= count <= 254 for count in digits.values())  # 200, four of 13.4
    assert 1746 <= worded <= 1854  # 1800, four of 13.4


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("#### {}", 1.0),
        ("####{}.", 1.0),
        ("no: #### 99\n#### {}", 1.0),
        ("#### {}\n#### 99", 0.0),
        ("{}", 0.0),
        ("#### ", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_marked_number_counts_in_count(text: str, reward: float):
    env = make("earl:calc-count")
    env.reset(4)
    turn = env.step(text.replace("{}", env.unwrapped.answer))
    assert (turn.reward, turn.terminated) == (reward, True)


def posed_countdown(form: str) -> ExpressionCountdown:
    env = ExpressionCountdown(form=form, whole=False)
    env.reset(0)
    env.solution, env.answer = "(3 + 4) / 8", {"numbers": [8, 3, 4], "target": 0.875}
    return env


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("#### (3 + 4) / 8", 1.0),
        ("####\n (4+3)/8 \nso", 1.0),
        ("#### (4 + 3) / 8\n#### 1", 1.0),  # the first line counts
        ("#### 1\n#### (4 + 3) / 8", 0.0),
        ("#### (4 + 3) / 8 = 0.875", 0.0),
        ("#### 3 + 4 / 8", 0.0),
        ("#### 0.875", 0.0),
        ("#### (3 + 4) / 8 + 3 - 3", 0.0),
        ("#### 3.4 / 8", 0.0),
        ("#### 9**9**9", 0.0),
        ("#### (3 + 4) // 8", 0.0),
        ("#### ", 0.0),
        ("(3 + 4) / 8", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_takes_the_first_marked_line(text: str, reward: float):
    turn = posed_countdown("marked").step(text)
    assert (turn.reward, turn.terminated) == (reward, True)
    assert turn.info == {"is_right": reward == 1.0, "has_form": "####" in text}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>x</think><answer>(3 + 4) / 8</answer>", 1.0),
        ("<answer>(3 + 4) / 8</answer> <answer>1</answer>", 1.0),
        ("<answer>1</answer> <answer>(3 + 4) / 8</answer>", 0.0),
        ("<answer>(3 + 4) / 8", 0.0),
        ("</answer>(3 + 4) / 8<answer>", 0.0),
        ("#### (3 + 4) / 8", 0.0),
    ],
)
def test_stand_alone_countdown_takes_the_first_answer_tag(text: str, reward: float):
    assert posed_countdown("tag").step(text).reward == reward


def test_first_answers_are_found_where_they_are():
    assert first_answer("<answer>1</answer><answer>2</answer>") == "1"
    assert first_answer("</answer><answer>") is None
    assert first_answer("x") is None
    assert first_marked("a #### b #### c\nd") == "b #### c"
    assert first_marked("####") == ""
    assert first_marked("x") is None


def test_the_calculator_answers_in_the_originals_tags():
    env = make("earl:arithmetic-digit")
    system = env.reset(0)[0][0]["content"]
    assert "<calculator> (12 + 6) / 3 </calculator> <result> 6 </result>" in system
    assert env.stop == ("</calculator>",)
    assert env.observe_as == "inline"
    turn = env.step("Let me see. <calculator> (12 + 6) / 3 </calculator>")
    assert turn.observation == " <result> 6 </result>"
    assert turn.info == {"tool": "calculator", "tool_ok": True, "tool_uses": 1}
    assert env.step("<calculator> 1 / 3 </calculator>").observation == " <result> 0.333 </result>"
    error = env.step("<calculator> 1 / 0 </calculator>")
    assert error.observation == " <result> Error: division by zero </result>"


def test_the_whole_response_is_graded_results_included():
    env = make("earl:arithmetic-digit")
    env.reset(0)
    env.step(f"<calculator> {env.unwrapped.current.expression} </calculator>")
    twin = env.fork()
    assert env.step("").reward == 1.0  # the result is the last number of the response
    assert twin.step("Or 7?").reward == 0.0
    env = make("earl:calc-countdown")
    env.reset(0)
    solution = env.unwrapped.current.solution
    env.step(f"#### {solution}\n<calculator> 1 + 1 </calculator>")
    assert env.step("\n#### 1 + 1").reward == 1.0  # the first line of the response


def test_calls_run_out_but_an_answer_is_still_taken():
    env = make("earl:arithmetic-digit", max_uses=2)
    env.reset(0)
    turns = [env.step("<calculator> 1 + 1 </calculator>") for _ in range(3)]
    assert [turn.info["tool_ok"] for turn in turns] == [True, True, False]
    assert "No calls are left" in turns[2].observation
    assert env.step(f"#### {env.unwrapped.answer}").reward == 1.0


def test_a_policy_that_only_calls_is_cut_off_at_the_turns_of_the_table():
    env = make("earl:calc-count")
    env.reset(0)
    turns = 1
    while not env.step("<calculator> 1 + 1 </calculator>").truncated:
        turns += 1
    assert turns == env.max_turns == ENVS["earl:calc-count"].turns == 34


def test_parameters_can_be_changed_and_mistakes_are_named():
    calc = partial(make, "earl:calc")
    env = make("earl:arithmetic-digit", digits=1, operations=1)
    env.reset(0)
    assert len(env.unwrapped.current.expression) == 5
    with pytest.raises(TypeError, match="no_such"):
        make("earl:arithmetic-digit", no_such=1)
    for build, options, said in (
        (calc, {"tasks": ["calc-cuont"]}, "'calc-cuont'.*'calc-count'"),
        (calc, {"tasks": THREE, "digits": 3}, "digits"),
        (calc, {"tasks": THREE, "data": "x.jsonl"}, "no file"),
        (calc, {"tasks": []}, "at least one"),
        (ExpressionCountdown, {"form": "box"}, "form"),
        (ExpressionCountdown, {"digits": 0}, "digits=0"),
        (Count, {"digits": (1, 40)}, "digits"),
        (Count, {"language": -1}, "language=-1"),
    ):
        with pytest.raises(ValueError, match=said):
            build(**options)


def test_the_mix_follows_the_rows_of_the_original():
    for split, weights in (("train", (1000, 20000, 1000)), ("test", (2000, 2000, 2000))):
        env = make("earl:calc", tasks=THREE, split=split)
        n = 200
        seen = Counter((env.reset(seed), env.task().meta["task"])[1] for seed in range(n))
        for name, weight in zip(THREE, weights, strict=True):
            share = weight / sum(weights)
            assert abs(seen[name] - n * share) <= 4 * (n * share * (1 - share)) ** 0.5
        assert env.task().data_source == "calc_bench"


def test_the_task_carries_the_chat_and_the_set():
    env = make("earl:arithmetic-lang2", split="test")
    messages, info = env.reset(5)
    task = env.task()
    assert task.prompt == tuple(messages)
    assert task.id == "earl:arithmetic-lang2:test:5"
    assert task.data_source == "basic_calculator_tutorial"
    assert task.meta["task"] == "arithmetic-lang2"
    assert task.answer == info["answer"]


ROWS: list[dict[str, Any]] = [
    {
        "question_rewrite": f"Ann has {n} clips and buys {n}. How many has she?",
        "answer_rewrite": f"{n} + {n} = {2 * n}\n#### {2 * n:,}",
        "question": "Ann has 7 clips and buys 7. How many has she?",
        "answer": "7 + 7 = 14\n#### 14",
        "extra_info": {"rewrite_tag": "yes", "index": n},
    }
    for n in range(10_000, 10_060)
]


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    failed = {**ROWS[0], "question_rewrite": "?", "extra_info": {"rewrite_tag": "no", "index": 0}}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, failed]))
    return file


def test_rewritten_questions_come_from_a_file(rows_file: Path, tmp_path: Path):
    table = pyarrow.Table.from_pylist(
        [json.loads(line) for line in rows_file.read_text().splitlines()]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    env = make("earl:calc-gsm8k", data=str(rows_file))
    same = make("earl:calc-gsm8k", data=str(tmp_path / "rows.parquet"))
    for seed in range(40):
        text = question(env, seed)
        assert same.reset(seed) == env.reset(seed)
        n = int(re.findall(r"\d+", text)[0])
        assert env.unwrapped.answer == str(2 * n)
        wrong = env.fork()
        assert env.step(f"#### {2 * n:,}").reward == 1.0
        assert wrong.step(f"#### {2 * n + 1}").reward == 0.0
        env.reset(seed)
        assert follow(env, env.demonstrate(random.Random(0)))[-1].reward == 1.0


def test_rewritten_questions_are_graded_by_their_own_answer_and_only_tagged_rows_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """EARL's layout: everything in `extra_info`; `answer` is that of the question before."""
    columns = {name: value for name, value in ROWS[0].items() if name != "extra_info"}
    tags = [{"rewrite_tag": "yes"}, {"rewrite_tag": "no"}, {}, {"rewrite_tag": None}]
    rows = [{"prompt": "?", "extra_info": {**columns, **tag}} for tag in tags]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    (problem,) = {*GsmRewrite(data=str(file)).problems}
    assert (problem.question, problem.answer) == (columns["question_rewrite"], "20000")
    assert "3 of 4 rows are skipped" in caplog.text
    del rows[0]["extra_info"]["answer_rewrite"]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        DataError, match="row 1: needs the texts question_rewrite and answer_rewrite"
    ):
        GsmRewrite(data=str(file))


def test_a_file_is_split_by_its_questions_and_a_folder_by_its_files(rows_file: Path):
    train, test = (GsmRewrite(data=str(rows_file), split=split) for split in ("train", "test"))
    assert len(train.problems) + len(test.problems) == 60
    assert not set(train.problems) & set(test.problems)
    folder = rows_file.parent / "set"
    folder.mkdir()
    lines = rows_file.read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:50]))
    (folder / "test.jsonl").write_text("".join(lines[50:]))
    assert len(GsmRewrite(data=str(folder)).problems) == 50
    assert len(GsmRewrite(data=str(folder), split="test").problems) == 10
    (folder / "train.jsonl").unlink()
    with pytest.raises(DataError, match="no split 'train'; it has test"):
        GsmRewrite(data=str(folder))


def test_plain_columns_are_read_too_and_forks_share_the_rows(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    assert split_of("1 + 1?") == "train"
    env = GsmRewrite(data=str(file))
    assert str(env.reset(0)[0]).startswith("1 + 1?\n")
    assert env.fork().problems is env.problems is GsmRewrite(data=str(file)).problems
    mixed = make("earl:calc", data=str(file))
    mixed.reset(0)
    parts = (mixed.unwrapped.parts, mixed.fork().unwrapped.parts)
    assert parts[0]["calc-gsm8k"].problems is parts[1]["calc-gsm8k"].problems
    assert parts[0]["calc-gsm8k"] is not parts[1]["calc-gsm8k"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"}', "row 1: needs the texts"),
        ('{"question": "a", "answer": "42"}', "'#### ' and a number, not '42'"),
        ('{"question": "a", "answer": "#### many"}', "a number"),
        ("[1]", "row 1 is list"),
        ("", "no problem for split='train'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, line: str, message: str):
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    with pytest.raises(DataError, match=re.escape(message)):
        make("earl:calc-gsm8k", data=str(file))


def test_without_the_file_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("graft_envs.earl.gsm.locate", lambda hub_id: None)
    for env_id in ("earl:calc-gsm8k", "earl:calc"):
        with pytest.raises(DataError, match=r"gsm_8k_rewrite.*data="):
            make(env_id)
        assert ENVS[env_id].needs == ("data:gsm_8k_rewrite",)
    with pytest.raises(DataError, match=r"no file or folder .*nowhere\.jsonl"):
        make("earl:calc-gsm8k", data="nowhere.jsonl")


def test_a_remainder_takes_two_calls():
    env = make("earl:calc-modulo")
    env.reset(0)
    inner = env.unwrapped.current
    inner.number, inner.modulus, inner.answer = 1234, 56, "2"
    assert inner.calculations == ["1234 / 56", "1234 - 56 * 22"]
    assert inner.expression == "1234 % 56"
    limits = [(10**7, 10**5), (10**9, 10**7)]
    for split, (number, modulus) in zip(("train", "test"), limits, strict=True):
        env = make("earl:calc-modulo", split=split)
        drawn = [env.unwrapped.current.describe() for seed in range(50) if env.reset(seed)]
        assert all(1 <= one["modulus"] <= one["number"] <= number for one in drawn)
        assert modulus / 10 < max(one["modulus"] for one in drawn) <= modulus


@pytest.mark.parametrize(("split", "scale", "box"), [("train", 6, (2, 3)), ("test", 4, (2, 2))])
def test_a_sudoku_has_one_solution_with_every_digit_in_every_box(
    split: str, scale: int, box: tuple[int, int]
):
    env = make("earl:calc-sudoku", split=split)
    for seed in range(5):
        text = question(env, seed)
        inner = env.unwrapped.current
        solution = ast.literal_eval(inner.answer)
        assert f"box of {box[0]} x {box[1]} cells" in text and str(inner.board) in text
        digits = set(range(1, scale + 1))
        boxes = [
            {solution[r + i][c + j] for i in range(box[0]) for j in range(box[1])}
            for r in range(0, scale, box[0])
            for c in range(0, scale, box[1])
        ]
        rows = [set(row) for row in solution]
        columns = [set(column) for column in zip(*solution, strict=True)]
        assert all(unit == digits for unit in (*rows, *columns, *boxes))
        for shown, right in zip(inner.board, solution, strict=True):
            assert all(a in (None, b) for a, b in zip(shown, right, strict=True))
        assert env.fork().step(f"#### {inner.board}").reward == 0.0
    shares = [
        sum(cell is None for row in env.unwrapped.current.board for cell in row) / scale**2
        for seed in range(20)
        if env.reset(seed)
    ]
    assert max(shares) <= 0.7


def test_countdown_counts_invalid_numbers_and_planning_phrases():
    env = make("earl:countdown-1")
    env.reset(0)
    a, b, *_ = env.given_numbers
    env.step(f"<calculator> {a} + {b} </calculator>")
    turn = env.step("That is far from it. <calculator> 99999 + 1 </calculator>")
    assert (turn.info["tools/invalid_numbers"], turn.info["tools/planning_phrases"]) == (1, 1)
    end = env.step("A different approach: <answer> 1 </answer>")
    assert (end.info["tools/invalid_numbers"], end.info["tools/planning_phrases"]) == (1, 2)
    other = make("earl:arithmetic-digit")
    other.reset(0)
    assert not other.given_numbers and "tools/invalid_numbers" not in other.step("1").info
