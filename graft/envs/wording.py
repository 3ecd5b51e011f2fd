"""Numbers and arithmetic in words.

    305 * (12 - 7)
    three hundred and five * (twelve - seven)      numbers in words
    multiplication of 305 and (12 minus 7)         operators in words

Operators in words put every part that is not a number in parentheses: "plus" and "times" have no
agreed precedence, and a question must have one reading.
"""

from __future__ import annotations

import ast
import re

# fmt: off
SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = (
    "thousand", "million", "billion", "trillion", "quadrillion", "quintillion", "sextillion",
    "septillion", "octillion", "nonillion", "decillion",
)
# fmt: on
TOO_LARGE = 1000 ** (len(SCALES) + 1)

OUTER = {
    "+": "addition of {0} and {1}",
    "-": "subtraction of {1} from {0}",
    "*": "multiplication of {0} and {1}",
    "/": "division of {0} by {1}",
}
INNER = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def number_in_words(number: int) -> str:
    """English, with "and" before the last two digits: 1234 -> one thousand, two hundred and
    thirty-four; -1001 -> minus one thousand and one. Below 10^36.
    """
    if abs(number) >= TOO_LARGE:
        raise ValueError(
            f"{number} has no name here; numbers must be below 10^{3 * len(SCALES) + 3}"
        )
    if number < 0:
        return f"minus {number_in_words(-number)}"
    if number < 1000:
        return _below_thousand(number)
    groups: list[str] = []
    rest, last = divmod(number, 1000)
    for scale in SCALES:
        rest, group = divmod(rest, 1000)
        if group:
            groups.insert(0, f"{_below_thousand(group)} {scale}")
    text = ", ".join(groups)
    if last == 0:
        return text
    return f"{text}{' and' if last < 100 else ','} {_below_thousand(last)}"


def numbers_in_words(expression: str) -> str:
    """ "3 * (40 - 7)" -> "three * (forty - seven)"; the signs keep their usual precedence."""
    return re.sub(r"[0-9]+", lambda found: number_in_words(int(found[0])), expression)


def operators_in_words(expression: str) -> str:
    """An expression in words, with parentheses that leave only the reading by the usual precedence.

    >>> operators_in_words("3 + 4 * 5 - 6")
    'subtraction of 6 from (3 plus (4 times 5))'
    """
    tree = ast.parse(expression, mode="eval").body
    if not isinstance(tree, ast.BinOp):
        return expression
    return OUTER[_SIGNS[type(tree.op)]].format(_grouped(tree.left), _grouped(tree.right))


def flat_in_words(left: str, sign: str, right: str) -> str:
    """The original's wording: both sides of an operator, with only the parentheses they have.

    "3 + 4", "*", "5" -> "multiplication of 3 plus 4 and 5". Its right value is that of the expression
    in signs, 3 + 4 * 5 = 23, although the words can be read as 35.
    """
    sides = [re.sub(r"[-+*/]", lambda found: INNER[found[0]], side) for side in (left, right)]
    return OUTER[sign].format(*sides)


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds:
        text = f"{SMALL[hundreds]} hundred"
        return f"{text} and {_below_thousand(rest)}" if rest else text
    if rest < 20:
        return SMALL[rest]
    tens, ones = divmod(rest, 10)
    return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")


def _grouped(node: ast.expr) -> str:
    if not isinstance(node, ast.BinOp):
        return ast.unparse(node)
    return f"({_grouped(node.left)} {INNER[_SIGNS[type(node.op)]]} {_grouped(node.right)})"
