"""The host follows a grammar: draws added at once or one by one make the same completion."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.expa.cost import calculator
from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.request import Draw, SampleRequest
from graft.engine.native.sampling.grammar_follower import GrammarFollower
from graft.types import NO_ACTION, Finish, Sampling

VOCAB = 48
SPACE, GRAMMAR = calculator(VOCAB, every=4)


def drawn(rng: random.Random, count: int) -> list[int]:
    """What a device draws: after an action of several tokens it writes the others in steps of their own."""
    actions: list[int] = []
    mode = GRAMMAR.start
    while len(actions) < count:
        action = rng.choice([a for a in range(SPACE.num_actions) if SPACE.allows(mode, a)])
        actions += [action, *[NO_ACTION] * (len(GRAMMAR.written(mode, action)) - 1)]
        mode = GRAMMAR.step(mode, action)
    return actions[:count]


def request_of(budget: int, stop_tokens: frozenset[int]) -> SampleRequest:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    sampling = Sampling(max_tokens=budget)
    sequence = Sequence([1], None, 0)
    return SampleRequest(
        sequence, 0, sampling, stop_tokens, None, GRAMMAR, GRAMMAR.start, budget, 0, future
    )


def followed(actions: list[int], size: int, request: SampleRequest) -> tuple[object, ...]:
    """The request after draws of `size` actions, up to its end."""
    follower, finish = GrammarFollower(SPACE), None
    for start in range(0, len(actions), size):
        part = slice(start, start + size)
        values = [-float(number) for number in range(len(actions))][part]
        finish = follower.add(Draw(request, actions[part], values, values), GRAMMAR)
        if finish is not None:
            break
    kept = request.actions, request.logprobs, request.entropies, request.modes
    return finish, request.mode, request.sequence.tokens, *kept


@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.integers(2, 20),
    st.frozensets(st.integers(0, SPACE.num_actions - 1), max_size=2),
)
def test_a_segment_at_once_is_the_same_as_action_by_action(
    seed: int, budget: int, size: int, stop_tokens: frozenset[int]
) -> None:
    actions = drawn(random.Random(seed), 60)[:budget]  # a device takes no more steps
    whole = followed(actions, size, request_of(budget, stop_tokens))
    assert whole == followed(actions, 1, request_of(budget, stop_tokens))
    finish, _, tokens, *kept = whole
    assert all(len(part) == len(tokens) - 1 for part in kept)
    assert len(tokens) - 1 <= budget
    if len(tokens) - 1 == budget:
        assert finish is not None


def test_a_call_by_hand() -> None:
    """Token 3 asks for the calculator, which is entered; digit, digit, operator, digit, exit."""
    route, one, plus, leave = VOCAB, VOCAB + 2, VOCAB + 11, VOCAB + 15
    actions = [40, 3, route, NO_ACTION, one, one, plus, NO_ACTION, one, leave, NO_ACTION]
    request = request_of(100, frozenset())
    finish, mode, tokens, kept, logprobs, *_ = followed(actions, len(actions), request)
    assert finish is Finish.EXIT and mode == GRAMMAR.start
    assert tokens == [1, 40, 3, 11, 12, 21, 21, 30, 12, 21, 34, 12]
    assert kept == actions
    assert logprobs == [0, -1, -2, 0, -4, -5, -6, 0, -8, -9, 0]
    assert request.modes == [0, 0, 1, 1, 2, 3, 3, 3, 2, 3, 3]
