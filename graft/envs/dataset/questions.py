"""Questions with a short answer, compared as text: open questions, and logic puzzles."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from graft.envs.base import Trace, with_request
from graft.envs.dataset.base import DatasetEnv
from graft.rewards.answers import accepted_answers, same_words, word_f1
from graft.text.parse import last_boxed, last_tag
from graft.types import Author, Turn

FORMS = {
    "tag": (
        "Think it through inside <think> and </think>, then give the answer alone, as short as "
        "possible, inside <answer> and </answer>.\n\nQuestion: {question}"
    ),
    "boxed": "Think it through, then give the answer alone in \\boxed{}.\n\nQuestion: {question}",
}


class QuestionEnv(DatasetEnv):
    """1.0 if the answer is one of the golds, ignoring case, articles and punctuation; else 0.0.

    gold ["Paris", "Paris, France"]    "<answer>paris</answer>"  ->  1.0

    `form` is where the answer is read: "tag" is <answer>...</answer>, "boxed" is a box. The last one
    counts. info["f1"] is how far the words overlap with the nearest gold. `request` encloses the question as
    {question}, or follows it; None: that of the form.
    """

    def __init__(
        self,
        *,
        question_key: str = "question",
        answer_key: str = "answer",
        form: str = "tag",
        request: str | None = None,
        **source: Any,
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"form={form!r}: must be one of {', '.join(FORMS)}")
        self.answer_key = answer_key
        self.form = form
        self.request = FORMS[form] if request is None else request
        super().__init__(question_key=question_key, columns=(answer_key,), **source)

    def ask(self, row: Mapping[str, Any]) -> str:
        self.answer = self.answers_of(row, self.answer_key)
        return with_request(self.text_of(row, self.question_key), self.request)

    def respond(self, action: str) -> Turn:
        answer = last_tag(action, "answer") if self.form == "tag" else last_boxed(action)
        golds = accepted_answers(self.answer)
        is_right = answer is not None and any(same_words(answer, gold) for gold in golds)
        info = {
            "correct": is_right,
            "has_answer": answer is not None,
            "f1": max(word_f1(answer or "", gold) for gold in golds),
        }
        return Turn(reward=float(is_right), terminated=True, info=info)

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, self._write(accepted_answers(self.answer)[0]))]

    def sample_random_action(self) -> str:
        return self._write(self.action_rng().choice(("Paris", "42", "yes", "no", "True", "False")))

    def _write(self, answer: str) -> str:
        return f"<answer>{answer}</answer>" if self.form == "tag" else f"\\boxed{{{answer}}}"
