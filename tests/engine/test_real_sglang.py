"""What graft relies on in an SGLang server, asked of the stand-in and of a real one (slow)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.engine.remote import weight_tensors
from graft.engine.remote.endpoint import EndpointError
from graft.engine.remote.sglang import SGLangServer
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.text.tokenizer import FastTokenizer
from graft.types import Completion, Finish, Sampling
from tests.engine.engine_kit import dense_logp, tiny_decoder
from tests.engine.fake_sglang import serving_sglang
from tests.engine.real_sglang import PYTHON, RealSGLang

TOKENIZER = FastTokenizer.bytes()
REAL = (pytest.mark.slow, pytest.mark.timeout(600))
WINDOW = 128
LAST = TOKENIZER.vocab_size - 1
PROMPT = TOKENIZER.encode("two and three")


def decoder_of(seed: int) -> Any:
    return tiny_decoder(seed, vocab_size=TOKENIZER.vocab_size, max_positions=WINDOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    save_model(decoder_of(0), path)
    TOKENIZER.save(path)
    return path


@pytest.fixture(scope="module", params=["stand-in", pytest.param("real", marks=REAL)])
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    if request.param == "stand-in":
        with serving_sglang(decoder_of(0), TOKENIZER) as fake:
            fake.window, fake.delay = WINDOW, 0.002
            yield fake.url
        return
    if not PYTHON.exists():
        pytest.skip("no SGLang: make .venv/sglang/.ready installs it")
    server = RealSGLang(folder, WINDOW)
    server.start()
    yield server.url
    server.kill()


@pytest.fixture
def engine(url: str, folder: Path, tmp_path: Path) -> Iterator[SGLangServer]:
    opened = open_engine(url, folder, tmp_path)
    yield opened
    opened.close()


def open_engine(url: str, folder: Path, exchange: Path, sync: str = "auto") -> SGLangServer:
    opened = SGLangServer(
        [url], folder, tokenizer=TOKENIZER, deadline=60.0, exchange=exchange, sync=sync
    )
    opened.health()
    return opened


def sample(engine: SGLangServer, tokens: list[int], **sampling: Any) -> Completion:
    async def main() -> Completion:
        return await engine.open(tokens, 1).sample(Sampling(**sampling))

    return asyncio.run(main())


def logprobs(seed: int, tokens: list[int], start: int, temperature: float) -> torch.Tensor:
    logp = dense_logp(decoder_of(seed), tokens, temperature=temperature)[start - 1 : -1]
    return logp.gather(-1, torch.tensor(tokens[start:])[:, None])[:, 0]


@pytest.mark.parametrize("sync", ["file", "memory"])
def test_log_probs_are_those_of_the_weights_that_were_sent(
    url, folder, tmp_path, sync, monkeypatch
):
    monkeypatch.setattr(weight_tensors, "BUCKET_BYTES", 20_000)  # several buckets
    engine = open_engine(url, folder, tmp_path, sync)
    for version in (1, 2):
        engine.load(hf_names(decoder_of(version)), version)
        for temperature in (1.0, 0.7):
            found = sample(engine, PROMPT, temperature=temperature, max_tokens=12)
            # the server draws, and may draw the end
            assert found.version == version and found.finish in (Finish.LENGTH, Finish.STOP)
            tokens = PROMPT + found.tokens
            want = logprobs(version, tokens, len(PROMPT), temperature)
            assert (torch.tensor(found.logprobs) - want).abs().max() < 1e-4
            other = logprobs(version + 7, tokens, len(PROMPT), temperature)
            assert (torch.tensor(found.logprobs) - other).abs().mean() > 0.01
    engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_token_of_the_vocabulary_is_scored(engine, temperature):
    engine.load(hf_names(decoder_of(3)), 3)
    tokens = [5, LAST, 0, LAST - 1, 0, LAST]  # a real server calls the last one 0
    [[[found]]] = engine.score([tokens], [[1]], [tokens[1:]], 0, temperature)
    assert (torch.tensor(found) - logprobs(3, tokens, 1, temperature)).abs().max() < 1e-4


def test_samples_end_where_ours_end(engine):
    engine.load(hf_names(decoder_of(4)), 4)
    greedy = sample(engine, PROMPT, temperature=0.0, max_tokens=20)
    again = sample(engine, PROMPT, temperature=0.0, max_tokens=20, stop_tokens=[greedy.tokens[5]])
    end = greedy.tokens.index(greedy.tokens[5]) + 1
    assert (again.tokens, again.finish) == (greedy.tokens[:end], Finish.STOP)
    for num_tokens in (WINDOW - 8, WINDOW - 7, WINDOW - 6, WINDOW - 3, WINDOW):
        full = sample(engine, [5] * num_tokens, max_tokens=20)
        assert full.finish is Finish.LENGTH and len(full.tokens) <= WINDOW - num_tokens
        assert full.tokens or num_tokens >= WINDOW - 6  # a real server takes no prompt of that size


def test_a_sample_that_is_paused_keeps_its_tokens(engine):
    engine.load(hf_names(decoder_of(5)), 5)

    async def main() -> Completion:
        context = engine.open(PROMPT)
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=100)))
        await asyncio.sleep(0.1)
        engine.pause()
        return await task

    paused = asyncio.run(main())
    assert paused.finish in (Finish.PAUSE, Finish.STOP) and len(paused.tokens) < 100
    want = logprobs(5, PROMPT + paused.tokens, len(PROMPT), 1.0)
    assert not paused.tokens or (torch.tensor(paused.logprobs) - want).abs().max() < 1e-4


def test_a_request_that_the_server_refuses_is_its_own_fault_alone(engine):
    async def main() -> Any:
        content = {"input_ids": [5] * (WINDOW + 9), "sampling_params": {"max_new_tokens": 1}}
        return await engine.pool.servers[0].ask("/generate", content)

    with pytest.raises(EndpointError) as caught:
        asyncio.run(main())
    assert caught.value.code == 400
    assert len(sample(engine, PROMPT, max_tokens=2).tokens) == 2
