"""An answer that only repeats an expression of the question earns nothing."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest

from graft.envs.dataset.maths import MathEnv
from graft.rewards import make_reward
from graft.rewards.maths.echo import expression, expressions, repeats
from graft.rewards.maths.grading import decide, grade
from tests.rewards.attempts import attempt

ASKED = [
    "What is {}?", "Compute ${}$.", "Evaluate: {}", "Calculate {} =", "{}=?", "Find the value of\n\\[{}\\]",
    "1) {}\n2) nothing", "What is a result of {}, please?", "Let x = {}. Find x.", "Simplify {} - easy.",
]  # fmt: skip


def generated(rng: random.Random) -> tuple[list[str], str]:
    """An expression in several spellings, and its value."""
    numbers = [rng.randint(2, 99) for _ in range(rng.randint(2, 4))]
    signs = [rng.choice("+-*") for _ in numbers[1:]]
    plain = str(numbers[0]) + "".join(f"{s}{n}" for s, n in zip(signs, numbers[1:], strict=True))
    value = str(eval(plain))
    spellings = [
        plain,
        plain.replace("+", " + ").replace("-", " - ").replace("*", " * "),
        plain.replace("*", "\\cdot "),
        plain.replace("*", " \\times "),
        plain.replace("*", "×").replace("-", "−"),
        f"({plain})",
        f"\\left({plain}\\right)",
        f"${plain}$",
        f"{plain} =",
    ]
    if set(signs) == {"+"}:
        spellings.append("+".join(map(str, reversed(numbers))))
    return spellings, value


def test_no_spelling_of_a_questions_expression_is_paid():
    rng = random.Random(0)
    for _ in range(150):
        spellings, value = generated(rng)
        question = rng.choice(ASKED).format(rng.choice(spellings[:5]))
        for answer in rng.sample(spellings, 3):
            assert not grade(answer, value, question=question), (question, answer)
        assert grade(value, value, question=question)
        worked = f"{int(value) - 1} + 1"  # an expression, but not that of the question
        assert worked in question or grade(worked, value, question=question), (question, worked)


@pytest.mark.parametrize(
    ("question", "answer", "gold", "is_echo"),
    [
        ("Expand $(x+1)^2$.", "(x+1)^2", "x^2+2x+1", True),
        ("Expand $(x+1)^2$.", "(1 + x)**2", "x^2+2x+1", True),
        ("Expand $(x+1)^2$.", "x^2 + 2x + 1", "x^2+2x+1", False),
        ("Factor $x^2+2x+1$.", "x^2+2x+1", "(x+1)^2", True),
        ("Simplify 6/8.", "\\frac{6}{8}", "3/4", True),
        ("Simplify 6/8.", "3/4", "\\frac{3}{4}", False),
        ("Which is larger, 3/4 or 2/3?", "\\frac{3}{4}", "3/4", False),  # it is the gold
        ("What is 5! ?", "5!", "120", True),
        ("What is $\\sqrt{16}$?", "\\sqrt{16}", "4", True),
        ("What is 2**10?", "2^{10}", "1024", True),
        ("What is 1/2 as a decimal?", "1/2", "0.5", True),
        ("What is 12*13?", "(12)(13)", "156", True),
        ("What is 12*13?", "12*13+0", "156", True),
        ("What is 12*13?", "2*12*13/2", "156", True),
        ("What is 12*13?", "100+56", "156", False),
        ("What is 12*13?", "12*13=156", "156", False),
        ("Expand $(x+1)(x-1)$.", "(x + 1) \\cdot (x - 1)", "x^2-1", True),
        ("Expand $(x+1)(x-1)$.", "1 + (x+1)(x-1)*1 - 1 + 0", "x^2-1", False),  # rewritten: paid
        ("Expand $(x+1)(x-1)$.", "(x+1)(x-1)*1 + 0", "x^2-1", True),
        ("Solve $x^2 = x + 1/2$.", "\\frac{1+\\sqrt{3}}{2}", "1/2+\\sqrt{3}/2", False),
        ("Tom has 3 apples and buys 4.", "3+4", "7", False),  # the question has no such expression
        ("What is -7 plus 0?", "-7", "-7", False),
        ("What is 3 + 4?", "3 + 4 = 7", "7", False),
        ("", "3+4", "7", False),
    ],
)
def test_echoes_are_told_from_answers(question: str, answer: str, gold: str, is_echo: bool):
    assert repeats(answer, question, [gold], decide) is is_echo
    if is_echo:
        assert not grade(answer, gold, question=question)


def test_an_expression_is_its_numbers_letters_and_signs():
    assert expression("2x + 1") == expression("1+2*x") == {"2": 1, "x": 1, "+": 1, "1": 1}
    assert expression("7") is None and expression("-7") is None and expression("x") is None
    assert [(text, dict(found)) for text, found in expressions("Is 1+2 = 3, or 4*5?")] == [
        ("1+2", {"1": 1, "+": 1, "2": 1}),
        ("4*5", {"4": 1, "5": 1}),
    ]


def test_long_and_strange_questions_take_no_time():
    rng = random.Random(1)
    alphabet = "0123456789+-*/^!%()[]{}\\$ .?=aAIx\n"
    began = time.process_time()
    for question in ("(" * 200_000, "1+" * 100_000, "a " * 100_000, "\\" * 200_000, " " * 200_000):
        grade("1+1", "2", question=question)
    for _ in range(200):
        text = "".join(rng.choice(alphabet) for _ in range(200))
        repeats(text[:20], text, [text[20:40]], decide)
    assert time.process_time() - began < 3


def test_environment_and_reward_know_the_question():
    rows = [{"problem": "What is $3 + 4$?", "answer": "7"}]
    env = MathEnv(rows=rows)
    for answer, earns in (("3+4", 0.0), ("7", 1.0), ("2+5", 1.0)):
        env.reset(seed=0)
        assert env.step(f"\\boxed{{{answer}}}").reward == earns
    prompt = ({"role": "user", "content": "What is 3 + 4?"},)
    for answer, earns in (("3+4", 0.0), ("7", 1.0), (str(Fraction(14, 2)), 1.0)):
        answered = attempt(f"\\boxed{{{answer}}}", prompt=prompt, answer="7")
        assert make_reward("math_answer")(*answered) == earns
