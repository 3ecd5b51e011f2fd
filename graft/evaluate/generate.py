"""Text from a model folder: tokens, log-probs and entropies as the engine drew them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.config import ConfigError, read_arguments
from graft.engine.native.engine import NativeEngine
from graft.models.device_choice import choose_device, choose_dtype
from graft.models.extra_actions import ACTIONS
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import load_model
from graft.protocols import Engine
from graft.recipe.json_schema import check_keywords
from graft.rollout.options import RolloutOptions
from graft.rollout.setup import draw_key
from graft.structure import Structure
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.types import Message


def read_variables(given: Sequence[str]) -> dict[str, Any]:
    """Template variables from texts: ["enable_thinking=false"] -> {"enable_thinking": False}."""
    for text in given:
        name, has_value, _ = text.partition("=")
        if not name or not has_value:
            raise ConfigError(f"--template-arg {text!r} is not name=value")
    return read_arguments(given)


def read_schema(path: Path) -> Structure:
    """The structure of a file with a JSON schema."""
    try:
        structure = Structure.json(path.read_text("utf-8"))
        check_keywords(json.loads(structure.source))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--schema {str(path)!r}: {error}") from error
    return structure


class Generator:
    """Completes prompts with an engine; several prompts run as one batch."""

    def __init__(self, engine: Engine, tokenizer: FastTokenizer, chat: Chat | None) -> None:
        """`chat` None: the tokenizer has no chat template, and prompts are encoded as they stand."""
        self.engine, self.tokenizer, self.chat = engine, tokenizer, chat
        self.note = ""
        self.ends = tuple(sorted({*tokenizer.eos_ids, *(chat.end_ids if chat else ())}))

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Generator:
        """A model folder or .gguf file, with an engine of its own."""
        where = choose_device(device)
        kind, note = choose_dtype(dtype, where)
        tokenizer = open_tokenizer(path)
        model = load_model(path, dtype=kind, device=where)
        chat = None
        if template or tokenizer.chat_template:
            chat = Chat(tokenizer, template, **(template_args or {}))
        engine = NativeEngine(model, tokenizer=tokenizer, eos_ids=tokenizer.eos_ids)
        opened = cls(engine, tokenizer, chat)
        opened.note = "\n".join(filter(None, (note, words_only(path))))
        return opened

    def prompt_tokens(self, prompt: str | Sequence[Message], raw: bool) -> list[int]:
        """Encode through the chat template if there is one; `raw` encodes the text as it stands."""
        if isinstance(prompt, str) and (raw or self.chat is None):
            return self.tokenizer.encode(prompt)
        if self.chat is None:
            raise ValueError("messages need a chat template, and this tokenizer has none: give one")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.chat.prompt(list(messages))

    async def complete(
        self,
        prompts: Sequence[str | Sequence[Message]],
        options: RolloutOptions,
        *,
        raw: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """The samples of each prompt. A prompt and seed always give the same draws."""
        sampling = replace(options.make_sampling(), stop_tokens=self.ends)
        samples, seed = options.samples or 1, options.seed or 0

        async def complete_prompt(prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
            tokens = self.prompt_tokens(prompt, raw)
            root = self.engine.open(tokens)
            paths = [root.fork(draw_key(seed, str(tokens), i)) for i in range(samples)]
            root.close()
            try:
                drawn = await asyncio.gather(*(path.sample(sampling) for path in paths))
            finally:
                for path in paths:
                    path.close()
            return [self._described(tokens, completion) for completion in drawn]

        return list(await asyncio.gather(*(complete_prompt(prompt) for prompt in prompts)))

    def _described(self, prompt: list[int], completion: Any) -> dict[str, Any]:
        tokens = completion.tokens
        if tokens and tokens[-1] in self.ends:
            tokens = tokens[:-1]
        return {
            "prompt_tokens": prompt,
            "tokens": completion.tokens,
            "text": self.tokenizer.decode(tokens),
            "logprobs": completion.logprobs,
            "entropies": completion.entropies,
            "finish": str(completion.finish),
        }


def words_only(path: Path) -> str:
    """A note about a model with actions beyond the vocabulary; "" for others."""
    if not (path / ACTIONS).exists():
        return ""
    return (
        f"this model has actions beyond the vocabulary ({ACTIONS}); here it samples vocabulary tokens only "
        "and calls no tool. `graft eval` samples with them"
    )
