r"""Grade a mathematical answer: at once where the result is certain, else by math-verify.

    "1,200" and "1200"             equal once both are tidied: right, in microseconds
    "\frac{2}{4}" and "0.5"        exact numbers: right
    "2\sqrt{3}" and "\sqrt{3}"     values that certainly differ: wrong
    "\sqrt{12}" and "2\sqrt{3}"    values that agree: math-verify decides

Most wrong answers are decided here; the rest goes to a pool of processes that are killed when they
exceed the limit. An answer that cannot be decided in time is wrong.

Without `decide`, beyond texts that are equal when tidied, math-verify grades 47 instead of 1,942 answers a
second (200 integers, 59 fractions and 58 radicals, half of them wrong, two busy cores of an Intel Xeon), and
changes 28 of the 132 verdicts in `test_grading.py`: "5 or more" is then 5, and "1 1/2" is not 1.5.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from itertools import pairwise

from graft.rewards.maths.comparison import compare
from graft.rewards.maths.echo import repeats
from graft.rewards.maths.formulas import Formula
from graft.rewards.maths.reading import Number, read
from graft.rewards.maths.spelling import spell, tidy
from graft.rewards.maths.symbolic import MAX_LENGTH, is_readable, math_equal
from graft.rewards.worker_pool import NoWorkers, WorkerError, WorkerPool

MAX_TIDY = 2000  # characters; longer texts are only compared as texts
MAX_QUESTION = 20_000  # characters of a question in which an answer is looked for

SYMBOLIC = "graft.rewards.maths.symbolic"
WORKERS = WorkerPool(f"{SYMBOLIC}:warm")
_alone = threading.Lock()


def grade(
    answer: str, golds: str | Sequence[str], *, question: str = "", timeout: float = 1.0
) -> bool:
    r"""True if `answer` means the same as `golds`, or as one of them.

    >>> grade(r"\frac{1}{2}", ["0.25", "0.5"])
    True
    >>> grade("3+4", "7"), grade("3+4", "7", question="What is 3 + 4?")
    (True, False)

    Safe on any thread. `question`: an expression of it that is only repeated is no answer. `timeout` is
    in seconds of processor time, for each gold that needs math-verify.
    """
    golds = [golds] if isinstance(golds, str) else golds
    if len(answer) <= MAX_TIDY and repeats(answer, question[-MAX_QUESTION:], golds, decide):
        return False
    undecided: list[str] = []
    for gold in golds:
        verdict = decide(answer, gold)
        if verdict:
            return True
        if verdict is None:
            undecided.append(gold)
    return any(_verify(answer, gold, timeout) for gold in undecided)


def _verify(answer: str, gold: str, timeout: float) -> bool:
    answer, gold = spell(answer), spell(gold)
    if not (is_readable(answer) and is_readable(gold)):
        return False
    try:
        return WORKERS.call(f"{SYMBOLIC}:math_equal", answer, gold, timeout=timeout)
    except NoWorkers:
        with _alone:  # without processes the bounds in `symbolic` are the only protection
            return math_equal(answer, gold)
    except WorkerError:  # took too long or used too much memory: wrong
        return False


def decide(answer: str, gold: str) -> bool | None:
    """True or False where no algebra is needed; else None.

    >>> decide("1,200", "1200"), decide("3", "4"), decide("x + x", "2x")
    (True, False, None)
    """
    if len(answer) > MAX_TIDY or len(gold) > MAX_TIDY:
        return answer.strip() == gold.strip()
    answer, gold = tidy(answer), tidy(gold)
    if not answer or not gold:
        return False
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > MAX_LENGTH:
        return None if len(answer) <= MAX_LENGTH else False
    if _leaves_out(answer, gold) or ("=" not in gold and states_falsehood(answer)):
        return False
    answer, gold = _value(answer, gold), _value(gold, answer)
    first, second = read(answer), read(gold)
    if first is None and is_prose(answer, gold):
        return False
    if isinstance(second, Number | Formula) and _TWICE.search(answer):
        return False  # "x=5, x=7" is neither
    if first is None or second is None:
        return None
    return compare(first, second)


_WORD = re.compile(r"(?<![A-Za-z\\])(?<!\\begin\{)(?<!\\end\{)[A-Za-z]{3,}")
_KNOWN = re.compile(r"and|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|exp|max|min|gcd|lcm|mod")
_SIDE_BY_SIDE = re.compile(r"(?:^|[-+*/=(,<>]) ?[0-9.]+ [0-9.]+(?![0-9./])")


def is_prose(answer: str, gold: str) -> bool:
    """True for a text in which math-verify would find a number that the text does not state.

    "7, not 5" and "5 or more" are not 5, nor is "2 3", which some read as 2 + 3. A word may be a
    product if the gold has its letters: "2abc" and "2cab".
    """
    if not any(character.isdigit() for character in answer):
        return False
    words = [word for word in _WORD.findall(answer) if not _KNOWN.fullmatch(word)]
    return bool(_SIDE_BY_SIDE.search(answer)) or any(set(word) - set(gold) for word in words)


_EQUATION = re.compile(r"[^=<>]*(?:[-+*/^]|\\frac)[^=<>]*=[^=<>]*")


def _leaves_out(answer: str, gold: str) -> bool:
    r""" "1,2,10" for "1,2,\ldots,10", or "4" for "x^2+y^2=4"."""
    if ("\\ldots" in answer) != ("\\ldots" in gold):
        return True
    return _EQUATION.fullmatch(gold) is not None and not any(sign in answer for sign in "=<>\\")


_TWICE = re.compile(r"([A-Za-z]+)=.*(?<![A-Za-z])\1=", re.DOTALL)
_NAME = re.compile(
    r"(?![0-9])(?!.*\\(?:frac|sqrt|sin|cos|tan|log|ln))(?=.*[A-Za-z])[\w\\{}()\[\]|', ]+", re.ASCII
)


def _value(text: str, other: str) -> str:
    """The value in "x=5" or "5=x" or "S=2*3=6", if `other` is not an equation.

    Two assignments stay as they are: x=5 is not y=5.
    """
    sides = [side.strip() for side in text.split("=")]
    if len(sides) == 1 or "=" in other or "<" in text or ">" in text:
        return text
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        return sides[0]
    # "x=1 or x=2": the part in the middle is no value, so there is not one value
    if _NAME.fullmatch(sides[0]) and all(
        isinstance(read(side), Number | Formula) for side in sides[1:-1]
    ):
        return sides[-1]
    return text


def states_falsehood(text: str) -> bool:
    """ "6=5", "x=2+2=5"."""
    sides = [read(side.strip()) for side in text.split("=")]
    known = [s for s in sides if isinstance(s, Number) or (isinstance(s, Formula) and s.is_number)]
    return any(compare(one, other) is False for one, other in pairwise(known))
