r"""Rewards against the rules of the systems that they reproduce, on thousands of made texts.

The rules are written anew from the specifications, in the shortest form. A difference is allowed only in a
class that is named here, and there the test says which side pays what.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from graft.config import load_config
from graft.envs.dataset.maths import MathEnv
from graft.envs.dataset.questions import QuestionEnv
from graft.rewards import make_reward
from graft.rewards.deep_research import score_deep_research
from graft.rewards.numbers import parse_number
from graft.rewards.sources import grade_by_source
from graft_envs.code.programs import ProgramEnv
from tests.rewards.attempts import attempt

SIGNS = "+-*/"


def expression(rng: random.Random, numbers: Sequence[int]) -> str:
    """The numbers in some order with signs between them, often in parentheses."""
    parts = [str(number) for number in rng.sample(numbers, len(numbers))]
    while len(parts) > 1:
        at = rng.randrange(len(parts) - 1)
        joined = f"{parts[at]}{rng.choice(('', ' '))}{rng.choice(SIGNS)} {parts[at + 1]}"
        parts[at : at + 2] = [f"({joined})" if rng.random() < 0.6 else joined]
    return parts[0]


def value_of(text: str) -> Any:
    try:
        return eval(text, {"__builtins__": {}})  # made here, of digits and signs
    except Exception:  # every one is 0.01 to RL-GRPO
        return None


def countdown_case(rng: random.Random) -> tuple[list[int], int, str]:
    """Numbers, a target and what a policy may write as an expression."""
    numbers = [rng.randint(1, 12) for _ in range(rng.randint(2, 4))]
    written = expression(rng, numbers)
    value = value_of(written)
    target = int(value) if value is not None and value == int(value) else rng.randint(1, 40)
    target += rng.choice((0, 0, 0, 1))
    change = rng.choice(("", "", "", "", "less", "other", "text", "equals", "minus", "odd"))
    if change == "less":
        written = expression(rng, numbers[1:])
    elif change == "other":
        written = expression(rng, [*numbers[1:], rng.randint(1, 12)])
    elif change == "text":
        written = rng.choice(
            ("", " ", "no idea", f"{written} is right", f"x = {written}", "1/0", "(", "=")
        )
    elif change == "equals":
        written += rng.choice((f" = {target}", "=", " = 0", f"\n= {target}"))
    elif change == "minus":
        written = f"-{written}" if rng.random() < 0.5 else f"-({written})"
    elif change == "odd":
        power = " ** ".join(map(str, numbers[:2]))  # a tower of three would take all day
        odd = (power, written.replace("/", "//"), f"{written}.0", f"0{written}")
        written = rng.choice((*odd, written.replace("+", "%"), written.replace("+", ",")))
    return numbers, target, written


def wrap(rng: random.Random, written: str, other: str) -> str:
    forms = (
        "<answer>{0}</answer>", "<answer> {0} </answer>", "</think>\n<answer>\n{0}\n</answer>",
        "<answer>{1}</answer> no: <answer>{0}</answer>", "<answer>{0}</answer> or <answer>{1}",
        "<answer>{1} <answer>{0}</answer>", "<answer>{0}</answer></answer>", "<answer>{0}",
        "{0}</answer>", "{0}", "\\boxed{{{0}}}", "#### {0}", "<answer>\\boxed{{{0}}}</answer>",
        "<Answer>{0}</Answer>", "<answer></answer> {0}", "so\n{0}\n",
    )  # fmt: skip
    return rng.choice(forms).format(written, other)


def rl_grpo(text: str, numbers: Sequence[int], target: int) -> tuple[float, str]:
    """RL-GRPO's reward and the expression that it read: a last <answer>, as many numbers as given, each of
    them a given one."""
    pairs = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    left = pairs[-1].strip().split("=")[0] if pairs else ""
    used = [int(digits) for digits in re.findall(r"\d+", left)]
    if len(used) != len(numbers) or not set(used) <= set(numbers):
        return 0.01, left
    value = value_of(left)
    return 0.01 if value is None else 1.01 if value == target else 0.02, left


def repaired(left: str, numbers: Sequence[int]) -> str:
    """Why graft grades an expression otherwise than RL-GRPO: a fault of that rule, or ""."""
    if re.search(r"[^0-9+\-*/() ]|\*\*|//", left):
        return "more than + - * /"  # powers, remainders, decimals, tuples: eval takes them
    if Counter(map(int, re.findall(r"\d+", left))) != Counter(numbers):
        return "a number twice"  # its prompt says once
    return ""


def test_the_recipe_of_rl_grpo_pays_what_rl_grpo_pays():
    pay = make_reward(load_config("rl-grpo/countdown").task.reward)
    rng, paid, excused = random.Random(0), Counter(), Counter()
    for _ in range(1500):
        numbers, target, written = countdown_case(rng)
        text = wrap(rng, written, expression(rng, numbers))
        expected, left = rl_grpo(text, numbers, target)
        reward = pay(*attempt(text, answer={"numbers": numbers, "target": target}))
        if (why := repaired(left, numbers)) and reward != expected:
            assert reward == 0.01 < expected, text
            excused[why] += 1
        else:
            assert reward == expected, (text, numbers, target)
            paid[expected] += 1
    assert min(paid[0.01], paid[0.02], paid[1.01]) > 100, paid
    assert set(excused) == {"more than + - * /", "a number twice"} and excused.total() < 120


def earl_number(text: str, gold: str) -> float:
    """EARL's numeric tasks: the last number right after ####, without commas, as a float."""
    marked = re.findall(r"####\s?(-?[0-9.,]+)", text)
    try:
        return float(bool(marked) and float(marked[-1].replace(",", "")) == float(gold))
    except ValueError:
        return 0.0


def earl_expression(found: str | None, numbers: Sequence[int], target: float) -> float:
    """EARL's countdown: the given integers, nothing but digits, + - * / ( ) . and blanks, near the target."""
    found = found and found.strip()
    whole = sorted(map(int, re.findall(r"\d+", found or "")))
    if found is None or whole != sorted(numbers) or re.search(r"[^0-9+\-*/(). ]", found):
        return 0.0
    value = value_of(found)
    return float(value is not None and abs(value - target) < 1e-5)


def test_rows_of_earl_earn_what_earl_pays():
    rng, right = random.Random(1), Counter()
    marks = (
        *("#### {0}", "####{0}", "#### {1}\n#### {0}", "#### {0}\n{1}", "{0}", "#### about {0}"),
        *("##### {0}", "#### ${0}", "####\n{0}", "####  {0}", "#### {0}, {1}", "#### {0}."),
        "so {0} #### {0} #### x",
    )
    for _ in range(1000):
        gold = rng.choice((str(rng.randint(-9999, 999_999)), f"{rng.uniform(-99, 9999):.3f}"))
        same = (gold, gold, f"{float(gold):,}", f"{float(gold):.3f}")
        forms = (*same, f"{gold}0", f"-{gold}", gold[:-1])
        text = rng.choice(marks).format(rng.choice(forms), rng.randint(0, 99))
        expected = earl_number(text, gold)
        assert grade_by_source("calc_bench", text, gold, {"task": "arithmetic"}) == expected, text
        right["number", expected] += 1
    for _ in range(600):
        gold = rng.randint(-999, 9999)
        others = [rng.randint(0, 99) for _ in range(rng.randint(0, 3))]
        last = rng.choice((gold, gold, gold + 1, f"{gold}.0", f"{gold:,}"))
        text = rng.choice(("#### {0}", "so {0}.", "{0}", "x")).format(last)
        text = " ".join([*(f"{other} +" for other in others), text])
        found = [word.strip(".,#") for word in text.split() if re.search("[0-9]", word)]
        expected = float(bool(found) and float(found[-1].replace(",", "")) == gold)
        assert grade_by_source("basic_calculator_tutorial", text, str(gold), {}) == expected, text
        right["last", expected] += 1
    for _ in range(1000):
        numbers, target, written = countdown_case(rng)
        text = rng.choice(("{0}", "#### {0}", "####\n{0}\nso", "#### {0}\n#### {1}")).format(
            written, expression(rng, numbers)
        )
        line = re.search(r"####\s*(.*)", text)
        tag = wrap(rng, written, expression(rng, numbers))
        answer = re.search("<answer>(.*?)</answer>", "<think>" + tag, re.DOTALL)
        meta = {"task": "countdown", "expr": " + ".join(map(str, numbers))}
        row = {"nums": numbers, "target": str(target)}
        for found, grade in (
            (line and line[1], grade_by_source("calc_bench", text, str(target), meta)),
            (answer and answer[1], grade_by_source("countdown", tag, "", row)),
        ):
            if found and re.search(r"\.|\*\*|//", found):  # powers and decimals, which eval takes
                assert grade == 0.0
                continue
            expected = earl_expression(found, numbers, target)
            assert grade == expected, (found, numbers, target)
            right["expression", expected] += 1
    assert all(count > 70 for count in right.values()) and len(right) == 6, right


def squad(text: str) -> str:
    """Lower case, no punctuation, no articles, single blanks."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def deep_research(text: str, golds: Sequence[str]) -> float:
    """ARPO's reward: the format, then the F1 of the box, then a tenth for both tools."""
    thinks, closed = text.count("<think>"), text.count("</think>")
    if (
        not thinks
        or thinks != closed
        or text.count("<answer>") != 1
        or text.count("</answer>") != 1
    ):
        return -1.0
    for tool in ("search", "python"):
        at = text.find(f"<{tool}>")
        while at >= 0:
            places = [at]
            for tag in (f"</{tool}>", "<result>", "</result>"):
                places.append(text.find(tag, at))
            if min(places) < 0 or places != sorted(places):
                return -1.0
            at = text.find(f"<{tool}>", places[-1])
    inside = re.search("<answer>(.*?)</answer>", text, re.DOTALL)
    if inside is None or "\\boxed{" not in inside[1] or "}" not in inside[1]:
        return -1.0
    start = max(inside[1].rfind("\\boxed{"), inside[1].rfind("\\fbox{"))
    opening = inside[1].index("{", start)
    depth = 0
    for end in range(opening, len(inside[1])):
        depth += {"{": 1, "}": -1}.get(inside[1][end], 0)
        if depth == 0:
            break
    else:
        return -1.0
    answer, f1 = squad(inside[1][opening + 1 : end]), 0.0
    for gold in map(squad, golds):
        if answer != gold and {answer, gold} & {"yes", "no", "noanswer"}:
            continue
        common = (Counter(answer.split()) & Counter(gold.split())).total()
        if common:
            f1 = max(f1, 2 * common / (len(answer.split()) + len(gold.split())))
    return f1 + 0.1 if f1 and "</search>" in text and "</python>" in text else f1


def test_deep_research_pays_what_arpo_pays():
    rng, seen = random.Random(2), Counter()
    words = (
        *("Lem", "Stanislaw", "the", "of", "yes", "no", "1,961"),
        *("Solaris", "A.", "noanswer", "3.5"),
    )
    call = "<{0}>q</{0}> <result>\nr\n</result>"
    pieces = (call.format("search"), call.format("python"), "<think>t</think>", " so ", "\n")
    broken = (
        "<search>", "</search>", "<result>", "</result>", "<python>x", "</python>", "<think>", "</think>",
        "<answer>", "</answer>", "\\boxed{x}", "}",
    )  # fmt: skip
    for _ in range(2500):
        golds = [
            " ".join(rng.choices(words, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2))
        ]
        given = " ".join(
            rng.choices(words, k=rng.randint(0, 3)) + rng.sample(golds, rng.randint(0, 1))
        )
        box = rng.choice(
            ("\\boxed{%s}",) * 6 + ("\\boxed{{%s}", "%s", "\\boxed{\\text{%s}}", "\\fbox{%s}")
        )
        before = [rng.choice(pieces) for _ in range(rng.randint(0, 4))]
        answer = (
            f"<answer>{rng.choice(('', 'It is '))}{box % given}{rng.choice(('', '.'))}</answer>"
        )
        parts = ["<think>t</think>" * (rng.random() < 0.9), *before, answer]
        if rng.random() < 0.3:
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(broken))
        text = "".join(parts)
        expected = deep_research(text, golds)
        assert score_deep_research(text, golds).score == expected, text
        seen[
            "malformed" if expected < 0 else "both" if expected > 1 else "f1" if expected else "0"
        ] += 1
    assert all(count > 12 for count in seen.values()) and len(seen) == 4, seen


def test_questions_pay_what_gem_pays():
    rng, right = random.Random(3), Counter()
    words = ("Paris", "the", "a", "U.S.A.", "don't", "New-York", "of", "Lem", "!", "x")
    env = QuestionEnv(rows=[{"question": "?", "answer": "gold"}])
    for _ in range(1200):
        golds = [
            " ".join(rng.choices(words, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2))
        ]
        given = rng.choice(
            (rng.choice(golds).upper(), " ".join(rng.choices(words, k=rng.randint(1, 3))))
        )
        forms = (
            "<answer>{0}</answer>",
            "<answer> {0}.</answer>",
            "<answer>x</answer><answer>{0}</answer>",
        )
        text = rng.choice((*forms, "{0}", "\\boxed{{{0}}}", "<answer>{0}")).format(given)
        pairs = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
        expected = float(bool(pairs) and squad(pairs[-1]) in map(squad, golds))
        env.reset(0)
        env.answer = golds
        reward = env.step(text).reward
        if pairs and not squad(pairs[-1]):  # "the" or "!": nothing is left to compare, and GEM pays
            continue
        assert reward == expected, (text, golds)
        right[expected] += 1
    assert min(right[0.0], right[1.0]) > 120, right
    for answer, gold, rule, reward in (("3.5", "35", 1.0, 0.0), ("1200.0", "1,200", 0.0, 1.0)):
        env.reset(0)
        env.answer = gold  # numbers are compared by value; without points, 3.5 is 35 to GEM
        assert float(squad(answer) == squad(gold)) == rule and parse_number(answer) is not None
        assert env.step(f"<answer>{answer}</answer>").reward == reward


def rational(text: str) -> Fraction | None:
    r"""The number that "1,200", "-3.50", "7/4" or "\frac{7}{4}" is."""
    found = re.fullmatch(
        r"\\d?frac\{(-?\d+)\}\{(\d+)\}|(-?[\d,]+(?:\.\d+)?)(?:/(\d+))?", text.strip()
    )
    if found is None:
        return None
    top, bottom = found[1] or found[3].replace(",", ""), found[2] or found[4] or "1"
    return Fraction(top) / Fraction(bottom) if Fraction(bottom) else None


def test_mathematics_pays_what_gem_pays():
    """GEM: the last box against any gold, by spelling, by value, or as math-verify decides."""
    rng, right = random.Random(4), Counter()
    env = MathEnv(rows=[{"problem": "?", "answer": "1"}])
    for _ in range(600):
        number = Fraction(rng.randint(-400, 4000), rng.choice((1, 1, 2, 4, 5, 8)))
        top, bottom, value = number.numerator, number.denominator, float(number)
        forms = [
            f"\\frac{{{top}}}{{{bottom}}}",
            f"{top}/{bottom}",
            f"{value:g}" if abs(value) < 1e5 else "0",
        ]
        forms += [f"{top:,}", f"{value:.3f}"] if bottom == 1 else []
        gold = rng.choice(forms)
        near = Fraction(rng.choice((top + 1, -top, top, top * 10)), bottom)
        given = rng.choice((*forms, str(near), f"{float(near):g}", ""))
        shape = rng.choice(
            ("\\boxed{%s}", "so \\boxed{7} no, \\boxed{%s}.", "$\\boxed{%s}$", "%s", "\\boxed{%s")
        )
        golds: Any = rng.choice((gold, [gold], ["1/977", gold]))
        value_given = rational(given) if "%s}" in shape else None
        expected = float(value_given is not None and value_given == rational(gold))
        env.reset(0)
        env.answer = golds
        assert env.step(shape % given).reward == expected, (shape % given, golds)
        right[expected] += 1
    assert min(right[0.0], right[1.0]) > 120, right


def test_programs_pay_what_gem_pays():
    """GEM: -0.1 without a block; 1 if the last one prints what every test expects and ends well; else 0."""
    tests = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}
    env = ProgramEnv(rows=[{"problem": "?", "tests": tests}], max_tests=2)
    block = "```python\n%s\n```"
    double = "print(2 * int(input()))"
    for text, reward in (
        (double, -0.1),
        ("", -0.1),
        (block % double, 1.0),
        (block % "print(4)" + "\n" + block % double, 1.0),
        (block % double + "\n" + block % "print(4)", 0.0),
        (block % f"{double}\nraise SystemExit(3)", 0.0),
        (block % f"print(' ', end=''); {double}", 1.0),  # blanks around the output do not count
        (block % "print(4)", 0.0),  # one of two
        (block % "print(", 0.0),
    ):
        env.reset(0)
        assert env.step(text).reward == reward, text
