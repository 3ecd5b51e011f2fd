"""The files of a tokenizer, read without transformers, whose import takes seconds."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from graft.text.space_prefix import parts_of
from graft.trust.bounds import parse_json, read_bytes, read_text
from graft.trust.links import check_links

MAX_GROWTH = 1000.0
"""Of a text, by all steps of a tokenizer."""
MAX_AROUND = 1000
"""Special tokens that a post-processor puts around a text; models have one or two."""
MAX_BYTES = 1 << 26
"""Of a tokenizer.json: Gemma's has 33 MB."""
MAX_MARKS = {b"{": 100_000, b",": 4_000_000}
"""Objects and values of a tokenizer.json: parsed, they take up to 1 kB and 100 bytes each. DeepSeek's, of
128,000 tokens, has 1,928 of these braces and 265,453 commas."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The roles a special token can have; chat templates read them as variables."""
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder beside tokenizer.json with chat templates by name, as transformers writes it."""


class TokenizerNotFound(ValueError):
    """A path without a readable tokenizer; the message says what is missing."""


class TokenizerFiles(NamedTuple):
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    config: Mapping[str, Any]
    eos_ids: list[int]


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Read a Hugging Face folder, or a `tokenizer.json` together with the files beside it."""
    if not path.exists():
        raise TokenizerNotFound(
            f"no tokenizer at '{path}': no such file or folder. Check the path of the model, or of the "
            "tokenizer: it is a downloaded folder with tokenizer.json, or that file; a model of the hub is "
            "written OWNER/NAME, such as Qwen/Qwen3-0.6B, without https://"
        )
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    check_links(folder)
    if not file.exists():
        return _through_transformers(folder)
    config = _read_json(folder / "tokenizer_config.json")
    try:
        content = read_bytes(file, MAX_BYTES)
        _refuse_marks(content)
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the Rust side raises plain Exception
        raise TokenizerNotFound(f"'{file}' is not a tokenizer.json: {error}") from error
    _refuse_growth(file, backend.normalizer, backend.pre_tokenizer)
    _refuse_growth(file, backend.decoder)
    _refuse_repeats(file, backend.post_processor)
    try:
        _declare_from_config(backend, config)
        names = {**_read_json(folder / "special_tokens_map.json"), **config}
        special = {name: _content(names[name]) for name in NAMED if names.get(name)}
        templates = _read_templates(folder, config)
        return TokenizerFiles(backend, special, templates, config, read_eos_ids(folder))
    except TokenizerNotFound:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise unusable(folder, error) from error


def unusable(path: Path, error: Exception) -> TokenizerNotFound:
    """The error about files that hold no tokenizer that works."""
    folder = path if path.is_dir() else path.parent
    return TokenizerNotFound(
        f"the tokenizer in '{folder}' cannot be used ({type(error).__name__}: {error}); download "
        "its files again"
    )


def _refuse_marks(content: bytes) -> None:
    """Refuse what would fill the memory while it is parsed; escapes cannot hide these marks."""
    for mark, most in MAX_MARKS.items():
        if (count := content.count(mark)) > most:
            raise ValueError(
                f"it has {count:,} times {mark.decode()!r}, and a tokenizer at most {most:,}; it is made to "
                "fill the memory, and is not used"
            )


def _refuse_growth(file: Path, *parts: Any) -> None:
    """Refuse steps that double a text again and again: "1" -> "11", forty times."""
    growth = 1.0
    for part in parts:
        for node in parts_of(part):
            growth = min(growth * max(1.0, _growth_of(node)), 1e9)
    if growth > MAX_GROWTH:
        raise TokenizerNotFound(
            f"'{file}' makes a text up to {growth:.3g} times as long: it is made to fill the memory, and is "
            "not used"
        )


def _growth_of(node: Mapping[str, Any]) -> float:
    """How much longer a step makes a text, at most."""
    kind = node.get("type")
    if kind == "Replace":
        pattern = node.get("pattern") or {}
        return len(str(node.get("content", ""))) / len(pattern.get("String") or "a")
    if kind == "Prepend":
        return len(str(node.get("prepend", "")))
    if kind == "Precompiled":  # a table of texts, each ends with a zero
        blob = base64.b64decode(node.get("precompiled_charsmap") or "")
        return max(map(len, blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")))
    # a byte that is not ASCII is written as a character of two bytes; an empty suffix is everywhere
    return 2.0 if kind == "ByteLevel" or (kind == "BPEDecoder" and not node.get("suffix")) else 1.0


def _refuse_repeats(file: Path, processor: Any) -> None:
    """Refuse a post-processor that writes a text several times or not at all, or much around it."""
    around = 0
    for node in parts_of(processor):
        if node.get("type") != "TemplateProcessing":
            continue
        texts = [piece for piece in node["single"] if "Sequence" in piece]
        if len(texts) != 1:
            raise TokenizerNotFound(
                f"'{file}': its post-processor writes a text {len(texts):,} times; it must be once"
            )
        sizes = {name: len(token["ids"]) for name, token in node["special_tokens"].items()}
        names = [piece["SpecialToken"]["id"] for piece in node["single"] if piece not in texts]
        around += sum(sizes.get(name, 0) for name in names)
    if around > MAX_AROUND:
        raise TokenizerNotFound(
            f"'{file}': its post-processor puts {around:,} special tokens around a text; at most "
            f"{MAX_AROUND:,} are possible"
        )


def _declare_from_config(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only `tokenizer_config.json` lists, as in older folders."""
    listed = config.get("added_tokens_decoder") or {}
    for index, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is not None:
            continue
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        token = AddedToken(entry["content"], **{f: bool(entry.get(f, False)) for f in flags})
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        got = backend.token_to_id(entry["content"])
        if got != int(index):
            raise TokenizerNotFound(
                f"tokenizer_config.json gives {entry['content']!r} the id {index}, tokenizer.json "
                f"makes it {got}; the two files do not belong together"
            )


def read_eos_ids(folder: Path) -> list[int]:
    """The ids at which transformers stops sampling from the model in this folder.

    generation_config.json {"eos_token_id": [151645, 151643]}; without it those of config.json, or of its
    text_config.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        content = _read_json(file)
        text = content.get("text_config")
        inside = text.get("eos_token_id") if isinstance(text, Mapping) else None
        given = inside if content.get("eos_token_id") is None else content["eos_token_id"]
        if given is None:
            continue
        ends = given if isinstance(given, list) else [given]
        if any(isinstance(end, bool) or not isinstance(end, int) or end < 0 for end in ends):
            raise TokenizerNotFound(
                f"'{file}' has eos_token_id={given!r}; expected the id of a token, or a list of ids"
            )
        return ends
    return []


def _content(entry: Any) -> str:
    """ "<eos>" from "<eos>" or {"content": "<eos>", "special": true, ...}."""
    return str(entry["content"]) if isinstance(entry, Mapping) else str(entry)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = parse_json(read_bytes(path))
    except (ValueError, OSError) as error:
        raise TokenizerNotFound(f"'{path}' is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerNotFound(f"'{path}' holds a {type(data).__name__}; expected a JSON object")
    return data


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files win over `tokenizer_config.json`, as in transformers."""
    stored = config.get("chat_template") or {}
    if isinstance(stored, str):
        stored = {"default": stored}
    elif isinstance(stored, list):  # [{"name": "default", "template": "..."}, ...]
        stored = {entry["name"]: entry["template"] for entry in stored}
    default = folder / TEMPLATE_FILE
    files = {"default": default} if default.exists() else {}
    files |= {p.stem: p for p in sorted(folder.glob(f"{MORE_TEMPLATES}/*.jinja"))}
    if not files:
        return dict(stored)
    try:
        return {name: read_text(file) for name, file in files.items()}
    except (OSError, ValueError) as error:
        raise TokenizerNotFound(f"a chat template of '{folder}' cannot be read: {error}") from error


def template_file(path: Path) -> Path:
    """The file in which a tokenizer's folder has its chat template."""
    folder = path if path.is_dir() else path.parent
    own = folder / TEMPLATE_FILE
    return own if own.exists() else folder / "tokenizer_config.json"


def _through_transformers(folder: Path) -> TokenizerFiles:
    """Folders with only a SentencePiece model or a vocabulary list: let transformers convert it."""
    from transformers import AutoTokenizer

    held = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
    try:
        found = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise TokenizerNotFound(
            f"'{folder}' has no tokenizer.json, and transformers cannot read it either "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}); it holds: {held}"
        ) from error
    # without files transformers makes an empty tokenizer from config.json: texts have no tokens then
    if len(set(found.get_vocab()) - set(found.all_special_tokens)) < 2:
        raise TokenizerNotFound(
            f"'{folder}' has no tokenizer.json and no other file of a tokenizer; it holds: {held}. Copy "
            "the tokenizer's files there, from the folder of the model that it was trained from"
        )
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerNotFound(
            f"'{folder}' gives a {type(found).__name__}, which is pure Python and has no "
            f"tokenizer.json form; convert it to one, or choose another model folder"
        )
    stored = found.chat_template or {}
    templates = {"default": stored} if isinstance(stored, str) else dict(stored)
    return TokenizerFiles(backend, found.special_tokens_map, templates, {}, read_eos_ids(folder))
