"""Sampling of one turn: freely, and under a structure where a call of the policy is held to its schema.

    So I add.<tool_call>                                     drawn freely, up to the mark
                        {"name": "add", "arguments": {...}}</tool_call>      under the structure of a call
                                                             and freely again

It is one completion: what was drawn freely has mode 0, the rest the rows of its structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from graft.engine.errors import EngineError
from graft.gateway.forest import LiveContext
from graft.protocols import Tokenizer
from graft.structure import Structure, StructureError
from graft.text.call_syntax import CallSyntax
from graft.text.turn import start_of_content
from graft.types import Completion, Finish, Sampling


class TurnForm(NamedTuple):
    """What a turn must look like."""

    turn: Structure | None = None
    """All of it."""
    call: Structure | None = None
    """Each call, from its mark on, where the rest is free."""


class DrawnTurn:
    """A turn while it is drawn; `parts` are its completions, one for each version of the weights."""

    def __init__(
        self,
        live: LiveContext,
        sampling: Sampling,
        tokenizer: Tokenizer,
        syntax: CallSyntax,
        call: Structure | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        """
        call    the structure of calls that are held to one
        begun   the last tokens of the prompt, with which the turn begins
        """
        self.parts: list[Completion] = []
        self.is_lost = False
        """Whether a mark was followed by what its structure does not allow: no call is read then."""
        self._live, self._sampling, self._tokens = live, sampling, [*begun]
        self._tokenizer, self._syntax, self._call = tokenizer, syntax, call
        self._num_begun = len(begun)
        self._start: int | None = None
        """Of an open call: its first token."""
        if call is not None and begun:
            self._start = self._last_mark()

    async def draw(self) -> None:
        try:
            while await self._go_on():
                pass
        finally:
            self._live.is_busy = False

    async def _go_on(self) -> bool:
        """Draw the next part; whether the turn goes on behind it."""
        how = self._next()
        if how is None:
            self.parts[-1] = replace(self.parts[-1], finish=Finish.LENGTH)
            return False
        try:
            part = await self._live.context.sample(how)
        except EngineError as error:
            if how.structure is not self._call or not isinstance(error.__cause__, StructureError):
                raise
            self._call, self._start, self.is_lost = None, None, True
            return True
        self._add(part)
        if self._call is None or part.finish is not Finish.STOP:
            return part.finish is Finish.PAUSE
        is_marked, self._start = self._start is None, None
        if any(stop in self._text(self._num_begun) for stop in self._sampling.stop):
            return False
        if is_marked:
            marked = self._last_mark(len(self._syntax.open.encode()) + 4)
            if not self._is_marked(marked):
                return False  # the turn is over
            text = self._text()
            if self._syntax.open in text[start_of_content(text, self._syntax) :]:
                self._start = marked
        return True

    def _next(self) -> Sampling | None:
        """How to draw the next part; None where no token is left."""
        whole, num_drawn = self._sampling, len(self._tokens) - self._num_begun
        if (budget := whole.max_tokens - num_drawn) < 1:
            return None
        if self._start is not None:
            stop = tuple(one for one in whole.stop if one != self._syntax.close)
            count = len(self._tokens) - self._start
            how = replace(whole, structure=self._call, stop=stop, num_begun=count)
        elif self._call is not None:
            how = replace(whole, stop=(*whole.stop, self._syntax.open), num_begun=num_drawn)
        elif num_drawn:
            how = replace(whole, num_begun=num_drawn)
        else:
            return whole
        return replace(how, max_tokens=budget, min_tokens=0)

    def _add(self, part: Completion) -> None:
        """Add a completion: to the last one, if that ended at a mark or behind a call."""
        self._tokens += part.tokens
        last = self.parts[-1] if self.parts else None
        if last is None or last.finish is Finish.PAUSE or last.version != part.version:
            self.parts.append(part)
            return
        self.parts[-1] = Completion(
            last.tokens + part.tokens,
            last.actions + part.actions,
            last.logprobs + part.logprobs,
            last.entropies + part.entropies,
            last.modes + part.modes,
            part.finish,
            part.version,
            {**last.masks, **part.masks},
        )

    def _last_mark(self, reach: int | None = None) -> int | None:
        """The token in which the last mark of a call begins, of the last `reach` tokens or of all."""
        num_tokens = len(self._tokens)
        first = 0 if reach is None else max(num_tokens - reach, 0)
        starts = range(num_tokens - 1, first - 1, -1)
        return next((at for at in starts if self._syntax.open in self._text(at)), None)

    def _is_marked(self, at: int | None) -> bool:
        """Whether the last token has completed the mark that begins at this one."""
        return at is not None and self._syntax.open not in self._text(at, -1)

    def _text(self, first: int = 0, end: int | None = None) -> str:
        return self._tokenizer.decode(self._tokens[first:end])
