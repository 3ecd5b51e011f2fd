"""A policy of fixed texts behind a tokenizer of bytes, as a trainer's engine would answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer

END = "<|im_end|>"


def byte_tokenizer() -> Any:
    """The members of a transformers tokenizer that the adapters read: ChatML over bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(letters))}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", END])
    return SimpleNamespace(
        backend_tokenizer=raw,
        chat_template=TEMPLATES["chatml"],
        special_tokens_map={"eos_token": END, "pad_token": "<|endoftext|>"},
    )


class ScriptedPolicy:
    """Answers request i with text i and the end of the turn; keeps what it was shown."""

    def __init__(self, *texts: str, ends: bool = True) -> None:
        fast = FastTokenizer(byte_tokenizer().backend_tokenizer)
        self.encode, self.decode = fast.encode, fast.decode
        self.texts, self.ends = list(texts), ends
        self.shown: list[str] = []

    def next_tokens(self, prompt: list[int], limit: int = 10**9) -> list[int]:
        self.shown.append(self.decode(prompt))
        text = self.texts[len(self.shown) - 1]
        return self.encode(text + (END if self.ends else ""))[:limit]
