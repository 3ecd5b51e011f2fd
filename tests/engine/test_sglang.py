"""SGLang's API: log-probs are the learner's, versions are checked, dead servers are reported."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.engine.remote import endpoint, servers_engine
from graft.engine.remote.endpoint import EndpointError
from graft.engine.remote.server_protocol import ServerReply
from graft.engine.remote.sglang import SGLangServer
from graft.engine.remote.vllm_server import VLLMServer
from graft.models.decoder import Decoder
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.structure import Structure
from graft.text.tokenizer import FastTokenizer
from graft.types import Completion, Finish, Sampling
from tests.engine.engine_kit import TOOLS, dense_logp, gap, tiny_decoder
from tests.engine.fake_sglang import FakeSGLang, serving_sglang

TOKENIZER = FastTokenizer.bytes()


def decoder_of(seed: int) -> Decoder:
    return tiny_decoder(seed, vocab_size=TOKENIZER.vocab_size, max_positions=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(decoder_of(0), path)
    TOKENIZER.save(path)
    return path


class Stage:
    """Fake servers, and an engine over all of them."""

    def __init__(self, folder: Path, exchange: Path, fakes: list[FakeSGLang]) -> None:
        self.folder, self.exchange, self.fakes = folder, exchange, fakes

    def engine(self, **options: Any) -> SGLangServer:
        options = {"deadline": 20.0, "exchange": self.exchange, **options}
        urls = [fake.url for fake in self.fakes]
        return SGLangServer(urls, self.folder, tokenizer=TOKENIZER, **options)


@pytest.fixture
def stage(folder, tmp_path, monkeypatch) -> Iterator[Callable[[int], Stage]]:
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(endpoint, "RETRIES", 3)
    with ExitStack() as stack:

        def make(count: int = 1) -> Stage:
            opened = [
                stack.enter_context(serving_sglang(decoder_of(0), TOKENIZER)) for _ in range(count)
            ]
            return Stage(folder, tmp_path / "exchange", opened)

        yield make


def sample(engine: SGLangServer, tokens: list[int], key: int = 1, **sampling: Any) -> Completion:
    async def main() -> Completion:
        return await engine.open(tokens, key).sample(Sampling(**sampling))

    return asyncio.run(main())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.002)


def test_log_probs_are_the_learners_before_and_after_three_updates(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.health()
    before = TOKENIZER.encode("two and three")
    for version in range(4):
        decoder = decoder_of(version)
        if version:
            engine.load(hf_names(decoder), version)
        for temperature in (1.0, 0.7):
            completion = sample(engine, before, temperature=temperature, max_tokens=12)
            assert (completion.version, completion.finish) == (version, Finish.LENGTH)
            assert completion.actions == completion.tokens and completion.modes == [0] * 12
            assert gap(decoder, before, completion, temperature) < 1e-4
            assert gap(decoder_of(version + 7), before, completion, temperature) > 0.01
    assert fake.version == f"{engine.pool.run}-v3"
    assert len(list(set_up.exchange.iterdir())) == 1  # the last weights alone
    assert "sampling_seed" not in fake.paths("/generate")[-1]["sampling_params"]
    engine.close()
    assert list(set_up.exchange.iterdir()) == []


def test_entropies_are_lower_bounds_of_twenty_tokens(stage):
    set_up = stage()
    engine = set_up.engine()
    assert engine.entropy_top_k == 20
    completion = sample(engine, [5, 6], max_tokens=8)
    logp = dense_logp(decoder_of(0), [5, 6, *completion.tokens])[1:-1]
    true = torch.special.entr(logp.exp()).sum(-1)
    found = torch.tensor(completion.entropies)
    assert (found <= true + 1e-4).all() and (found > 0.5 * true).all()


def test_log_probs_of_a_truncated_distribution_are_nan(stage):
    completion = sample(stage().engine(), [5, 6], top_k=3, max_tokens=4)
    assert len(completion.tokens) == 4
    assert all(map(math.isnan, completion.logprobs)) and all(map(math.isnan, completion.entropies))


def test_contexts_grow_and_fork_with_the_tokens_they_have(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.health()
    del fake.requests[:]

    async def main() -> list[list[int]]:
        context = engine.open([1, 2])
        first = await context.sample(Sampling(max_tokens=3))
        context.append([9])
        twin, past = context.fork(), context.fork(at=2)
        await twin.sample(Sampling(max_tokens=2))
        await past.sample(Sampling(max_tokens=2))
        with pytest.raises(ValueError, match="cannot fork at token 9 of a context of 6"):
            context.fork(at=9)
        return [[1, 2, *first.tokens, 9], twin.tokens[:-2], past.tokens[:-2]]

    own, twin, past = asyncio.run(main())
    assert twin == own and past == [1, 2]
    assert [content["input_ids"] for content in fake.paths("/generate")] == [[1, 2], own, [1, 2]]


def test_stop_tokens_and_strings_cut_where_the_native_engine_cuts(stage):
    engine = stage().engine(eos_ids=(256,))
    greedy = {"temperature": 0.0, "max_tokens": 20}
    free = sample(engine, [5], **greedy)
    native = NativeEngine(decoder_of(0), tokenizer=TOKENIZER, kv_tokens=256, page_size=4)

    def natively(**sampling: Any) -> Completion:
        async def main() -> Completion:
            return await native.open([5]).sample(Sampling(**greedy, **sampling))

        return asyncio.run(main())

    assert free.tokens == natively().tokens
    letters = [token for token in free.tokens if 32 < token < 127]
    assert letters
    text = TOKENIZER.decode(letters[:1])
    for stops in ({"stop_tokens": (free.tokens[2],)}, {"stop": (text,)}):
        completion, want = sample(engine, [5], **greedy, **stops), natively(**stops)
        assert (completion.tokens, completion.finish) == (want.tokens, want.finish)
        assert completion.finish is Finish.STOP and len(completion.tokens) < 20
    # it begins before the sample, so the server does not see it
    first = free.tokens[: free.tokens.index(letters[0])]
    prompt = [5, *first, 60]
    following = sample(engine, prompt, **greedy).tokens
    stop = "<" + TOKENIZER.decode(following[:2])
    if "\ufffd" not in stop:
        completion = sample(engine, prompt, **greedy, stop=(stop,), num_begun=1)
        assert completion.tokens == following[:2] and completion.finish is Finish.STOP


def test_a_stop_string_that_began_before_the_sample_is_found_here(stage):
    engine = stage().engine()
    reply = ServerReply([97, 98, 99], [-1.0] * 3, [[-0.5, -1.0]] * 3, "length")
    sampling = Sampling(stop=("<a",), num_begun=1, max_tokens=3)
    pending = engine.begin(engine.open([1, 60]), sampling, version=0, window=64)
    completion = engine._completion(reply, pending, None)
    assert (completion.tokens, completion.finish) == ([97], Finish.STOP)
    sampling = Sampling(stop=("<a",), max_tokens=3)
    pending = engine.begin(engine.open([1, 60]), sampling, version=0, window=64)
    completion = engine._completion(reply, pending, None)
    assert (completion.tokens, completion.finish) == ([97, 98, 99], Finish.LENGTH)


def test_the_window_ends_a_sample_and_a_full_context_has_an_empty_completion(stage):
    engine = stage().engine()
    assert len(sample(engine, [5] * 61, max_tokens=9).tokens) == 3
    completion = sample(engine, [5] * 64)
    assert completion.tokens == [] and completion.finish is Finish.LENGTH


def test_pause_returns_the_tokens_so_far_and_the_next_sample_continues(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.health()

    async def main() -> tuple[list[int], Completion, Completion]:
        fake.delay = 0.02
        context = engine.open([1, 2])
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=60)))
        await asyncio.sleep(0.2)
        engine.pause()
        first = await task
        fake.delay = 0.0
        return context.tokens, first, await context.sample(Sampling(max_tokens=4))

    tokens, first, second = asyncio.run(main())
    assert first.finish is Finish.PAUSE and 0 < len(first.tokens) < 60
    assert tokens == [1, 2, *first.tokens, *second.tokens]
    assert gap(decoder_of(0), [1, 2], first) < 1e-4
    assert gap(decoder_of(0), [1, 2, *first.tokens], second) < 1e-4


@pytest.mark.parametrize("is_old", [False, True])
def test_a_load_pauses_running_samples_whose_tokens_are_of_the_old_weights(stage, is_old):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    fake.is_old = is_old
    engine.health()

    async def main() -> tuple[Completion, Completion]:
        fake.delay = 0.02
        context = engine.open([1, 2])
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=60)))
        await asyncio.sleep(0.2)
        engine.load(hf_names(decoder_of(3)), 3)
        first = await task
        fake.delay = 0.0
        return first, await context.sample(Sampling(max_tokens=4))

    first, second = asyncio.run(main())
    assert (first.finish, first.version, second.version) == (Finish.PAUSE, 0, 3)
    assert 0 < len(first.tokens) < 60
    assert gap(decoder_of(0), [1, 2], first) < 1e-4
    assert gap(decoder_of(3), [1, 2, *first.tokens], second) < 1e-4


def test_a_sample_that_starts_during_a_load_waits_for_it(stage):
    set_up = stage()
    engine = set_up.engine()
    engine.health()

    async def main() -> Completion:
        loading = asyncio.ensure_future(asyncio.to_thread(engine.load, hf_names(decoder_of(3)), 3))
        await until(lambda: engine._loading is not None)
        completion = await engine.open([1, 2]).sample(Sampling(max_tokens=4))
        await loading
        return completion

    completion = asyncio.run(main())
    assert completion.version == 3 and gap(decoder_of(3), [1, 2], completion) < 1e-4


def test_a_server_with_other_weights_is_a_stale_engine(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.load(hf_names(decoder_of(1)), 1)
    sample(engine, [5], max_tokens=2)
    fake.version = "default"  # as after a restart
    with pytest.raises(EngineError, match=f"{fake.url} is a stale engine.*'default'.*v1"):
        sample(engine, [5], max_tokens=2)
    with pytest.raises(EngineError, match=r"no server left.*stale"):
        sample(engine, [5], max_tokens=2)
    engine.load(hf_names(decoder_of(2)), 2)
    assert sample(engine, [5], max_tokens=2).version == 2


def test_another_process_of_the_run_may_have_given_it_later_weights(stage):
    set_up = stage()
    first, second = set_up.engine(), set_up.engine()
    second.health()
    first.load(hf_names(decoder_of(1)), 1)
    second.version = 1
    assert sample(second, [5], max_tokens=2).version == 1
    first.load(hf_names(decoder_of(2)), 2)
    completion = sample(second, [5], max_tokens=6)  # the tag of the reply is of the later version
    assert completion.version == 2 and gap(decoder_of(2), [5], completion) < 1e-4


def test_score_agrees_with_the_native_engine(stage):
    engine = stage().engine()
    native = NativeEngine(decoder_of(0), kv_tokens=256, page_size=4)
    arguments = ([[5, 6, 7, 8], [9, 10]], [[1, 4], [2]], [[11, 12, 13], [14]], 0)
    for temperature in (1.0, 0.7):
        found, want = engine.score(*arguments, temperature), native.score(*arguments, temperature)
        for text, wanted in zip(found, want, strict=True):
            for position, wanted_position in zip(text, wanted, strict=True):
                for got, right in zip(position, wanted_position, strict=True):
                    assert got == pytest.approx(right, abs=1e-4)


def test_two_servers_share_contexts_and_both_load_the_weights(stage):
    set_up = stage(2)
    engine = set_up.engine()
    engine.load(hf_names(decoder_of(1)), 1)
    contexts = [engine.open([5, i]) for i in range(4)]
    assert [context.server.url for context in contexts] == [f.url for f in set_up.fakes] * 2
    assert contexts[1].fork().server is contexts[1].server  # the prefix is cached there

    async def main() -> list[Completion]:
        return await asyncio.gather(*(c.sample(Sampling(max_tokens=4)) for c in contexts))

    for context, completion in zip(contexts, asyncio.run(main()), strict=True):
        assert completion.version == 1
        assert gap(decoder_of(1), context.tokens[:2], completion) < 1e-4
    assert {fake.version for fake in set_up.fakes} == {f"{engine.pool.run}-v1"}
    for context in contexts:
        context.close()
    assert [server.num_contexts for server in engine.pool.servers] == [
        0,
        1,
    ]  # the fork is still open


def test_samples_of_a_dead_server_move_to_another_with_a_warning(stage, caplog):
    set_up = stage(2)
    engine, [one, two] = set_up.engine(), set_up.fakes
    engine.health()

    async def main() -> Completion:
        one.delay = 0.02
        context = engine.open([1, 2])
        assert context.server.url == one.url
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=20)))
        await until(lambda: len(one.running) > 0)
        one.is_dead = True
        completion = await task
        assert context.server.url == two.url
        return completion

    with caplog.at_level(logging.WARNING, "graft"):
        completion = asyncio.run(main())
    assert len(completion.tokens) == 20 and gap(decoder_of(0), [1, 2], completion) < 1e-4
    assert any(one.url in text and "is excluded" in text for text in caplog.messages)
    engine.load(hf_names(decoder_of(1)), 1)  # continues without it
    assert sample(engine, [5], max_tokens=2).version == 1
    one.is_dead = False
    engine.load(hf_names(decoder_of(2)), 2)  # and includes it again
    assert all(not server.fault for server in engine.pool.servers)


def test_the_only_server_killed_in_the_middle_is_named(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.health()

    async def main() -> None:
        fake.delay = 0.02
        context = engine.open([1, 2])
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=20)))
        await until(lambda: len(fake.running) > 0)
        fake.is_dead = True
        try:
            await task
        finally:
            assert context.tokens == [1, 2]

    with pytest.raises(EndpointError, match=f"{fake.url}.*closed the connection"):
        asyncio.run(main())
    fake.is_dead, fake.delay = False, 0.0
    fake.running.clear()
    assert len(sample(engine, [5], max_tokens=2).tokens) == 2  # it has the weights that it had
    fake.is_dead = True
    with pytest.raises(EngineError, match=f"no server took the new weights.*{fake.url}"):
        engine.load(hf_names(decoder_of(1)), 1)
    fake.is_dead = False
    with pytest.raises(EngineError, match="no server left"):
        sample(engine, [5])  # its weights may be half loaded


def test_a_busy_server_gets_the_request_again(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.health()
    fake.faults = [503, 429]
    assert len(sample(engine, [5], max_tokens=2).tokens) == 2


def test_a_closed_context_ends_its_sample(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.health()

    async def main() -> Completion:
        fake.delay = 0.02
        context = engine.open([1, 2])
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=60)))
        await until(lambda: len(fake.running) > 0)
        with pytest.raises(EngineError, match="while it samples"):
            context.append([1])
        context.close()
        return await task

    completion = asyncio.run(main())
    assert completion.finish is Finish.ABORT and completion.tokens == []


def test_a_sample_that_the_server_does_not_stop_ends_empty_after_a_while(stage, monkeypatch):
    monkeypatch.setattr(servers_engine, "STOP_SECONDS", 0.1)
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    engine.health()
    monkeypatch.setattr(engine.protocol, "stop", lambda server, names: asyncio.sleep(0))

    async def main() -> Completion:
        fake.delay = 0.05
        context = engine.open([1, 2])
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=60)))
        await until(lambda: len(fake.running) > 0)
        engine.pause()
        return await task

    completion = asyncio.run(main())
    assert completion.finish is Finish.PAUSE and completion.tokens == []


def test_what_sglang_cannot_do_is_refused(stage, folder, tmp_path):
    set_up = stage()
    engine, [fake] = set_up.engine(), set_up.fakes
    with pytest.raises(EngineError, match=r"engine\.sync=memory"):
        VLLMServer([fake.url], folder, tokenizer=TOKENIZER, exchange=tmp_path, sync="memory")
    with pytest.raises(EngineError, match="must list servers"):
        SGLangServer([], folder, tokenizer=TOKENIZER, exchange=tmp_path)
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        SGLangServer([fake.url], tmp_path, tokenizer=TOKENIZER, exchange=tmp_path)
    with pytest.raises(EngineError, match="cannot apply a grammar"):
        asyncio.run(engine.open([1]).sample(Sampling(), TOOLS))
    with pytest.raises(EngineError, match="masks of a structured answer"):
        asyncio.run(engine.open([1]).sample(Sampling(structure=Structure.json())))
    with pytest.raises(EngineError, match="changed in place"):
        engine.load(None, 1)
    weights = dict(hf_names(decoder_of(1)))
    weights.popitem()
    with pytest.raises(EngineError, match="missing"):
        engine.load(weights, 1)
    assert list(set_up.exchange.iterdir()) == []
    fake.is_raw = True
    with pytest.raises(
        EngineError, match=f"{fake.url}.*at every temperature.*SGLANG_RETURN_ORIGINAL_LOGPROB"
    ):
        engine.health()
    fake.is_dead = True
    with pytest.raises(EngineError, match=f"{fake.url}.*closed the connection"):
        engine.health()


def test_nothing_waits_longer_than_the_deadline(stage):
    set_up = stage()
    engine, [fake] = set_up.engine(deadline=0.5), set_up.fakes
    engine.health()
    fake.delay = 0.2
    with pytest.raises(EngineError, match=rf"{fake.url}.*0\.5 s"):
        sample(engine, [5], max_tokens=60)
