"""GGUF files (llama.cpp): one file with quantised weights, the shape and the tokenizer.

Blocks of quantised numbers are moved to the decoder's device and dequantised there; the result is an
ordinary decoder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.io.gguf_blocks import BLOCKS, PLAIN, dequantise
from graft.models.io.gguf_head import GgufTensor, read_head
from graft.models.io.gguf_tokenizer import build_backend, special_token
from graft.models.io.stream import StoredTensor, stream
from graft.models.io.tensor_names import hf_rows
from graft.models.io.tensors import ModelFileError, build_decoder, first_line
from graft.models.shape import ModelShape, UnsupportedModel, rope_frequencies
from graft.text.tokenizer import FastTokenizer

DAMAGED = (ValueError, IndexError, KeyError, TypeError, OverflowError, ZeroDivisionError, OSError)
"""What is raised for files that are not whole."""
GEMMA = "gemma3"
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", GEMMA: "gemma3_text"}
"""llama.cpp's architectures -> our families. Mistral's files say llama."""
ROPE_FACTORS = "rope_freqs.weight"
ENDS = ("eos", "eot", "eom")
"""Ends of a text, a turn and a message: sampling stops at each."""
ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
"""Special tokens by Hugging Face's names -> GGUF's."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "swin_norm": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": (0,),
    "attention.shared_kv_layers": (0,),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Entries that change the function in llama.cpp: the values with which they do not."""


def load_gguf(
    path: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """The decoder in a GGUF file of one of `FAMILIES`, dequantised."""
    path = Path(path)
    file = open_gguf(path)
    shape = gguf_shape(file, path)
    names = {theirs: name for name, theirs in gguf_names(shape).items()}
    # an unknown tensor keeps its name, and `build_decoder` reports it
    places = {names.get(name, name): p for name, p in file.places.items() if name != ROPE_FACTORS}
    stored = {name: place.sizes for name, place in places.items()}

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, raw in stream(places, torch.device(device), f"'{path}'"):
            _write(raw, places[name], name, shape, views[name])

    try:
        return build_decoder(shape, stored, fill, origin=f"'{path}'", dtype=dtype, device=device)
    finally:
        _opened.cache_clear()


def _write(raw: Tensor, place: StoredTensor, name: str, shape: ModelShape, view: Tensor) -> None:
    """Dequantise a tensor's bytes into `view`, in Hugging Face's order of rows."""
    if shape.norm_offset and name.endswith("norm.weight"):
        view.copy_(dequantised(raw, place) - 1)  # llama.cpp stores what rows are multiplied by
    elif heads := paired_heads(shape, name):
        view.copy_(unpair_rows(dequantised(raw, place), heads))
    elif place.kind in BLOCKS or place.kind in PLAIN:
        dequantise(raw, place.kind, view)
    else:
        view.copy_(dequantised(raw, place))


def gguf_package(task: str) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{task} needs the gguf package: pip install graft-rl[gguf]", name="gguf"
        ) from error
    return gguf


class GgufFile(NamedTuple):
    """What a GGUF file holds: its entries, and where its tensors lie."""

    entries: dict[str, Any]
    places: dict[str, StoredTensor]


def open_gguf(path: Path) -> GgufFile:
    """The file's entries and places; no tensor is read."""
    gguf_package(f"reading '{path}'")
    if not path.is_file():
        raise ModelFileError(f"no GGUF file at '{path}'")
    state = path.stat()
    file = _opened(path, state.st_size, state.st_mtime_ns)
    count = file.entries.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise ModelFileError(
            f"'{path}' is one of {count} shards; join them first: llama-gguf-split --merge"
        )
    return file


@lru_cache(maxsize=1)
def _opened(path: Path, size: int, changed: int) -> GgufFile:
    """The file as it is now: shape, tokenizer and weights are read one after another.

    `load_gguf`, which comes last, frees it.
    """
    try:
        head = read_head(path)
        places = {name: _place(path, size, name, tensor) for name, tensor in head.tensors.items()}
    except DAMAGED as error:  # bad magic; truncated; duplicate entries; texts that are not UTF-8
        raise ModelFileError(
            f"'{path}' ({size} bytes) is not a whole GGUF file ({error}); download it again"
        ) from error
    return GgufFile(head.entries, places)


def _place(path: Path, size: int, name: str, tensor: GgufTensor) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(tensor.kind)
    count, num_bytes = GGML_QUANT_SIZES[kind]
    if tensor.sizes[-1] % count:
        raise ValueError(
            f"{name} has rows of {tensor.sizes[-1]}, and {kind.name} blocks of {count}"
        )
    stop = tensor.start + math.prod(tensor.sizes) // count * num_bytes
    if stop > size:
        raise ValueError(f"{name} ends at {stop}")
    return StoredTensor(path, tensor.start, stop, kind.name, tensor.sizes)


def gguf_shape(file: GgufFile, path: Path) -> ModelShape:
    """The ModelShape that the metadata and the list of tensors describe."""
    family = file.entries.get("general.architecture", "")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"'{path}': architecture {family!r} has no native decoder; known: {', '.join(FAMILIES)}"
        )

    def get(key: str, default: Any = None) -> Any:
        value = file.entries.get(f"{family}.{key}", default)
        if value is None:
            raise ModelFileError(f"'{path}' lacks the entry {family}.{key}; is the file complete?")
        if isinstance(value, list):  # one number per layer
            raise UnsupportedModel(f"'{path}': {family}.{key} differs by layer: {value[:20]}")
        if isinstance(value, str) != (key == "rope.scaling.type"):
            raise ModelFileError(
                f"'{path}': {family}.{key}={str(value)[:60]!r} is of the wrong kind"
            )
        return value

    if get("expert_count", 0):
        raise UnsupportedModel(f"'{path}': a mixture of experts has no native decoder")
    for key, neutral in NEUTRAL.items():
        if (value := file.entries.get(f"{family}.{key}")) not in (None, *neutral):
            raise UnsupportedModel(
                f"'{path}': {family}.{key}={value} changes what the model computes, and the native "
                "decoder does not support it; use another model"
            )
    window = get("attention.sliding_window", 0)
    if family != GEMMA and 0 < window < get("context_length"):
        raise UnsupportedModel(
            f"'{path}': {family}.attention.sliding_window={window}; only full attention is supported"
        )
    tensors = file.places
    if "token_embd.weight" not in tensors:
        raise ModelFileError(f"'{path}' has no token_embd.weight; is the file complete?")
    width, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"'{path}': {family}.{key}={get(key)}, but the head size is {head_dim}; they must be equal"
            )
    is_biased = "blk.0.attn_q.bias" in tensors
    shape = ModelShape(
        family=FAMILIES[family],
        # rows, not the metadata: some files pad the embedding beyond the tokenizer
        vocab_size=tensors["token_embd.weight"].sizes[0],
        width=width,
        layers=get("block_count"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        ff=get("feed_forward_length"),
        tied="output.weight" not in tensors,
        qk_norm=family in ("qwen3", GEMMA),
        qkv_bias=is_biased or family == "qwen2",
        out_bias=is_biased and family != "qwen2",
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(get("rope.freq_base", 10_000.0)),
        max_positions=get("context_length"),
        **(_gemma_fields(get, window) if family == GEMMA else {}),
    )
    # llama.cpp treats a factor without a type as linear
    is_scaled = get("rope.scaling.factor", 0.0) not in (0.0, 1.0)
    scaling = get("rope.scaling.type", "linear" if is_scaled else "none")
    if ROPE_FACTORS in tensors:
        place = {ROPE_FACTORS: tensors[ROPE_FACTORS]}
        [(_, raw)] = stream(place, torch.device("cpu"), f"'{path}'")
        factors = dequantised(raw, place[ROPE_FACTORS]).tolist()
        return replace(shape, rope_scaling=_llama3_scaling(shape, factors, path))
    if scaling == "none":
        return shape
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"'{path}': rope scaling {scaling!r} is not supported; known: none, linear, yarn"
        )
    rope: dict[str, Any] = {"rope_type": scaling, "factor": _shortest(get("rope.scaling.factor"))}
    if scaling == "yarn":
        rope |= {
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "beta_fast": _shortest(get("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": _shortest(get("rope.scaling.yarn_beta_slow", 1.0)),
        }
    return replace(shape, rope_scaling=rope)


def _gemma_fields(get: Callable[..., Any], window: int) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 without an entry: every sixth layer sees all."""
    layers, width, heads = (
        get(k) for k in ("block_count", "embedding_length", "attention.head_count")
    )
    is_27b = layers == 62  # the only size whose queries are not scaled by the head's
    return {
        "windows": tuple(window if (layer + 1) % 6 else 0 for layer in range(layers)),
        "local_theta": _shortest(get("rope.freq_base_swa", 10_000.0)),
        "query_scale": math.sqrt(get("attention.key_length") * heads / width) if is_27b else 1.0,
        "activation": "gelu_tanh",
        "norm_offset": True,
        "sandwich": True,
        "scales_embedding": True,
    }


def _llama3_scaling(shape: ModelShape, factors: list[float], path: Path) -> dict[str, Any]:
    """Llama 3.1's scaling from the divisor of each frequency, which is all that a GGUF file stores.

    The largest divisor is the factor (8 or 32); the other three numbers are those of every Llama 3
    release, and the divisors they give must be the stored ones.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, _ = rope_frequencies(shape)
    scaled, _ = rope_frequencies(replace(shape, rope_scaling=scaling))
    given = [one / other for one, other in zip(plain, scaled, strict=True)]
    if len(given) != len(factors) or any(
        abs(ours / theirs - 1) > 1e-3 for ours, theirs in zip(given, factors, strict=True)
    ):
        raise UnsupportedModel(
            f"'{path}': {ROPE_FACTORS} is not Llama 3's rope scaling; load the Hugging Face folder"
        )
    return scaling


def gguf_names(shape: ModelShape) -> dict[str, str]:
    """Hugging Face's tensor names -> llama.cpp's.

    "model.layers.3.self_attn.q_proj.weight" -> "blk.3.attn_q.weight"
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    theirs = next(name for name, ours in FAMILIES.items() if ours == shape.family)
    known = get_tensor_name_map(MODEL_ARCH[theirs.upper()], shape.layers)
    return {name: str(known.get_name(name, (".weight", ".bias"))) for name in hf_rows(shape)}


def paired_heads(shape: ModelShape, name: str) -> int:
    """Heads of a tensor whose rows llama.cpp stores in another order; 0: the order is the same."""
    if shape.family != "llama":
        return 0
    return shape.heads if ".q_proj." in name else shape.kv_heads if ".k_proj." in name else 0


def unpair_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order to Hugging Face's.

    llama.cpp rotates pairs of neighbouring rows of a head, Hugging Face row i with row i + d/2:
    one head of size 4 stored as rows [0, 2, 1, 3] becomes [0, 1, 2, 3].
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def dequantised(raw: Tensor, place: StoredTensor) -> Tensor:
    """The tensor in fp32, of any kind that the installed gguf package knows."""
    if place.kind in BLOCKS or place.kind in PLAIN:
        result = torch.empty(place.sizes, device=raw.device)
        dequantise(raw, place.kind, result)
        return result
    from gguf import GGMLQuantizationType, dequantize

    blocks = raw.cpu().numpy().reshape(*place.sizes[:-1], -1)
    try:
        result = dequantize(blocks, GGMLQuantizationType[place.kind])
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"'{place.file}': a tensor of {list(place.sizes)} is quantised as {place.kind}, which the "
            f"installed gguf package cannot dequantise; pip install -U gguf, or use another quantisation"
        ) from error
    return torch.from_numpy(result).view(place.sizes).to(raw.device)


def open_tokenizer(path: Path) -> FastTokenizer:
    """The tokenizer of a Hugging Face folder or of a .gguf file."""
    if path.suffix != ".gguf":
        return FastTokenizer.load(path)
    fields = open_gguf(path).entries
    entries, templates = (
        {
            name.removeprefix(start): value
            for name, value in fields.items()
            if name.startswith(start)
        }
        for start in ("tokenizer.ggml.", "tokenizer.chat_template")
    )
    ends = [entries.get(f"{kind}_token_id") for kind in ENDS]
    try:
        special = {role: special_token(entries, name) for role, name in ROLES.items()}
        tokenizer = FastTokenizer(
            build_backend(entries),
            {role: token for role, token in special.items() if token is not None},
            {name.removeprefix(".") or "default": str(text) for name, text in templates.items()},
            eos_ids=[int(index) for index in ends if index is not None],
        )
        tokenizer.origin = f"'{path}'"
        return tokenizer
    except UnsupportedModel as error:
        raise UnsupportedModel(f"'{path}': {error}") from error
    except Exception as error:  # the Rust side raises plain Exception
        raise ModelFileError(
            f"'{path}' has no usable tokenizer ({type(error).__name__}: {first_line(error)}); download it "
            "again, or load the Hugging Face folder"
        ) from error


def _shortest(value: float) -> float:
    """GGUF stores fp32: 9.999999747e-06 was 1e-05."""
    return float(f"{value:.7g}")
