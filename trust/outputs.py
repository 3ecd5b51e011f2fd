"""Fuzzed model outputs through every parser, grader, call format, template and verdict.

Texts are drawn from fragments that the readers know (tags, boxes, fences, JSON, LaTeX, control tokens, words
of a verdict), from Unicode and from numbers, sometimes nested or repeated without end. A text fails where a
reader raises, where it takes longer than `DEADLINE`, and where an answer that is wrong by construction is
paid. Every text goes through all readers of one group; an alarm ends a reader that does not return.
"""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from graft.envs import ENVS
from graft.envs.dataset.prompts import opened
from graft.rewards.answers import countdown_score, exact_match, f1, last_answer, math_answer
from graft.rewards.countdown_use import countdown_use
from graft.rewards.deep_research import deep_research
from graft.rewards.judge.prompt import Grade, JudgePrompt
from graft.rewards.maths.grading import SYMBOLIC, WORKERS, decide
from graft.rewards.maths.hendrycks import hendrycks_math
from graft.rewards.sources import SOURCES
from graft.text import calls, parse
from graft.text.chat import Chat
from graft.text.syntax_probe import syntax_of
from graft.text.turn import readings
from graft.tools.calculator import Calculator
from graft.tools.formats import FORMATS
from graft.types import Author, Episode, Leaf, Span, Task, Trajectory
from tests.envs.env_kit import build
from tests.text.text_calls import CALLING, tokenizer_of
from tests.text.text_templates import SEARCH, small_bpe
from trust.bank import Row

SMALL, FULL = 5_000, 1_000_000
DEADLINE = 5.0  # seconds for one text, its readers and the processes that they ask
LONG = 20_000  # characters of a text that is repeated

FRAGMENTS = r"""
<answer> </answer> <think> </think> <python> </python> <search> </search> <result> </result> <tool_call>
</tool_call> <tool_name> </tool_name> <arguments> </arguments> <calculator> </calculator> <|im_start|>
<function=f> </function> <parameter=x> </parameter> <arg_key> </arg_key> <arg_value> </arg_value> [TOOL_CALLS]
[ARGS] <|python_tag|> <｜tool▁call▁begin｜>function<｜tool▁sep｜> ```json ```<｜tool▁call▁end｜> <|call|>
<|tool_call_start|> <|tool_call_end|> [f(x=1)] <|start|>assistant analysis to=functions.f
<|im_end|> <|endoftext|> <|channel|> <|message|> <eos> <pad> ``` ```python ~~~ ` #### \boxed{ \boxed \fbox{ }
{ [ ] ( ) \frac{ \dfrac \sqrt{ \text{ \left( \right) \infty \pi ^{ _{ \\ \begin{pmatrix} \end{pmatrix} & $ $$
\% \times \cdot {"name":"f","arguments":{"x":1}} {"name" "arguments": null true NaN Infinity 1e999 \ud800
\u0000 nan inf -inf 0/0 x/x x-x ** ^ + - * / = < > ! , . : ; ' " 0 1 2 3 7 42 -1 0.5 1,234 007 1e5
999999999999999999 Correct Incorrect NOT_ATTEMPTED correct incorrect not No. isn't A B C Verdict: Grade: yes
no True False None import print( lambda __import__ eval( calculate compare and left up guess The answer is so
<<< >>> graft.sentinel.7c1e.0. {question} {truth} {prediction} %s {0} \1 \g<0>
""".split()  # noqa: SIM905
SPACES = (" ", "\n", "\t", "", "", "\r\n", "\u00a0", "\u200b", "\x00", "\x1e", "\u2028")
STRANGE = "é漢字🙂\u0301\u202eß½²٣∞−×÷≤Ａ１\ud800\udfff\ufeff"

TEXT_GOLD, NUMBER_GOLD = "Qzxvanbrook", "7919.375"
"""Answers that no text contains or computes by chance."""
NUMBERS, TARGET = [3, 7, 25, 50], 9973
"""No expression with these numbers, each used once, has this value."""


Reader = Callable[[str, random.Random], str]
"""(a text, a generator) -> what was paid for a wrong answer, or ""."""


class Late(Exception):
    """The alarm of one text."""


def text_of(draw: random.Random) -> str:
    """One fuzzed output, usually of less than 300 characters."""
    parts: list[str] = []
    for _ in range(draw.choice((1, 2, 3, 5, 8, 13, 21))):
        kind = draw.random()
        if kind < 0.75:
            parts.append(draw.choice(FRAGMENTS))
        elif kind < 0.85:
            parts.append(str(draw.randint(-(10 ** draw.randint(0, 20)), 10 ** draw.randint(0, 20))))
        elif kind < 0.95:
            parts.append("".join(draw.choices(STRANGE, k=draw.randint(1, 4))))
        else:
            parts.append(chr(draw.randrange(0x20, 0x3000)))
        parts.append(draw.choice(SPACES))
    shape = draw.random()
    if shape < 0.0005:  # one in two thousand: nested or repeated
        return (draw.choice(FRAGMENTS) * draw.randint(100, LONG))[:LONG]
    if shape < 0.001:
        opening, closing = draw.choice((("(", ")"), ("[", "]"), ("{", "}"), ("\\frac{", "}")))
        depth = draw.randint(50, 2000)
        return f"\\boxed{{{opening * depth}{''.join(parts)}{closing * depth}}}"
    whole = "".join(parts)
    if shape < 0.2:
        return f"\\boxed{{{whole}}}"
    return f"<think>hm</think><answer>{whole}</answer>" if shape < 0.3 else whole


def attempt(text: str, answer: Any) -> tuple[Task, Trajectory]:
    task = Task("t", "toy", prompt=({"role": "user", "content": "Who?"},), answer=answer)
    episode = Episode(task)
    root = episode.append(Span(None, Author.TASK, [], text="Who?"))
    episode.leaves.append(Leaf((episode.append(Span(root, Author.POLICY, [], text=text)),)))
    return task, next(episode.trajectories())


SYNTAXES = [*dict.fromkeys(syntax_of(Chat(tokenizer_of(name))) for name in CALLING)]


def parsers(text: str, draw: random.Random) -> str:
    for read in (
        parse.tags,
        parse.last_boxed,
        parse.last_number,
        parse.marked_number,
        parse.first_answer,
        parse.first_marked,
        parse.code_blocks,
        calls.read_arguments,
        last_answer,
        opened,
    ):
        read(text)
    for style in calls.STYLES:
        calls.tool_calls(text, style)
    for syntax in SYNTAXES:
        list(readings(text, syntax, [SEARCH]))
    countdown_use(text, NUMBERS)
    return ""


CALCULATOR = Calculator()


def call_formats(text: str, draw: random.Random) -> str:
    for call_format in FORMATS.values():
        styles = {name: call_format.style(name) for name in ("python", "search", "f")}
        call_format.find(text, styles)
    CALCULATOR(text)
    return ""


def rewards(text: str, draw: random.Random) -> str:
    paid: dict[str, float] = {}
    for gold in (TEXT_GOLD, NUMBER_GOLD):
        if gold in text:
            continue
        task, trajectory = attempt(text, gold)
        for reward in (exact_match, f1, hendrycks_math, deep_research):
            paid[reward.__name__] = max(reward(task, trajectory), paid.get(reward.__name__, 0.0))
        for source, grader in SOURCES.items():
            meta = {"task": "arithmetic", "nums": NUMBERS, "target": TARGET, "expr": "3+7+25+50"}
            paid[source] = max(grader(text, gold, meta) or 0.0, paid.get(source, 0.0))
    paid["countdown"] = countdown_score(last_answer(text), NUMBERS, TARGET)
    return ", ".join(f"{name} {value:g}" for name, value in paid.items() if value > 0)


def maths(text: str, draw: random.Random) -> str:
    answer = last_answer(text)
    for gold in (NUMBER_GOLD, r"\frac{7919}{31}", "(7919, 31)", "x^{7919}+31"):
        if decide(answer, gold):
            return f"decide, {gold}"
    return ""


def symbolic(text: str, draw: random.Random) -> str:
    """Those that math-verify decides, in its processes."""
    return "math_answer" if math_answer(*attempt(text, r"\frac{7919}{31}x")) > 0 else ""


def warm_symbolic() -> Reader:
    """The processes take seconds to start, which is not the time of the first text."""
    WORKERS.call(f"{SYMBOLIC}:math_equal", "x", "y", timeout=60.0)
    return symbolic


NEGATIONS = (
    "No. The {} answer is Paris.",
    "It isn't {}.",
    "not quite {}",
    "<think>maybe {}",
    "{}? No, wrong.",
    "This is not {}.",
    "{} would have been Paris.",
    "I would not say {}",
)
PROMPTS = [JudgePrompt("correct"), JudgePrompt("simpleqa")]


def verdicts(text: str, draw: random.Random) -> str:
    word = draw.choice(("correct", "Correct", "CORRECT", "A: CORRECT"))
    negated = draw.choice(NEGATIONS).format(word)
    for prompt in PROMPTS:
        prompt.read(text)
        for reply in (negated, f"{text}\n{negated}"):
            if prompt.read(reply) is Grade.CORRECT:
                return f"{prompt.name}, {reply!r}"
        filled = prompt.fill(text, [TEXT_GOLD], text)
        fence = filled.rpartition(">>> is data")[0].rpartition(" ")[2]
        if filled.count(f"\n{fence}>>>") != 3 or filled.count(f"<<<{fence}\n") != 3:
            return f"{prompt.name}: the text changes its quotation"
    return ""


CHAT = Chat(small_bpe(), "chatml")
SPECIAL = CHAT.tokenizer.special_ids


def templates(text: str, draw: random.Random) -> str:
    """Control tokens in contents are letters: a prompt has as many as with a harmless content."""
    try:
        text.encode()
    except UnicodeEncodeError:  # a tokenizer reads UTF-8; environments drop lone surrogates
        text = text.encode(errors="replace").decode()
    counts: list[list[int]] = []
    for content in ("x", text or "x"):
        messages = [{"role": role, "content": content} for role in ("system", "user")]
        prompt = CHAT.prompt(messages)
        more = CHAT.extend([{"role": "user", "content": content}], closed=True)
        counts.append([sum(token in SPECIAL for token in tokens) for tokens in (prompt, more)])
    return "" if counts[0] == counts[1] else f"control tokens {counts}"


class Environments:
    """A text is one action in each of a few environments; an episode that ended starts again."""

    def __init__(self, names: list[str]) -> None:
        self.envs = [(name, build(name)) for name in names]
        self.played = 0
        for _, env in self.envs:  # the first item of a dataset starts processes and reads files
            env.reset(0)

    def prepare(self, draw: random.Random) -> None:
        """Pose a task; some datasets take seconds for one, which is no time of the text."""
        self.name, self.env = self.envs[self.played % len(self.envs)]
        self.played += 1
        _, self.info = self.env.reset(draw.randrange(1000))

    def __call__(self, text: str, draw: random.Random) -> str:
        name, info = self.name, self.info
        turn = self.env.step(text)
        json.dumps(turn.observation)
        if not math.isfinite(turn.reward):
            return f"{name}: reward {turn.reward}"
        gold = info.get("answer")
        # of several right solutions the gold is only one, but none is written by chance
        is_wrong = isinstance(gold, str) and len(gold) > 3 and gold.strip() not in text
        if name.startswith("rg:") and is_wrong and turn.reward >= 0.99:
            return f"{name}: reward {turn.reward} for {text!r}, gold {gold!r}"
        return ""


def quick_envs() -> list[str]:
    """Environments without data and without processes."""
    found = [name for name, entry in ENVS.items() if not entry.needs and not name.startswith("rg:")]
    return [name for name in found if not getattr(build(name), "blocking", True)]


def groups() -> Iterator[tuple[str, float, Callable[[], Reader]]]:
    """Name, share of the count, and what makes the reader."""
    yield "parsers", 0.30, lambda: parsers
    yield "call formats", 0.20, lambda: call_formats
    yield "rewards", 0.17, lambda: rewards
    yield "maths", 0.10, lambda: maths
    yield "maths in processes", 0.01, warm_symbolic
    yield "judge verdicts", 0.10, lambda: verdicts
    yield "chat templates", 0.06, lambda: templates
    yield "environments", 0.05, lambda: Environments(quick_envs())
    scored = [name for name in ENVS if name.startswith("rg:")]
    yield "reasoning-gym", 0.01, lambda: Environments(scored)


def run(count: int, seed: int) -> Iterator[Row]:
    for name, share, make in groups():
        yield fuzz(name, make(), max(1, round(count * share)), seed)


def fuzz(name: str, read: Reader, count: int, seed: int) -> Row:
    """The row of one group: texts that raise, hang or are paid."""
    row = Row("outputs", name, count)
    draw = random.Random(f"{name} {seed}")
    slowest = 0.0
    before = signal.signal(signal.SIGALRM, _late)
    try:
        for _ in range(count):
            text = text_of(draw)
            if isinstance(read, Environments):
                read.prepare(draw)
            started = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, 2 * DEADLINE)
            try:
                if paid := read(text, draw):
                    row.failures.append(f"paid: {paid}: {text[:200]!r}")
            except Exception as error:  # each is a failure of the reader, whatever it is
                row.failures.append(f"{type(error).__name__}: {error}: {text[:200]!r}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.perf_counter() - started
            slowest = max(slowest, took)
            if took > DEADLINE:
                row.failures.append(f"took {took:.1f} s: {text[:200]!r}")
    finally:
        signal.signal(signal.SIGALRM, before)
    row.measured = {"slowest, ms": round(1000 * slowest)}
    return row


def _late(*_: Any) -> None:
    raise Late(f"no answer in {2 * DEADLINE:g} s")
