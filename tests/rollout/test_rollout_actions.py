"""Paths and demonstrations whose calls are actions, with an engine that follows a script."""

import asyncio

import pytest

from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.demonstration import demonstration, plain_decisions
from graft.rollout.episode_builder import EpisodeBuilder
from graft.text.chat import Chat
from graft.types import NO_ACTION, Author, CallText, Sampling, Span, Status, Task
from tests.rollout.scripted import EOS, LETTERS, SORTING, Swapping, call, encoded, scripted

TASK = Task("t", "swapping")
COMPARE_AND_SWAP = [
    [*encoded("So"), *call("compare", "A", "B")],
    call("swap", "A", "B"),
    [*encoded("Done."), EOS],
]


def texts(row) -> list[tuple[str, str]]:
    return [(str(span.author), span.text) for span in row.spans]


def test_a_call_ends_the_sample_and_its_answer_is_written_by_the_template():
    envs: list[Swapping] = []

    class Kept(Swapping):
        def __init__(self):
            super().__init__()
            envs.append(self)

        forkable = False

    where = scripted([COMPARE_AND_SWAP], Kept)
    (episode,) = collect([TASK], where, independent(1))
    (row,) = episode.trajectories()
    assert texts(row) == [
        ("task", "S?"),
        ("policy", "So compare A and B"),
        ("env", ": A > B\n"),
        ("policy", " swap A and B"),
        ("env", " => B, A\n"),
        ("policy", "Done."),
    ]
    assert (row.leaf.reward, row.leaf.status) == (1.0, Status.DONE)
    assert row.leaf.metrics == {"turns": 3.0, "tool_calls": 2.0, "tool_failures": 0.0}
    received = envs[-1].received
    assert received == ["So compare A and B", " swap A and B", "Done."]
    assert [(text.tool, text.arguments) for text in received[:2]] == [
        ("compare", ("A", "B")),
        ("swap", ("A", "B")),
    ]
    assert not isinstance(received[2], CallText)
    assert [*where.engine.contexts[1].tokens] == row.tokens


def test_only_the_first_token_of_a_decision_is_trained():
    (episode,) = collect([TASK], scripted([COMPARE_AND_SWAP]), independent(1))
    row = trajectories_of([episode])
    batch = to_batch(row)
    first = row[0].spans[1]
    assert sum(first.mask) == 2 + 3 and len(first) == len("So compare A and B")
    chosen = [action for action in first.actions if action != NO_ACTION]
    assert chosen == [*encoded("So"), *call("compare", "A", "B")]
    assert batch.num_tokens == 5 + 3 + len("Done.") + 1


def test_a_call_that_is_cut_is_truncated_and_never_made():
    where = scripted([COMPARE_AND_SWAP], sampling=Sampling(max_tokens=12))
    (episode,) = collect([TASK], where, independent(1))
    assert episode.leaves[0].status is Status.TRUNCATED
    assert episode.spans[-1].text == "So compare A"
    assert episode.leaves[0].metrics["tool_calls"] == 0


def test_a_prefill_is_part_of_the_prompt():
    where = scripted([[[*encoded("Done."), EOS]]], prefill="So:\n")
    (episode,) = collect([TASK], where, independent(1))
    assert LETTERS.decode(episode.spans[0].tokens) == "S?So:\n"
    assert [span.author for span in episode.spans] == [Author.TASK, Author.POLICY]


def test_a_prefill_is_left_out_where_the_prompt_ends_with_it():
    user = {"role": "user", "content": "?"}
    for begun, due in {"So:\n": "", "First. So:\n": "", "So: ": "So:\n"}.items():
        assert Chat.due_prefill([user, {"role": "assistant", "content": begun}], "So:\n") == due
    assert Chat.due_prefill([user], "So:\n") == "So:\n"


class Taught(Swapping):
    def demonstrate(self, rng):
        return [
            (Author.POLICY, "So"),
            (Author.POLICY, CallText("any text", "compare", ("A", "B"))),
            (Author.ENV, "A > B"),
            (Author.POLICY, CallText("", "swap", ("A", "B"))),
            (Author.ENV, "B, A"),
            (Author.POLICY, "Done."),
        ]


@pytest.mark.parametrize("prefill", ["", "So:\n"])
def test_a_demonstration_has_the_tokens_and_decisions_of_the_rollout(prefill):
    where = scripted([COMPARE_AND_SWAP], prefill=prefill)
    (rolled,) = collect([TASK], where, independent(1))
    shown = demonstration(TASK, Taught(), Chat(LETTERS), 0, actions=SORTING, prefill=prefill)
    expected = to_batch(trajectories_of([rolled]))
    batch = to_batch(trajectories_of([shown]))
    assert next(shown.trajectories()).tokens == next(rolled.trajectories()).tokens
    assert next(shown.trajectories()).text == next(rolled.trajectories()).text
    for name in ("actions", "modes", "mask", "turns"):
        assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name


class TaughtAtOnce(Taught):
    def demonstrate(self, rng):
        return super().demonstrate(rng)[1:]


def test_an_attempt_can_start_in_a_tool_whose_entry_is_not_trained():
    received: list[str] = []

    class Heard(Swapping):
        def respond(self, action: str):
            received.append(action)
            return super().respond(action)

    script = [call("compare", "A", "B")[1:], *COMPARE_AND_SWAP[1:]]
    where = scripted([script], Heard, start="compare")
    (episode,) = collect([TASK], where, independent(1))
    rolled = to_batch(trajectories_of([episode]))
    (row,) = episode.trajectories()
    assert texts(row)[1:3] == [("policy", " compare"), ("policy", " A and B")]
    assert not any(row.spans[1].mask) and sum(row.spans[2].mask) == 2
    first = received[0]
    assert (first, first.tool, first.arguments) == (" compare A and B", "compare", ("A", "B"))
    how = {"actions": SORTING, "start_tool": "compare"}
    shown = demonstration(TASK, TaughtAtOnce(), Chat(LETTERS), 0, **how)
    batch = to_batch(trajectories_of([shown]))
    for name in ("actions", "modes", "mask", "turns"):
        assert getattr(batch, name).tolist() == getattr(rolled, name).tolist(), name
    with pytest.raises(ValueError, match=r"actions\.start=compare: every attempt begins"):
        demonstration(TASK, Taught(), Chat(LETTERS), 0, **how)


def test_plain_text_follows_the_grammar_and_may_not_hide_a_call():
    plain = plain_decisions(encoded("So."), SORTING)
    assert (plain.actions, plain.modes, plain.mode) == (encoded("So."), [0, 0, 0], 0)
    with pytest.raises(ValueError, match="as a CallText of its own"):
        plain_decisions([SORTING.space.vocab_size], SORTING)


def test_a_cut_keeps_every_path_where_it_stood():
    """Two finished trajectories and a live one; the first is cut, so that all later spans move up."""

    async def play():
        where = scripted([COMPARE_AND_SWAP, [[*encoded("no"), EOS]], [call("swap", "A", "B")]])
        async with EpisodeBuilder(TASK, where) as builder:
            await builder.open()
            trajectories = [await builder.root() for _ in range(3)]
            await trajectories[0].finish()
            await trajectories[1].finish()
            await trajectories[2].turn()
            before = [LETTERS.decode(tokens_of(builder, trajectory)) for trajectory in trajectories]
            assert builder.cut(trajectories[0].tip, 3) == 1  # "S?" and "S" of "So compare A and B"
            assert builder.episode.spans[1].text == "S"
            assert builder.episode.spans[2].text == "o compare A and B"
            assert [
                LETTERS.decode(tokens_of(builder, trajectory)) for trajectory in trajectories
            ] == before
            assert [trajectory.leaf.tips for trajectory in trajectories[:2]] == [
                (trajectories[0].tip,),
                (trajectories[1].tip,),
            ]
            assert (
                builder.cut(trajectories[0].tip, 2) == 0
            )  # exactly behind the prompt: nothing to split
            assert builder.cut(trajectories[0].tip, 3) == 1
            assert len(builder.episode.spans) == 10

    def tokens_of(builder, trajectory) -> list[int]:
        return [
            t for i in builder.episode.walk(trajectory.tip) for t in builder.episode.spans[i].tokens
        ]

    asyncio.run(play())


def test_a_cut_behind_an_empty_observation_keeps_it():
    async def play():
        async with EpisodeBuilder(TASK, scripted([])) as builder:
            await builder.open()
            builder.episode.append(Span(0, Author.POLICY, [5]))
            builder.episode.append(Span(1, Author.ENV, []))
            tip = builder.episode.append(Span(2, Author.POLICY, [6]))
            return builder.cut(tip, 3)

    assert asyncio.run(play()) == 2
