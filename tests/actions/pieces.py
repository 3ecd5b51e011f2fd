"""A tokenizer of given pieces: the longest that fits comes first, as a large model's would."""

from __future__ import annotations

from collections.abc import Sequence

TAGGED = (
    *(
        "<eos>",
        " <",
        "<",
        " </",
        ">",
        "calculator",
        "compare",
        "swap",
        "check",
        " is",
        " if",
        " and",
    ),
    *(" A", " B", " C", " D", " E", ",", " negative", " positive", " even", " odd", " calculate"),
    *(" compare", " swap", " check", " +", " -", " *", " /", " (", ")", ".", " =", " ", "[", "]"),
    *("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "-", "*", "so"),
    *(":", " =>", ";", "\n"),
)
"""Enough for every bundled file."""


class Pieces:
    def __init__(self, pieces: Sequence[str] = TAGGED) -> None:
        self.pieces = list(pieces)
        self.vocab_size = len(self.pieces)
        self.eos_id, self.pad_id, self.chat_template = 0, None, None
        self.eos_ids = (0,)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            fitting = [piece for piece in self.pieces if text.startswith(piece)]
            if not fitting:
                raise ValueError(f"no piece for {text!r}")
            ids.append(self.pieces.index(max(fitting, key=len)))
            text = text[len(self.pieces[ids[-1]]) :]
        return ids

    def encode_after(self, text: str, last: int | None = None) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def save(self, folder: object) -> None:
        raise NotImplementedError
