"""reasoning-gym: every dataset, its own scorer, and none of its surprises."""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import ENVS, make
from graft.envs.splits import split_of
from graft.rewards.worker_pool import NoWorkers, WorkerError
from graft.types import Author
from graft_envs import reasoning as rg

pytest.importorskip("reasoning_gym")

MIXTURE = {"datasets": ["gcd", {"name": "lcm", "weight": 2.0}]}
WITHOUT_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
SLOW = {"futoshiki", "knight_swap", "zebra_puzzles"}  # a second or so per item


def build(name: str, **settings: Any) -> Any:
    return make(f"rg:{name}", **(MIXTURE if name == "composite" else {}), **settings)


@pytest.mark.peer
def test_the_table_is_the_packages_own():
    from reasoning_gym.factory import DATASETS

    assert tuple(sorted(DATASETS)) == rg.NAMES
    assert {env_id for env_id in ENVS if env_id.startswith("rg:")} == {f"rg:{n}" for n in rg.NAMES}


@pytest.mark.peer
def test_no_other_scorer_runs_text_as_a_program():
    """`warm` disarms the ones that are known; a new version may bring another."""
    import reasoning_gym

    root = Path(reasoning_gym.__file__).parent
    armed = set()
    for file in root.rglob("*.py"):
        _, found, scorer = file.read_text("utf-8").partition("def score_answer")
        if found and any(call in scorer for call in ("eval(answer", "parse_expr(answer", "exec(")):
            armed.add(file.stem)
    assert armed == {
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens"),
        *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix"),
        "string_insertion",
    }


@pytest.mark.parametrize("name", sorted(set(rg.NAMES) - SLOW))
def test_gold_is_paid_in_full_nothing_is_not_and_nonsense_gets_a_reward(name: str):
    env = build(name)
    prompt, info = env.reset(3)
    assert prompt.endswith("Give the final answer in \\boxed{}.")
    json.dumps([info, env.get_state(), env.task().to_json()])
    if name in WITHOUT_GOLD:
        with pytest.raises(NotImplementedError):
            env.demonstrate(random.Random(0))
    else:
        ((author, text),) = env.demonstrate(random.Random(0))
        assert author is Author.POLICY
        assert env.step(text).reward == 1.0
    for nothing in ("no box", "\\boxed{}", "\\boxed{ \n }", "\\boxed{1"):
        env.reset(3)
        turn = env.step(nothing)
        assert (turn.reward, turn.terminated, turn.info) == (0.0, True, {"has_answer": False})
    for text in ("zzz", "-1", "[[1, 2], [3]]", '{"a": [1]}', "True", "1 × x", "\x00é\n"):
        env.reset(3)
        assert 0.0 <= env.step(f"\\boxed{{{text}}}").reward <= 1.0  # malformed


def test_any_word_for_true_is_no_longer_right_in_game_of_life_halting():
    env = build("game_of_life_halting")
    for seed in range(4):
        _, info = env.reset(seed)
        wrong = {"True": "False", "False": "True"}[info["answer"]]
        assert env.step(f"\\boxed{{{wrong}}}").reward == 0.0
        env.reset(seed)
        assert env.step("\\boxed{banana}").reward == 0.0
        env.reset(seed)
        assert env.step(f"\\boxed{{ {info['answer'].lower()} }}").reward == 1.0


def test_a_score_between_0_and_1_is_passed_on():
    env = build("rectangle_count")
    gold = int(env.reset(0)[1]["answer"])
    near = env.step(f"\\boxed{{{gold + 1}}}").reward
    env.reset(0)
    assert 0.0 < env.step(f"\\boxed{{{gold + 2}}}").reward < near < 1.0


def test_a_number_is_not_its_own_prime_factors():
    env = build("prime_factorization")
    seed = next(seed for seed in range(20) if " × " in env.reset(seed)[1]["answer"])
    _, info = env.reset(seed)
    factors = info["answer"].split(" × ")
    for answer, reward in (
        (str(math.prod(map(int, factors))), 0.0),
        ("*".join(reversed(factors)), 1.0),
        (" \\times ".join(factors), 1.0),
    ):
        env.reset(seed)
        assert env.step(f"\\boxed{{{answer}}}").reward == reward


@pytest.mark.parametrize("name", ["leg_counting", "syllogism", "number_sorting"])
def test_blanks_and_a_text_command_around_a_right_answer_cost_nothing(name: str):
    env = build(name)
    for frame in ("{}", " {}\n", "\\text{{{}}}", " \\text{{ {} }} "):
        _, info = env.reset(2)
        assert env.step(f"\\boxed{{{frame.format(info['answer'])}}}").reward == 1.0
        env.reset(2)
        assert env.step(f"\\boxed{{{frame.format('zzz')}}}").reward < 0.1


def test_a_machine_without_workers_is_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    env = build("countdown")
    env.reset(0)

    def refuse(*args: object, **kwargs: object) -> None:
        raise NoWorkers("no processes here")

    monkeypatch.setattr(rg.WORKERS, "call", refuse)
    with pytest.raises(NoWorkers):
        env.step("\\boxed{1+1}")


@pytest.mark.parametrize("name", ["gcd", "word_sorting", "codeio"])
def test_a_very_large_size_costs_nothing_and_begins_with_the_same_items(name: str):
    small, large = build(name), build(name, size=10**9)
    assert rg.item(small.settings, 7) == rg.item(large.settings, 7)
    assert len({large.reset(seed)[0] for seed in range(5)}) == 5
    assert large.idx > 500


@pytest.mark.parametrize("name", ["countdown", "spiral_matrix", "simple_integration"])
def test_an_answer_is_not_run_as_a_program(name: str, tmp_path: Path):
    env = build(name)
    mark = tmp_path / "was_here"
    for program in (
        f"__import__('pathlib').Path('{mark}').touch()",
        f"open('{mark}', 'w')",
        f"exec(chr(49)) or open('{mark}', 'w')",
        f"[open('{mark}', 'w') for _ in [1]]",
    ):
        env.reset(0)
        assert env.step(f"\\boxed{{{program}}}").reward < 0.1
        assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("(3 + 4) * 7 - 1.5", True),
        ("x**2/2 + C + sin(x)*exp(2*x)", True),
        ("open(x)", False),
        ("exec(1)", False),
        ("x.func", False),
        ("x . func", False),
        ("lambda x: x", False),
        ("__class__", False),
        ("x[0]", False),
        ("'x'", False),
    ],
)
def test_formulas_are_arithmetic_with_known_names(text: str, is_fine: bool):
    if is_fine:
        rg.check_formula(text)
    else:
        with pytest.raises(ValueError):
            rg.check_formula(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        ("countdown", "9**9**9"),
        ("rush_hour", "A+9999999999"),
        ("rubiks_cube", "R9999999999"),
        ("polynomial_multiplication", "(1+x)**99999999"),
    ],
)
def test_a_scorer_that_does_not_end_is_stopped(
    name: str, bomb: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rg, "SCORE_LIMIT", 0.3)
    env = build(name)
    env.reset(0)
    assert env.step(f"\\boxed{{{bomb}}}").reward <= 0.01


def test_a_megabyte_is_no_answer():
    env = build("letter_counting")
    env.reset(0)
    assert env.step("\\boxed{" + "1" * 1_000_000 + "}").reward == 0.0
    env.reset(0)
    assert env.step("{" * 1_000_000).reward == 0.0


def test_items_are_shared_by_envs_with_equal_settings(monkeypatch: pytest.MonkeyPatch):
    env = build("leg_counting")
    prompt, _ = env.reset(11)

    def refuse(*args: object, **kwargs: object) -> None:
        raise WorkerError("called again")

    monkeypatch.setattr(rg.WORKERS, "call", refuse)
    assert build("leg_counting").reset(11)[0] == prompt
    assert env.fork().reset(11)[0] == prompt
    with pytest.raises(ValueError, match="called again"):
        build("leg_counting", dataset_seed=43).reset(11)


def test_difficulty_size_and_seed_are_settings():
    hard = build("chain_sum", min_terms=7, max_terms=7)
    assert hard.reset(0)[0].count(" + ") + hard.prompt.count(" - ") == 6
    assert {build("gcd", size=3).reset(seed)[0] for seed in range(30)} <= {
        rg.item(build("gcd", size=3).settings, idx).question
        + "\n\nGive the final answer in \\boxed{}."
        for idx in range(3)
    }
    assert build("gcd").reset(0)[0] != build("gcd", dataset_seed=7).reset(0)[0]
    with pytest.raises(ValueError, match=r"rg:gcd .*no_such_setting"):
        build("gcd", no_such_setting=1)
    with pytest.raises(ValueError, match=r"rg:composite .*gives no item: .* name them: datasets="):
        make("rg:composite", datasets=[])
    with pytest.raises(ValueError, match="size=0"):
        build("gcd", size=0)


def test_the_mixture_runs_as_it_is_listed():
    env = make("rg:composite")
    questions = [env.reset(seed)[0] for seed in range(12)]
    assert env.step(f"\\boxed{{{env.answer}}}").reward == 1.0
    kinds = {rg.item(env.settings, idx).question.split()[0] for idx in range(30)}
    assert len(set(questions)) > 6 and len(kinds) > 2


def test_splits_are_disjoint_by_the_text_of_the_question():
    for split in ("train", "test"):
        env = build("gcd", split=split)
        for seed in range(20):
            question = env.reset(seed)[0].removesuffix("\n\nGive the final answer in \\boxed{}.")
            assert split_of(question) == split


def test_the_global_generators_are_left_alone():
    before = random.getstate()
    for name in ("codeio", "pool_matrix", "bf"):
        env = build(name)
        env.reset(1)
        env.step("\\boxed{1}")
    assert random.getstate() == before


ELSEWHERE = """
import json, sys
from graft.envs import make
print(json.dumps([make(f"rg:{name}").reset(2) for name in sys.argv[1:]]))
"""


def test_another_process_with_other_hashes_poses_the_same(capfd: pytest.CaptureFixture[str]):
    names = ["isomorphic_strings", "ransom_note", "word_ladder", "codeio", "bf"]
    command = [sys.executable, "-c", ELSEWHERE, *names]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    here = [list(build(name).reset(2)) for name in names]
    assert json.loads(done.stdout) == here
    assert capfd.readouterr().out == ""  # one of them prints dots while it generates


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rg, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "graft-rl\[envs\]"'):
        make("rg:gcd")


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["gcd", "countdown", "spiral_matrix", "boxnet", "jugs", "maze"]),
    text=st.text(max_size=60) | st.text(alphabet="\\boxed{}[]()0123456789+-*/\"':, ", max_size=60),
)
def test_no_text_makes_it_raise(name: str, text: str):
    env = build(name)
    for action in (text, f"\\boxed{{{text}}}"):
        env.reset(1)
        assert 0.0 <= env.step(action).reward <= 1.0


@pytest.mark.parametrize(
    ("name", "cheat"),
    [
        ("puzzle24", "1*2*3*4"),
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "1e999"),
        ("propositional_logic", "x"),
        ("color_cube_rotation", "red-ish"),
        ("rush_hour", "?"),
        ("graph_color", "{}"),
        ("sentence_reordering", "word"),
    ],
)
def test_what_the_library_pays_for_nothing_is_not_paid(name: str, cheat: str):
    env = build(name)
    for seed in range(6):
        env.reset(seed)
        assert env.step(f"\\boxed{{{cheat}}}").reward == 0.0


def test_countdown_counts_numbers_and_no_names():
    """x-x and x/x write any number, next to the given ones."""
    entry = {
        "answer": "",
        "metadata": {"source_dataset": "countdown", "numbers": [3, 7], "target": 2},
    }
    library = build("countdown")  # for its settings
    score = partial(rg.score, library.settings, base64.b64encode(pickle.dumps(entry)).decode())
    assert score(["(3 + 7)*(x-x) + x/x + x/x"]) == 0.0
    assert score(["7 - 3 - 2"]) == score(["2"]) == score(["7/3.5"]) == 0.0
    entry["metadata"]["target"] = 4
    packed = base64.b64encode(pickle.dumps(entry)).decode()
    assert rg.score(library.settings, packed, ["7 - 3"]) == 1.0


def test_a_probability_may_be_rounded_but_not_to_nothing():
    env = build("coin_flip")
    for seed in range(12):
        gold = float(env.reset(seed)[1]["answer"])
        assert env.step(f"\\boxed{{{gold:.6g}}}").reward == 1.0
        env.reset(seed)
        assert env.step(f"\\boxed{{{gold * 1.01:.6g}}}").reward == 0.0


def test_a_salt_gives_other_items_and_the_same_ones_each_time():
    plain, salted, again, other = (build("gcd") for _ in range(4))
    salted.task_salt = again.task_salt = "one"
    other.task_salt = "two"
    prompts = [[env.reset(seed)[0] for seed in range(5)] for env in (plain, salted, again, other)]
    assert prompts[1] == prompts[2]
    published = {rg.item(plain.settings, idx).question for idx in range(plain.size)}
    for asked in (prompts[1], prompts[3]):
        assert not published & {text.partition("\n\nGive the final")[0] for text in asked}
    assert prompts[1] != prompts[3] and salted.fork().settings == salted.settings
