"""`SGLangServer`: samples from SGLang's own HTTP API, which loads new weights from a folder.

    python -m sglang.launch_server --model-path FOLDER

    /generate                    token ids in; ids, log-probs and the weights' version out
    /update_weights_from_disk    new weights, with a version that every later reply repeats
    /update_weights_from_tensor  the same through memory (engine.sync=memory)
    /abort_request               ends a request and returns its tokens so far

Log-probs are at the sampling temperature, but before top-k, top-p and min-p: with those they are not of
the distribution that was drawn from, so they are returned as NaN, and such samples cannot be trained on.
Releases of SGLang without a repetition penalty in its penaltylib accept `repetition_penalty` and ignore it.

The quick tests run against a stand-in with this API (`tests/engine/fake_sglang.py`), the slow ones against
SGLang 0.5.17 itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import EndpointError, parsing
from graft.engine.remote.server_protocol import Server, ServerProtocol, ServerReply
from graft.engine.remote.servers_engine import ServersEngine
from graft.engine.remote.stateless import PendingSample
from graft.engine.remote.weight_tensors import TensorBucket
from graft.http import is_loopback


class SGLangProtocol(ServerProtocol):
    """SGLang's native API."""

    name = "sglang"
    has_truncated_logprobs = False
    tags_replies = True
    takes_tensors = True
    logprobs_remedy = "start it without the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB"
    is_deterministic = False
    """Whether the servers draw by seed (--enable-deterministic-inference)."""

    async def inspect(self, server: Server) -> None:
        await server.ask("/health")
        if await server.ask_first_known("/model_info", "/get_model_info") is None:
            raise EngineError("it has no /model_info: is it SGLang?")
        info = await server.ask_first_known("/server_info", "/get_server_info") or {}
        server.window = float(info.get("context_length") or "inf")
        server.max_prompt = float(info.get("max_req_input_len") or "inf") - 1
        server.tp = int(info.get("tp_size") or 1)
        server.is_on_gpu = info.get("device") == "cuda"
        self.is_deterministic = bool(info.get("enable_deterministic_inference"))

    async def read_tag(self, server: Server) -> str | None:
        info = await server.ask_first_known("/model_info", "/get_model_info")
        tag = info.get("weight_version") if isinstance(info, dict) else None
        return None if tag is None else str(tag)

    def request(
        self, server: Server, tokens: list[int], pending: PendingSample, seed: int, name: str
    ) -> tuple[str, dict[str, Any]]:
        sampling = pending.sampling
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": pending.budget,
            "min_new_tokens": min(sampling.min_tokens, pending.budget),
            "stop_token_ids": sorted(pending.stop_tokens),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        if self.is_deterministic:
            parameters["sampling_seed"] = seed
        return "/generate", {
            "input_ids": tokens,
            "sampling_params": parameters,
            "return_logprob": True,
            "top_logprobs_num": self.top_k,
            "rid": name,
            "stream": False,
        }

    def read(self, answer: Any) -> ServerReply:
        with parsing(answer, "completion"):
            meta = answer["meta_info"]
            entries = meta.get("output_token_logprobs") or []
            tops = meta.get("output_top_logprobs") or []
            tokens = [int(entry[1]) for entry in entries]
            logprobs = [float(entry[0]) for entry in entries]
            known = [[float(entry[0]) for entry in table] for table in tops]
            finish = str(meta["finish_reason"]["type"])
        if len(known) != len(tokens) or (
            meta.get("completion_tokens", len(tokens)) != len(tokens) and finish != "abort"
        ):
            raise ValueError(
                f"log-probs of {len(tokens)} tokens, top log-probs of {len(known)}, but "
                f"{meta.get('completion_tokens')} sampled tokens"
            )
        tag = meta.get("weight_version")
        return ServerReply(tokens, logprobs, known, finish, None if tag is None else str(tag))

    async def score(self, server: Server, tokens: list[int], count: int) -> list[float]:
        content: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - count - 1,  # the first has no log-prob
        }

        def read(answer: Any) -> list[float]:
            with parsing(answer, "log-probs of the prompt"):
                entries = answer["meta_info"]["input_token_logprobs"][-count:]
                if [entry[1] for entry in entries] != [as_reported(t) for t in tokens[-count:]]:
                    raise ValueError("of other tokens")
                return [float(entry[0]) for entry in entries]

        def as_reported(token: int) -> int:
            # in prompts it writes the last id of the vocabulary as 0; the log-prob is of the last id
            return token if token < self.config["vocab_size"] - 1 else 0

        return await server.ask("/generate", content, read)

    async def score_next(
        self, server: Server, tokens: list[int], token: int, temperature: float
    ) -> float:
        content: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "top_k": -1},
            "return_logprob": True,
            "token_ids_logprob": [token],
        }

        def read(answer: Any) -> float:
            with parsing(answer, f"log-prob of token {token}"):
                [entries] = answer["meta_info"]["output_token_ids_logprobs"]
                [logp] = [entry[0] for entry in entries if entry[1] == token]
                return float(logp)

        return await server.ask("/generate", content, read)

    async def pause(self, server: Server) -> None:
        # older servers have no such path, nor one to resume, and do the same as part of an update
        await server.ask_first_known("/pause_generation", content={"mode": "abort"})

    async def give_folder(self, server: Server, folder: Path, tag: str) -> None:
        content = {
            "model_path": str(folder),
            "weight_version": tag,
            "abort_all_requests": True,
            "flush_cache": True,
        }
        await server.ask("/update_weights_from_disk", content, _check_loaded, retries=0)

    async def give_bucket(self, server: Server, bucket: TensorBucket, tag: str) -> None:
        by_handle = (
            bucket.is_on_gpu and server.is_on_gpu and is_loopback(urlsplit(server.url).hostname)
        )
        content: dict[str, Any] = {
            "serialized_named_tensors": [bucket.text(by_handle)] * server.tp,
            # until the last bucket it has weights of two versions, which nobody may train on
            "weight_version": tag if bucket.is_last else f"{tag}-partial",
            "abort_all_requests": True,
            "flush_cache": bucket.is_last,
        }
        await server.ask("/update_weights_from_tensor", content, _check_loaded, retries=0)

    async def resume(self, server: Server) -> None:
        await server.ask_first_known("/continue_generation", content={})

    async def stop(self, server: Server, names: list[str]) -> None:
        for name in names:
            await server.ask("/abort_request", {"rid": name}, retries=0)


class SGLangServer(ServersEngine):
    """An engine over `sglang.launch_server`."""

    protocol_type = SGLangProtocol


def _check_loaded(answer: Any) -> None:
    if not isinstance(answer, dict) or not answer.get("success"):
        raise EndpointError(f"it did not load the weights: {str(answer)[:200]!r}", 200)
