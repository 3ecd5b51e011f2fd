"""ARPO's and AEPO's branches: who forks, where, and how many leaves there are in the end."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft.algos.parts import make
from graft.algos.presets import build
from graft.engine.native.engine import NativeEngine
from graft.envs.base import BaseEnv
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.arpo_faithful import FaithfulBranching
from graft.rollout.branches.branch import BRANCHES, independent
from graft.rollout.branches.entropy import aepo, arpo
from graft.rollout.branches.uncertainty import (
    mean_entropy,
    probability,
    root_budget,
    turn_entropies,
)
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.tools.errors import ToolError
from graft.types import Author, Finish, Sampling, Span, Status, Task, Turn
from tests.rollout.scripted import TextContext, TextEngine

LETTERS = FastTokenizer.characters("abcdefghijklmnopqrstuvwxyz]?;")
TASK = Task("t", "asking")


class OneQuestion(BaseEnv):
    """Every turn that ends in "]" is answered with "?;"; any other ends the attempt."""

    env_id = "asking"
    observe_as = "inline"
    stop = ("]",)
    max_turns = None
    saved = (*BaseEnv.saved, "received")

    def pose(self) -> str:
        self.received: list[str] = []
        self.answer = "z"
        return "q"

    def respond(self, action: str) -> Turn:
        self.received.append(action)
        if action.endswith("]"):
            return Turn("?;", info={"tool": "ask"})
        return Turn(reward=float(action.endswith("z")), terminated=True)


class ScriptedEngine(TextEngine):
    """An engine that samples what `script(trajectory, turn)` gives: a text and one entropy per token.

    Trajectories are counted in the order in which they are made; a fork goes on with its source's turn.
    """

    vocab_size = 16

    def __init__(self, script, pause=lambda: 0) -> None:
        self.script, self.pause, self.kind = script, pause, Voice
        self.contexts: list[Voice] = []


class Voice(TextContext):
    def __init__(self, engine, tokens, turn=0, number=None) -> None:
        super().__init__(engine, tokens)
        self.turn, self.number = turn, number
        self.pending: list[tuple[int, float]] = []
        if number is not None:
            engine.contexts.append(self)

    def append(self, tokens):
        assert not self.pending, "an observation in the middle of a turn"
        self.tokens += tokens

    def fork(self, key=None, at=None):
        number = len(self.engine.contexts)
        turn = self.turn if at is None or at == len(self.tokens) else self.turn - 1
        return Voice(self.engine, self.tokens[:at], turn, number)

    async def sample(self, sampling, grammar=None):
        for _ in range(self.engine.pause()):
            await asyncio.sleep(0)
        if not self.pending:
            assert sampling.num_begun == 0
            text, entropies = self.engine.script(self.number, self.turn)
            self.turn += 1
            self.pending = list(zip(LETTERS.encode(text), entropies, strict=True))
        now, self.pending = self.pending[: sampling.max_tokens], self.pending[sampling.max_tokens :]
        finish = Finish.LENGTH if self.pending else Finish.STOP
        return self.write([t for t, _ in now], finish, entropies=[h for _, h in now])


def scripted(script, pause=lambda: 0, make_env=OneQuestion, **changes) -> RolloutSetup:
    given = {"sampling": Sampling(max_tokens=40), "max_turns": 20, **changes}
    engine = ScriptedEngine(script, pause)
    return RolloutSetup(
        engine=engine, chat=Chat(LETTERS), make_env=lambda task: make_env(), **given
    )


def grow(branch, setup, task=TASK):
    return collect([task], setup, branch)[0]


def texts(episode) -> list[str]:
    return [row.text for row in episode.trajectories()]


SURE, UNSURE = math.log(16) * 0.1, math.log(16) * 0.9


def one_call(trajectory, turn):
    """One call; trajectory 0 is unsure afterwards, the others are sure."""
    if turn == 0:
        return "aa]", [SURE] * 3
    entropy = UNSURE if trajectory == 0 else SURE
    return f"{'bcdefghi'[trajectory]}z", [entropy] * 2


# formulas


def test_entropy_is_a_mean_over_the_tokens_there_are_in_units_of_the_vocabulary():
    assert mean_entropy([0.2, 0.9, 0.4], 16) == pytest.approx(0.5 / math.log(16))
    assert mean_entropy([math.log(50)], 50) == pytest.approx(1.0)
    assert mean_entropy([], 50) == 0.0
    assert mean_entropy([0.0], 1) == 0.0  # a vocabulary of one token is never unsure


@pytest.mark.parametrize(
    ("change", "in_a_row", "expected"),
    [
        (0.0, 0, 0.5),
        (0.5, 0, 0.6),  # 0.5 + 0.2 * 0.5
        (-1.0, 0, 0.3),
        (0.0, 2, 0.45),  # 0.5 * (1 - 2 * 0.05)
        (0.5, 3, 0.51),  # 0.6 * 0.85
        (0.0, 25, 0.0),  # never below 0
        (9.0, 0, 1.0),
        (-9.0, 0, 0.0),
    ],
)
def test_the_probability_of_branching(change, in_a_row, expected):
    assert probability(0.5, 0.2, change, 0.05, in_a_row) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("samples", "sensitivity", "root", "tool", "expected"),
    [
        (16, 0.5, 0.3, 0.3, 8),  # sigmoid(0) = 0.5
        (16, 2.0, 1.0, 0.0, 14),  # 16 * 0.8808 = 14.1
        (16, 2.0, 0.0, 1.0, 2),  # 16 * 0.1192 = 1.9
        (16, 1e9, 0.0, 1.0, 1),  # at least the attempt that was made
        (16, 1e9, 1.0, 0.0, 16),
        (1, 0.5, 0.0, 1.0, 1),
        (12, 0.5, 1.0, 0.0, 7),  # 12 * 0.6225 = 7.47
    ],
)
def test_the_number_of_roots_follows_the_entropy_gap(samples, sensitivity, root, tool, expected):
    assert root_budget(samples, sensitivity, root, tool) == expected


def test_turns_are_measured_by_their_first_decisions():
    def policy(parent, entropies, mask=None):
        n = len(entropies)
        zeros = [0] * n
        return Span(
            parent, Author.POLICY, zeros, zeros, zeros, entropies, zeros, mask or [True] * n
        )

    spans = [
        Span(None, Author.TASK, [1]),
        policy(0, [1.0]),
        policy(1, [2.0, 9.0]),  # goes on with the same turn
        Span(2, Author.ENV, [1]),
        policy(3, [4.0, 0.0, 2.0], [True, False, True]),  # the second merely continues the first
    ]
    nats = math.log(16)
    assert turn_entropies(spans, 2, 16) == pytest.approx([1.5 / nats, 3.0 / nats])


# who forks, and where


def test_the_unsure_path_forks_right_behind_the_observation():
    how = arpo(3, initial_rollouts=2, rule="threshold", entropy_weight=1.0, tokens=1)
    setup = scripted(one_call)
    episode = grow(how, setup)
    # root 0 writes "bz" and is unsure, so its fork (trajectory 2) goes on behind the same result
    assert texts(episode) == ["aa]?;bz", "aa]?;cz", "aa]?;dz"]
    first, second, third = (episode.walk(leaf.tips[0]) for leaf in episode.leaves)
    assert first[:3] == third[:3] and second[1] != first[1]
    assert setup.engine.contexts[2].tokens == LETTERS.encode("qaa]?;dz")
    probed = episode.spans[first[3]].info
    assert probed["forks"] == 1 and probed["entropy_change"] == pytest.approx(0.8)
    assert episode.spans[second[3]].info["forks"] == 0
    assert [leaf.metrics["tool_calls"] for leaf in episode.leaves] == [1, 1, 1]
    assert sum(span.info.get("tool_calls", 0) for span in episode.spans) == 2  # made once each


def test_a_source_keeps_the_tokens_it_has_begun_with_as_one_span():
    script = lambda trajectory, turn: ("a]", [0.0] * 2) if turn == 0 else ("bcdefz", [UNSURE] * 6)  # noqa: E731
    how = arpo(2, initial_rollouts=1, rule="threshold", entropy_weight=1.0, tokens=2)
    episode = grow(how, scripted(script))
    assert texts(episode) == ["a]?;bcdefz", "a]?;bcdefz"]
    tip = episode.spans[episode.leaves[0].tips[0]]
    assert tip.text == "bcdefz" and len(tip.entropies) == len(tip.mask) == 6
    assert tip.reward == 1.0 and tip.info["finish"] == "stop"


def test_a_fork_inherits_its_sources_baseline():
    # trajectory 0: first tokens sure; after the 1st result unsure, forks trajectory 1, which is less unsure
    # things after its own result: more than the root's baseline, less than its own first tokens
    def script(trajectory, turn):
        entropies = {(0, 0): SURE, (0, 1): UNSURE, (1, 1): UNSURE, (1, 2): UNSURE * 0.5}
        text = ["a]", "b]" if trajectory == 1 else "bz", "cz"][turn]
        return text, [entropies.get((trajectory, turn), SURE)] * 2

    how = arpo(
        3,
        initial_rollouts=1,
        rule="threshold",
        entropy_weight=1.0,
        branch_probability=0.5,
        threshold=0.6,
    )
    episode = grow(how, scripted(script))
    assert texts(episode) == ["a]?;bz", "a]?;b]?;cz", "a]?;b]?;cz"]
    changes = [s.info["entropy_change"] for s in episode.spans if "entropy_change" in s.info]
    assert changes == pytest.approx([0.8, 0.35])


def test_with_too_small_a_budget_the_most_unsure_goes_first_or_the_oldest():
    def script(trajectory, turn):
        if turn == 0:
            return "a]", [SURE] * 2
        return f"{'bcdef'[trajectory]}z", [
            [SURE * 2, SURE * 4, SURE * 3, SURE, SURE][trajectory]
        ] * 2

    for order, expected in {"entropy": "c", "index": "b"}.items():
        how = arpo(4, initial_rollouts=3, rule="threshold", entropy_weight=1.0, order=order)
        episode = grow(how, scripted(script))
        source = episode.leaves["bcd".index(expected)]
        fork = episode.leaves[3]
        assert episode.walk(fork.tips[0])[2] == episode.walk(source.tips[0])[2], order


def test_beam_size_bounds_the_ways_on_from_one_observation():
    how = arpo(8, initial_rollouts=1, beam_size=4, rule="threshold", branch_probability=1.0)
    episode = grow(how, scripted(one_call))
    children = [s.parent for s in episode.spans if s.author is Author.POLICY]
    behind_the_first_result = next(i for i, s in enumerate(episode.spans) if s.author == "env")
    # the source and three forks; the other four begin at the prompt, all at once
    assert children.count(behind_the_first_result) == 4 and children.count(0) == 5


def test_branching_again_and_again_has_a_price():
    """Threshold 0.46: 0.5 and 0.5 * 0.95 are enough, 0.5 * 0.9 is not: two in a row, then a pause."""

    def script(trajectory, turn):
        return ("a]" if turn < 5 else "az"), [SURE] * 2

    how = aepo(
        9,
        initial_rollouts=1,
        dynamic=False,
        rule="threshold",
        threshold=0.46,
        entropy_weight=0.0,
        penalty=0.05,
    )
    episode = grow(how, scripted(script))
    per_turn: dict[int, list[int]] = {}
    for index, span in enumerate(episode.spans):
        if "forks" in span.info:
            per_turn.setdefault(len(episode.walk(index)), []).append(span.info["forks"])
    # turn 2: the root (0.5); turn 3: both (0.475); turn 4: none (0.45); turn 5: all four again
    assert list(per_turn.values())[:4] == [[1], [1, 1], [0] * 4, [1] * 4]


def test_counted_over_the_prompt_one_trajectory_pays_for_the_other():
    """0 is unsure in turn 1 and 1 in turn 2: 0.4 + 0.2 * 0.8 = 0.56, with a price 0.34."""

    def script(trajectory, turn):
        is_unsure = (trajectory, turn) in {(0, 1), (1, 2)}
        return ("a]" if turn < 3 else "az"), [UNSURE if is_unsure else SURE] * 2

    for over, expected in {"path": 2, "prompt": 1}.items():
        how = aepo(
            8,
            initial_rollouts=2,
            dynamic=False,
            rule="threshold",
            threshold=0.45,
            branch_probability=0.4,
            penalty=0.4,
            penalty_over=over,
        )
        episode = grow(how, scripted(script))
        assert sum(span.info.get("forks", 0) for span in episode.spans) == expected, over


def test_aepos_first_attempt_counts_and_decides_the_number_of_roots():
    def sure_after_results(trajectory, turn):
        return ("a]", [UNSURE] * 2) if turn == 0 else ("bz", [0.0] * 2)

    how = aepo(8, sensitivity=100.0, branch_probability=0.0)
    setup = scripted(sure_after_results)
    episode = grow(how, setup)
    assert len(episode.leaves) == len(setup.engine.contexts) == 8
    assert sum(span.parent == 0 for span in episode.spans) == 8  # all of them roots

    def unsure_after_results(trajectory, turn):
        return ("a]", [0.0] * 2) if turn == 0 else ("bz", [UNSURE] * 2)

    how = aepo(8, sensitivity=3.0, branch_probability=1.0, penalty=0.0)
    episode = grow(how, scripted(unsure_after_results))
    # 8 * sigmoid(-2.7) = 0.50, rounded and at least 1: the first alone, and none is left to fork
    assert len(episode.leaves) == 8
    how = aepo(8, sensitivity=1.0, branch_probability=1.0, penalty=0.0)
    episode = grow(how, scripted(unsure_after_results))
    # 8 * sigmoid(-0.9) = 2.3: the first and one more, which forks once; the other five are roots
    assert len(episode.leaves) == 8
    forks = [span.info["forks"] for span in episode.spans if "forks" in span.info]
    assert forks[0] == 1


# budgets


@given(
    samples=st.integers(1, 12),
    roots=st.integers(1, 12),
    beam=st.integers(1, 4),
    chance=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    order=st.sampled_from(["entropy", "index", "arrival"]),
    kind=st.sampled_from(["arpo", "aepo", "arpo published", "aepo published"]),
    seed=st.integers(0, 10**6),
)
def test_there_are_always_exactly_n_leaves(samples, roots, beam, chance, order, kind, seed):
    rng = random.Random(seed)
    lengths: dict[int, int] = {}

    def script(trajectory, turn):
        last = lengths.setdefault(trajectory, turn + rng.randrange(4))
        text = "".join(rng.choices("abcd", k=rng.randint(1, 6))) + ("]" if turn < last else "z")
        return text, [rng.random() * 3 for _ in text]

    class Faulty(OneQuestion):
        def respond(self, action):
            if rng.random() < 0.1:
                raise ToolError("gone")
            return super().respond(action)

    name, _, how = kind.partition(" ")
    options = {"order": order} if not how else {"faithful": True}
    branch = {"arpo": arpo, "aepo": aepo}[name](
        samples, min(roots, samples), beam, chance, tokens=3, **options
    )
    setup = scripted(script, pause=lambda: rng.randrange(4), make_env=Faulty)
    episode = grow(branch, setup)
    assert len(episode.leaves) == samples
    tips = [leaf.tips[-1] for leaf in episode.leaves]
    assert len({*tips}) == samples or any(not leaf.status.is_trainable for leaf in episode.leaves)
    # what an engine's context holds is the walk through the tree, token by token
    walks = [row.tokens for row in episode.trajectories()]
    held = [context.tokens for context in setup.engine.contexts]
    assert all(walk in held for walk in walks)
    for leaf, row in zip(episode.leaves, episode.trajectories(), strict=True):
        if leaf.status is Status.DONE:
            assert leaf.reward == sum(span.reward for span in row.spans)


def test_a_copy_of_the_environment_that_fails_costs_a_fork_and_no_leaf():
    class Uncopied(OneQuestion):
        forkable = False
        made = 0

        def reset(self, seed=None):
            Uncopied.made += 1
            if Uncopied.made == 4:  # the task itself, two roots; then the first fork
                raise ToolError("no more of these")
            return super().reset(seed)

    how = arpo(3, initial_rollouts=2, branch_probability=1.0)
    episode = grow(how, scripted(one_call, make_env=Uncopied))
    assert [leaf.status for leaf in episode.leaves] == [Status.DONE] * 3
    assert any("no more of these" in s.info.get("error", "") for s in episode.spans)


@pytest.mark.parametrize("how", [arpo(6), aepo(6), arpo(6, faithful=True), independent(6)])
def test_a_root_whose_environment_cannot_be_made_is_a_leaf_with_the_error(how):
    class Scarce(OneQuestion):
        forkable = False
        made = 0

        def reset(self, seed=None):
            Scarce.made += 1
            if Scarce.made > 3:  # the task itself and two attempts
                raise ToolError("no more of these")
            return super().reset(seed)

    episode = grow(how, scripted(one_call, make_env=Scarce))
    statuses = [leaf.status for leaf in episode.leaves]
    assert len(statuses) == 6 and statuses.count(Status.TOOL_ERROR) == 4
    assert "no more of these" in episode.spans[0].info["error"]


def test_an_environment_that_raises_when_it_is_copied_costs_its_forks():
    class Uncopyable(OneQuestion):
        def fork(self):
            if self.received:
                raise OSError("cannot be copied now")
            return super().fork()

    for how in (arpo(4, branch_probability=1.0), arpo(4, branch_probability=1.0, faithful=True)):
        episode = grow(how, scripted(one_call, make_env=Uncopyable))
        assert [leaf.status for leaf in episode.leaves] == [Status.DONE] * 4
        assert any("cannot be copied now" in s.info.get("error", "") for s in episode.spans)


def test_a_turn_that_is_begun_and_full_is_a_turn_like_any_other():
    def script(trajectory, turn):
        return ("aaa]", [SURE] * 4) if turn == 0 else ("bbbbbb", [SURE] * 6)

    plain = grow(independent(3), scripted(script, sampling=Sampling(max_tokens=4)))
    how = arpo(3, initial_rollouts=1, branch_probability=0.0, tokens=4)
    begun = grow(how, scripted(script, sampling=Sampling(max_tokens=4)))
    for one, other in zip(plain.leaves, begun.leaves, strict=True):
        assert one.metrics == other.metrics and one.status == other.status == Status.TRUNCATED


def test_aepos_first_attempt_is_read_over_all_its_contexts():
    class Anew(OneQuestion):
        observe_as = "prompt"

    def script(trajectory, turn):  # a context that begins anew has no number
        return ("bz", [UNSURE] * 2) if trajectory is None else ("a]", [SURE] * 2)

    how = aepo(8, sensitivity=1.0, branch_probability=0.0)
    setup = scripted(script, make_env=Anew)
    episode = grow(how, setup)
    # first 0.1, after results 0.9: 8 * sigmoid(-0.8) = 2.5, so 2 roots begin before the others
    spans = [episode.spans[i] for tip in episode.leaves[0].tips for i in episode.walk(tip)]
    assert turn_entropies(spans, 20, 16) == pytest.approx([0.1, 0.9])
    assert len(episode.leaves) == 8


def test_the_published_table_has_attempts_that_ended_at_once():
    how = arpo(2, initial_rollouts=2, branch_probability=0.0, faithful=True)
    grow(how, scripted(lambda trajectory, turn: ("az", [SURE] * 2)))
    assert how.first_entropies == pytest.approx({(0, 0): 0.2, (0, 1): 0.2})


def test_without_observations_there_is_nothing_to_fork_from():
    how = arpo(6, initial_rollouts=2, branch_probability=1.0)
    episode = grow(how, scripted(lambda trajectory, turn: ("abz", [UNSURE] * 3)))
    assert sum(span.parent == 0 for span in episode.spans) == len(episode.leaves) == 6


# the published programs


def test_the_published_arpo_forks_by_a_coin_whose_sense_is_kept():
    how = arpo(16, faithful=True)
    assert how._is_due(0.50, 0.0, 0) and not how._is_due(0.51, 0.0, 0)
    assert how._is_due(0.59, 0.5, 0) and not how._is_due(0.61, 0.5, 0)  # 0.5 + 0.2 * 0.5
    assert not how._is_due(0.41, -0.5, 0)


@pytest.mark.parametrize(
    ("in_a_row", "chance"), [(0, 0.5), (1, 0.4737), (2, 0.4444), (3, 0.4118), (8, 1 / 6), (10, 0.0)]
)
def test_the_published_aepo_forks_less_often_the_longer_the_row(in_a_row, chance):
    how = aepo(16, dynamic=False, faithful=True)
    uniforms = [i / 10_000 for i in range(10_000)]
    share = sum(how._is_due(u, 0.0, in_a_row) for u in uniforms) / len(uniforms)
    assert share == pytest.approx(chance, abs=2e-4)


def test_the_published_table_of_first_entropies_outlives_its_step():
    how = arpo(2, initial_rollouts=2, branch_probability=0.0, faithful=True)
    assert isinstance(how, FaithfulBranching)
    how.begin(1)
    grow(how, scripted(one_call))
    first = {(0, 0): 0.3, (0, 1): 0.3}  # a sum over three tokens
    assert how.first_entropies == pytest.approx(first)
    how.begin(2)
    grow(
        how, scripted(lambda trajectory, turn: ("aaaa]", [SURE] * 5) if turn == 0 else ("z", [0.0]))
    )
    assert how.first_entropies == pytest.approx(first)
    again = arpo(2, initial_rollouts=2, faithful=True)
    again.restore(how.state)
    assert again.first_entropies == how.first_entropies


def test_the_published_aepo_throws_its_first_attempt_away():
    how = aepo(4, faithful=True, branch_probability=1.0)
    setup = scripted(one_call)
    episode = grow(how, setup)
    assert len(episode.leaves) == 4 and len(setup.engine.contexts) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_rollouts": 9}, "initial_rollouts=9 is more than the 8 attempts"),
        ({"initial_rollouts": 0}, "initial_rollouts=0: must be a whole number"),
        ({"beam_size": 1.5}, "beam_size=1.5"),
        ({"branch_probability": 1.2}, "branch_probability=1.2: must lie in"),
        ({"branch_probability": "half"}, "branch_probability='half': must be a number"),
        ({"entropy_weight": math.nan}, "entropy_weight=nan: must be a finite number"),
        ({"initial_rollouts": True}, "initial_rollouts=True: must be a whole number"),
        ({"faithful": "maybe"}, "faithful='maybe': must be true or false"),
        ({"rule": "coin"}, "rule='coin': must be one of stochastic, threshold"),
        ({"order": "size"}, "order='size': must be one of entropy, index, arrival"),
        ({"tokens": 0}, "tokens=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(("arpo", {"samples": 8, **options}), BRANCHES, "branch")


# with a real model


def real_setup(**changes):
    shape = ModelShape(
        vocab_size=LETTERS.vocab_size, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ff=64
    )
    torch.manual_seed(0)
    policy = Decoder(shape).initialise(3)
    engine = NativeEngine(
        policy, tokenizer=LETTERS, eos_ids=(LETTERS.eos_id,), kv_tokens=8192, page_size=4
    )
    given = {"sampling": Sampling(max_tokens=12), "max_turns": 5, "max_context": 96, **changes}
    given.setdefault("make_env", lambda task: OneQuestion())
    return policy, RolloutSetup(engine=engine, chat=Chat(LETTERS), **given)


TASKS = [Task(f"t{i}", "asking", seed=i) for i in range(6)]


@pytest.mark.parametrize("kind", [arpo, aepo])
def test_forked_trees_have_the_log_probs_of_their_rows_recomputed(kind):
    policy, setup = real_setup()
    episodes = collect(TASKS, setup, kind(6, initial_rollouts=2, branch_probability=0.9))
    assert sum(s.info.get("forks", 0) for e in episodes for s in e.spans) > 5
    rows = trajectories_of(episodes)
    batch = to_batch(rows)
    together = Forest(rows, batch.mask, policy.device).logprobs(policy, 1.0)[0]
    assert torch.allclose(together[batch.mask], batch.logprobs[batch.mask], atol=1e-5)
    for number, row in enumerate(rows):
        alone = to_batch([row])
        width = alone.mask.shape[1]
        found = Forest([row], alone.mask, policy.device).logprobs(policy, 1.0)[0]
        mask = alone.mask[0]
        assert torch.allclose(found[0][mask], together[number, :width][mask], atol=1e-5)


@pytest.mark.parametrize("roots", [1, 3, 6])
def test_without_branching_the_numbers_are_grpos(roots):
    _, setup = real_setup()
    _, same = real_setup()
    plain = collect(TASKS, setup, independent(6))
    how = arpo(6, initial_rollouts=roots, branch_probability=0.0, entropy_weight=0.0, tokens=2)
    branched = collect(TASKS, same, how)

    def batch_and_credit(episodes):
        batch = to_batch(trajectories_of(episodes))
        return batch, build("grpo")[1](batch.zeros(), batch)

    (one, credit), (other, same_credit) = batch_and_credit(plain), batch_and_credit(branched)
    assert torch.equal(one.actions, other.actions) and torch.equal(credit, same_credit)
    if roots == 6:  # else batches of other sizes round differently
        assert torch.equal(one.logprobs, other.logprobs)
        assert torch.equal(one.entropies, other.entropies)
    assert torch.allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_stop_string_may_lie_across_what_was_begun_and_the_rest():
    class Words(OneQuestion):
        stop = ("ab",)

    _, setup = real_setup(make_env=lambda task: Words())
    whole = collect(TASKS, setup, independent(8))
    _, setup = real_setup(make_env=lambda task: Words())
    for tokens in (1, 2, 3):
        how = arpo(8, initial_rollouts=2, branch_probability=0.0, tokens=tokens)
        assert [texts(e) for e in collect(TASKS, setup, how)] == [texts(e) for e in whole]


def test_failed_leaves_leave_no_trace_in_the_gradient():
    """A step in which tools break for some equals the step without those leaves."""

    class Breaks(OneQuestion):
        def respond(self, action):
            if action.startswith(tuple("abcdef")) and action.endswith("]"):
                raise ToolError("the tool is gone")
            return super().respond(action)

    policy, setup = real_setup(make_env=lambda task: Breaks())
    episodes = collect(TASKS, setup, arpo(6, initial_rollouts=3, branch_probability=0.9))
    statuses = [leaf.status for e in episodes for leaf in e.leaves]
    assert Status.TOOL_ERROR in statuses

    def gradient(some):
        rows = trajectories_of(some)
        batch = to_batch(rows)
        reward = torch.arange(len(rows)).float() % 3  # random weights earn nothing otherwise
        batch = batch.replace(reward=reward)
        _, credit, loss, reduction = build("arpo_hard")
        batch = batch.replace(advantages=credit(batch.zeros(), batch))
        policy.zero_grad()
        logp, entropy = Forest(rows, batch.mask, policy.device).logprobs(policy, 1.0)
        (loss(logp, entropy, batch)[0] * reduction(batch)).sum().backward()
        return [p.grad.clone() for p in policy.parameters()]

    without = [
        replace(e, leaves=[leaf for leaf in e.leaves if leaf.status.is_trainable]) for e in episodes
    ]
    for found, expected in zip(gradient(episodes), gradient(without), strict=True):
        assert torch.equal(found, expected)
