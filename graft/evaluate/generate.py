"""Text from a model folder: tokens, log-probs and entropies as the engine drew them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.config import ConfigError
from graft.engine.native.engine import NativeEngine
from graft.models.device import choose_device, choose_dtype
from graft.models.extra_actions import ACTIONS
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import load_model
from graft.rollout.episode_builder import draw_key
from graft.text.chat import Chat
from graft.types import Message, Sampling


def read_variables(given: Sequence[str]) -> dict[str, Any]:
    """Template variables from texts: ["enable_thinking=false"] -> {"enable_thinking": False}."""
    import yaml

    found: dict[str, Any] = {}
    for text in given:
        name, has_value, value = text.partition("=")
        if not name or not has_value:
            raise ConfigError(f"--template-arg {text!r} is not name=value")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--template-arg {text!r}: {error}") from error
    return found


class Generator:
    """A loaded model that answers prompts; several at a time run as one batch."""

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        where = choose_device(device)
        kind, self.note = choose_dtype(dtype, where)
        self.tokenizer = open_tokenizer(path)
        self.model = load_model(path, dtype=kind, device=where)
        if (path / ACTIONS).exists():
            words_only = (
                f"this model has actions beyond the vocabulary ({ACTIONS}); here it writes words "
                "alone and calls no tool. `graft eval` samples with them"
            )
            self.note = "\n".join(filter(None, (self.note, words_only)))
        asked = template or self.tokenizer.chat_template
        self.chat = Chat(self.tokenizer, template, **(template_args or {})) if asked else None
        ends = {*self.tokenizer.eos_ids, *(self.chat.end_ids if self.chat else ())}
        self.ends = tuple(sorted(ends))
        self.engine = NativeEngine(self.model, tokenizer=self.tokenizer, eos_ids=self.ends)

    def prompt_tokens(self, prompt: str | list[Message], raw: bool) -> list[int]:
        """Through the chat template where there is one; `raw` encodes the text as it stands."""
        if isinstance(prompt, str) and (raw or self.chat is None):
            return self.tokenizer.encode(prompt)
        if self.chat is None:
            raise ValueError("messages need a chat template, and this tokenizer has none: give one")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.chat.prompt(messages)

    def __call__(
        self,
        prompts: Sequence[str | list[Message]],
        sampling: Sampling,
        *,
        n: int = 1,
        seed: int = 0,
        raw: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """`n` completions of each prompt. A prompt and seed always give the same draws."""
        return asyncio.run(self._all(prompts, sampling, n, seed, raw))

    async def _all(
        self,
        prompts: Sequence[str | list[Message]],
        sampling: Sampling,
        n: int,
        seed: int,
        raw: bool,
    ) -> list[list[dict[str, Any]]]:
        async def one(prompt: str | list[Message]) -> list[dict[str, Any]]:
            tokens = self.prompt_tokens(prompt, raw)
            root = self.engine.open(tokens)
            paths = [root.fork(draw_key(seed, str(tokens), i)) for i in range(n)]
            root.close()
            drawn = await asyncio.gather(*(path.sample(sampling) for path in paths))
            for path in paths:
                path.close()
            return [self._described(tokens, completion) for completion in drawn]

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    def _described(self, prompt: list[int], completion: Any) -> dict[str, Any]:
        said = completion.tokens
        if said and said[-1] in self.ends:
            said = said[:-1]
        return {
            "prompt_tokens": prompt,
            "tokens": completion.tokens,
            "text": self.tokenizer.decode(said),
            "logprobs": completion.logprobs,
            "entropies": completion.entropies,
            "finish": str(completion.finish),
        }
