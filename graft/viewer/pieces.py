"""The text of single tokens, as the model's own tokenizer writes them one after the other.

    bytes of "né" are the tokens 110, 195, 169     pieces "n", "", "é"

A token alone may be half a character, or a word whose leading blank is only written after other text. So
a piece is the text that the token adds: decoded together with the piece before it, minus that piece. A
token that completes no character yet has an empty piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft.files import read_object
from graft.runs import RunRecord

LONGEST = 400
"""Characters of one piece that are shown; one id of a hostile tokenizer can stand for a long text."""
HALF = "\ufffd"
PATIENCE = 8
"""Tokens that one character may take; longer sequences are shown undecoded."""


class TokenTexts:
    """The tokenizer of a run, opened at its first use; `reason` says why there is none."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.reason = ""
        self._tokenizer: Any = None
        self._source: Path | None = None
        self._is_from_recipe = False
        self._names: list[str] = []
        self._vocabulary = 0

    def __call__(self, tokens: Sequence[int], start: int, end: int) -> list[str] | None:
        """The pieces of tokens[start:end], given the tokens before them; None without a tokenizer."""
        self._open()
        if self._tokenizer is None:
            return None
        return pieces(self._tokenizer, tokens, start, end)

    def action(self, action: int) -> str:
        """The name of an action beyond the vocabulary, "" for a token."""
        self._open()
        place = action - self._vocabulary
        if not self._vocabulary or place < 0:
            return ""
        return self._names[place] if place < len(self._names) else f"action {action}"

    def _open(self) -> None:
        """Open the tokenizer once: from a checkpoint, or from the configuration before there is one."""
        if self._tokenizer is not None and self._source is not None:
            return
        newest = self.record.checkpoint
        if newest is not None and newest != self._source:
            self._source = newest
            self._load(newest)
        elif newest is None and not self._is_from_recipe:
            self._is_from_recipe = True
            self._from_recipe()

    def _load(self, folder: Path) -> None:
        from graft.text.tokenizer import FastTokenizer

        try:
            self._tokenizer, self.reason = FastTokenizer.load(folder), ""
        except Exception as error:  # a file being written, a library of another version, ...
            self.reason = f"the tokenizer of {folder.name} cannot be read: {error}"
            return
        self._vocabulary = int(read_object(folder / "config.json").get("vocab_size") or 0)
        named = read_object(folder / "actions.json").get("actions")
        self._names = [str(name) for name in named] if isinstance(named, list) else []

    def _from_recipe(self) -> None:
        """Open the configuration's tokenizer if no checkpoint has one. It imports torch, so it comes last."""
        try:
            from graft.config import load_config
            from graft.recipe.admission import admit
            from graft.train.model import load_tokenizer
            from graft.train.run_dir.checkpoint import latest_model
            from graft.trust.ownership import settings_from

            file = self.record.path / "config.yaml"
            with settings_from(file):
                config = admit(load_config(str(file), is_resolved=False))
                path = config.model.path
                source = latest_model(path, weights=False) if path else None
                self._tokenizer = load_tokenizer(config, source)
            self._vocabulary = self._tokenizer.vocab_size
        except Exception as error:  # a user's environment or path may raise anything
            self.reason = (
                "no checkpoint yet, and the tokenizer of config.yaml cannot be opened "
                f"({type(error).__name__}: {error}); tokens are shown as their numbers"
            )


def pieces(tokenizer: Any, tokens: Sequence[int], start: int, end: int) -> list[str]:
    """See above; `tokens` is the whole walk, since the first piece depends on the tokens before it."""
    found: list[str] = []
    behind = max(start - 1, 0)  # where the piece before begins
    done = start
    before = tokenizer.decode(tokens[behind:done]) if done > behind else ""
    for at in range(start, min(end, len(tokens))):
        text = tokenizer.decode(tokens[behind : at + 1])
        if text.endswith(HALF) and at + 1 - done < PATIENCE and at + 1 < len(tokens):
            found.append("")
            continue
        new = (
            text[len(before) :]
            if text.startswith(before)
            else tokenizer.decode(tokens[done : at + 1])
        )
        found.append(new[:LONGEST])
        behind, done = done, at + 1
        before = tokenizer.decode(tokens[behind:done])
    return found
