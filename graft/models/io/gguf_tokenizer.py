"""The tokenizer in the metadata of a GGUF file, built as the model's own tokenizer.json has it.

GGUF stores a vocabulary and the name of a pre-tokenizer. The rest of a tokenizer.json is known by that name:

    "qwen2"    texts are put into Unicode's form NFC, then split by Qwen's regular expression
    "smollm"   digits are split off one by one, then words as in GPT-2

Another name is refused: with another model's pre-tokenizer a text gets other tokens, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from graft.models.shape import UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's token types."""
BLANK = "\u2581"
"""SentencePiece's space."""
DIGITS = "digits"
"""A step that splits off every digit."""
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = _SUFFIXES + _WORD + r"\p{L}+|\p{N}{1,3}|" + _REST
QWEN_2 = _SUFFIXES + _WORD + r"\p{L}+|\p{N}|" + _REST
QWEN_35 = (
    _SUFFIXES + _WORD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DEEPSEEK_CODER = (
    "[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    DIGITS,
)


class PreTokenizer(NamedTuple):
    """What stands in a tokenizer.json around a byte-level vocabulary."""

    steps: tuple[str, ...] = ()
    """Regular expressions whose matches are split off, one after another, or DIGITS."""
    has_words: bool = False
    """Whether words are split as in GPT-2 after that."""
    normalizer: str = ""
    ignores_merges: bool = False
    """Whether a word that is a token needs no merges; these models begin texts with bos, too."""


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(has_words=True),
    "smollm": PreTokenizer((DIGITS,), has_words=True),
    "llama-bpe": PreTokenizer((LLAMA_3,), ignores_merges=True),
    "llama3": PreTokenizer((LLAMA_3,), ignores_merges=True),
    "llama-v3": PreTokenizer((LLAMA_3,), ignores_merges=True),
    "dbrx": PreTokenizer((LLAMA_3,)),
    "qwen2": PreTokenizer((QWEN_2,), normalizer="NFC"),
    "deepseek-r1-qwen": PreTokenizer((QWEN_2,), normalizer="NFC"),
    "qwen35": PreTokenizer((QWEN_35,), normalizer="NFC"),
    "tekken": PreTokenizer((TEKKEN,), ignores_merges=True),
    "deepseek-v3": PreTokenizer(DEEPSEEK_3),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
}
"""By llama.cpp's names.

Only those that were compared with a tokenizer of the model's makers, or with its published file, are listed:
llama.cpp has names for some forty more, and knows no normalizers.
"""


def build_backend(entries: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that the entries below "tokenizer.ggml." describe."""
    tokens, kinds = entries.get("tokens"), entries.get("token_type")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("it has no tokenizer.ggml.tokens")
    kinds = kinds if isinstance(kinds, list) else [NORMAL] * len(tokens)
    while kinds and kinds[-1] == UNUSED:  # rows that pad the embedding are no tokens
        kinds = kinds[:-1]
    tokens = tokens[: len(kinds)]
    vocab = {token: index for index, token in reversed([*enumerate(tokens)])}
    model = entries.get("model")
    if model == "gpt2":
        backend, begins = _byte_level(entries, vocab)
    elif model == "llama":
        backend, begins = _sentencepiece(entries, tokens, kinds, vocab)
    else:
        raise UnsupportedModel(
            f"tokenizer.ggml.model={model!r} is not supported; known: gpt2, llama. Load the model's Hugging "
            "Face folder"
        )
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=is_special)
                for token, its in zip(tokens, kinds, strict=True)
                if its == kind
            ]
        )
    bos = special_token(entries, "bos")
    if bos is not None and entries.get("add_bos_token", begins):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    return backend


def special_token(entries: Mapping[str, Any], role: str) -> str | None:
    """The text of the token with a role: bos, eos, unknown or padding."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if entries.get("model") == "llama" else {}
    index = entries.get(f"{role}_token_id", defaults.get(role))
    if index is None:
        return None
    if not 0 <= index < len(entries["tokens"]):
        raise ValueError(f"tokenizer.ggml.{role}_token_id={index} is beyond its vocabulary")
    return entries["tokens"][index]


def _byte_level(
    entries: Mapping[str, Any], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    name = entries.get("pre")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre={name!r} is not known here, and with another pre-tokenizer texts would get "
            f"other tokens than in training; known: {', '.join(PRE_TOKENIZERS)}. Load the model's Hugging "
            "Face folder"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in entries.get("merges") or []]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignores_merges)  # type: ignore[arg-type]
    )
    if pre.normalizer == "NFC":
        backend.normalizer = normalizers.NFC()
    split = [
        pre_tokenizers.Digits(individual_digits=True)
        if step == DIGITS
        else pre_tokenizers.Split(Regex(step), "isolated")
        for step in pre.steps
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.has_words)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, last]) if split else last
    backend.decoder = decoders.ByteLevel()
    return backend, pre.ignores_merges


def _sentencepiece(
    entries: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = entries.get("scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise ValueError("its tokenizer has no score for each token")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_of(tokens, kinds, scores),
            unk_token=special_token(entries, "unknown"),
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    blanks = normalizers.Replace(" ", BLANK)
    ends = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if entries.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks])
        ends.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = blanks
    backend.decoder = decoders.Sequence(ends)
    return backend, True


def merges_of(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, by the third's score, the highest first.

    "a" -1, "b" -2, "ab" -3, "aba" -4: [("a", "b"), ("ab", "a")]. Control tokens and bytes are not joined
    from texts that look like them.
    """
    pieces = {
        token: score
        for token, kind, score in zip(tokens, kinds, scores, strict=False)
        if kind == NORMAL
    }
    found = [
        (-score, -at, token[:at], token[at:])
        for token, score in pieces.items()
        for at in range(1, len(token))
        if token[:at] in pieces and token[at:] in pieces
    ]
    return [(first, second) for _, _, first, second in sorted(found, key=lambda one: one[:2])]
