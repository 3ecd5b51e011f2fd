"""GGUF files (llama.cpp) from a model and its tokenizer: the inverse of `gguf_read`.

    model.layers.3.self_attn.q_proj.weight  ->  blk.3.attn_q.weight, for llama with paired rows
    "Ġhello"                                ->  tokenizer.ggml.tokens[...], as in byte-level BPE

Matrices are stored in the requested type, vectors always as f32, as llama.cpp does, one tensor at a time.
Supported tokenizers are byte-level BPE with a pre-tokenizer that llama.cpp has a name for, and graft's
two own tokenizers, which are byte-level BPE without merges.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from torch import Tensor

from graft.files import new_file, sync
from graft.models.finite import find_unusable
from graft.models.io.export import ExportError, check_fits
from graft.models.io.gguf_read import ROPE_FACTORS, gguf_names, gguf_package, paired_heads
from graft.models.io.gguf_tokenizer import (
    CONTROL,
    DIGITS,
    NORMAL,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
    PreTokenizer,
)
from graft.models.io.load import StoredModel
from graft.models.shape import ModelShape, UnsupportedModel, rope_frequencies
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

KINDS = ("f32", "f16", "bf16", "q8_0")
ENDS_BESIDE_EOS = ("eot_token_id", "eom_token_id")
"""GGUF keys for tokens that end a turn or a message."""


def write_gguf(
    stored: StoredModel, tokenizer: FastTokenizer, path: Path, kind: str = "f16", name: str = ""
) -> None:
    """Write one whole GGUF file at `path`; it appears when it is complete."""
    gguf = gguf_package("writing GGUF")
    if kind not in KINDS:
        raise ValueError(f"GGUF type {kind!r} is not supported; known: {', '.join(KINDS)}")
    stored.check()
    check_fits(stored.shape, tokenizer)
    metadata = {**shape_metadata(stored.shape), **tokenizer_metadata(tokenizer, stored.shape)}
    with _explained_file(path) as aside:
        writer = gguf.GGUFWriter(aside, stored.shape.family)
        try:
            writer.add_name(name or path.stem)
            writer.add_file_type(
                gguf.LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"]
            )
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for key, value in metadata.items():
                _add(writer, key, value)
            _write_tensors(gguf, writer, stored, kind)
        finally:
            writer.close()


@contextmanager
def _explained_file(path: Path) -> Iterator[Path]:
    """A temporary path that is renamed to `path`; a failed write raises ExportError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as aside:
            yield aside
        sync(path.parent)
    except OSError as error:
        raise ExportError(
            f"cannot write '{path}' ({error}); no partial file is left: free disk space, or give another "
            f"--gguf"
        ) from error


def shape_metadata(shape: ModelShape) -> dict[str, Any]:
    """llama.cpp's metadata of a decoder, under the name of its architecture."""
    family = shape.family
    return {
        f"{family}.{key}": value
        for key, value in {
            "block_count": shape.layers,
            "context_length": shape.max_positions,
            "embedding_length": shape.width,
            "feed_forward_length": shape.ff,
            "attention.head_count": shape.heads,
            "attention.head_count_kv": shape.kv_heads,
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
            "attention.layer_norm_rms_epsilon": float(shape.norm_eps),
            "rope.dimension_count": shape.head_dim,
            "rope.freq_base": float(shape.rope_theta),
            "vocab_size": shape.vocab_size,
            **_rope_metadata(shape),
        }.items()
    }


def _rope_metadata(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind in ("default", "llama3"):  # Llama 3's scaling is a tensor of divisors
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    unsupported = {"attention_factor", "mscale", "mscale_all_dim", "truncate"} & set(scaling)
    if kind != "yarn" or unsupported:
        what = f" with {', '.join(sorted(unsupported))}" if unsupported else ""
        raise UnsupportedModel(f"rope scaling {kind!r}{what} cannot be stored in a GGUF file")
    window = scaling.get("original_max_position_embeddings") or shape.max_positions
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": int(window),
        "rope.scaling.yarn_beta_fast": float(scaling.get("beta_fast") or 32),
        "rope.scaling.yarn_beta_slow": float(scaling.get("beta_slow") or 1),
    }


def tokenizer_metadata(tokenizer: FastTokenizer, shape: ModelShape) -> dict[str, Any]:
    """The tokenizer in llama.cpp's form: tokens by id, their types, merges in order."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        file = Path(folder, "tokenizer.json")
        content = json.loads(file.read_text(encoding="utf-8"))
        prefix = tokenizers.Tokenizer.from_file(str(file)).encode("", add_special_tokens=True).ids
    model, added = content["model"], content.get("added_tokens") or []
    vocab: dict[str, int] = model.get("vocab") or {}
    if not isinstance(vocab, dict):
        raise _unsupported(f"a {model.get('type')} tokenizer")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
    named = {entry["content"] for entry in added}
    plain = {token: index for token, index in vocab.items() if token not in named}
    if model.get("type") == "WordLevel":
        plain = {_byte_level(token): index for token, index in plain.items()}
        pre = "gpt-2"  # nothing is merged, so the pre-tokenizer does not matter
    else:
        pre = pre_tokenizer_name(content, merges)
    tokens = [f"[PAD{index}]" for index in range(shape.vocab_size)]
    kinds = [UNUSED] * shape.vocab_size
    for token, index in plain.items():
        tokens[index], kinds[index] = token, NORMAL
    for entry in added:
        tokens[entry["id"]] = entry["content"]
        kinds[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": tokenizer.bos_id is not None
        and prefix[:1] == [tokenizer.bos_id],
    }
    if merges:
        found["tokenizer.ggml.merges"] = merges
    else:  # without merges readers expect scores; equal ones join no tokens
        found["tokenizer.ggml.scores"] = [0.0] * shape.vocab_size
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "padding_token_id": tokenizer.pad_id,
        "unknown_token_id": tokenizer.unk_id,
    }
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    ids |= dict(zip(ENDS_BESIDE_EOS, ends_beside_eos(tokenizer), strict=False))
    found |= {f"tokenizer.ggml.{key}": index for key, index in ids.items() if index is not None}
    return found


def ends_beside_eos(tokenizer: FastTokenizer) -> list[int]:
    """Tokens that end a turn or a text, except the eos token; those of turns first."""
    turn_ends = sorted(Chat(tokenizer).end_ids) if tokenizer.chat_template is not None else []
    return [i for i in dict.fromkeys([*turn_ends, *tokenizer.eos_ids]) if i != tokenizer.eos_id]


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{what} cannot be written to GGUF: only byte-level BPE as in Qwen, Llama 3, DeepSeek, "
        f"SmolLM, Tekken and GPT-2 is supported. Export with --out and convert that folder with llama.cpp's "
        f"convert_hf_to_gguf.py"
    )


def _byte_level(character: str) -> str:
    """A character of a character tokenizer in byte-level BPE: " " is "Ġ"."""
    if len(character.encode()) != 1:
        raise _unsupported(f"a tokenizer of characters with {character!r}, which is several bytes,")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return level.pre_tokenize_str(character)[0][0]


def pre_tokenizer_name(content: Mapping[str, Any], merges: list[str]) -> str:
    """llama.cpp's name for the pre-tokenizer and the normalizer of a tokenizer.json."""
    model, pre = content["model"], content.get("pre_tokenizer") or {}
    *steps, last = pre.get("pretokenizers") or [pre]
    if model.get("type") != "BPE" or model.get("byte_fallback") or last.get("type") != "ByteLevel":
        raise _unsupported(f"a {model.get('type')} tokenizer that is not byte-level")
    if last.get("add_prefix_space", True):
        raise _unsupported("a tokenizer that puts a space before every text")
    found = PreTokenizer(
        steps=tuple(map(_step, steps)),
        has_words=last.get("use_regex", True),
        normalizer=_normalizer(content.get("normalizer")),
        ignores_merges=bool(model.get("ignore_merges")),
    )
    if not merges and not found.normalizer:
        return "gpt-2"  # nothing is joined, whatever the words are
    for name, known in PRE_TOKENIZERS.items():
        if found == known:
            return name
    how = found.steps[-1] if found.steps else "GPT-2's words" if found.has_words else "nothing"
    beside = f" after {found.normalizer}" if found.normalizer else ""
    whole = ", whole words without merges" if found.ignores_merges else ""
    raise _unsupported(f"a tokenizer that splits text by {how[:60]!r}{beside}{whole}")


def _step(step: Mapping[str, Any]) -> str:
    """A step of a pre-tokenizer as in `PreTokenizer.steps`."""
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return DIGITS
    pattern = (step.get("pattern") or {}).get("Regex")
    is_plain = step.get("behavior", "Isolated") == "Isolated" and not step.get("invert")
    if step.get("type") == "Split" and pattern and is_plain:
        return str(pattern)
    raise _unsupported(f"a tokenizer that splits text by {str(dict(step))[:60]}")


def _normalizer(normalizer: Mapping[str, Any] | None) -> str:
    """The normalizer's name; "" for none, or for an empty list of them."""
    listed = [normalizer] if normalizer else []
    while len(listed) == 1 and "normalizers" in listed[0]:
        listed = listed[0]["normalizers"]
    return ", ".join(str(one.get("type")) for one in listed)


def pair_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k from Hugging Face's order to llama.cpp's: i and i + d/2 become neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _write_tensors(gguf: Any, writer: GGUFWriter, stored: StoredModel, kind: str) -> None:
    """First all sizes, as the format requires, then the data, tensor by tensor."""
    shape, names = stored.shape, gguf_names(stored.shape)
    kinds: dict[str, Any] = {}
    factors = _rope_factors(shape)
    single = np.dtype(np.float32)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, single, factors.nbytes)
    for name, size in stored.sizes.items():
        kinds[name] = gguf.GGMLQuantizationType[_kind_of(size, kind).upper()]
        num_bytes = math.prod(gguf.quant_shape_to_byte_shape(size, kinds[name]))
        writer.add_tensor_info(names[name], size, single, num_bytes, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for name in stored.sizes:
        weight = stored.read(name).float()
        if kinds[name].name == "F16" and (why := find_unusable({name: weight.half()})):
            raise UnsupportedModel(
                f"{why} as f16, which ends at 65504; take --gguf-type bf16 or f32"
            )
        if heads := paired_heads(shape, name):
            weight = pair_rows(weight, heads)
        writer.write_tensor_data(gguf.quantize(weight.contiguous().numpy(), kinds[name]))


def _kind_of(size: tuple[int, ...], kind: str) -> str:
    """Vectors are f32; rows that are not a multiple of q8_0's block of 32 are f16."""
    if len(size) == 1:
        return "f32"
    return "f16" if kind == "q8_0" and size[-1] % 32 else kind


def _rope_factors(shape: ModelShape) -> np.ndarray | None:
    """Llama 3's rope scaling, as the divisor of each frequency."""
    if shape.rope_scaling.get("rope_type") != "llama3":
        return None
    plain, _ = rope_frequencies(replace(shape, rope_scaling={}))
    scaled, _ = rope_frequencies(shape)
    return np.array([a / b for a, b in zip(plain, scaled, strict=True)], dtype=np.float32)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
