"""Applies a grammar to drawn actions on the host: what each one writes, and the mode after it."""

from __future__ import annotations

from typing import NamedTuple

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.native.request import Draw, SampleRequest
from graft.protocols import Grammar
from graft.types import NO_ACTION, Finish


class Decision(NamedTuple):
    """A grammar's answer to an action."""

    tokens: list[int]
    mode: int
    is_exit: bool
    fault: str
    """Why the answer is invalid; empty if it is valid."""


class GrammarFollower:
    """Adds draws to requests under a grammar; the grammar's answers are cached until another comes."""

    def __init__(self, space: ActionSpace) -> None:
        self.space = space
        self._grammar: Grammar | None = None
        self._special: dict[int, frozenset[int]] = {}
        self._decisions: dict[tuple[int, int], Decision] = {}

    def add(self, draw: Draw, grammar: Grammar) -> Finish | None:
        """Add plain tokens and special actions in runs of either kind."""
        if grammar is not self._grammar:
            self._grammar, self._special = grammar, special_actions(grammar, self.space)
            self._decisions = {}
        request, actions, logprobs, entropies = draw
        start, count = 0, len(actions)
        finish: Finish | None = None
        while start < count and finish is None and not request.is_over:
            action, special = actions[start], self._special.get(request.mode)
            if special is not None and action not in special:
                stop = count
                if not special.isdisjoint(actions):
                    stop = next((i for i in range(start, count) if actions[i] in special), count)
                run = slice(start, stop)
                finish = request.add_tokens(actions[run], logprobs[run], entropies[run])
                start = stop
            elif (stop := self._add_decisions(draw, grammar, start)) > start:
                start = stop
            elif action == NO_ACTION:
                start += 1
            else:
                finish = self._decide(request, grammar, action, logprobs[start], entropies[start])
                start += 1
        return finish

    def _add_decisions(self, draw: Draw, grammar: Grammar, start: int) -> int:
        """Add special actions from `start` on, up to a plain token or to one that may end the completion;
        the place of that one."""
        request, actions, logprobs, entropies = draw
        mode, room = request.mode, request.budget_left
        if request.stop_strings is not None:
            return start  # each of them may end it
        at = start
        for at in range(start, len(actions)):
            action, special = actions[at], self._special.get(mode)
            if action == NO_ACTION:
                continue
            if special is not None and action not in special:
                break
            decision = self._decisions.get((mode, action)) or self._answer(grammar, mode, action)
            tokens, next_mode, is_exit, fault = decision
            room -= len(tokens)
            if fault or is_exit or room <= 0 or action in request.stop_tokens:
                break
            request.write(action, logprobs[at], entropies[at], tokens)
            request.mode = mode = next_mode
        else:
            at = len(actions)
        return at

    def _decide(
        self, request: SampleRequest, grammar: Grammar, action: int, logprob: float, entropy: float
    ) -> Finish | None:
        """Write what the action stands for and change the mode; an invalid answer fails the request."""
        mode = request.mode
        decision = self._decisions.get((mode, action)) or self._answer(grammar, mode, action)
        tokens, next_mode, is_exit, fault = decision
        if fault:
            request.fail(EngineError(f"in mode {mode}, after action {action}, the grammar {fault}"))
            return None
        finish = request.add_decision(action, logprob, entropy, tokens, is_exit)
        request.mode = next_mode
        return finish

    def _answer(self, grammar: Grammar, mode: int, action: int) -> Decision:
        """The grammar's answer, always the same: a grammar has no state but its mode."""
        tokens, after = list(grammar.written(mode, action)), grammar.step(mode, action)
        fault = ""
        if not 0 <= after < self.space.num_modes:
            fault = f"went to mode {after} (the action space has 0 to {self.space.num_modes - 1})"
        elif not tokens or not 0 <= min(tokens) <= max(tokens) < self.space.vocab_size:
            fault = f"wrote {tokens} (the model reads tokens 0 to {self.space.vocab_size - 1})"
        decision = Decision(tokens, after, grammar.is_exit(mode, action), fault)
        self._decisions[mode, action] = decision
        return decision


def special_actions(grammar: Grammar, space: ActionSpace) -> dict[int, frozenset[int]]:
    """The actions of each mode that do more than write themselves and stay in the mode.

    Language in which 9 enters a tool: {0: {9, NO_ACTION}}, and all beyond the vocabulary. A mode that
    every action leaves has no entry, nor has any mode of a grammar that is not an `Automaton`.
    """
    if not isinstance(grammar, Automaton):
        return {}
    beyond = {NO_ACTION, *range(space.vocab_size, space.num_actions)}
    special: dict[int, set[int]] = {grammar.start: {*beyond}}
    for mode, action in (*grammar.transitions, *grammar.writes, *grammar.exits):
        special.setdefault(mode, {*beyond}).add(action)
    return {
        mode: frozenset(actions)
        for mode, actions in special.items()
        if grammar.default.get(mode, mode) == mode
    }
