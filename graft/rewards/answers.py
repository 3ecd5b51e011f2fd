"""Rewards that compare the policy's final answer with the task's.

The functions on texts come first; the rewards after them only select the texts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from graft.rewards.maths.grading import grade
from graft.rewards.numbers import each_gold, is_gold, join_groups, parse_number
from graft.rewards.plugins import blocking
from graft.text.parse import last_boxed, last_tag
from graft.tools.calculator import CalculatorError, work
from graft.types import Task, Trajectory

_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_WORDED = re.compile(r"\s*\\text(?:bf|tt|rm)?\s*\{([^{}]*)\}\s*")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_END_MARKS = re.compile(r"^[\s!-*,/:-@\[-`{-~]+|(?<![\s!-/:-@\[-`{-~])[\s!-/:-@\[-`{-~]+$")
"""Punctuation around a number, except a sign or a point before it: SQuAD drops all of it."""
_QUOTES = "'\"`\u2018\u2019\u201c\u201d"
_CURRENCIES = "$€£"
_PROSE_MARK = re.compile(
    rf"(?<![.,;:!?{_QUOTES}])[.,;:!?{_QUOTES}]+(?=\s|$)"  # after a word
    rf"|(?<!\S)[,;:?{_QUOTES}]+"  # before one
    r"|(?<=[^\W\d_])[.'\u2019](?=[^\W\d_])"  # U.S.A, don't
    r"|(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})"  # ice-cream
    r"|(?<=\d),(?=\d{3}(?!\d))"  # 1,000 people
)
_SYMBOL = re.compile(r"[+*/<>=^~|\\\[\]{}]|(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})")
"""A mark of a formula; the "-" of ice-cream is none."""
_LONG_WORD = re.compile(r"[^\W\d_]{3}")
_BRACKETED_WORD = re.compile(r"[(\[{]\s*(\w+)\s*[)\]}]")
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,3})([^*_]+)\1")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def last_answer(text: str) -> str:
    r"""The final answer in a text: the last <answer> tag, else \boxed{}, else the line after ####,
    else all of it.

    >>> last_answer("so <answer> 42 </answer>")
    '42'
    """
    found = last_tag(text, "answer")
    # ARPO asks for a box inside the tag
    boxed = last_boxed(text if found is None else found)
    if boxed is not None:
        found = boxed
    if found is None:
        found = last_marked(text)
    return (text if found is None else found).strip()


def last_pair(text: str, tag: str) -> str | None:
    """What the last <tag> and the </tag> after it enclose, each pair from the first <tag> that is open.

    >>> last_pair("<answer>1 <answer>2</answer>", "answer"), last_pair("<answer>1", "answer")
    ('1 <answer>2', None)
    """
    opening, closing, found, at = f"<{tag}>", f"</{tag}>", None, 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        found, at = text[start + len(opening) : end], end + len(closing)
    return found


def last_marked(text: str) -> str | None:
    """The rest of the line after the last "####", as GSM8K writes answers; None without one."""
    lines = _MARKED.findall(text)
    return lines[-1].strip() if lines else None


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single blanks: what SQuAD compares.

    >>> normalise("The  Eiffel Tower.")
    'eiffel tower'
    """
    text = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())


def in_words(text: str) -> str:
    r"""The contents of \text{...}, if that is the whole text: models write words so in a box.

    >>> in_words(r"\text{ Ann }"), in_words(" Ann"), in_words(r"\text{a} + 1")
    ('Ann', 'Ann', '\\text{a} + 1')
    """
    found = _WORDED.fullmatch(text)
    return (found[1] if found else text).strip()


def same_words(a: str, b: str) -> bool:
    """True if two texts are the same answer to SQuAD: numbers by value, everything else after `normalise`.

    Question answering benchmarks are defined so. "x<5" and "x>5" are the same to it: see `same_text`.

    >>> same_words("The Beatles!", "beatles"), same_words("$1,200.", "1200"), same_words("3.5", "35")
    (True, True, False)
    """
    a, b = in_words(a), in_words(b)
    numbers = [parse_number(_END_MARKS.sub("", text)) for text in (a, b)]
    if numbers != [None, None]:
        return numbers[0] == numbers[1]  # without punctuation 3.5 would be 35
    return _is_same(a, b, normalise)


def same_text(a: str, b: str) -> bool:
    """True if two texts are the same answer: numbers by value, other texts without case, articles and the
    marks of prose. Every other mark counts.

    >>> same_text("The Beatles!", "beatles"), same_text("x < 5", "x<5"), same_text("(B)", "b")
    (True, True, True)
    >>> same_text("x<5", "x>5"), same_text("C", "C++"), same_text("5!", "5")
    (False, False, False)
    """
    a, b = (_unadorned(in_words(text)) for text in (a, b))
    numbers = [_stated_number(text) for text in (a, b)]
    if numbers != [None, None]:
        return numbers[0] == numbers[1]
    return _is_same(a, b, without_prose_marks)


def without_prose_marks(text: str) -> str:
    """Lower case, no articles, no commas, stops and quotes around words; in a formula only its blanks go.

    >>> without_prose_marks("The U.S.A., of course!"), without_prose_marks("f(x) = [0, 1)")
    ('usa of course', 'f(x)=[0,1)')
    """
    text = " ".join(text.lower().split())
    if _SYMBOL.search(text) or ("," in text and not _LONG_WORD.search(text)):
        return re.sub(r" ?([^\w ]) ?", r"\1", text).rstrip(".")
    return " ".join(_ARTICLE.sub(" ", _PROSE_MARK.sub("", text)).split())


def _is_same(a: str, b: str, simplified: Callable[[str], str]) -> bool:
    first, second = simplified(a), simplified(b)
    if not first and not second:  # "The The" is all articles, "A" may be a choice
        first, second = a.lower(), b.lower()
    return bool(first) and first == second


def _unadorned(text: str) -> str:
    """Remove the emphasis or brackets around a word: "**7**" is 7, "(B)" is choice B."""
    text = text.strip()
    if emphasised := _EMPHASIS.fullmatch(text):
        text = emphasised[2].strip()
    bracketed = _BRACKETED_WORD.fullmatch(text)
    return bracketed[1] if bracketed else text


def _stated_number(text: str) -> Fraction | None:
    """The number in "$1,200." or "'7'"; a factorial or "<5" is none."""
    bare = text.strip(_QUOTES + _CURRENCIES + " \t\n").rstrip(f".,;:?%{_QUOTES}{_CURRENCIES} \t\n")
    number = parse_number(bare.rstrip("!"))
    return None if bare.endswith("!") and number is not None and number.denominator == 1 else number


def word_f1(answer: str, gold: str) -> float:
    """The harmonic mean of the shares of words that the two have in common.

    >>> word_f1("the city of Paris", "Paris")
    0.5
    """
    return _overlap(normalise(answer).split(), normalise(gold).split())


def value_f1(answer: str, gold: str) -> float:
    """`word_f1` with numbers by value: SQuAD drops their signs and points, so that -3.5 is 35.

    >>> value_f1("about 0.00001 m", "1e-05 m"), word_f1("-3.5", "35"), value_f1("-3.5", "35")
    (0.8, 1.0, 0.0)
    """
    return _overlap(_valued_words(answer), _valued_words(gold))


def _valued_words(text: str) -> list[str | Fraction]:
    """The words that SQuAD compares, with a Fraction in place of each that states a number."""
    words: list[str | Fraction] = []
    for word in join_groups(text).split():
        number = parse_number(_END_MARKS.sub("", word))
        words += normalise(word).split() if number is None else [number]
    return words


def _overlap(answer: Sequence[Hashable], gold: Sequence[Hashable]) -> float:
    common = (Counter(answer) & Counter(gold)).total()
    return 2 * common / (len(answer) + len(gold)) if common else 0.0


def countdown_score(answer_text: str, numbers: Sequence[int], target: int | Fraction) -> float:
    """1.0 if the expression uses exactly these numbers and has exactly this value, else 0.0.

    A trailing "= value" is ignored; the value is computed.

    >>> countdown_score("(1 + 2) / 3 = 1", [3, 1, 2], 1), countdown_score("1 * 1", [1, 2, 3], 1)
    (1.0, 0.0)
    """
    return float(value_of(answer_text.partition("=")[0], numbers) == target)


def value_of(expression: str, numbers: Sequence[int | Fraction]) -> Fraction | None:
    """The value of an expression that uses exactly these numbers; None for any other text.

    Decimals are other numbers, as in EARL's and RL-GRPO's rules: 7.0 is not the 7 that was given.
    """
    if "." in expression:
        return None
    try:
        working = work(expression)
    except CalculatorError:
        return None
    return working.value if sorted(working.numbers) == sorted(numbers) else None


def question_of(task: Task) -> str:
    """The row's own "question" if it has one, else the last message of the user."""
    if isinstance(question := task.meta.get("question"), str):
        return question
    contents = [message.get("content") for message in task.prompt if message.get("role") == "user"]
    return text_of_content(contents[-1]) if contents else ""


def text_of_content(content: Any) -> str:
    """The text of a message, without pictures."""
    if isinstance(content, list):  # parts, of which only texts can be shown
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")


def exact_match(task: Task, trajectory: Trajectory) -> float:
    """1.0 if the final answer is the task's answer, or one of them when it is a list."""
    answer = last_answer(trajectory.answer_text)
    return float(any(same_text(answer, accepted) for accepted in accepted_answers(task.answer)))


def f1(task: Task, trajectory: Trajectory) -> float:
    """`value_f1` of the final answer and the nearest of the task's."""
    answer = last_answer(trajectory.answer_text)
    return max(value_f1(answer, accepted) for accepted in accepted_answers(task.answer))


@blocking
def math_answer(task: Task, trajectory: Trajectory) -> float:
    r"""1.0 if the final answer means the same as the task's answer: "\frac{1}{2}" and "0.5". An expression
    of the question that is only repeated earns nothing: "3+4" for "What is 3+4?"."""
    answer = last_answer(trajectory.answer_text)
    return float(grade(answer, final_answers(task.answer), question=question_of(task)))


def countdown(
    task: Task, trajectory: Trajectory, scale: Sequence[float] = (0.0, 0.0, 1.0), tag: str = ""
) -> float:
    """The value of the final answer's expression against the task's {"numbers": [...], "target": n}.

    scale   the rewards of an answer that does not use exactly these numbers, of one with another value,
            and of a right one; RL-GRPO's is [0.01, 0.02, 1.01]
    tag     the expression must be the contents of the last <tag>; empty: a tag answer, a box, the line
            after ####, or all of the text
    """
    if len(scale) != 3:
        raise ValueError(
            f"countdown: scale={list(scale)} must be three rewards: no form, wrong, right"
        )
    numbers, target = _countdown_gold(task.answer)
    text = trajectory.answer_text
    expression = last_pair(text, tag) or "" if tag else last_answer(text)
    value = value_of(expression.partition("=")[0], numbers)
    no_form, wrong, right = scale
    return no_form if value is None else right if value == target else wrong


def _countdown_gold(given: Any) -> tuple[list[Fraction], Fraction]:
    """Numbers and target of a task, exactly, also if they are floats, of numpy, or texts."""
    if not isinstance(given, Mapping) or not {"numbers", "target"} <= set(given):
        raise ValueError(
            f"the task's answer is {given!r:.200}; countdown needs {{numbers, target}}"
        )
    several = [parse_number(str(one)) for one in (*given["numbers"], given["target"])]
    numbers = [one for one in several if one is not None]
    if len(numbers) < len(several):
        raise ValueError(f"the task's answer is {given!r:.200}; numbers and target must be numbers")
    return numbers[:-1], numbers[-1]


def accepted_answers(answer: Any) -> list[str]:
    """A task's answer as the list of texts that are right."""
    golds = [str(gold) for gold in each_gold(answer) if is_gold(gold)]
    if not golds:
        raise ValueError(
            f"the task has no answer to compare with, but {answer!r:.80}; a row has one in its column answer "
            "(or solution, or the one that answer_key= names), an environment sets self.answer in pose(), or "
            "info['answer'] in reset(). Otherwise choose a reward that needs no answer"
        )
    return golds


def final_answers(answer: Any) -> list[str]:
    """The accepted answers without the worked solutions that GSM8K and MATH keep in this column.

    >>> final_answers("3 + 4 = 7\\n#### 7")
    ['7']
    """
    return [last_answer(one) for one in accepted_answers(answer)]
