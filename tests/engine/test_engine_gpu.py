"""The same engine on a CUDA device, in both precisions."""

from __future__ import annotations

import pytest
import torch
from engine_kit import dense_logits, prompt, sample_all, tiny_decoder, tiny_engine

from graft.types import Sampling


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("dtype, most, mean", [("float32", 1e-4, 1e-5), ("bfloat16", 0.2, 2e-2)])
def test_log_probs_on_a_gpu_equal_a_full_float32_forward(
    dtype: str, most: float, mean: float, head_dim: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    decoder = tiny_decoder(head_dim=head_dim).to("cuda", getattr(torch, dtype))
    exact = tiny_decoder(head_dim=head_dim).double()
    exact.load_state_dict(decoder.state_dict())
    engine = tiny_engine(decoder, kv_tokens=512, page_size=16, prefill_chunk=19)
    contexts = []
    for length in (3, 30, 41):
        root = engine.open(prompt(length))
        contexts += [root.fork() for _ in range(6)]
    before = [list(context.tokens) for context in contexts]
    completions = sample_all(contexts, Sampling(temperature=0.9, max_tokens=24, stop_tokens=(2,)))
    gaps: list[float] = []
    for tokens, completion in zip(before, completions, strict=True):
        logits = dense_logits(exact, tokens + completion.tokens)[len(tokens) - 1 : -1] / 0.9
        logp = logits.log_softmax(-1)
        pairs = zip(completion.tokens, completion.logprobs, strict=True)
        gaps += [abs(logp[i, token].item() - got) for i, (token, got) in enumerate(pairs)]
    assert max(gaps) < most
    assert sum(gaps) / len(gaps) < mean
