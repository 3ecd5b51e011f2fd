"""A language model as judge: does the policy's answer mean the same as the accepted one?

    gold "Barack Obama", answer "barack obama."         1.0, the same text: no request
    gold "Barack Obama", answer "the 44th president"    a request; "Correct" is 1.0, "Incorrect" 0.0

The judge is any server with OpenAI's chat completions (vLLM, SGLang, llama.cpp, a hosted model). A
failed request is repeated after growing pauses, or after the server's Retry-After. If all attempts fail,
the texts are compared instead, so that a run continues without its judge; `counts["failures"]` is the
number of such verdicts. Evaluations should set `strict`: no verdict, no score.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import islice
from pathlib import Path

from graft.http import HttpFault
from graft.rewards.answers import accepted_answers, in_words, last_answer, question_of
from graft.rewards.judge.agreement import Agreement, JudgedItem
from graft.rewards.judge.prompt import Grade, JudgePrompt
from graft.text.parse import last_boxed
from graft.tools.answer_cache import CacheBroken, SearchCache
from graft.tools.chat_model import ChatModel
from graft.tools.errors import ToolError
from graft.types import Task, Trajectory

log = logging.getLogger(__name__)

ASKED = 2  # requests for a verdict until a reply ends with one
MAX_REPLY = 2**20  # bytes; the verdict is one word
NOT_ATTEMPTED = "judge/not_attempted"
"""The metric of an attempt that a prompt with grades was filled for."""
AT_A_TIME = 1024  # items of `agreement_on` in memory: a file may have a million samples


class JudgeError(ToolError):
    """The judge gave no verdict; the message says why. In a rollout it fails one attempt."""


class RateLimit:
    """The earliest start of the next request of any thread: 1/rate seconds after the last, and not before
    the end of the server's Retry-After; None: no rate."""

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise ValueError(f"judge: rate={rate} must be above 0, in requests per second, or None")
        self.gap = 1 / rate if rate else 0.0
        self._free = 0.0  # when the next start is allowed
        self._taking = threading.Lock()

    def wait(self, end: float) -> bool:
        """Reserve the next start and wait for it; False at once if it is after `end`."""
        with self._taking:
            start = max(self._free, time.monotonic())
            if start > end:
                return False
            self._free = start + self.gap
        if (left := start - time.monotonic()) > 0:
            time.sleep(left)
        return True

    def hold(self, seconds: float) -> None:
        """Let no thread start a request for this time."""
        with self._taking:
            self._free = max(self._free, time.monotonic() + seconds)


class Judge:
    """A reward: 1.0 if the answer is the accepted text or if the judge at `url` calls it correct.

    Judge("http://host:8001/v1", model="Qwen2.5-72B-Instruct", cache="verdicts.db")
    """

    blocking = True
    """It waits for a server, so it is called in a thread."""

    def __init__(
        self,
        url: str | None = None,
        model: str | None = None,
        *,
        api_key_env: str = "",
        timeout: float = 30.0,
        retries: int = 3,
        deadline: float = 120.0,
        cache: str | Path | None = None,
        concurrency: int = 8,
        rate: float | None = None,
        prompt: str | Path = "correct",
        strict: bool = False,
    ) -> None:
        """
        url: the server's base, such as http://host:8001/v1; None takes $JUDGE_URL.
        model: the name of the served model; None takes $JUDGE_MODEL, and "" sends no name, for a server
        with one model.
        api_key_env: the environment variable with the key for this server; "": no key, or
        $OPENAI_API_KEY for OpenAI's own server.
        timeout: seconds for one attempt. retries: attempts after the first.
        deadline: seconds for a verdict: attempts, pauses and the wait for a free slot together.
        cache: a file of replies that processes of one machine may share; a cached question is not sent
        again.
        concurrency: requests at a time.
        rate: requests per second, over all threads; None: no limit.
        prompt: a bundled name or a file: see `graft.rewards.judge.prompt`.
        strict: without a verdict the attempt fails (JudgeError) instead of comparing texts, so every
        score comes from a verdict.
        """
        if timeout <= 0 or deadline <= 0 or retries < 0 or concurrency < 1:
            raise ValueError(
                f"judge: timeout={timeout} and deadline={deadline} must be above 0, "
                f"retries={retries} at least 0, concurrency={concurrency} at least 1"
            )
        self._chat = ChatModel(
            url,
            model,
            who="judge",
            api_key_env=api_key_env,
            timeout=timeout,
            retries=retries,
            max_bytes=MAX_REPLY,
        )
        self.url, self.model = self._chat.url, self._chat.name
        self.prompt = JudgePrompt(prompt)
        self.deadline, self.concurrency, self.strict = deadline, concurrency, strict
        self.counts: Counter[str] = Counter(calls=0, cached=0, failures=0)
        """Verdicts that were requested, taken from the cache, and not obtained."""
        self._cache = _open_cache(cache) if cache else None
        self._slots = threading.BoundedSemaphore(concurrency)
        self._rate_limit = RateLimit(rate)
        self._agreement = Agreement()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        item = JudgedItem(
            question_of(task), accepted_answers(task.answer), prediction_of(trajectory)
        )
        grade = self.grade(item)
        if self.prompt.has_grades:
            trajectory.leaf.metrics[NOT_ATTEMPTED] = float(grade is Grade.NOT_ATTEMPTED)
        return float(grade is Grade.CORRECT)

    def is_correct(self, question: str, golds: Sequence[str], prediction: str) -> bool:
        """True if the prediction is one of the accepted texts, or the judge says it means the same."""
        return self.grade(JudgedItem(question, golds, prediction)) is Grade.CORRECT

    def grade(self, item: JudgedItem) -> Grade:
        """The grade of a prediction; the accepted text and an empty prediction need no request."""
        if item.is_same_text or not item.prediction:
            with self._lock:
                self._agreement.not_asked += 1
            return Grade.CORRECT if item.is_same_text else Grade.NOT_ATTEMPTED
        try:
            return self._verdict(item)
        except JudgeError as error:
            if self.strict:
                raise
            self._warn("judge", f"{error}; answers are compared as texts wherever the judge fails")
            return Grade.INCORRECT  # as texts they differ

    def verdict(self, item: JudgedItem) -> bool | None:
        """The judge's verdict, also where the texts are the same; None if there is none."""
        try:
            return self._verdict(item) is Grade.CORRECT
        except JudgeError as error:
            self._warn("judge", str(error))
            return None

    def agreement(self) -> Agreement:
        """The agreement of its verdicts so far with the comparison of texts.

        A reward sends only items whose texts differ; `agreement_on` sends every item.
        """
        with self._lock:
            return deepcopy(self._agreement)

    def agreement_on(self, items: Iterable[JudgedItem]) -> Agreement:
        """Ask about every item, those with the same text too, `concurrency` at a time, and compare."""
        found = Agreement()
        left = iter(items)
        with ThreadPoolExecutor(self.concurrency) as pool:
            while some := list(islice(left, AT_A_TIME)):
                judged = [item for item in some if item.prediction]
                found.not_asked += len(some) - len(judged)
                for item, verdict in zip(judged, pool.map(self.verdict, judged), strict=True):
                    if verdict is None:
                        found.failures += 1
                    else:
                        found.add(item, verdict)
        return found

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _verdict(self, item: JudgedItem) -> Grade:
        try:
            grade = self._grade(item)
        except JudgeError:
            with self._lock:
                self.counts["failures"] += 1
                self._agreement.failures += 1
            raise
        with self._lock:
            self._agreement.add(item, grade is Grade.CORRECT)
        return grade

    def _grade(self, item: JudgedItem) -> Grade:
        """The grade in the reply; one without a verdict is asked for again, between another fence."""
        question, golds, prediction, _ = item
        kept = self._read_cache(known := self.prompt.cache_key(question, golds, prediction))
        if kept is not None and (grade := self.prompt.read(kept)) is not None:
            self._count("cached")
            return grade
        self._count("calls")
        reply = ""
        for _ in range(ASKED):
            reply = self._request(self.prompt.fill(question, golds, prediction))
            if (grade := self.prompt.read(reply)) is not None:
                self._keep(known, reply)
                return grade
        raise JudgeError(
            f"judge {self.url} gave no verdict in {ASKED} replies: their last line must be the verdict "
            f"alone, and the last one ends with {reply[-80:]!r}"
        )

    @property
    def _cache_key(self) -> str:
        return f"judge:{self.model or self.url}"  # by model: the server may change

    def _read_cache(self, known: str) -> str | None:
        if self._cache is None:
            return None
        try:
            answer = self._cache.get(self._cache_key, known, 0)
        except CacheBroken as error:
            self._warn("cache", f"the judge's cache cannot be read: {error}")
            return None
        return answer if isinstance(answer, str) else None

    def _keep(self, known: str, reply: str) -> None:
        if self._cache is not None:
            try:
                self._cache.put(self._cache_key, known, 0, reply)
            except CacheBroken as error:  # the verdict is still good
                self._warn("cache", f"the judge's cache cannot be written: {error}")

    def _request(self, prompt: str) -> str:
        """The judge's reply; JudgeError after the last attempt or at the deadline."""
        start = time.monotonic()
        if not self._slots.acquire(timeout=self.deadline):
            raise JudgeError(f"no free slot for judge {self.url} in {self.deadline:g} s")
        try:
            return self._chat.reply(
                [{"role": "user", "content": prompt}],
                temperature=0,
                is_whole=True,
                deadline=self.deadline - (time.monotonic() - start),
                before=self._wait_for_start,
                # not longer than one request can wait
                on_fault=lambda fault, _: self._rate_limit.hold(
                    min(fault.retry_after, self.deadline)
                ),
            )
        except HttpFault as fault:
            raise JudgeError(f"judge {self.url} {fault}") from fault
        finally:
            self._slots.release()

    def _wait_for_start(self, end: float) -> None:
        if not self._rate_limit.wait(end):
            raise JudgeError(
                f"no request to judge {self.url} could start in {self.deadline:g} s: its rate= or its "
                "Retry-After is too slow for the deadline"
            )

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _warn(self, about: str, what: str) -> None:
        with self._lock:
            is_first = about not in self._warned
            self._warned.add(about)
        if is_first:
            log.warning("%s (reported once; `counts` has the total)", what)


def prediction_of(trajectory: Trajectory) -> str:
    r"""The final answer of the policy's last message, out of its box: <answer>It is \boxed{7}</answer>."""
    answer = last_answer(trajectory.answer_text)
    box = last_boxed(answer)
    return in_words(answer if box is None else box)


def _open_cache(path: str | Path) -> SearchCache:
    try:
        return SearchCache(path)
    except ValueError as error:
        raise ValueError(
            f"cannot keep the judge's replies in {str(path)!r}: {error.__cause__ or error}; name a "
            "file that does not exist yet, on a local disk"
        ) from error
