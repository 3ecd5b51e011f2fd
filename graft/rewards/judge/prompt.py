"""The judge's prompt: a text file with three placeholders.

    Question: {question}
    Accepted, one a line: {truth}
    To be graded: {prediction}
    Say Correct or Incorrect.

A prompt that names NOT_ATTEMPTED asks for SimpleQA's three grades instead; `simpleqa` is bundled.

They are filled in one pass, so "{truth}" inside a prediction is not replaced. Other braces have no
meaning: a prompt may contain JSON or \\boxed{}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

BUNDLED = Path(__file__).parent / "prompts"
PLACEHOLDERS = ("question", "truth", "prediction")
MAX_FILE = 2**20  # bytes
MAX_CHARS = 4000  # of a question and of an answer: the end of a longer one is shown

_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_NAME = re.compile(r"\{(\w+)\}")


class Grade(StrEnum):
    CORRECT = "correct"
    INCORRECT = "incorrect"
    NOT_ATTEMPTED = "not_attempted"
    """Neither right nor wrong: the answer does not commit itself."""


_LETTERS = dict(zip("ABC", Grade, strict=True))
_LETTER = re.compile(r"\W*([ABC])(?:\W*$|\s*[:.)-])")


class JudgePrompt:
    """A checked prompt: `JudgePrompt("correct")` is bundled, any other name is a file's path."""

    def __init__(self, name: str | Path = "correct") -> None:
        self.name = str(name)
        self.text = _read(self.name)
        lacking = [f"{{{name}}}" for name in PLACEHOLDERS if f"{{{name}}}" not in self.text]
        if lacking:
            has = ", ".join(dict.fromkeys(_NAME.findall(self.text))) or "none"
            raise ValueError(
                f"judge prompt {self.name!r} has no {', '.join(lacking)} (names in braces that it has: "
                f"{has}); write {{question}}, {{truth}} and {{prediction}} in the text"
            )
        if "correct" not in self.text.lower():
            raise ValueError(
                f"judge prompt {self.name!r} does not ask for a verdict that can be parsed; let it ask for "
                "one word, Correct or Incorrect"
            )

    @property
    def has_grades(self) -> bool:
        """Whether it asks for SimpleQA's grades, A: CORRECT, B: INCORRECT, C: NOT_ATTEMPTED."""
        return "NOT_ATTEMPTED" in self.text

    def read(self, reply: str) -> Grade:
        """The grade in a reply: a letter where the prompt has grades, else or as well the word.

        >>> JudgePrompt("simpleqa").read("C"), JudgePrompt().read("Correct.")
        (<Grade.NOT_ATTEMPTED: 'not_attempted'>, <Grade.CORRECT: 'correct'>)
        """
        verdict = reply.rpartition("</think>")[2]  # a model may write any word in its thoughts
        if self.has_grades:
            if letter := _LETTER.match(verdict):
                return _LETTERS[letter[1]]
            if re.search(r"not.?attempted", verdict, re.IGNORECASE):
                return Grade.NOT_ATTEMPTED
        return Grade.CORRECT if is_correct_reply(verdict) else Grade.INCORRECT

    def fill(self, question: str, golds: Sequence[str], prediction: str) -> str:
        """The prompt for one prediction."""
        values = {
            "question": question[-MAX_CHARS:] or "(not given)",
            "truth": "\n".join(golds),
            "prediction": prediction[-MAX_CHARS:],
        }
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.text)


def is_correct_reply(reply: str) -> bool:
    """Whether a reply says "correct" and does not negate it.

    >>> is_correct_reply("Correct."), is_correct_reply("Incorrect"), is_correct_reply("This is not correct.")
    (True, False, False)
    """
    verdict = reply.lower()
    is_negated = any(word in verdict for word in ("incorrect", "wrong", "not correct"))
    return "correct" in verdict and not is_negated


def _read(name: str) -> str:
    bundled = sorted(file.stem for file in BUNDLED.glob("*.txt"))
    file = BUNDLED / f"{name}.txt" if name in bundled else Path(name).expanduser()
    try:
        if file.stat().st_size > MAX_FILE:
            raise ValueError(f"judge prompt {name!r} has over {MAX_FILE} bytes: is it a prompt?")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"judge prompt {name!r} is neither bundled ({', '.join(bundled)}) nor a text file in UTF-8 "
            f"that can be read: {error}"
        ) from error
