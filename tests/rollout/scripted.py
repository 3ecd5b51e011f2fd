"""Engines that follow scripts, an env that receives their turns, and the actions they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graft.actions.actions import Actions, load_actions
from graft.envs.base import BaseEnv
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.types import NO_ACTION, CallText, Completion, Finish, Sampling, Turn

LETTERS = FastTokenizer.characters(" \n:,.<>=/?!ABCDEacdehimnoprstuwxSDN")
SORTING = load_actions("sorting", LETTERS)


def encoded(text: str) -> list[int]:
    return LETTERS.encode(text)


def call(tool: str, *arguments: str) -> list[int]:
    """The decisions of a whole call."""
    return [a for a in SORTING.spell(tool, arguments).actions if a != NO_ACTION]


EOS = LETTERS.eos_id

Script = Sequence[Sequence[int]]
"""The decisions of each sample."""


class TextEngine:
    """What engines of tests share; `kind` is the class of their contexts."""

    version = 0
    kind: Any

    def open(self, tokens: Sequence[int], key: int | None = None) -> Any:
        return self.kind(self, list(tokens))

    def load(self, weights: Any, version: int) -> None: ...

    def close(self) -> None: ...


class TextContext:
    """A context in which `sample` is left to write."""

    mode: int | None = None

    def __init__(self, engine: Any, tokens: list[int]) -> None:
        self.engine, self.tokens = engine, tokens

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def fork(self, key: int | None = None, at: int | None = None) -> Any:
        return type(self)(self.engine, self.tokens[:at])

    def close(self) -> None: ...

    def write(
        self, tokens: list[int], finish: Finish = Finish.STOP, logprob: float = 0.0, **more: Any
    ) -> Completion:
        """Append the tokens and return them as they were drawn."""
        self.tokens += tokens
        same = [logprob] * len(tokens)
        drawn = {"entropies": same, "version": self.engine.version, **more}
        modes = [0] * len(tokens)
        return Completion(tokens, [*tokens], same, modes=modes, finish=finish, **drawn)


class Swapping(BaseEnv):
    """A, B stand in the wrong order. A swap exchanges them; a turn without a call ends it."""

    env_id = "swapping"
    observe_as = "inline"
    stop = ("never",)
    max_turns = None

    def __init__(self, fault: Callable[[Swapping], None] = lambda env: None) -> None:
        super().__init__()
        self.fault = fault
        self.received: list[str] = []

    def pose(self) -> str:
        self.order, self.received, self.answer = "A, B", [], "B, A"
        return "S?"

    def respond(self, action: str) -> Turn:
        self.received.append(action)
        self.fault(self)
        if not isinstance(action, CallText):
            return Turn(reward=float(self.order == self.answer), terminated=True)
        if action.tool == "swap":
            self.order = ", ".join(reversed(self.order.split(", ")))
            return Turn(self.order, info={"tool": "swap"})
        return Turn("A > B", info={"tool": "compare"})


class ScriptedEngine(TextEngine):
    """The n-th context that samples follows scripts[n]; `likely` is what `score` returns."""

    version, vocab_size = 3, LETTERS.vocab_size

    def __init__(
        self,
        scripts: Sequence[Script],
        actions: Actions = SORTING,
        likely: Callable[[int, Sequence[int]], float] = lambda place, action: -1.0,
    ) -> None:
        self.scripts, self.actions, self.likely = list(scripts), actions, likely
        self.scored: list[tuple[list[int], list[int], list[list[int]], int]] = []
        self.contexts: list[ScriptedContext] = []

    def open(self, tokens, key=None):
        return self._add(tokens, None)

    def _add(self, tokens, mode):
        context = ScriptedContext(self, list(tokens), mode)
        self.contexts.append(context)
        return context

    def score(self, texts, at, continuations, mode=0, temperature=1.0):
        wanted = [list(c) for c in continuations]
        self.scored += [(list(t), list(p), wanted, mode) for t, p in zip(texts, at, strict=True)]
        return [[[[self.likely(p, a) for a in c] for c in wanted] for p in places] for places in at]


class ScriptedContext(TextContext):
    def __init__(self, engine: ScriptedEngine, tokens: list[int], mode: int | None) -> None:
        super().__init__(engine, tokens)
        self.mode = mode
        self.script: list[Sequence[int]] | None = None
        self.is_open = True

    def append(self, tokens):
        assert self.is_open
        self.tokens.extend(tokens)

    def fork(self, key=None, at=None):
        assert self.is_open, "forked after it was closed"
        return self.engine._add(self.tokens[:at], self.mode if at is None else None)

    def close(self):
        self.is_open = False

    async def sample(self, sampling, grammar=None):
        assert self.is_open and grammar is self.engine.actions.grammar
        if self.script is None:
            self.script = list(self.engine.scripts.pop(0))
        mode = grammar.start if self.mode is None else self.mode
        tokens, actions, modes, finish = [], [], [], Finish.STOP
        for action in self.script.pop(0):
            assert self.engine.actions.space.allows(mode, action), (mode, action)
            written = grammar.written(mode, action)
            tokens += written
            actions += [action] + [NO_ACTION] * (len(written) - 1)
            modes += [mode] * len(written)
            finish = Finish.EXIT if grammar.is_exit(mode, action) else Finish.STOP
            mode = grammar.step(mode, action)
        if len(tokens) > sampling.max_tokens:
            n, finish = sampling.max_tokens, Finish.LENGTH
            tokens, actions, modes = tokens[:n], actions[:n], modes[:n]
        self.tokens += tokens
        self.mode = mode
        logprobs = [0.0 if action == NO_ACTION else -0.5 for action in actions]
        return Completion(tokens, actions, logprobs, logprobs, modes, finish, self.engine.version)


def scripted(scripts: Sequence[Script], make_env=Swapping, likely=None, **changes) -> RolloutSetup:
    engine = ScriptedEngine(scripts) if likely is None else ScriptedEngine(scripts, likely=likely)
    given = {"sampling": Sampling(max_tokens=200), "actions": SORTING, **changes}
    return RolloutSetup(
        engine=engine, chat=Chat(LETTERS), make_env=lambda task: make_env(), **given
    )
