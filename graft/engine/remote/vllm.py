"""`VLLMEngine`: vLLM in this process, with weights of its own that `load` replaces in memory.

A thread owns vLLM (`vllm_thread`), and new weights are loaded between two of its steps, so no sample is
of two versions. Stop strings are found here, on the tokens as they come: vLLM runs without a tokenizer.
Several processes may hold one engine, each with a part of every layer (`engine_group`).
Log-probs are of the distribution that was drawn from (after temperature, top-k, top-p); entropies are
lower bounds from the likeliest tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from graft.engine.engine_group import EngineGroup
from graft.engine.errors import EngineError
from graft.engine.remote.stateless import StatelessContext, StatelessEngine, seed_of
from graft.engine.remote.top_entropy import known_tokens
from graft.engine.remote.vllm_library import (
    engine_arguments,
    prompt_score_parameters,
    sampling_parameters,
    token_score_parameters,
)
from graft.engine.remote.vllm_thread import VLLMSample, VLLMScore, VLLMThread
from graft.protocols import Tokenizer
from graft.types import Completion, Finish, Sampling

MIN_TEMPERATURE = 0.01
"""vLLM raises any lower temperature to this one, except 0."""


class VLLMEngine(StatelessEngine):
    """Continuous batching by vLLM.

    model_folder  the Hugging Face folder that the run starts from; without weights in it the first
                  `load` brings them
    tokenizer     only to find stop strings
    eos_ids       stop tokens of every sample
    seed          of every draw, together with the context's key and its length
    deadline      seconds for a completion, a score or new weights
    max_context   tokens of the longest context
    args          arguments of vLLM itself, such as {"gpu_memory_utilization": 0.5}
    dtype         "float32" or "bfloat16"
    group         the processes that hold the engine together, with tensor parallelism; None: this one
    """

    def __init__(
        self,
        model_folder: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        deadline: float = 600.0,
        max_context: int = 4096,
        args: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        group: EngineGroup | None = None,
    ) -> None:
        super().__init__("vllm", model_folder, tokenizer, eos_ids, seed, deadline)
        self.window = min(max_context, self.config.get("max_position_embeddings") or max_context)
        has_weights = any(any(self.folder.glob(kind)) for kind in ("*.safetensors", "*.bin"))
        self.group = group
        tp = 1 if group is None else group.size
        arguments = engine_arguments(args or {}, self.folder, has_weights, tp)
        top_k = min(arguments["max_logprobs"], self.vocab_size)
        top_k = self.vocab_size if top_k < 0 else top_k
        if top_k < 1:
            raise EngineError("engine.args max_logprobs=0 leaves no log-probs to train with")
        self._top_k, self.entropy_top_k = top_k, known_tokens(self.vocab_size, top_k)
        arguments |= {"dtype": dtype, "seed": seed % 2**32, "max_model_len": self.window}
        self._vllm = VLLMThread(self.folder, arguments, has_weights, deadline, group)

    @property
    def version(self) -> int:
        return self._vllm.version

    @version.setter
    def version(self, version: int) -> None:
        self._vllm.version = version

    async def complete(self, context: StatelessContext, sampling: Sampling) -> Completion:
        """Draw until a stop, `max_tokens` or the window; if cancelled, nothing keeps running."""
        self.check_open()
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"temperature={sampling.temperature}: vLLM draws at {MIN_TEMPERATURE} or more; "
                "0 is greedy"
            )
        pending = self.begin(context, sampling, self.version, self.window)
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

    def _scores(
        self, cases: list[tuple[list[int], list[int]]], temperature: float
    ) -> list[list[float]]:
        running = [
            self._start_scores(before + actions, len(actions), temperature)
            for before, actions in cases
        ]
        return [
            [logp for score in scores for logp in self._vllm.wait(score.future, "to score")]
            for scores in running
        ]

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

    def _load(self, weights: Mapping[str, Any], version: int) -> None:
        self._vllm.load(weights, version)

    def pause(self) -> None:
        self._vllm.pause()

    def sleep(self) -> None:
        """Give the memory back while the learner works; the next `load` takes it again."""
        self._vllm.sleep()

    def follow(self) -> None:
        """Repeat the calls of the group's first process until it releases this one."""
        self._vllm.follow()

    def release(self) -> None:
        """End `follow` in the other processes of the group."""
        self._vllm.release()

    def health(self) -> None:
        """EngineError if the thread does not answer."""
        self._vllm.call(lambda: None, "to answer")

    def close(self) -> None:
        """End every sample with an error and free vLLM's memory."""
        if self.is_open:
            self.is_open = False
            self._vllm.close()
