"""`VLLMServer`: samples from `vllm serve`, which loads new weights from a folder without a restart.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs --enable-prefix-caching

Samples are plain completions with token ids in and out. New weights: pause (which ends running samples),
reload from the folder, reset the prefix cache, resume. The paths for that exist in dev mode only, and
they give full control of the server to everyone who reaches them: do not expose it to the internet.

The CPU build computes with packed weights, and a reload does not pack those of experts, or of a head
that is the embedding; such a server is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import EndpointError, parsing
from graft.engine.remote.server_protocol import Server, ServerProtocol, ServerReply
from graft.engine.remote.servers_engine import ServersEngine
from graft.engine.remote.stateless import PendingSample
from graft.engine.remote.weight_files import HEAD, names_in

TOP_KS = (20, 10, 5, 2)
"""Numbers of top log-probs to try, for servers with a low --max-logprobs."""


class VLLMProtocol(ServerProtocol):
    """vLLM's OpenAI-compatible completions, and the paths of its dev mode."""

    name = "vllm"
    logprobs_remedy = "start it with --logprobs-mode processed_logprobs"

    async def inspect(self, server: Server) -> None:
        await server.ask("/health")
        server.model, server.window = await server.ask("/v1/models", None, _models)
        is_paused = await server.ask_first_known("/is_paused")
        info = await server.ask_first_known("/server_info")
        if is_paused is None or info is None:
            raise EngineError(
                "it cannot take new weights: start it with the environment variable "
                "VLLM_SERVER_DEV_MODE=1"
            )
        is_cpu = re.search(r"device_config=(DeviceConfig\(.*?)?'?cpu", str(info)) is not None
        is_tied = self.config.get("tie_word_embeddings") or HEAD not in names_in(self.folder)
        if is_cpu and (is_tied or any("num" in name and "experts" in name for name in self.config)):
            raise EngineError(
                "vLLM's CPU build does not reload all weights where the head is the embedding "
                "(tie_word_embeddings) or a layer has several experts; use vLLM in this process "
                "(leave engine.url out), or a GPU"
            )
        await self._find_top_k(server)

    async def _find_top_k(self, server: Server) -> None:
        """Set `top_k` to the number of top log-probs that the server returns."""
        for count in [count for count in TOP_KS if count <= self.top_k] or [self.top_k]:
            content = self._plain(server, [0]) | {"logprobs": count}
            try:
                await server.ask("/v1/completions", content, self.read)
            except EndpointError as error:
                if error.code != 400 or "logprobs" not in str(error):
                    raise
            else:
                self.top_k = count
                return
        raise EngineError("it returns no log-probs: start it with --max-logprobs 20")

    async def read_tag(self, server: Server) -> str | None:
        info = await server.ask_first_known("/weight_info")
        return None if info is None else str(info.get("weight_version"))

    def request(
        self, server: Server, tokens: list[int], pending: PendingSample, seed: int, name: str
    ) -> tuple[str, dict[str, Any]]:
        sampling = pending.sampling
        content = self._plain(server, tokens) | {
            "request_id": name,
            "max_tokens": pending.budget,
            "min_tokens": min(sampling.min_tokens, pending.budget),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": self.top_k,
            "stop_token_ids": sorted(pending.stop_tokens),
            "seed": seed,
        }
        if sampling.stop:
            content |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        return "/v1/completions", content

    def _plain(self, server: Server, tokens: list[int]) -> dict[str, Any]:
        return {
            "model": server.model,
            "prompt": tokens,
            "max_tokens": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,  # ours are among the stop tokens
            "skip_special_tokens": False,
            "repetition_penalty": 1.0,  # overrides the defaults in the model's generation_config
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def read(self, answer: Any) -> ServerReply:
        with parsing(answer, "completion with token ids"):
            choice = answer["choices"][0]
            tokens: list[int] = choice["token_ids"]
            logprobs = choice["logprobs"]
            tops = [
                sorted(map(float, table.values()), reverse=True)[: self.top_k]
                for table in logprobs["top_logprobs"]
            ]
            token_logprobs = [float(logp) for logp in logprobs["token_logprobs"]]
            finish = str(choice["finish_reason"])
        if not len(tokens) == len(token_logprobs) == len(tops):
            raise ValueError(f"{len(token_logprobs)} log-probs of {len(tokens)} tokens")
        return ServerReply(tokens, token_logprobs, tops, finish)

    async def score(self, server: Server, tokens: list[int], count: int) -> list[float]:
        content = self._plain(server, tokens) | {"prompt_logprobs": 0}

        def read(answer: Any) -> list[float]:
            with parsing(answer, "log-probs of the prompt"):
                tables = answer["choices"][0]["prompt_logprobs"][-count:]
                pairs = zip(tokens[-count:], tables, strict=True)
                return [float(table[str(token)]["logprob"]) for token, table in pairs]

        return await server.ask("/v1/completions", content, read)

    async def score_next(
        self, server: Server, tokens: list[int], token: int, temperature: float
    ) -> float:
        content = self._plain(server, tokens) | {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "logprobs": 1,
            "logprob_token_ids": [token],
        }

        def read(answer: Any) -> float:
            with parsing(answer, f"log-prob of token {token}"):
                [table] = answer["choices"][0]["logprobs"]["top_logprobs"]
                return float(table[f"token_id:{token}"])

        return await server.ask("/v1/completions", content, read)

    async def pause(self, server: Server) -> None:
        await server.ask("/pause?mode=abort", {}, retries=0)

    async def give_folder(self, server: Server, folder: Path, tag: str) -> None:
        content = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(folder)},
            "timeout": self.deadline,
        }
        await server.ask("/collective_rpc", content, retries=0)
        await server.ask("/reset_prefix_cache", {}, _check_reset, retries=0)
        # older servers keep no version
        await server.ask_first_known("/update_weight_version", content={"new_version": tag})

    async def resume(self, server: Server) -> None:
        await server.ask("/resume", {}, retries=0)

    async def stop(self, server: Server, names: list[str]) -> None:
        # the server numbers the prompts of a request
        content = {"request_ids": [f"cmpl-{name}-0" for name in names]}
        await server.ask("/abort_requests", content, retries=0)


class VLLMServer(ServersEngine):
    """An engine over `vllm serve`."""

    protocol_type = VLLMProtocol


def _models(answer: Any) -> tuple[str, float]:
    with parsing(answer, "list of models"):
        [*_, model] = answer["data"]
        return str(model["id"]), float(model.get("max_model_len") or "inf")


def _check_reset(answer: Any) -> None:
    if isinstance(answer, dict) and answer.get("success") is False:
        raise ValueError("a failure to reset its prefix cache")
