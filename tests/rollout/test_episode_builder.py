import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

import graft
from graft.engine.native.engine import NativeEngine
from graft.envs import make
from graft.envs.base import BaseEnv
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import build_episode, collect, collect_informative
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.failure import together
from graft.rollout.outcomes import is_flat
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.tools.errors import ToolError
from graft.types import Author, Sampling, Status, Task, Turn

ALPHABET = "0123456789+-*=[];?"


class Echo(BaseEnv):
    """Answers every text with "7;" until the third turn; `fault` breaks it in the second."""

    observe_as = "inline"
    stop = ("]",)
    max_turns = None

    def __init__(self, fault: Exception | None = None, seconds: float = 0.0) -> None:
        super().__init__()
        self.fault, self.seconds, self.count = fault, seconds, 0

    def pose(self) -> str:
        self.count = 0
        self.answer = "7"
        return "1+2="

    def respond(self, action: str) -> Turn:
        self.count += 1
        time.sleep(self.seconds)
        if self.fault is not None and self.count == 2:
            raise self.fault
        return Turn("7;", reward=float(self.count), terminated=self.count == 3)


class Slow(Echo):
    blocking = True


class Unforkable(Echo):
    forkable = False
    made = 0

    def __init__(self) -> None:
        super().__init__()
        Unforkable.made += 1

    def fork(self):
        raise AssertionError("an env that cannot fork was forked")


def merging_tokenizer() -> FastTokenizer:
    """A BPE in which "1" "2" and "12" are all tokens: most samples are not what encode() gives."""
    pieces = ["<eos>", *ALPHABET, *(a + b for a in "0123456789" for b in "0123456789")]
    merges = [(a, b) for a in "0123456789" for b in "0123456789"]
    backend = tokenizers.Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, merges))
    backend.decoder = Fuse()
    return FastTokenizer(backend, {"eos_token": "<eos>"}, {"default": TEMPLATES["plain"]})


def make_setup(make_env, engine=None, tokenizer=None, **changes) -> RolloutSetup:
    tokenizer = tokenizer or FastTokenizer.characters(ALPHABET)
    shape = ModelShape(
        vocab_size=tokenizer.vocab_size, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ff=16
    )
    engine = engine or NativeEngine(
        Decoder(shape).initialise(3),
        tokenizer=tokenizer,
        eos_ids=(tokenizer.eos_id,),
        kv_tokens=4096,
    )
    base = RolloutSetup(
        engine=engine,
        chat=Chat(tokenizer),
        make_env=lambda task: make_env(),
        sampling=Sampling(max_tokens=12),
    )
    return replace(base, **changes)


TASKS = [Task(f"t{i}", "echo", seed=i) for i in range(4)]


def test_an_episode_is_one_tree_and_tokens_are_never_re_encoded():
    where = make_setup(Echo, sampling=Sampling(max_tokens=64))
    (episode,) = collect(TASKS[:1], where, independent(6))
    assert len(episode.leaves) == 6
    assert [s.parent for s in episode.spans].count(None) == 1
    decode = where.chat.tokenizer.decode
    for row in episode.trajectories():
        assert row.spans[0] is episode.spans[0]
        for span in row.spans:
            if span.author is Author.ENV:
                assert (span.text, span.mask, decode(span.tokens)) == ("7;", [], "7;")
            elif span.author is Author.POLICY:
                assert decode(span.tokens).removesuffix("<eos>") == span.text
                assert len(span.tokens) == len(span.logprobs) == sum(span.mask)
    finished = [leaf for leaf in episode.leaves if leaf.status is Status.DONE]
    assert finished and all(leaf.reward == 6.0 for leaf in finished)  # 1 + 2 + 3


def test_samples_that_encode_would_write_differently_stay_as_they_were_drawn():
    where = make_setup(Echo, tokenizer=merging_tokenizer(), sampling=Sampling(max_tokens=20))
    rows = trajectories_of(collect(TASKS, where, independent(4)))
    tokenizer = where.chat.tokenizer
    odd = [
        span
        for row in rows
        for span in row.spans
        if span.author is Author.POLICY
        and tokenizer.encode(tokenizer.decode(span.tokens)) != span.tokens
    ]
    assert len(odd) > 5
    batch = to_batch(rows)
    with torch.no_grad():
        logp, _ = Forest(rows, batch.mask, torch.device("cpu")).logprobs(where.engine.decoder)
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)


def test_engine_logprobs_are_the_trainers_logprobs():
    where = make_setup(Echo, sampling=Sampling(max_tokens=20, temperature=0.7))
    rows = trajectories_of(collect(TASKS, where, independent(4)))
    batch = to_batch(rows)
    with torch.no_grad():
        forest = Forest(rows, batch.mask, torch.device("cpu"))
        logp, entropy = forest.logprobs(where.engine.decoder, temperature=0.7)
    assert batch.num_tokens > 50
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy[batch.mask], batch.entropies[batch.mask], atol=1e-5, rtol=0)


def test_what_grows_beside_an_episode_does_not_change_it():
    def texts(concurrency: int, tasks) -> dict[str, list[list[int]]]:
        episodes = collect(tasks, make_setup(Echo), independent(3), concurrency=concurrency)
        return {
            e.task.id: sorted([t for s in row.spans for t in s.tokens] for row in e.trajectories())
            for e in episodes
        }

    together = texts(8, TASKS)
    assert texts(1, TASKS) == together
    assert texts(8, TASKS[2:]) == {id_: together[id_] for id_ in ("t2", "t3")}


def test_another_salt_draws_other_samples():
    first, second = (
        collect(TASKS[:1], make_setup(Echo, salt=salt), independent(4))[0] for salt in (1, 2)
    )
    assert [s.tokens for s in first.spans] != [s.tokens for s in second.spans]


@pytest.mark.parametrize(
    ("make_env", "status", "word"),
    [
        (lambda: Echo(KeyError("gone")), Status.ENV_ERROR, "KeyError: 'gone'"),
        (lambda: Echo(ToolError("server is down")), Status.TOOL_ERROR, "server is down"),
        (lambda: Slow(seconds=5.0), Status.TIMEOUT, "waited 1 s for env echo step"),
    ],
)
def test_a_failure_is_a_status_of_its_own_path(make_env, status, word):
    where = make_setup(
        make_env, sampling=Sampling(max_tokens=64), deadline=1.0 if status is Status.TIMEOUT else 60
    )
    (episode,) = collect(TASKS[:1], where, independent(4))
    assert len(episode.leaves) == 4
    failed = [leaf for leaf in episode.leaves if leaf.status is status]
    assert failed
    assert any(word in span.info.get("error", "") for span in episode.spans)
    assert trajectories_of([episode]) == [
        row for row in episode.trajectories() if row.leaf.status.is_trainable
    ]


def test_an_env_that_cannot_be_posed_is_one_failed_leaf():
    class Broken(Echo):
        def pose(self):
            raise OSError("no data")

    (episode,) = collect(TASKS[:1], make_setup(Broken), independent(4))
    assert [leaf.status for leaf in episode.leaves] == [Status.ENV_ERROR]
    assert "no data" in episode.spans[0].info["error"]


def test_a_bug_of_ours_is_not_hidden_in_a_status():
    class Broken:
        """An engine and its context, with a bug in sampling."""

        version, vocab_size, tokens, mode = 0, 5, (1, 2), None

        def open(self, tokens, key=None):
            return self

        def fork(self, key=None):
            return self

        async def sample(self, sampling, grammar=None):
            raise ZeroDivisionError("a bug")

        def close(self):
            pass

    with pytest.raises(ZeroDivisionError):
        collect(TASKS[:1], make_setup(Echo, engine=Broken()), independent(2))


def test_budgets_truncate():
    short = make_setup(Echo, sampling=Sampling(max_tokens=1, stop_tokens=()))
    statuses = {leaf.status for e in collect(TASKS, short, independent(4)) for leaf in e.leaves}
    assert Status.TRUNCATED in statuses
    one_turn = make_setup(Echo, sampling=Sampling(max_tokens=64), max_turns=1)
    for episode in collect(TASKS, one_turn, independent(2)):
        assert all(leaf.metrics["turns"] == 1 for leaf in episode.leaves)
        assert all(leaf.status is Status.TRUNCATED for leaf in episode.leaves)
    tight = make_setup(Echo, sampling=Sampling(max_tokens=64), max_context=9)
    for episode in collect(TASKS, tight, independent(2)):
        for row in episode.trajectories():
            assert len(row.tokens) <= 9 + 2  # an observation may pass the limit, a sample never


def test_an_env_that_cannot_fork_is_rebuilt_by_replay():
    async def play():
        where = make_setup(Unforkable, sampling=Sampling(max_tokens=64))
        async with EpisodeBuilder(TASKS[0], where) as builder:
            await builder.open()
            trajectory = await builder.root()
            while trajectory.is_live and trajectory.env.count < 2:
                await trajectory.turn()
            twin = await builder.fork(trajectory)
            assert twin.env is not trajectory.env
            assert twin.env.count == trajectory.env.count == len(trajectory.actions)
            assert twin.context.tokens == trajectory.context.tokens

    asyncio.run(play())


def test_a_forked_path_shares_its_past_and_nothing_else():
    async def play():
        where = make_setup(Echo, sampling=Sampling(max_tokens=64))
        async with EpisodeBuilder(TASKS[0], where) as builder:
            await builder.open()
            trajectory = await builder.root()
            await trajectory.turn()
            if not trajectory.is_live:
                pytest.skip("the first turn was cut")
            twin = await builder.fork(trajectory)
            assert (twin.tip, twin.reward, twin.metrics) == (
                trajectory.tip,
                trajectory.reward,
                trajectory.metrics,
            )
            await asyncio.gather(trajectory.finish(), twin.finish())
            shared = set(builder.episode.walk(trajectory.tip)) & set(builder.episode.walk(twin.tip))
            assert len(shared) == 3  # the prompt, the first turn, its answer
            assert trajectory.env.count == twin.env.count == 3

    asyncio.run(play())


def test_an_external_reward_replaces_the_envs_and_turns_still_add_up():
    where = make_setup(
        Echo, sampling=Sampling(max_tokens=64), reward=lambda task, row: float(len(row.spans))
    )
    rows = trajectories_of(collect(TASKS, where, independent(3)))
    batch = to_batch(rows)
    assert batch.reward.tolist() == [float(len(row.spans)) for row in rows]
    torch.testing.assert_close(batch.rewards.sum(1), batch.reward)


def test_dynamic_sampling_refills_flat_groups_and_never_comes_back_empty():
    async def one(reward: float):
        where = make_setup(Echo, reward=lambda task, row: reward)
        return await build_episode(TASKS[0], where, independent(2))

    flat = asyncio.run(one(1.0))
    rich = asyncio.run(one(1.0))
    rich.leaves[0].reward = 0.0
    rich.leaves[0].status = rich.leaves[1].status = Status.DONE
    assert is_flat(flat) and not is_flat(rich)
    draws = iter([[flat, rich, flat], [rich, flat], [flat]])
    kept, aside = collect_informative(iter(TASKS * 5), 3, lambda tasks: next(draws), max_rounds=3)
    assert [is_flat(e) for e in kept] == [False, False, True]
    assert len(aside) == 3


class Rewritten(Echo):
    """Gives the whole next prompt each turn: "1+2=", then "1+2=7", then "1+2=77"."""

    observe_as = "prompt"

    def respond(self, action: str) -> Turn:
        turn = super().respond(action)
        return turn._replace(observation="1+2=" + "7" * self.count)


class Raw(Rewritten):
    observe_as = "raw"


class Requests(Rewritten):
    """The same as messages of which each turn brings all, as programs do that call a model."""

    observe_as = "user"

    def respond(self, action: str) -> Turn:
        turn = super().respond(action)
        parts = ("1+2=", turn.observation.removeprefix("1+2="))
        messages = [{"role": "user", "content": part} for part in parts]
        return turn._replace(info={"observe_as": "messages", "messages": messages, "tools": []})


@pytest.mark.parametrize("make_env", [Rewritten, Raw, Requests])
def test_a_rewritten_history_is_a_new_context_and_a_row_of_its_own(make_env):
    where = make_setup(make_env, sampling=Sampling(max_tokens=64))
    (episode,) = collect(TASKS[:1], where, independent(6))
    decode = where.chat.tokenizer.decode
    done = [n for n, leaf in enumerate(episode.leaves) if leaf.status is Status.DONE]
    assert done
    for number in done:
        rows = [row for row in episode.trajectories() if row.leaf_index == number]
        prompts = [decode(row.spans[0].tokens) for row in rows]
        assert prompts == ["1+2=", "1+2=7", "1+2=77"]
        assert all([s.author for s in row.spans] == [Author.TASK, Author.POLICY] for row in rows)
        assert rows[0].leaf.reward == 6.0
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    assert batch.leaf.unique().numel() == len({row.leaf_index for row in rows})
    with torch.no_grad():
        logp, _ = Forest(rows, batch.mask, torch.device("cpu")).logprobs(where.engine.decoder)
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tools", "shown"), [(["b"], ["b"]), ([], None), (None, ["a"])])
def test_a_prompt_of_its_own_has_tools_of_its_own(tools, shown, monkeypatch):
    """A sub-agent's request names its tools; without them the task's own stay."""
    where, seen = make_setup(Requests), []
    monkeypatch.setattr(where.chat, "prompt", lambda messages, tools: seen.append(tools) or [1])
    builder = EpisodeBuilder(TASKS[0], where)
    builder.tools = ["a"]
    assert builder.prompt_tokens([{"role": "user", "content": "?"}], tools) == ([1], None)
    assert seen == [shown]


def test_contexts_of_one_path_draw_independently_and_the_same_again():
    texts = []
    for _ in range(2):
        where = make_setup(Rewritten, sampling=Sampling(max_tokens=64))
        (episode,) = collect(TASKS[:1], where, independent(6))
        texts.append([s.text for s in episode.spans if s.author is Author.POLICY])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > len(texts[0]) // 2


def test_a_fork_keeps_the_contexts_before_it():
    async def run():
        where = make_setup(Rewritten, sampling=Sampling(max_tokens=64))
        async with EpisodeBuilder(TASKS[0], where) as builder:
            await builder.open()
            trajectory = await builder.root()
            while trajectory.is_live and not trajectory.past:
                await trajectory.turn()
            twin = await builder.fork(trajectory)
            await asyncio.gather(trajectory.finish(), twin.finish())
            builder.settle()
            return builder.episode

    episode = asyncio.run(run())
    first, second = episode.leaves
    assert first.tips[0] == second.tips[0] and len(first.tips) > 1


def test_a_history_wrapper_by_name_gives_one_context_per_turn():
    tokenizer = FastTokenizer.bytes()
    where = make_setup(
        lambda: make("calculator", wrappers="concat_with_action"),
        tokenizer=tokenizer,
        sampling=Sampling(max_tokens=400),
        max_context=4000,
    )
    (episode,) = collect(TASKS[:1], where, independent(8))
    walks = max((list(leaf.tips) for leaf in episode.leaves), key=len)
    assert len(walks) > 1  # a random model writes "]" once in 260 bytes: a call, and an answer
    prompts = [episode.spans[episode.walk(tip)[0]].text for tip in walks]
    for before, after in pairwise(prompts):
        assert after.startswith(before) and len(after) > len(before)


def test_what_fails_together_is_raised_as_it_is_and_never_by_a_starred_clause():
    async def broken():
        raise KeyError("first")

    async def grown():
        async with together() as group:
            group.create_task(broken())
            group.create_task(asyncio.sleep(5))

    with pytest.raises(KeyError, match="first"):
        asyncio.run(grown())
    files = Path(graft.__file__).parent.rglob("*.py")
    # before Python 3.11.4 what is raised inside one arrives in a group
    assert not [file.name for file in files if "except" + "*" in file.read_text(encoding="utf-8")]
