"""Text to ids and back, from our own alphabets and from Hugging Face folders."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_templates import THINKING, message, small_bpe
from tokenizers import AddedToken, models, pre_tokenizers

from graft.protocols import Tokenizer as TokenizerProtocol
from graft.text.template import CHATML, PLAIN, render
from graft.text.tokenizer import FastTokenizer, UnknownCharacter
from graft.text.tokenizer_files import TokenizerNotFound

DIGITS = "0123456789+="
BYTES = FastTokenizer.bytes()


def test_characters_come_after_pad_eos_and_unk():
    digits = FastTokenizer.characters(DIGITS)
    assert digits.encode("12+3=<eos>") == [4, 5, 13, 6, 14, 1]
    assert (digits.pad_id, digits.eos_id, digits.unk_id, digits.bos_id) == (0, 1, 2, None)
    assert digits.vocab_size == 15
    assert digits.special_ids == {0, 1, 2}
    assert digits.decode([4, 5, 1, 0]) == "12<eos><pad>"
    assert digits.decode([4, 5, 1, 0], skip_special=True) == "12"


def test_repeated_and_unusual_characters_have_one_token_each():
    odd = FastTokenizer.characters("ab \n\tab<é😀")
    assert odd.vocab_size == 3 + 8
    assert odd.decode(odd.encode("é <\n\t😀a")) == "é <\n\t😀a"


def test_a_character_outside_the_alphabet_is_named():
    with pytest.raises(UnknownCharacter, match=r"'x' \(position 3, in '1\+2x3'\)"):
        FastTokenizer.characters(DIGITS).encode("1+2x3")
    assert FastTokenizer.characters(DIGITS).encode("<unk>") == [2]  # it is written by name


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    """The alphabet read from its file, which is always encoded by the backend."""
    folder = tmp_path_factory.mktemp("alphabet")
    FastTokenizer.characters(ALPHABET).save(folder)
    return FastTokenizer.load(folder)


ALPHABET = "0+= \r\n<>eosé"


@given(
    st.lists(st.sampled_from([*ALPHABET, "<eos>", "<unk>"])).map("".join),
    st.none() | st.integers(0, 14),
)
def test_letters_have_the_tokens_that_the_backend_gives_them(
    loaded: FastTokenizer, text: str, last: int | None
):
    alphabet = FastTokenizer.characters(ALPHABET)
    assert alphabet.encode(text) == loaded.encode(text)
    assert alphabet.encode_after(text, last) == loaded.encode_after(text, last)
    if "<unk>" not in text:  # as plain text its "u" is unknown
        assert alphabet.encode_plain(text, last) == loaded.encode_plain(text, last)


def test_an_empty_alphabet_is_refused():
    with pytest.raises(ValueError, match="alphabet is empty"):
        FastTokenizer.characters("")


def test_a_byte_is_its_own_token():
    assert BYTES.encode("Aé\n<eos>") == [65, 0xC3, 0xA9, 10, 256]
    assert BYTES.encode("".join(map(chr, range(128)))) == list(range(128))
    assert (BYTES.eos_id, BYTES.pad_id, BYTES.vocab_size) == (256, 257, 258)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text("ab<eos>|", max_size=12))
def test_every_text_survives_the_byte_tokenizer(left: str, right: str):
    text = left + right
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert BYTES.decode(BYTES.encode(left) + BYTES.encode("")) == left
    if "<" not in text:
        assert ids == list(text.encode())


@given(st.lists(st.integers(0, 300), max_size=30))
def test_any_ids_can_be_decoded(ids: list[int]):
    BYTES.decode(ids)


def as_protocol(tokenizer: TokenizerProtocol) -> TokenizerProtocol:
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer", [FastTokenizer.characters(DIGITS + "ab \n"), BYTES, small_bpe(THINKING)]
)
def test_saved_and_loaded_is_the_same(tokenizer: FastTokenizer, tmp_path: Path):
    as_protocol(tokenizer).save(tmp_path)
    for again in (FastTokenizer.load(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert again.encode("12 + 3 = ab\n") == tokenizer.encode("12 + 3 = ab\n")
        for name in ("vocab_size", "eos_id", "bos_id", "pad_id", "special_ids", "chat_template"):
            assert getattr(again, name) == getattr(tokenizer, name)
        assert again.special_tokens == tokenizer.special_tokens


def test_a_loaded_alphabet_is_still_strict(tmp_path: Path):
    FastTokenizer.characters(DIGITS).save(tmp_path)
    with pytest.raises(UnknownCharacter):
        FastTokenizer.load(tmp_path / "tokenizer.json").encode("x")


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def bare_folder(folder: Path) -> Path:
    """A tokenizer.json alone: tokens a and b, and </s>, which nothing declares special."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(max_length=2)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_special_tokens_are_read_from_either_file_in_either_form(tmp_path: Path):
    bare_folder(tmp_path)
    assert FastTokenizer.load(tmp_path).eos_id is None
    write_config(tmp_path, eos_token={"content": "</s>", "special": True}, pad_token=None)
    names = {"eos_token": "a", "pad_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names), encoding="utf-8")
    loaded = FastTokenizer.load(tmp_path)
    assert (loaded.special_tokens["eos_token"], loaded.eos_id, loaded.special_ids) == (
        "</s>",
        2,
        {2},
    )
    assert loaded.pad_id is None  # the config has none
    assert loaded.encode("a b</s>a") == [0, 1, 2, 0]  # and the stored truncation to 2 is gone


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path):
    bare_folder(tmp_path)
    listed = {"5": {"content": "<y>"}, "4": {"content": "<x>", "special": True}}
    write_config(tmp_path, added_tokens_decoder=listed)
    loaded = FastTokenizer.load(tmp_path)
    assert loaded.encode("<y><x>") == [5, 4]
    assert (loaded.special_ids, loaded.vocab_size) == ({4}, 6)
    write_config(tmp_path, added_tokens_decoder={"9": {"content": "<x>"}})
    with pytest.raises(TokenizerNotFound, match="do not belong together"):
        FastTokenizer.load(tmp_path)


def test_templates_are_found_in_all_their_places(tmp_path: Path):
    bare_folder(tmp_path)
    assert FastTokenizer.load(tmp_path).chat_template is None
    write_config(tmp_path, chat_template="{{ 1 }}")
    assert FastTokenizer.load(tmp_path).chat_template == "{{ 1 }}"
    entries = [{"name": n, "template": f"{{{{ '{n}' }}}}"} for n in ("tool_use", "default")]
    write_config(tmp_path, chat_template=entries)
    named = FastTokenizer.load(tmp_path)
    assert named.chat_template == "{{ 'default' }}"
    assert named.chat_templates["tool_use"] == "{{ 'tool_use' }}"
    named.save(tmp_path / "again")
    assert FastTokenizer.load(tmp_path / "again").chat_templates == named.chat_templates
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert FastTokenizer.load(tmp_path).chat_templates == {"default": CHATML}


def test_the_template_a_model_was_trained_with_is_the_one_saved(tmp_path: Path):
    tokenizer = small_bpe(THINKING)
    tokenizer.chat_templates["tool_use"] = THINKING + " "
    tokenizer.chat_template = CHATML
    tokenizer.save(tmp_path)
    assert FastTokenizer.load(tmp_path).chat_templates == {"default": CHATML}


def test_declaring_a_special_token_keeps_how_it_treats_blanks():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "\n": 1, "?": 2}, "?"))
    backend.add_special_tokens([AddedToken("<end>", rstrip=True, special=True)])
    assert FastTokenizer(backend, {"eos_token": "<end>"}).encode("a<end>\n\na") == [0, 3, 0]


def test_the_error_of_a_path_without_a_tokenizer_names_the_files(tmp_path: Path):
    with pytest.raises(TokenizerNotFound, match="no such file or folder"):
        FastTokenizer.load(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerNotFound, match=r"is not a tokenizer\.json"):
        FastTokenizer.load(tmp_path)
    bare_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerNotFound, match="not valid JSON"):
        FastTokenizer.load(tmp_path)


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys; from graft.text.chat import Chat; from graft.text import parse;"
        "from graft.text.tokenizer import FastTokenizer; Chat(FastTokenizer.bytes(), 'chatml');"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ran.stdout.strip() == "set()", ran.stderr


@pytest.mark.peer
@pytest.mark.parametrize(
    "tokenizer", [FastTokenizer.characters(DIGITS + "ab \n"), BYTES, small_bpe(THINKING)]
)
@pytest.mark.parametrize("model_type", [None, "qwen3", "llama"])  # qwen2 forces its own class
def test_transformers_reads_what_we_save(
    tokenizer: FastTokenizer, model_type: str | None, tmp_path: Path
):
    from transformers import AutoTokenizer

    if model_type:  # as beside a model's weights, where transformers also looks at the family
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer.save(tmp_path)
    peer = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "12 + 3 = ab\n" + tokenizer.special_tokens.get("eos_token", "") + " b  a="
    assert peer.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert (peer.eos_token_id, peer.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert peer.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    messages = [message("user", "1+2="), message("assistant", "3"), message("user", "a b")]
    assert tokenizer.chat_template is not None
    special: dict[str, Any] = dict(tokenizer.special_tokens)
    ours = render(tokenizer.chat_template, messages, **special)
    assert peer.apply_chat_template(messages, tokenize=False) == ours


@pytest.mark.peer
def test_folders_without_tokenizer_json_go_through_transformers(tmp_path: Path):
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    write_config(
        tmp_path, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>", chat_template=PLAIN
    )
    loaded = FastTokenizer.load(tmp_path)
    assert loaded.encode("abba<|endoftext|>") == [2, 1, 0, 3]
    assert (loaded.eos_id, loaded.chat_template) == (3, PLAIN)
    with pytest.raises(TokenizerNotFound, match=r"no tokenizer\.json, and transformers cannot"):
        (tmp_path / "empty").mkdir()
        FastTokenizer.load(tmp_path / "empty")


@pytest.mark.peer
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "t5"])
def test_a_model_folder_without_a_tokenizer_is_refused(family: str, tmp_path: Path):
    # transformers would make a tokenizer of special tokens only, and every text would be empty
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(
        TokenizerNotFound, match=r"no other file of a tokenizer; it holds: config\.json"
    ):
        FastTokenizer.load(tmp_path)


A, EOS = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}


def processor(*single: dict[str, Any], ids: int = 1) -> dict[str, Any]:
    token = {"id": "<eos>", "ids": [256] * ids, "tokens": ["<eos>"] * ids}
    pair = [A, {"Sequence": {"id": "B", "type_id": 0}}]
    named = {"single": [*single], "pair": pair, "special_tokens": {"<eos>": token}}
    return {"type": "TemplateProcessing", **named}


def sequence(part: str, step: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "Sequence", part: [step] * count}


AS_BYTES = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
PREPEND = {"type": "Prepend", "prepend": "a" * 100}
TABLE = base64.b64encode(b"\4\0\0\0" + bytes(4) + b"x" * 2000 + b"\0").decode()
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "the text again": ("post_processor", processor(A, A), "a text 2 times"),
    "no text": ("post_processor", processor(EOS), "a text 0 times"),
    "in a list": (
        "post_processor",
        sequence("processors", processor(A, A, A), 2),
        "a text 3 times",
    ),
    "many ends": ("post_processor", processor(A, *[EOS] * 1001), "1,001 special tokens"),
    "a long end": ("post_processor", processor(A, EOS, EOS, ids=600), "1,200 special tokens"),
    "objects": ("post_processor", processor(*[A] * 60_000), "120,0.. times '{'"),
    "values": ("added_tokens", [0] * 4_000_001, "4,000,... times ','"),
    "bytes of bytes": ("normalizer", sequence("normalizers", {"type": "ByteLevel"}, 10), "05e.03"),
    "bytes, split": (
        "pre_tokenizer",
        sequence("pretokenizers", {"type": "ByteLevel", **AS_BYTES}, 10),
        "1.02e.03 times",
    ),
    "a decoder": (
        "decoder",
        sequence("decoders", {"type": "BPEDecoder", "suffix": ""}, 10),
        "1.02e.03 times",
    ),
    "prefixes": ("normalizer", sequence("normalizers", PREPEND, 2), "2e.04 times"),
    "a table": (
        "normalizer",
        {"type": "Precompiled", "precompiled_charsmap": TABLE},
        "4e.03 times",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_would_fill_the_memory_is_refused(name: str, tmp_path: Path):
    part, value, complaint = HOSTILE[name]
    FastTokenizer.bytes().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    with pytest.raises(TokenizerNotFound, match=rf"tokenizer\.json'.*{complaint}"):
        FastTokenizer.load(tmp_path)


def test_a_post_processor_of_models_is_kept(tmp_path: Path):
    FastTokenizer.bytes().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text()) | {"post_processor": processor(EOS, A, EOS)}
    file.write_text(json.dumps(content))
    tokenizer = FastTokenizer.load(tmp_path)
    assert tokenizer.encode("ab") == [97, 98]
    tokenizer.save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "tokenizer.json").read_text())
    assert again["post_processor"] == content["post_processor"]


def old_sentencepiece(*, byte_fallback: bool = False) -> FastTokenizer:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "<0xC3>": 4, "<0xA9>": 5}
    model = models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    return FastTokenizer(tokenizers.Tokenizer(model), {"unk_token": "<unk>"})


def test_characters_without_a_token_are_named_once(caplog: pytest.LogCaptureFixture):
    tokenizer = old_sentencepiece()
    assert tokenizer.encode("ab<unk>") == [2, 3, 0] and not caplog.records
    assert tokenizer.encode("aéb\u4e2db") == [2, 0, 3, 0, 3]
    (record,) = caplog.records
    assert "'é', '\u4e2d'" in record.getMessage() and "<unk>" in record.getMessage()
    assert tokenizer.encode("é") == [0] and len(caplog.records) == 1
    assert old_sentencepiece(byte_fallback=True).encode("é") == [4, 5]
    unigram = models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)
    assert FastTokenizer(tokenizers.Tokenizer(unigram), {"unk_token": "<unk>"}).encode("aé") == [
        1,
        0,
    ]
    assert len(caplog.records) == 2
