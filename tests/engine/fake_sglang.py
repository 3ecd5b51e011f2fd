"""A small server with SGLang's HTTP API over one of our decoders, so that its log-probs are true.

    python -m tests.engine.fake_sglang FOLDER PORT      a process of its own; any family of transformers'

It has the part of the API that `SGLangServer` uses, and behaves as SGLang 0.5.17 does: log-probs at the
temperature but before top-k and top-p, the stop token in the output, a version in every reply, the last id
of the vocabulary written as 0 in a prompt, contexts that are too long refused, tensors read by a list of
allowed classes. `test_real_sglang.py` asks the same of both.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from graft.models.decoder import Decoder, causal
from graft.models.io.load import load_model
from graft.models.io.tensor_names import hf_names
from graft.text.tokenizer import FastTokenizer


def load_other(folder: str) -> Any:
    """A model of any family, as transformers computes it; fused attention leaves out soft caps."""
    from transformers import AutoModelForCausalLM

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not f"{module}.".startswith(("torch.", "collections.", "builtins.")):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class FakeSGLang:
    """What it serves, and the faults it simulates."""

    def __init__(
        self, decoder: Any, tokenizer: FastTokenizer, load: Callable[[str], Any] = load_model
    ) -> None:
        self.decoder, self.tokenizer, self.load = decoder, tokenizer, load
        self.url = ""
        self.version = "default"
        self.is_raw = False
        """Return log-probs of temperature 1 (SGLANG_RETURN_ORIGINAL_LOGPROB)."""
        self.is_old = False
        """Without pause_generation and with the older names of its information."""
        self.window: float = math.inf
        """--context-length."""
        self.delay = 0.0
        """Seconds a token takes."""
        self.faults: list[int] = []
        """Statuses, used up one by one before it answers properly."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.unpaused = threading.Event()
        self.unpaused.set()
        self.is_dead = False
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(0)

    def paths(self, path: str) -> list[dict[str, Any]]:
        return [content for requested, content in self.requests if requested == path]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        with self.lock:
            decoder = self.decoder
            if not isinstance(decoder, Decoder):
                return decoder(torch.tensor([tokens])).logits[0]
            hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), causal)
            return (hidden @ decoder.head_weight.T)[:, : decoder.shape.vocab_size]

    def generate(self, content: dict[str, Any]) -> dict[str, Any]:
        self.unpaused.wait(30)
        params, tokens = content["sampling_params"], list(content["input_ids"])
        rid = content.get("rid", "")
        version, meta = self.version, {"id": rid, "prompt_tokens": len(tokens)}
        start = content.get("logprob_start_len", -1)
        if start >= 0:
            logp = self.logits(tokens).log_softmax(-1)
            input_logprobs = [[None, self._as_reported(tokens[start]), None]]
            input_logprobs += [
                [float(logp[i - 1, tokens[i]]), self._as_reported(tokens[i]), None]
                for i in range(start + 1, len(tokens))
            ]
            meta["input_token_logprobs"] = input_logprobs
        output_logprobs: list[Any] = []
        tops: list[Any] = []
        given: list[Any] = []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        temperature = params.get("temperature", 1.0)
        self.running.add(rid)
        while len(output_logprobs) < params["max_new_tokens"]:
            time.sleep(self.delay)
            if self.is_dead:
                raise ConnectionAbortedError
            if rid in self.aborted:
                finish = {"type": "abort", "message": "Abort"}
                break
            logits = self.logits(tokens)[-1]
            logp = (logits / (temperature or 1.0)).log_softmax(-1)
            sent_logp = logits.log_softmax(-1) if self.is_raw else logp
            token = self._draw(logp, params)
            tokens.append(token)
            output_logprobs.append([float(sent_logp[token]), token, None])
            top = sent_logp.topk(min(content.get("top_logprobs_num", 0), len(logp)))
            tops.append([[v, i, None] for v, i in zip(*map(torch.Tensor.tolist, top), strict=True)])
            ids = content.get("token_ids_logprob") or []
            given.append([[float(sent_logp[i]), i, None] for i in ids])
            if token in params.get("stop_token_ids", ()):
                finish = {"type": "stop", "matched": token}
                break
            text = self.tokenizer.decode([one[1] for one in output_logprobs])
            found = next((stop for stop in params.get("stop", ()) if stop in text), None)
            if found is not None:
                finish = {"type": "stop", "matched": found}
                break
        self.running.discard(rid)
        meta |= {
            "finish_reason": finish,
            "completion_tokens": len(output_logprobs),
            "output_token_logprobs": output_logprobs,
            "output_top_logprobs": tops,
            "output_token_ids_logprobs": given,
            "weight_version": version,
        }
        return {"text": "", "output_ids": [one[1] for one in output_logprobs], "meta_info": meta}

    def _as_reported(self, token: int) -> int:
        return token if token < self.vocab_size - 1 else 0

    @property
    def vocab_size(self) -> int:
        decoder = self.decoder
        return (decoder.shape if isinstance(decoder, Decoder) else decoder.config).vocab_size

    def take(self, texts: list[str]) -> None:
        """Copy tensors into the model, by their names in a Hugging Face folder."""
        [text] = texts
        sent = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        own = dict(hf_names(self.decoder))
        with self.lock, torch.no_grad():
            for name, tensor in sent:
                own[name].copy_(tensor)

    def _draw(self, logp: torch.Tensor, params: dict[str, Any]) -> int:
        if params.get("temperature") == 0:
            return int(logp.argmax())
        if params.get("top_k", -1) > 0:
            least = logp.topk(params["top_k"]).values[-1]
            logp = logp.masked_fill(logp < least, -torch.inf)
        with self.lock:
            return int(torch.multinomial(logp.exp(), 1, generator=self.generator))

    def abort(self) -> None:
        self.aborted |= self.running

    def answer(self, path: str, content: dict[str, Any]) -> tuple[int, Any]:
        """Status and body; None: an empty body."""
        info = {"weight_version": self.version, "model_path": "m"}
        old = ("/get_model_info", "/get_server_info")
        new = ("/model_info", "/server_info", "/pause_generation", "/continue_generation")
        if path in (new if self.is_old else old):
            return 404, {"detail": "Not Found"}
        match path:
            case "/health":
                return 200, None
            case "/model_info" | "/get_model_info":
                return 200, info
            case "/server_info" | "/get_server_info":
                window = None if self.window == math.inf else self.window
                info = {"context_length": window, "version": "0.5", "tp_size": 1, "device": "cpu"}
                return 200, info | ({"max_req_input_len": window - 6} if window else {})
            case "/generate":
                num_input = len(content["input_ids"])
                num_tokens = num_input + content["sampling_params"]["max_new_tokens"]
                if num_tokens > self.window or num_input >= self.window - 6:
                    return 400, {"error": {"message": f"too long: {num_input}, {num_tokens}"}}
                return 200, self.generate(content)
            case "/abort_request":
                if content["rid"] in self.running:
                    self.aborted.add(content["rid"])
                return 200, None
            case "/pause_generation":
                self.unpaused.clear()
                self.abort()
                return 200, {"status": "ok"}
            case "/continue_generation":
                self.unpaused.set()
                return 200, {"status": "ok"}
            case "/update_weights_from_disk":
                self.abort()
                while self.running - self.aborted:
                    time.sleep(0.001)
                try:
                    decoder = self.load(content["model_path"])
                except (OSError, ValueError) as error:
                    return 400, {"success": False, "message": str(error)}
                with self.lock:
                    self.decoder, self.version = decoder, content["weight_version"]
                return 200, {"success": True, "message": "Succeeded to update model weights."}
            case "/update_weights_from_tensor":
                self.abort()
                self.take(content["serialized_named_tensors"])
                self.version = content["weight_version"]
                return 200, {"success": True, "message": "Success"}
            case _:
                return 404, {"detail": "Not Found"}


@contextmanager
def serving_sglang(
    decoder: Any, tokenizer: FastTokenizer, load: Callable[[str], Any] = load_model, port: int = 0
) -> Iterator[FakeSGLang]:
    fake = FakeSGLang(decoder, tokenizer, load)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _serve(self, content: dict[str, Any]) -> None:
            fake.requests.append((self.path, content))
            self.close_connection = True
            if fake.is_dead:
                return
            if fake.faults and self.path == "/generate":
                code, answer = fake.faults.pop(0), {"message": "not now"}
            else:
                try:
                    code, answer = fake.answer(self.path, content)
                except ConnectionAbortedError:
                    return
            body = b"" if answer is None else json.dumps(answer).encode()
            try:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        fake.is_dead = True
        fake.unpaused.set()
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    folder, port = sys.argv[1:]
    torch.set_num_threads(1)
    with serving_sglang(
        load_other(folder), FastTokenizer.load(Path(folder)), load_other, int(port)
    ):
        print("ready", os.getpid(), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
