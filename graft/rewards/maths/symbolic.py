"""Compare two mathematical answers with math-verify, within bounds on their size.

Without bounds an answer such as 9^{9^{9^9}} would keep a processor busy for ever, and math-verify's
own alarm cannot be used on threads. So the text is checked before it is parsed and the tree before
it is evaluated, and an answer that is too big is wrong. A comparison that still takes too long is
killed: `graft.rewards.maths.grading` runs this module in a worker process.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

MAX_LENGTH = 200  # characters of an answer
MAX_BRACES = 10  # nested; the LaTeX grammar needs seconds for hundreds
MAX_MAGNITUDE = 10_000.0  # decimal digits that evaluating any part of an answer may produce
MAX_TERMS = 300.0  # that multiplying an answer out may produce

# evaluated while they are parsed, so looking at the tree would come too late
_LARGE_FUNCTION = re.compile(r"(?:binom|Gamma)\D*[0-9]{4}")


def math_equal(answer: str, gold: str) -> bool:
    r"""True if `answer` means the same as `gold`: "\frac{1}{2}" and "0.5".

    An answer that cannot be parsed, or is too big to be evaluated, is not equal to anything.
    """
    if not (is_readable(answer) and is_readable(gold)):
        return False
    from math_verify import verify

    golds, answers = _trees(gold), _trees(answer)
    if golds is None or answers is None:
        return False
    return bool(
        verify(
            list(golds),
            list(answers),
            timeout_seconds=None,
            # x > 2 is as good as (2, \infty), whichever is the gold; but 1 < 2 is not the empty set
            allow_set_relation_comp=r"\emptyset" not in gold,
        )
    )


@lru_cache(maxsize=1024)  # a gold comes back with every sample of its group
def _trees(text: str) -> tuple[Any, ...] | None:
    """The trees that math-verify parses from a text; None if a part of one is too big."""
    from math_verify import LatexExtractionConfig, parse

    # it logs at every start that its alarm is off, which is intended here
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # LaTeX only (between dollars): otherwise math-verify would take any number in a text that it
    # cannot parse
    trees = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return tuple(trees) if all(_is_bounded(tree) for tree in trees) else None


def warm() -> None:
    """Import what `math_equal` needs and let the LaTeX grammar build its tables, once."""
    for answer, gold in (
        (r"\frac{\sqrt{2}}{2}+x^2", "x+1"),
        ("(1,2]", r"\{1,2\}"),
        ("x=1", "3!<x"),
    ):
        math_equal(answer, gold)


def is_readable(answer: str) -> bool:
    """True if the text is short and shallow enough to be parsed quickly."""
    if len(answer) > MAX_LENGTH or _LARGE_FUNCTION.search(answer):
        return False
    depth = deepest = 0
    for character in answer:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest <= MAX_BRACES


def _is_bounded(tree: Any) -> bool:
    """True if no part of a parsed answer is too big to evaluate or was left unevaluated."""
    import sympy
    from sympy.concrete.expr_with_limits import ExprWithLimits

    if isinstance(tree, str):
        return True  # could not be parsed: will be compared as text
    if isinstance(tree, sympy.MatrixBase):
        return all(_is_bounded(entry) for entry in tree)  # pyright: ignore[reportGeneralTypeIssues]
    unfinished = (ExprWithLimits, sympy.Limit, sympy.Derivative)  # sums, products, integrals ...
    try:
        return (
            not tree.has(*unfinished)
            and magnitude(tree) <= MAX_MAGNITUDE
            and num_terms(tree) <= MAX_TERMS
        )
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError):
        return False  # a tree that cannot be measured is not evaluated


def magnitude(tree: Any) -> float:
    """An upper bound of log10 |value| over a tree and all its parts; a variable counts as 10.

    9^{9^{9}}: the inner power has 9 * log10(9) = 8.6 digits, so the outer one has 10^8.6 * 0.95.
    """
    import sympy

    if isinstance(tree, sympy.Rational):
        # bit lengths: an integer of many digits does not fit a float
        return max(abs(int(tree.p)).bit_length(), int(tree.q).bit_length()) * math.log10(2)
    parts = [magnitude(part) for part in tree.args]
    largest = max(parts, default=1.0)
    if isinstance(tree, sympy.Pow):
        base, exponent = parts
        if tree.base.is_Rational and tree.exp.is_Integer:  # 2^{2025} is a common answer
            return max(largest, base * abs(int(tree.exp)))
        # a base near 1 still counts as one digit: 0.999^{10^9} is slow as well
        return max(largest, max(base, 1.0) * 10.0 ** min(exponent, 300.0))
    if isinstance(tree, sympy.factorial | sympy.binomial | sympy.gamma | sympy.exp):
        return 10.0 ** min(largest, 300.0)  # of the order of n digits: n!, C(n, k), e^n
    if tree.is_Mul:
        return max(sum(parts), largest)
    return largest + math.log10(len(parts) + 1)


def num_terms(tree: Any) -> float:
    """How many terms a tree may have when it is multiplied out: (1 + x)^3 has 4, 3x^2 has 1."""
    import sympy

    parts = [num_terms(part) for part in tree.args]
    if isinstance(tree, sympy.Pow) and tree.exp.is_Integer:
        base, power = parts[0], abs(int(tree.exp))
        # multisets of `power` out of `base` terms; numbers alone do not multiply out
        return float(math.comb(int(base) - 1 + power, power)) if tree.free_symbols else 1.0
    if tree.is_Add:
        return math.fsum(parts)
    return math.prod(parts)
