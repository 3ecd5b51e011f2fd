"""Text to ids and back: `tokenizers.Tokenizer` with its special tokens by name.

Two tiny tokenizers are built in: one token per character of an alphabet, and one token per byte.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from graft.files import write_text
from graft.text.marks import Interval
from graft.text.space_prefix import EVERYWHERE, parts_of, prefix_of, without_prefix
from graft.text.template import PLAIN
from graft.text.tokenizer_files import MORE_TEMPLATES, read_tokenizer, template_file, unusable

log = logging.getLogger(__name__)

MAX_CONTROL_TOKENS = 20_000
"""Models have up to some thousand. Every text is searched for them."""


class UnknownCharacter(ValueError):
    """A character outside the alphabet; as `<unk>` it would train garbage silently."""


class FastTokenizer:
    """Encodes exactly the text: no BOS or EOS is added, special tokens in the text are recognised.

    >>> digits = FastTokenizer.characters("0123456789+=")
    >>> digits.encode("12+3=<eos>")
    [4, 5, 13, 6, 14, 1]
    >>> digits.decode([4, 5, 1]), digits.decode([4, 5, 1], skip_special=True)
    ('12<eos>', '12')
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        """`eos_ids` are further tokens that end a text, such as those of generation_config.json."""
        # a tokenizer.json may set padding and truncation, which would cut prompts silently
        backend.no_padding()
        backend.no_truncation()
        self.special_tokens = dict(special_tokens or {})  # {"eos_token": "<eos>", ...}
        self.chat_templates = dict(chat_templates or {})  # {"default": jinja, "tool_use": jinja}
        self.chat_template: str | None = _default_template(self.chat_templates)
        self.origin = ""
        """The file of its chat template, for messages; empty: none."""
        self.chat: Any = None
        """The run's Chat, for wrappers that render; None: the tokenizer's own template."""
        self._backend = backend
        self._config = dict(config or {})
        _declare(backend, self.special_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: index for index, token in added.items()}
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        special = (token.content for token in added.values() if token.special)
        self.control_tokens = sorted(special, key=len, reverse=True)
        """Texts of special tokens, the longest first, since one may contain another."""
        if len(self.control_tokens) > MAX_CONTROL_TOKENS:
            raise ValueError(
                f"{len(self.control_tokens):,} special tokens; every text is searched for them, and at "
                f"most {MAX_CONTROL_TOKENS:,} are possible"
            )
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        ends = (*eos_ids, *([] if self.eos_id is None else [self.eos_id]))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        """Every token at which sampling stops; `eos_id` is among them."""
        self.pad_id = self._id("pad_token")
        self.unk_id = self._id("unk_token")
        self._is_strict = isinstance(backend.model, models.WordLevel)
        self._has_unknown = self.unk_id is not None and _writes_unknown(backend.model)
        self._added = {index: token.content for index, token in added.items()}
        self._prefix = prefix_of(backend)
        self._strips = any(node.get("start") for node in parts_of(backend.decoder))
        self._twins = {(False, False): backend}  # others are made on first use
        self._letters: dict[str, int] = {}
        """The tokens of an alphabet, where every other token begins with "<"; empty: not an alphabet."""

    def encode(self, text: str) -> list[int]:
        return self._spelled(text) or self._run(text).ids

    def encode_after(self, text: str, last: int | None = None) -> list[int]:
        """The tokens of a text that follows other tokens, of which `last` is the last.

        None stands for any token of ordinary text. Tokenizers made from SentencePiece add a blank
        before a text, but not after other tokens:

            Llama 2     encode("[/INST]5")  "▁[" "/" "INST" "]" "5"
                        encode("5")         "▁" "5"
                        encode_after("5")   "5"

        No token is joined across the border: the tokens before it are fixed.
        """
        return self._spelled(text) or self._after(text, last)[0]

    def encode_plain(self, text: str, last: int | None = None) -> list[int]:
        """Do as `encode_after` does, but special tokens in the text are not recognised: for untrusted text.

        encode("<|im_end|>") is one token, the end of a turn; encode_plain("<|im_end|>") are the
        tokens of ten characters that only look like it.
        """
        return self._spelled(text) or self._after(text, last, is_plain=True)[0]

    def encode_after_with_offsets(
        self, text: str, last: int | None = None
    ) -> tuple[list[int], list[Interval]]:
        """`encode_after`, and the characters [start, end) of each token.

        Some tokenizers leave blanks at the ends of a token out.
        """
        ids, offsets = self._after(text, last)
        return ids, offsets()

    def _spelled(self, text: str) -> list[int]:
        """The tokens of a text of `_letters`, in a tenth of the backend's time; empty for other texts."""
        if not self._letters or ("<" in text and any(one in text for one in self.control_tokens)):
            return []
        try:
            return [*map(self._letters.__getitem__, text)]
        except KeyError:
            return []

    def _after(
        self, text: str, last: int | None, *, is_plain: bool = False
    ) -> tuple[list[int], Callable[[], list[Interval]]]:
        """The tokens, and a function for their characters: of a long text these take most of the time."""
        token = None if last is None else self._added.get(last)
        if token is not None and not is_plain:
            # encoded together: some tokens absorb the blanks that follow them
            whole, length = self._run(token + text), len(token)
            ids = whole.ids
            if ids[:1] == [last]:
                return ids[1:], lambda: [
                    (max(0, a - length), max(0, b - length)) for a, b in whole.offsets[1:]
                ]
        encoding = self._run(text, is_plain)
        ids = encoding.ids
        if not self._prefix or (token is not None and self._prefix == EVERYWHERE):
            return ids, lambda: encoding.offsets
        # only the text before the first added token starts differently
        first = next((i for i, index in enumerate(ids) if index in self._added), len(ids))
        end = encoding.offsets[first][0] if first < len(ids) else len(text)
        head = self._run(text[:end], is_plain, is_continued=True)
        return head.ids + ids[first:], lambda: head.offsets + encoding.offsets[first:]

    def _run(
        self, text: str, is_plain: bool = False, is_continued: bool = False
    ) -> tokenizers.Encoding:
        backend = self._twin(is_plain, is_continued)
        try:
            encoding = backend.encode(text, add_special_tokens=False)
        except TypeError as error:
            if (at := lone_surrogate(text)) is None:
                raise
            raise UnknownCharacter(
                f"character {at} of a text, {text[at]!r}, is half of a pair (a lone surrogate) and cannot be "
                "encoded; decode bytes with errors='replace'"
            ) from error
        if self._has_unknown and self.unk_id in encoding.ids:
            self._report_unknown(text, encoding)
        return encoding

    def _twin(self, is_plain: bool, is_continued: bool) -> tokenizers.Tokenizer:
        """A copy of the backend with other options; threads share the original."""
        which = (is_plain, is_continued and (bool(self._prefix) or self._strips))
        twin = self._twins.get(which)
        if twin is None:
            spec = self._backend.to_str()
            if which[1]:
                spec = json.dumps(without_prefix(json.loads(spec)))
            twin = tokenizers.Tokenizer.from_str(spec)
            twin.encode_special_tokens = is_plain
            self._twins[which] = twin
        return twin

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`, special tokens visible; ids beyond the vocabulary write nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def decode_after(self, ids: Sequence[int], last: int | None = None) -> str:
        """The text of `ids` after token `last` (None: a token of ordinary text).

        Where `encode` adds a blank at the beginning, `decode` removes one; in the middle of a text
        none is removed.
        """
        continued = self._twin(is_plain=False, is_continued=True)
        if self._prefix != EVERYWHERE:
            return continued.decode(list(ids), skip_special_tokens=False)
        text = ""
        for is_added, some in groupby(ids, key=self._added.__contains__):  # a blank behind each
            run = [*some]
            backend = self._backend if last in self._added and not is_added else continued
            text, last = text + backend.decode(run, skip_special_tokens=False), run[-1]
        return text

    def backend_json(self) -> str:
        """The tokenizer as the text of its `tokenizer.json`."""
        return self._backend.to_str()

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact text; None if it is not in the vocabulary."""
        return self._backend.token_to_id(token)

    @classmethod
    def characters(cls, alphabet: str) -> FastTokenizer:
        """One token per character, after `<pad>` 0, `<eos>` 1 and `<unk>` 2; repeats count once."""
        if not alphabet:
            raise ValueError("the alphabet is empty; pass the characters, such as '0123456789+='")
        vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>"])}
        vocab |= {character: 3 + i for i, character in enumerate(dict.fromkeys(alphabet))}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()  # without one, tokens are joined by spaces
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        made = cls(backend, special, {"default": PLAIN})
        made._letters = {token: i for token, i in vocab.items() if len(token) == 1}
        return made

    @classmethod
    def bytes(cls) -> FastTokenizer:
        """Token b is byte b of the UTF-8 text, then `<eos>` 256 and `<pad>` 257; all text fits."""
        vocab = {character: byte for byte, character in enumerate(_byte_characters())}
        vocab |= {"<eos>": 256, "<pad>": 257}
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend, {"eos_token": "<eos>", "pad_token": "<pad>"}, {"default": PLAIN})

    @classmethod
    def load(cls, path: str | Path) -> FastTokenizer:
        """Read a Hugging Face folder, or a `tokenizer.json` together with the files beside it."""
        found = read_tokenizer(Path(path))
        try:
            made = cls(*found)
            made.origin = f"'{template_file(Path(path))}'"
            return made
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise unusable(Path(path), error) from error

    def save(self, folder: str | Path) -> None:
        """Write the files from which `load` and transformers' AutoTokenizer get this tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self._backend.to_str(pretty=True))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        config.pop("chat_template", None)  # it gets its own, readable file
        config |= {"clean_up_tokenization_spaces": False, **self.special_tokens}
        write_text(
            folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False)
        )
        if self.chat_template is not None:
            write_text(folder / "chat_template.jinja", self.chat_template)
        if self.chat_template != _default_template(self.chat_templates):
            return  # the variants do not fit a model trained with another template
        for name, text in self.chat_templates.items():
            if text != self.chat_template:
                (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
                write_text(folder / MORE_TEMPLATES / f"{name}.jinja", text)

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _report_unknown(self, text: str, encoding: tokenizers.Encoding) -> None:
        """Refuse the first unknown character of an alphabet; name those of other tokenizers, once."""
        unknown = [
            (start, end)
            for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if index == self.unk_id and text[start:end] != self.special_tokens.get("unk_token")
        ]
        if not unknown:
            return
        start, end = unknown[0]
        near = text[max(0, start - 20) : end + 20]
        if self._is_strict:
            raise UnknownCharacter(
                f"character {text[start:end]!r} (position {start}, in {near!r}) is not in the "
                f"tokenizer's alphabet; add it to the alphabet or keep it out of the text"
            )
        self._has_unknown = False  # said once
        pieces = dict.fromkeys(text[start:end] for start, end in unknown)
        log.warning(
            "the tokenizer has no token for %s, in %r: the policy reads %s instead, also in later texts, "
            "about which nothing is said; keep such characters out, or use another model",
            ", ".join(map(repr, [*pieces][:10])),
            near,
            self.special_tokens["unk_token"],
        )


def _writes_unknown(model: Any) -> bool:
    """Whether a text can have characters without a token; bytes have one for everything."""
    if getattr(model, "byte_fallback", False):
        return False
    return isinstance(model, models.Unigram) or getattr(model, "unk_token", None) is not None


def lone_surrogate(text: str) -> int | None:
    """The place of a text's first lone surrogate, which cannot be written as UTF-8."""
    return next((at for at, one in enumerate(text) if "\ud800" <= one <= "\udfff"), None)


def _declare(backend: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Make the tokenizer recognise these tokens as a whole; special ones keep their flags."""
    known = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    new = [name for name in dict.fromkeys(names) if name not in known]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in new])


def _default_template(templates: Mapping[str, str]) -> str | None:
    """The one called default, or the only one there is."""
    only = next(iter(templates.values())) if len(templates) == 1 else None
    return templates.get("default", only)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies: "A" is "A", a space is "Ġ".

    Bytes that print in Latin-1 stand for themselves; the others take 256, 257, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
