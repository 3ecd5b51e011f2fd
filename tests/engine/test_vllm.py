"""vLLM, in this process and as a server: its log-probs are those of the learner's forward.

Run with the interpreter that has vLLM; one engine serves the whole file.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.engine.remote.prompt_logprobs import PromptScorer
from graft.models.decoder import Decoder
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.transformers.scores import score_logits
from graft.models.truncation import Truncation
from graft.text.tokenizer import FastTokenizer
from graft.types import Completion, Finish, Sampling
from tests.engine.engine_kit import TOOLS, dense_logp, gap, tiny_decoder
from tests.processes import free_port

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TOKENIZER = FastTokenizer.bytes()
WINDOW = 2048
LONG = 2000
"""Tokens that take seconds."""


def decoder_of(seed: int, tied: bool = True) -> Decoder:
    """Heads of 32: the least that vLLM's attention takes. Large weights, so that a fault shows."""
    sizes = {"width": 64, "head_dim": 32, "max_positions": 2048}
    decoder = tiny_decoder(seed, vocab_size=TOKENIZER.vocab_size, tied=tied, **sizes)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.ndim == 2:
                weight.mul_(2.5)
    return decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(decoder_of(0), path)
    TOKENIZER.save(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    from graft.engine.remote.vllm import VLLMEngine

    made = VLLMEngine(
        folder,
        tokenizer=TOKENIZER,
        seed=1,
        deadline=60.0,
        max_context=WINDOW,
        args={"kv_cache_memory_bytes": 2**24},
    )
    yield made
    made.close()
    gc.collect()


@pytest.fixture
def decoder(engine: Any) -> Decoder:
    """What the engine serves: the weights of seed 0."""
    decoder = decoder_of(0)
    if engine.version:
        engine.load(hf_names(decoder), 0)
    return decoder


def talk(main: Callable[[], Any]) -> Any:
    return asyncio.run(main())


def sample(engine: Any, tokens: list[int], key: int = 1, **sampling: Any) -> Completion:
    async def main() -> Completion:
        return await engine.open(tokens, key).sample(Sampling(**sampling))

    return asyncio.run(main())


async def until_it_draws(engine: Any) -> None:
    async with asyncio.timeout(30):
        while not any(sample.pending.tokens for sample in list(engine._vllm.running.values())):
            await asyncio.sleep(0.001)


def test_log_probs_are_the_learners_before_and_after_three_updates(engine, decoder):
    before = TOKENIZER.encode("two and three")
    for version in range(4):
        if version:
            decoder = decoder_of(version)
            engine.load(hf_names(decoder), version)
        for temperature in (1.0, 0.7):
            completion = sample(engine, before, temperature=temperature, max_tokens=24)
            assert completion.version == engine.version == version
            assert len(completion.tokens) == 24 and completion.finish is Finish.LENGTH
            assert gap(decoder, before, completion, temperature) < 1e-3
            other = decoder_of(version + 7)
            # the measure detects another model
            assert gap(other, before, completion, temperature) > 0.1


@pytest.mark.parametrize(
    "cut", [Truncation(3), Truncation(top_p=0.7), Truncation(min_p=0.2), Truncation(9, 0.8)]
)
def test_log_probs_of_a_truncated_distribution_are_the_learners(engine, decoder, cut):
    before = TOKENIZER.encode("abc")
    completion = sample(engine, before, temperature=0.7, max_tokens=16, **cut._asdict())
    logp = dense_logp(decoder, before + completion.tokens, temperature=0.7)[len(before) - 1 : -1]
    chosen = torch.tensor(completion.tokens)
    want, entropy = score_logits(logp, chosen, None, truncation=cut)
    torch.testing.assert_close(torch.tensor(completion.logprobs), want, atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(completion.entropies), entropy, atol=1e-3, rtol=0)
    assert float((want - logp.gather(1, chosen[:, None])[:, 0]).max()) > 0.1


def test_the_repetition_penalty_is_the_native_engines(engine, decoder):
    before = TOKENIZER.encode("abc")
    how = {"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 16}
    native = NativeEngine(decoder, kv_tokens=1024)
    assert sample(engine, before, **how).tokens == sample(native, before, **how).tokens
    assert (
        sample(engine, before, **how).tokens
        != sample(engine, before, **{**how, "repetition_penalty": 1.0}).tokens
    )


def test_entropies_are_close_lower_bounds_of_twenty_tokens(engine, decoder):
    assert engine.entropy_top_k == 20
    before = TOKENIZER.encode("abc")
    completion = sample(engine, before, max_tokens=32)
    logp = dense_logp(decoder, before + completion.tokens)[len(before) - 1 : -1]
    true = torch.special.entr(logp.exp()).sum(-1)
    found = torch.tensor(completion.entropies)
    assert (found <= true + 1e-4).all() and (found > 0.5 * true).all()


def test_a_fork_continues_the_same_tokens_with_draws_of_its_own(engine, decoder):
    async def main() -> tuple[Any, ...]:
        context = engine.open(TOKENIZER.encode("once"), key=5)
        await context.sample(Sampling(max_tokens=4))
        context.append([1, 2])
        twin, past = context.fork(key=6), context.fork(key=5, at=4)
        sampling = Sampling(max_tokens=12)
        drawn = await asyncio.gather(*(c.sample(sampling) for c in (context, twin, past)))
        return context.tokens, twin.tokens, past.tokens, *drawn

    own, twin, past, first, other, again = talk(main)
    assert own[:10] == twin[:10] and own[8:10] == [1, 2] and len(own) == len(twin) == 22
    assert first.tokens != other.tokens
    assert past[4:8] == own[4:8]  # the same key and position draw the same
    for tokens, completion in ((own, first), (twin, other), (past, again)):
        assert gap(decoder, tokens[:-12], completion) < 1e-3


def test_stop_strings_and_stop_tokens_cut_where_the_native_engine_cuts(engine, decoder):
    before = TOKENIZER.encode("x")
    free = sample(engine, before, key=3, max_tokens=40)
    tokens = free.tokens
    third = tokens[2]
    completion = sample(engine, before, key=3, max_tokens=40, stop_tokens=(third,))
    assert (
        completion.tokens == tokens[: tokens.index(third) + 1] and completion.finish is Finish.STOP
    )
    # a single byte that is a character: found wherever it first stands
    letter = next(t for t in tokens[3:] if 32 < t < 127)
    completion = sample(engine, before, key=3, max_tokens=40, stop=(chr(letter),))
    assert (
        completion.tokens == tokens[: tokens.index(letter) + 1] and completion.finish is Finish.STOP
    )
    assert completion.logprobs == free.logprobs[: len(completion.tokens)]


def test_a_stop_string_may_begin_before_the_sample_and_min_tokens_passes_it_over(engine, decoder):
    first = next(
        (key, completion.tokens)
        for key in range(99)
        if 32 < (completion := sample(engine, [60], key=key, max_tokens=3)).tokens[0] < 127
    )
    key, tokens = first
    stop = "<" + chr(tokens[0])
    completion = sample(engine, [60], key=key, max_tokens=3, stop=(stop,), num_begun=1)
    assert completion.tokens == tokens[:1] and completion.finish is Finish.STOP
    completion = sample(engine, [60], key=key, max_tokens=3, stop=(stop,))
    assert completion.tokens == tokens and completion.finish is Finish.LENGTH
    completion = sample(
        engine, [60], key=key, max_tokens=3, min_tokens=2, stop=(stop,), num_begun=1
    )
    assert len(completion.tokens) == 3


def test_the_window_ends_a_sample_and_a_full_context_has_an_empty_completion(engine, decoder):
    completion = sample(engine, [65] * (WINDOW - 3), max_tokens=50)
    assert len(completion.tokens) == 3 and completion.finish is Finish.LENGTH
    completion = sample(engine, [65] * WINDOW, max_tokens=50)
    assert completion.tokens == [] and completion.finish is Finish.LENGTH


def test_pause_returns_the_tokens_so_far_and_the_next_sample_continues(engine, decoder):
    before = TOKENIZER.encode("long")

    async def main() -> tuple[list[int], Completion, Completion]:
        context = engine.open(before, key=2)
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=LONG)))
        await until_it_draws(engine)
        engine.pause()
        first = await task
        return context.tokens, first, await context.sample(Sampling(max_tokens=4))

    tokens, first, second = talk(main)
    assert first.finish is Finish.PAUSE and 0 < len(first.tokens) < LONG
    assert tokens == before + first.tokens + second.tokens
    assert gap(decoder, before, first) < 1e-3
    assert gap(decoder, before + first.tokens, second) < 1e-3


def test_a_load_pauses_running_samples_whose_tokens_are_of_the_old_weights(engine, decoder):
    new = decoder_of(9)
    before = TOKENIZER.encode("long")

    async def main() -> tuple[Completion, Completion]:
        context = engine.open(before, key=2)
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=LONG)))
        await until_it_draws(engine)
        engine.load(hf_names(new), 9)
        return await task, await context.sample(Sampling(max_tokens=8))

    first, second = talk(main)
    assert (first.finish, first.version, second.version) == (Finish.PAUSE, 0, 9)
    assert gap(decoder, before, first) < 1e-3
    assert gap(new, before + first.tokens, second) < 1e-3


def test_a_closed_context_ends_its_sample_and_a_cancelled_one_leaves_nothing_running(
    engine, decoder
):
    async def main() -> Completion:
        context, other = engine.open([1], key=1), engine.open([2], key=2)
        sampling = Sampling(max_tokens=LONG)
        tasks = [asyncio.ensure_future(c.sample(sampling)) for c in (context, other)]
        await asyncio.sleep(0.02)
        context.close()
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert other.tokens == [2]
        with pytest.raises(EngineError, match="closed context"):
            await context.sample(sampling)
        return await tasks[0]

    assert talk(main).finish is Finish.ABORT
    engine.health()  # earlier work is done
    assert not engine._vllm.running


def test_sleep_without_memory_to_give_back_changes_nothing(engine, decoder):
    """vLLM cannot sleep on a CPU; the engine goes on."""
    engine.sleep()
    assert gap(decoder, [1, 2], sample(engine, [1, 2], max_tokens=4)) < 1e-3


def test_score_agrees_with_the_native_engine(engine, decoder):
    native = NativeEngine(decoder, kv_tokens=256, page_size=4)
    texts, at = [[5, 6, 7, 8], [9, 10]], [[1, 4], [2]]
    continuations = [[11, 12, 13], [14]]
    for temperature in (1.0, 0.7):
        found = engine.score(texts, at, continuations, 0, temperature)
        want = native.score(texts, at, continuations, 0, temperature)
        flat = [
            (x, y)
            for a, b in zip(found, want, strict=True)
            for c, d in zip(a, b, strict=True)
            for e, f in zip(c, d, strict=True)
            for x, y in zip(e, f, strict=True)
        ]
        assert len(flat) == 12
        assert all(abs(x - y) < 1e-3 for x, y in flat)


def test_what_vllm_cannot_do_is_refused(engine, folder, decoder):
    from graft.engine.remote.vllm import VLLMEngine

    with pytest.raises(EngineError, match="cannot set logprobs_mode"):
        VLLMEngine(folder, tokenizer=TOKENIZER, args={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(EngineError, match=r"tensor_parallel_size=2.*engine\.tp.*engine\.url"):
        VLLMEngine(folder, tokenizer=TOKENIZER, args={"tensor_parallel_size": 2})
    with pytest.raises(EngineError, match=r"pipeline_parallel_size=2.*engine\.url"):
        VLLMEngine(folder, tokenizer=TOKENIZER, args={"pipeline_parallel_size": 2})
    with pytest.raises(EngineError, match="cannot apply a grammar"):
        talk(lambda: engine.open([1]).sample(Sampling(), TOOLS))
    with pytest.raises(EngineError, match=r"draws at 0\.01 or more"):
        sample(engine, [1], temperature=0.001)
    with pytest.raises(EngineError, match="changed in place"):
        engine.load(None, 1)
    with pytest.raises(ValueError, match="only mode 0"):
        engine.score([[1]], [[1]], [[2]], mode=1)
    with pytest.raises(ValueError, match="token 300 is outside"):
        engine.open([300])


def test_weights_that_are_not_all_there_stop_the_engine_until_they_are(engine, decoder):
    weights = dict(hf_names(decoder))
    name = "model.layers.1.mlp.down_proj.weight"
    del weights[name]
    with pytest.raises(EngineError, match=f"missing .*{name}"):
        engine.load(weights, 5)
    with pytest.raises(EngineError, match="half replaced"):
        sample(engine, [1])
    engine.load(hf_names(decoder), 5)
    assert gap(decoder, [1], sample(engine, [1], max_tokens=8)) < 1e-3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real one, and the folder it started from. The CPU build reloads untied heads alone."""
    folder = tmp_path_factory.mktemp("served")
    save_model(decoder_of(0, tied=False), folder)
    TOKENIZER.save(folder)
    port = free_port()
    options = f"--host 127.0.0.1 --port {port} --dtype float32 --max-model-len {WINDOW}"
    options += " --enforce-eager --kv-cache-memory-bytes 16777216 --uvicorn-log-level warning"
    options += " --logprobs-mode processed_logprobs"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [*command, *options.split()],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                pytest.fail((folder / "log").read_text()[-3000:])
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url, folder
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        log.close()


def engine_of(server: tuple[str, Path], exchange: Path, **options: Any) -> Any:
    from graft.engine.remote.vllm_server import VLLMServer

    url, folder = server
    options = {"tokenizer": TOKENIZER, "deadline": 60.0, "exchange": exchange, **options}
    return VLLMServer([url], options.pop("folder", folder), **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_scores_tokens_as_a_teacher(server):
    """Every token's log-prob and the likeliest ones are those of the same weights here."""
    decoder = decoder_of(0, tied=False)
    scorer = PromptScorer(f"{server[0]}/v1", TOKENIZER, deadline=60)
    scorer.check(5)
    tokens = TOKENIZER.encode("two and three is five")
    ((found,), want) = scorer.score([tokens], 5), dense_logp(decoder, tokens)
    own = want[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(found.logprobs[1:]), own, atol=1e-3, rtol=0)
    tops, ids = want.topk(5, -1)
    torch.testing.assert_close(torch.tensor(found.tops[1:]), tops[: len(own)], atol=1e-3, rtol=0)
    assert torch.tensor(found.ids[1:]).tolist() == ids[: len(own)].tolist()
    with pytest.raises(EngineError, match="--max-logprobs 500"):
        scorer.score([tokens], 500)
    with pytest.raises(EngineError, match="policy's tokenizer"):
        other = FastTokenizer.characters("".join(map(chr, range(32, 127))))
        PromptScorer(f"{server[0]}/v1", other, deadline=60).check(0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_log_probs_of_a_server_are_the_learners_after_three_updates(server, tmp_path):
    engine = engine_of(server, tmp_path)
    engine.health()
    before = TOKENIZER.encode("two and three")
    for version in range(4):
        decoder = decoder_of(version, tied=False)
        if version:
            engine.load(hf_names(decoder), version)
        for temperature in (1.0, 0.7):
            completion = sample(engine, before, temperature=temperature, max_tokens=24)
            assert (completion.version, len(completion.tokens)) == (version, 24)
            assert gap(decoder, before, completion, temperature) < 1e-3
            assert gap(decoder_of(version + 7, tied=False), before, completion, temperature) > 0.1
    native = NativeEngine(decoder, kv_tokens=256, page_size=4)
    score = ([[5, 6, 7, 8]], [[1, 4]], [[11, 12, 13], [14]], 0)
    for temperature in (1.0, 0.7):
        [found], [want] = engine.score(*score, temperature), native.score(*score, temperature)
        for place, wanted in zip(found, want, strict=True):
            for got, right in zip(place, wanted, strict=True):
                assert got == pytest.approx(right, abs=1e-3)
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_returns_its_tokens_when_it_is_paused_or_gets_new_weights(server, tmp_path):
    engine, old, new = engine_of(server, tmp_path), *(decoder_of(s, tied=False) for s in (4, 5))
    engine.load(hf_names(old), 4)

    async def stopped(stop: Callable[[], None]) -> tuple[list[Completion], Completion]:
        contexts = [engine.open([1, i]) for i in range(4)]
        samples = [asyncio.ensure_future(c.sample(Sampling(max_tokens=LONG))) for c in contexts]
        await asyncio.sleep(0.3)
        stop()
        first = await asyncio.gather(*samples)
        return first, await contexts[0].sample(Sampling(max_tokens=4))

    first, second = talk(lambda: stopped(engine.pause))
    assert {completion.finish for completion in first} == {Finish.PAUSE}
    assert any(completion.tokens for completion in first)
    for i, completion in enumerate(first):
        assert completion.version == 4 and len(completion.tokens) < LONG
        assert not completion.tokens or gap(old, [1, i], completion) < 1e-3
    assert gap(old, [1, 0, *first[0].tokens], second) < 1e-3

    first, second = talk(lambda: stopped(lambda: engine.load(hf_names(new), 5)))
    assert {(completion.finish, completion.version) for completion in first} == {(Finish.PAUSE, 4)}
    for i, completion in enumerate(first):
        assert not completion.tokens or gap(old, [1, i], completion) < 1e-3
    assert second.version == 5 and gap(new, [1, 0, *first[0].tokens], second) < 1e-3
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_cuts_at_stops_and_is_stale_with_weights_of_others(server, tmp_path, folder):
    engine = engine_of(server, tmp_path)
    engine.load(hf_names(decoder_of(0, tied=False)), 0)
    tokens = sample(engine, [5], key=3, max_tokens=40).tokens
    letter = next(token for token in tokens if 32 < token < 127)
    cut = tokens[: tokens.index(letter) + 1]
    for stops in ({"stop": (chr(letter),)}, {"stop_tokens": (letter,)}):
        completion = sample(engine, [5], key=3, max_tokens=40, **stops)
        assert completion.tokens == cut and completion.finish is Finish.STOP
    with pytest.raises(EngineError, match="where the head is the embedding"):
        engine_of(server, tmp_path, folder=folder).health()
    other = engine_of(server, tmp_path / "other")
    other.load(hf_names(decoder_of(1, tied=False)), 1)
    with pytest.raises(EngineError, match=f"{server[0]} is a stale engine"):
        sample(engine, [5])
