"""`VLLMEngine`: vLLM in this process, with weights of its own that `load` replaces in memory.

A thread owns vLLM (`vllm_thread`), and new weights are loaded between two of its steps, so no sample is
of two versions. Stop strings are found here, on the tokens as they come: vLLM runs without a tokenizer.
Log-probs are of the distribution that was drawn from (after temperature, top-k, top-p); entropies are
lower bounds from the likeliest tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.remote.stateless import (
    PendingSample,
    StatelessContext,
    check_score,
    check_space,
    model_config,
    seed_of,
    window_of,
)
from graft.engine.remote.top_entropy import known_tokens
from graft.engine.remote.vllm_library import (
    engine_arguments,
    prompt_score_parameters,
    sampling_parameters,
    token_score_parameters,
)
from graft.engine.remote.vllm_thread import VLLMSample, VLLMScore, VLLMThread
from graft.engine.stop_strings import TokenPieces
from graft.protocols import Tokenizer
from graft.types import Completion, Finish, Sampling

MIN_TEMPERATURE = 0.01
"""vLLM raises any lower temperature to this one, except 0."""


class VLLMEngine:
    """Continuous batching by vLLM.

    model_folder  the Hugging Face folder that the run starts from; without weights in it the first
                  `load` brings them
    tokenizer     only to find stop strings
    eos_ids       stop tokens of every sample
    seed          of every draw, together with the context's key and its length
    space         must be the whole vocabulary: vLLM has no modes and no extra actions
    deadline      seconds for a completion, a score or new weights
    max_context   tokens of the longest context
    args          arguments of vLLM itself, such as {"gpu_memory_utilization": 0.5}
    dtype         "float32" or "bfloat16"
    """

    def __init__(
        self,
        model_folder: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        space: ActionSpace | None = None,
        deadline: float = 600.0,
        max_context: int = 4096,
        args: Mapping[str, Any] | None = None,
        dtype: str = "float32",
    ) -> None:
        check_space(space, "vllm")
        folder = Path(model_folder)
        config = model_config(folder, "vllm")
        self.vocab_size: int = config["vocab_size"]
        self.window = int(min(max_context, window_of(config)))
        self.eos_ids, self.seed, self.deadline = frozenset(eos_ids), seed, deadline
        self._pieces = TokenPieces(tokenizer)
        has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
        arguments = engine_arguments(args or {}, folder, has_weights)
        top_k = min(arguments["max_logprobs"], self.vocab_size)
        top_k = self.vocab_size if top_k < 0 else top_k
        if top_k < 1:
            raise EngineError("engine.args max_logprobs=0 leaves no log-probs to train with")
        self._top_k, self.entropy_top_k = top_k, known_tokens(self.vocab_size, top_k)
        arguments |= {"dtype": dtype, "seed": seed % 2**32, "max_model_len": self.window}
        self._num_opened = 0
        self._is_open = True
        self._vllm = VLLMThread(folder, arguments, has_weights, deadline)

    @property
    def version(self) -> int:
        return self._vllm.version

    @version.setter
    def version(self, version: int) -> None:
        self._vllm.version = version

    @property
    def where(self) -> str:
        return "engine 'vllm'"

    def open(self, tokens: Sequence[int], key: int | None = None) -> StatelessContext:
        if not self._is_open:
            raise EngineError("the engine is closed")
        self._num_opened += 1
        return StatelessContext(self, tokens, seed_of(0, self._num_opened) if key is None else key)

    async def complete(self, context: StatelessContext, sampling: Sampling) -> Completion:
        """Draw until a stop, `max_tokens` or the window; if cancelled, nothing keeps running."""
        if not self._is_open:
            raise EngineError("the engine is closed")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"temperature={sampling.temperature}: vLLM draws at {MIN_TEMPERATURE} or more; "
                "0 is greedy"
            )
        pending = PendingSample(
            context.tokens,
            sampling,
            eos_ids=self.eos_ids,
            pieces=self._pieces,
            budget=min(sampling.max_tokens, self.window - len(context.tokens)),
            version=self.version,
        )
        if pending.budget < 1:
            return pending.completion(Finish.LENGTH)
        sample = VLLMSample(pending, asyncio.get_running_loop(), self._top_k)
        seed = seed_of(self.seed, context.key, len(context.tokens))
        parameters = sampling_parameters(pending, seed, self._top_k)
        name = self._vllm.add(sample, list(context.tokens), parameters)
        context.stop = lambda finish: self._vllm.end(name, finish)
        try:
            async with asyncio.timeout(self.deadline):
                return await sample.future
        except TimeoutError:
            raise EngineError(
                f"engine 'vllm' did not complete a sample in {self.deadline:g} s "
                f"({len(pending.tokens)} tokens drawn; {len(self._vllm.running)} samples run). Raise "
                "rollout.deadline, or request fewer tokens"
            ) from None
        finally:
            if not sample.is_over:
                self._vllm.end(name, Finish.ABORT)

    def score(
        self,
        texts: Sequence[Sequence[int]],
        at: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        mode: int = 0,
        temperature: float = 1.0,
    ) -> list[list[list[list[float]]]]:
        """For each text: log-probs [i][j][k] of action k of continuations[j] after text[: at[i]].

        At temperature 1 as log-probs of a prompt; else with one request per token.
        """
        wanted = check_score(texts, at, continuations, mode, self.vocab_size)
        running = [
            self._start_scores([*text[:position], *actions], len(actions), temperature)
            for text, positions in zip(texts, at, strict=True)
            for position in positions
            for actions in wanted
        ]
        found = (
            [logp for score in scores for logp in self._vllm.wait(score.future, "to score")]
            for scores in running
        )
        return [[[next(found) for _ in wanted] for _ in positions] for positions in at]

    def _start_scores(self, tokens: list[int], count: int, temperature: float) -> list[VLLMScore]:
        """Scores of the last `count` tokens."""
        if temperature == 1.0:
            score = VLLMScore(tokens[-count:])
            self._vllm.add(score, tokens, prompt_score_parameters())
            return [score]
        if temperature < MIN_TEMPERATURE:
            raise ValueError(f"cannot score at temperature {temperature}")
        ends = range(len(tokens) - count, len(tokens))
        scores = [VLLMScore([tokens[end]], is_next=True) for end in ends]
        for end, score in zip(ends, scores, strict=True):
            self._vllm.add(score, tokens[:end], token_score_parameters(tokens[end], temperature))
        return scores

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Take over new weights by Hugging Face name. Running samples end with "pause"."""
        if weights is None:
            raise EngineError(
                "engine 'vllm' has weights of its own and does not see those that were changed in "
                "place; give them to load(), or use engine.name=native"
            )
        self._vllm.load(weights, version)

    def pause(self) -> None:
        self._vllm.pause()

    def health(self) -> None:
        """EngineError if the thread does not answer."""
        self._vllm.call(lambda: None, "to answer")

    def close(self) -> None:
        """End every sample with an error and free vLLM's memory."""
        if self._is_open:
            self._is_open = False
            self._vllm.close()
