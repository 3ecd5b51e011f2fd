"""`SGLangServer`: samples from SGLang's own HTTP API, which takes new weights from a folder.

    python -m sglang.launch_server --model-path FOLDER

    /generate                    token ids in; ids, log-probs and the weights' version out
    /update_weights_from_disk    new weights, with a version that every later reply repeats
    /abort_request               gives back what was said so far

Log-probs are at the sampling temperature, but before top-k, top-p and min-p: with those they are not
what was drawn from, and come as NaN, which nobody can train on. The version in a reply is compared
with ours: a server that somebody else gave weights, or that was started anew, is a stale engine.

A stand-in that speaks this API is what the tests run against; the real one was not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.engine.errors import EngineError
from graft.engine.remote.servers import Server, ServerReply, ServersEngine
from graft.engine.remote.stateless import PendingSample
from graft.engine.remote.wire import EndpointError


class SGLangServer(ServersEngine):
    name = "sglang"
    tells_cut = False
    tags_replies = True
    is_deterministic = False
    """Whether the servers draw by seed (--enable-deterministic-inference); others are not told one."""

    async def _look(self, server: Server) -> None:
        await server.ask("/health", retries=None)
        if await server.ask_one_of("/model_info", "/get_model_info") is None:
            raise EngineError("it does not know /model_info: is it SGLang?")
        info = await server.ask_one_of("/server_info", "/get_server_info") or {}
        server.window = float(info.get("context_length") or "inf")
        self.is_deterministic = bool(info.get("enable_deterministic_inference"))

    async def _tag(self, server: Server) -> str | None:
        info = await server.ask_one_of("/model_info", "/get_model_info")
        tag = info.get("weight_version") if isinstance(info, dict) else None
        return None if tag is None else str(tag)

    def _request(
        self, server: Server, tokens: list[int], saying: PendingSample, seed: int, name: str
    ) -> tuple[str, dict[str, Any]]:
        sampling = saying.sampling
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "max_new_tokens": saying.room,
            "min_new_tokens": min(sampling.min_tokens, saying.room),
            "stop_token_ids": sorted(saying.stop_tokens),
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

    def _read(self, answer: Any) -> ServerReply:
        try:
            meta = answer["meta_info"]
            told = meta.get("output_token_logprobs") or []
            tops = meta.get("output_top_logprobs") or []
            tokens = [int(entry[1]) for entry in told]
            logprobs = [float(entry[0]) for entry in told]
            known = [[float(entry[0]) for entry in table] for table in tops]
            finish = str(meta["finish_reason"]["type"])
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"no completion: {str(answer)[:200]!r}") from None
        if len(known) != len(tokens) or (
            meta.get("completion_tokens", len(tokens)) != len(tokens) and finish != "abort"
        ):
            raise ValueError(
                f"log-probs of {len(tokens)} tokens and {len(known)} places, having sampled "
                f"{meta.get('completion_tokens')}"
            )
        tag = meta.get("weight_version")
        return ServerReply(tokens, logprobs, known, finish, None if tag is None else str(tag))

    async def _score(self, server: Server, tokens: list[int], count: int) -> list[float]:
        content: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - count - 1,  # of the first it tells nothing
        }

        def read(answer: Any) -> list[float]:
            try:
                told = answer["meta_info"]["input_token_logprobs"][-count:]
                if [entry[1] for entry in told] == tokens[-count:]:
                    return [float(entry[0]) for entry in told]
            except (KeyError, IndexError, TypeError):
                pass
            raise ValueError(f"no log-probs of the prompt: {str(answer)[:200]!r}")

        return await server.ask("/generate", content, read, retries=None)

    async def _score_next(
        self, server: Server, tokens: list[int], token: int, temperature: float
    ) -> float:
        content: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "top_k": -1},
            "return_logprob": True,
            "token_ids_logprob": [token],
        }

        def read(answer: Any) -> float:
            try:
                [[[logp, found, *_]]] = answer["meta_info"]["output_token_ids_logprobs"]
                if found == token:
                    return float(logp)
            except (KeyError, TypeError, ValueError):
                pass
            raise ValueError(f"no log-prob of token {token}: {str(answer)[:200]!r}")

        return await server.ask("/generate", content, read, retries=None)

    async def _give(self, server: Server, folder: Path, tag: str) -> None:
        await _if_known(server, "/pause_generation", {"mode": "abort"})
        try:
            content = {
                "model_path": str(folder),
                "weight_version": tag,
                "abort_all_requests": True,
                "flush_cache": True,
            }
            await server.ask("/update_weights_from_disk", content, _taken)
        finally:
            await _if_known(server, "/continue_generation", {})

    async def _stop(self, server: Server, names: list[str]) -> None:
        for name in names:
            await server.ask("/abort_request", {"rid": name})

    def _how_to_process(self) -> str:
        return "start it without the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB"


async def _if_known(server: Server, path: str, content: dict[str, Any]) -> None:
    """Older servers have no such path, and do the same as part of an update."""
    try:
        await server.ask(path, content)
    except EndpointError as error:
        if error.code != 404:
            raise


def _taken(answer: Any) -> None:
    if not isinstance(answer, dict) or not answer.get("success"):
        raise EndpointError(f"it did not take the weights: {str(answer)[:200]!r}", 200)
