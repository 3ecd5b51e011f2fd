"""New weights in the middle of a turn: sampled tokens stay, new weights draw the next ones.

Draws are named by their place and not by their time, so that an attempt that is paused anywhere and goes
on with the SAME weights must be the attempt that was never paused. That is most of what is tested here;
the rest is what other weights change.
"""

import asyncio

import pytest
import torch

from graft.engine.native.engine import NativeEngine
from graft.envs.base import BaseEnv
from graft.models.decoder import Decoder
from graft.models.io.tensor_names import weights_of
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.rollout.async_collector import AttemptRunner
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.branches.entropy import arpo
from graft.rollout.collect import build_episode
from graft.rollout.collector import CollectorConfig, RolloutRequest
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import allowed_table
from graft.types import Author, Finish, Sampling, Status, Task, Turn
from tests.rollout.scripted import LETTERS as SORTING_LETTERS
from tests.rollout.scripted import SORTING, Swapping, TextContext, TextEngine

LETTERS = FastTokenizer.characters("abcdefghijklmnopqrstuvwxyz]?;")
TASK = Task("t", "asking")
JOB = RolloutRequest([TASK], "a step")


class OneQuestion(BaseEnv):
    """A turn that ends in "]" or a, b, c is answered with "?;"; any other ends the attempt."""

    env_id = "asking"
    observe_as = "inline"
    stop = ("]", "a", "b", "c")
    max_turns = None

    def pose(self) -> str:
        self.answer = "z"
        return "q"

    def respond(self, action: str) -> Turn:
        if action.endswith(self.stop):
            return Turn("?;", info={"tool": "ask"})
        return Turn(reward=float(len(action)), terminated=True)


class Talking(OneQuestion):
    stop = ()


def decoder(seed: int, letters: FastTokenizer = LETTERS, extra: int = 0) -> Decoder:
    torch.manual_seed(seed)
    shape = ModelShape(
        vocab_size=letters.vocab_size,
        width=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        ff=48,
        max_positions=256,
        extra=extra,
        tied=False,
    )
    model = Decoder(shape)
    with torch.no_grad():
        model.head_weight.normal_(std=0.2)  # not so flat that everything is equally likely
    return model


def setup_of(
    model: Decoder, make_env=OneQuestion, letters=LETTERS, actions=None, kernels=None, **how
) -> RolloutSetup:
    engine = NativeEngine(
        model,
        tokenizer=letters,
        eos_ids=(letters.eos_id,),
        kv_tokens=4096,
        page_size=16,
        seed=5,
        kernels=kernels,
        space=None if actions is None else actions.space,
    )
    given = {"sampling": Sampling(max_tokens=24), "max_turns": 6, "max_context": 120, **how}
    return RolloutSetup(
        engine=engine,
        chat=Chat(letters),
        make_env=lambda task: make_env(),
        actions=actions,
        **given,
    )


async def decoded(engine: NativeEngine, count: int, growing: asyncio.Task) -> None:
    """Until the engine has drawn `count` tokens."""
    while engine.stats["decode_tokens"] < count and not growing.done():
        await asyncio.sleep(0)


def grown(setup: RolloutSetup, branch=None, at: tuple[int, ...] = (), weights=(None, None, None)):
    """An episode that is paused when the engine has decoded `at` tokens; version 1, 2 ... follow."""

    async def main():
        runner = AttemptRunner(CollectorConfig(setup, setup, branch or independent(1)))
        growing = asyncio.create_task(runner.attempt(TASK, JOB, 0))
        for version, (count, new) in enumerate(zip(at, weights, strict=False), 1):
            await decoded(setup.engine, count, growing)
            runner.load(new, version)
        return await growing

    return asyncio.run(main())


def turns(row) -> list[list]:
    """The texts of the policy and others, runs of one author as one: (author, what, ...)."""
    runs: list[list] = []
    for span in row.spans:
        if not runs or runs[-1][0] is not span.author:
            runs.append([span.author, [], [], [], [], ""])
        kept = (span.tokens, span.actions, span.modes, span.mask)
        for run, more in zip(runs[-1][1:5], kept, strict=True):
            run += more
        runs[-1][5] += span.text
    return runs


def outcomes(episode) -> list:
    rows = list(episode.trajectories())
    return [(row.leaf.reward, row.leaf.status, row.leaf.metrics, turns(row)) for row in rows]


def logprobs(row) -> torch.Tensor:
    return torch.tensor([p for s in row.spans if s.author is Author.POLICY for p in s.logprobs])


def learners(model: Decoder, rows, allowed=None) -> torch.Tensor:
    """The log-probs of a learner with these weights, [rows, tokens behind the prompt]."""
    batch = to_batch(rows)
    with torch.no_grad():
        return Forest(rows, batch.mask, model.device).logprobs(model, 1.0, allowed)[0]


# the same weights: nothing has happened


def test_an_attempt_paused_anywhere_is_what_it_would_have_been():
    whole = grown(setup_of(decoder(0)), independent(3))
    rows = list(whole.trajectories())
    count = sum(len(s) for row in rows for s in row.spans if s.author is Author.POLICY)
    assert count > 40 and any(row.leaf.metrics["turns"] > 1 for row in rows)
    split = 0
    for at in range(0, count, 14):
        paused = grown(setup_of(decoder(0)), independent(3), at=(at, at + 4))
        assert outcomes(paused) == outcomes(whole)
        split += len(paused.spans) > len(whole.spans)
        for row, same in zip(paused.trajectories(), rows, strict=True):
            torch.testing.assert_close(logprobs(row), logprobs(same), atol=1e-5, rtol=0)
    assert split > 2


def test_calls_made_of_actions_keep_their_mode_over_a_pause():
    def make_setup():
        model = decoder(3, SORTING_LETTERS, extra=SORTING.space.extra)
        return setup_of(model, Swapping, SORTING_LETTERS, SORTING)

    whole = grown(make_setup(), independent(2))
    modes = {mode for span in whole.spans for mode in span.modes}
    assert len(modes) > 1 and any(span.info.get("finish") == Finish.EXIT for span in whole.spans)
    split = 0
    for at in range(1, 40, 6):
        paused = grown(make_setup(), independent(2), at=(at,))
        assert outcomes(paused) == outcomes(whole)
        split += len(paused.spans) > len(whole.spans)
    assert split > 3  # in most of these places an attempt was in the middle of something


def test_a_tree_that_forks_in_a_turn_that_is_paused_is_the_same_tree():
    """ARPO begins turns, forks behind the observation, and goes on: all of it over seams."""
    branch = arpo(samples=6, initial_rollouts=2, tokens=4, rule="threshold", threshold=0.0)
    whole = grown(setup_of(decoder(0)), branch)
    assert any(span.info.get("forks") for span in whole.spans)
    split = 0
    for at in range(2, 60, 12):
        paused = grown(setup_of(decoder(0)), branch, at=(at, at + 3))
        assert outcomes(paused) == outcomes(whole)
        split += len(paused.spans) > len(whole.spans)
        for span in paused.spans:
            assert span.parent is None or len(paused.spans[span.parent])
    assert split > 2


# seams


def sampled_tokens(model: Decoder) -> list[int]:
    """What is sampled behind tokens 3, 4 where nothing stops it."""
    engine = NativeEngine(model, tokenizer=LETTERS, kv_tokens=1024, seed=5)

    async def main():
        return await engine.open([3, 4], key=7).sample(Sampling(max_tokens=30))

    return asyncio.run(main()).tokens


@pytest.mark.parametrize("is_given", [True, False])
def test_a_stop_string_across_the_seam_is_found(is_given):
    """By a sample that is given how much of the turn is there, as those of a trajectory are."""
    model = decoder(1)
    tokens = sampled_tokens(model)
    read = LETTERS.decode
    at = next(
        at
        for at in range(4, 20)
        if min(tokens[at - 1 : at + 1]) >= 3  # letters
        and read(tokens[at - 1 : at + 1]) not in read(tokens[:at])
    )
    stop = (read(tokens[at - 1 : at + 1]),)
    engine = NativeEngine(model, tokenizer=LETTERS, kv_tokens=1024, seed=5)

    async def main():
        context = engine.open([3, 4], key=7)
        sample = asyncio.create_task(context.sample(Sampling(max_tokens=30, stop=stop)))
        while len(context.tokens) < 2 + at:
            assert not sample.done()
            await asyncio.sleep(0)
        engine.pause()
        engine.load(None, version=1)
        first = await sample
        rest = Sampling(max_tokens=30 - at, stop=stop, num_begun=at if is_given else 0)
        return first, await context.sample(rest)

    first, second = asyncio.run(main())
    assert (first.tokens, first.finish, first.version) == (tokens[:at], Finish.PAUSE, 0)
    assert (second.tokens == tokens[at : at + 1]) is is_given and second.version == 1
    assert second.finish is Finish.STOP or not is_given


class Fragments(TextEngine):
    """An engine that samples given pieces of a turn, each of its own version: (tokens, finish)."""

    vocab_size = LETTERS.vocab_size

    def __init__(self, pieces) -> None:
        self.pieces, self.kind = list(pieces), Fragment
        self.samplings: list[Sampling] = []


class Fragment(TextContext):
    async def sample(self, sampling, grammar=None):
        engine = self.engine
        engine.samplings.append(sampling)
        completion = self.write(*engine.pieces.pop(0))
        engine.version += 1
        return completion


def fragments(pieces, tokenizer=LETTERS, **how) -> RolloutSetup:
    given = {"sampling": Sampling(max_tokens=24, min_tokens=5), **how}
    return RolloutSetup(Fragments(pieces), Chat(tokenizer), lambda task: OneQuestion(), **given)


def test_words_and_characters_across_a_seam_are_whole_in_the_text():
    bytes_ = FastTokenizer.bytes()
    whole = bytes_.encode("né z")  # é is two bytes
    pieces = [
        (whole[:2], Finish.PAUSE),
        (whole[2:4], Finish.PAUSE),
        ([], Finish.PAUSE),
        (whole[4:], Finish.STOP),
    ]
    answers: list[str] = []

    def reward(task, row):
        answers.append(row.answer_text)
        return 2.0

    setup = fragments(pieces, bytes_, reward=reward)
    episode = asyncio.run(build_episode(TASK, setup, independent(1)))
    spans = [s for s in episode.spans if s.author is Author.POLICY]
    assert [(s.version, len(s)) for s in spans] == [(0, 2), (1, 2), (3, 1)]
    assert answers == ["né z"] and [row.text for row in episode.trajectories()] == ["né z"]
    assert [s.reward for s in spans] == [0.0, 0.0, 2.0]  # on the turn's last token
    lengths = [(a.num_begun, a.max_tokens, a.min_tokens) for a in setup.engine.samplings]
    assert lengths == [(0, 24, 5), (2, 22, 3), (4, 20, 1), (4, 20, 1)]


def test_a_split_turn_is_one_turn_of_the_batch():
    pieces = [(LETTERS.encode("hi"), Finish.PAUSE), (LETTERS.encode("jk"), Finish.PAUSE)]
    setup = fragments([*pieces, ([LETTERS.eos_id], Finish.STOP)])
    episode = asyncio.run(build_episode(TASK, setup, independent(1)))
    batch = to_batch(trajectories_of([episode]))
    assert batch.turns.tolist() == [[0] * 5] and batch.versions.tolist() == [[0, 0, 1, 1, 2]]
    assert batch.rewards.tolist() == [[0.0, 0.0, 0.0, 0.0, 4.0]]
    assert episode.leaves[0].metrics["turns"] == 1


def test_a_turn_that_is_paused_behind_its_last_token_has_run_out_of_room():
    pieces = [(LETTERS.encode("hijk"), Finish.PAUSE), (LETTERS.encode("ef"), Finish.PAUSE)]
    setup = fragments(pieces, sampling=Sampling(max_tokens=6))
    [leaf] = asyncio.run(build_episode(TASK, setup, independent(1))).leaves
    assert (leaf.status, leaf.metrics["turns"]) == (Status.TRUNCATED, 1)


@pytest.mark.parametrize("seams", [(), (0,), (2,), (1, 3), (4,)])
def test_the_first_four_tokens_of_a_turn_are_four_however_they_are_split(seams):
    text = LETTERS.encode("hijklmno")
    begins = [(text[a:b], Finish.PAUSE) for a, b in zip((0, *seams), seams, strict=False)]
    if 4 not in seams:  # else the engine paused behind the last token that was wanted
        begins.append((text[seams[-1] if seams else 0 : 4], Finish.LENGTH))
    setup = fragments([*begins, (text[4:], Finish.STOP)])

    async def main():
        async with EpisodeBuilder(TASK, setup) as builder:
            await builder.open()
            trajectory = await builder.root()
            await trajectory.begin(4)
            begun = trajectory.partial.tokens
            fork = await builder.fork(trajectory)
            forked = list(fork.context.tokens), fork.tip
            await trajectory.turn()
            return begun, forked, trajectory

    begun, (tokens, tip), trajectory = asyncio.run(main())
    assert begun == text[:4] and trajectory.partial.tokens == text
    assert tokens == prompt_tokens() and tip == 0  # the fork has nothing of the turn that is begun
    assert trajectory.leaf.reward == 8.0 and trajectory.metrics["turns"] == 1


def prompt_tokens() -> list[int]:
    return Chat(LETTERS).prompt([{"role": "user", "content": "q"}], None)


# other weights


def assert_of_own_versions(episode, models, allowed=None, least=1, close=1e-5) -> None:
    """Each token has the log-prob of the weights that drew it, and each version drew some."""
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    for version, model in enumerate(models):
        own = batch.mask & (batch.versions == version)
        assert own.sum() >= least
        found = learners(model, rows, allowed)[own]
        torch.testing.assert_close(found, batch.logprobs[own], atol=close, rtol=0)


def test_tokens_before_the_seam_are_the_old_policys_and_those_behind_it_the_new_ones():
    old, new = decoder(0), decoder(9)
    setup = setup_of(decoder(0))
    episode = grown(setup, independent(4), at=(30,), weights=(weights_of(new),))
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    assert set(batch.versions[batch.mask].tolist()) == {0, 1}
    assert any(  # in the middle of a turn
        first.author is second.author and (first.version, second.version) == (0, 1)
        for row in rows
        for first, second in zip(row.spans, row.spans[1:], strict=False)
    )
    for version, model, other in ((0, old, new), (1, new, old)):
        own = batch.mask & (batch.versions == version)
        sampled = batch.logprobs[own]
        torch.testing.assert_close(learners(model, rows)[own], sampled, atol=1e-5, rtol=0)
        assert (learners(other, rows)[own] - sampled).abs().mean() > 0.1


def test_several_seams_in_one_turn_each_have_their_weights():
    models = [decoder(seed) for seed in (0, 8, 9, 10)]
    new = [weights_of(model) for model in models[1:]]
    setup = setup_of(decoder(0), sampling=Sampling(max_tokens=60), make_env=Talking)
    assert_of_own_versions(grown(setup, at=(9, 18, 27), weights=new), models, least=8)


def test_a_tree_of_forks_has_in_every_token_the_log_prob_of_its_own_version():
    models = [decoder(seed) for seed in (0, 8, 9)]
    branch = arpo(samples=8, initial_rollouts=3, tokens=5, rule="threshold", threshold=0.0)
    setup = setup_of(decoder(0))
    episode = grown(setup, branch, at=(20, 70), weights=[weights_of(m) for m in models[1:]])
    assert len(episode.leaves) == 8 and any(span.info.get("forks") for span in episode.spans)
    assert_of_own_versions(episode, models)


def test_actions_too_have_the_log_probs_of_their_version():
    models = [decoder(seed, SORTING_LETTERS, SORTING.space.extra) for seed in (3, 4)]
    setup = setup_of(
        decoder(3, SORTING_LETTERS, SORTING.space.extra), Swapping, SORTING_LETTERS, SORTING
    )
    episode = grown(setup, independent(3), at=(25,), weights=(weights_of(models[1]),))
    assert_of_own_versions(episode, models, allowed_table(SORTING, models[0]))


def test_nothing_is_left_in_the_engine_after_attempts_were_paused_and_discarded():
    setup = setup_of(decoder(0))
    grown(setup, independent(4), at=(10, 20, 30))
    thrown = setup_of(decoder(0))

    async def main():
        runner = AttemptRunner(CollectorConfig(thrown, thrown, independent(4)), discards=True)
        growing = asyncio.create_task(runner.attempt(TASK, JOB, 0))
        for version in (1, 2):
            start = thrown.engine.stats["decode_tokens"]
            await decoded(thrown.engine, start + 15, growing)
            assert not growing.done()
            runner.load(None, version)
        return await growing, runner.num_discarded

    episode, discarded = asyncio.run(main())
    assert discarded == 2
    assert {s.version for s in episode.spans if s.author is Author.POLICY} == {2}
    for engine in (setup.engine, thrown.engine):
        assert engine.stats["pages_free"] == engine.stats["pages_total"]
        assert engine.stats["running"] == 0 and not engine._tree.sequences


def test_a_burst_that_is_paused_between_two_looks_of_the_host_is_exact_too(
    kernel_device, monkeypatch
):
    from graft.engine.native.cuda import runner as burst
    from graft.engine.native.cuda.kernels import draw

    if kernel_device.type == "cpu":  # the interpreter works in small pieces
        monkeypatch.setattr(burst, "MAX_SPLITS", 1)
        monkeypatch.setattr(draw, "CHUNK", 16)
    models = [decoder(seed) for seed in (0, 9)]
    short = {"sampling": Sampling(max_tokens=9), "make_env": Talking}
    setup = setup_of(decoder(0).to(kernel_device), kernels=True, **short)
    setup.engine._loop.mean_length = 32.0  # segments of four steps
    episode = grown(setup, independent(2), at=(4,), weights=(weights_of(models[1]),))
    assert_of_own_versions(episode, models, close=2e-5)
    assert setup.engine.stats["pages_free"] == setup.engine.stats["pages_total"]
