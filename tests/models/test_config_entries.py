"""Entries of config.json one at a time: graft computes what transformers computes, or refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models.decoder import causal
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensors import ModelFileError
from graft.models.shape import ModelShape, UnsupportedModel, rope_frequencies
from graft.models.transformers.load import load_transformers_model
from tests.models.test_transformers_model import Case, store

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FULL, SLIDING = ["full_attention"] * 2, ["full_attention", "sliding_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

SAME: list[dict[str, Any]] = [
    {},
    # entries without a part in the function
    {"my_note": "x", "attention_dropuot": 0.5, "initializer_range": 0.5, "use_cache": False},
    {
        "attention_dropout": 0.5,
        "pretraining_tp": 2,
        "is_decoder": True,
        "transformers_version": "4",
    },
    # entries at values that change nothing
    {"is_causal": True, "logits_scaling": 1.0, "final_logit_softcapping": None},
    {"partial_rotary_factor": 1.0, "layer_types": FULL, "sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 256, "max_window_layers": 0},
    # entries that change it
    {"hidden_act": "swish"},
    {"rms_norm_eps": 0.1},
    {"tie_word_embeddings": True},
    {"num_hidden_layers": 1},
    {"rope_parameters": PLAIN | {"rope_theta": 50.0}},
    {"rope_parameters": PLAIN | {"rope_theta": 50.0}, "rope_theta": 7.0},
    {"rope_parameters": None, "rope_theta": 50.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 50.0},
    # two places for one thing
    {"rope_parameters": PLAIN, "rope_scaling": LINEAR},
    {"rope_parameters": PLAIN | {"rope_theta": 50.0}, "rope_scaling": LINEAR},
    {"rope_parameters": PLAIN | {"rope_theta": 50.0}, "rope_scaling": LINEAR, "rope_theta": 7.0},
    {"rope_parameters": LINEAR, "rope_scaling": YARN},
    {"rope_parameters": LINEAR, "rope_scaling": {}},
    {"rope_parameters": LINEAR, "rope_scaling": None},
    {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": None, "rope_scaling": LINEAR | {"type": "yarn"}},
    # yarn and all it may have
    {"rope_parameters": YARN},
    {"rope_parameters": YARN, "original_max_position_embeddings": 16},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
    {"rope_parameters": YARN | {"factor": None}, "original_max_position_embeddings": 32},
    {"rope_parameters": YARN | {"attention_factor": 0.7}},
    {"rope_parameters": YARN | {"mscale": 0.7}},
    {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 2.0, "truncate": False}},
    {"rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 16.0}},
    {"rope_parameters": YARN | {"beta_fast": None, "beta_slow": 0, "truncate": None}},
    # llama3, its window beside, its factors equal or the wrong way round
    {"rope_parameters": LLAMA3},
    {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
    {"rope_parameters": {k: v for k, v in LLAMA3.items() if not k.startswith("original")}},
    {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.0}},
    {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"is_causal": False}, "is_causal=False: a token would also attend to later ones"),
    ({"is_causal": None}, "is_causal=None"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu': only silu is computed"),
    ({"layer_types": SLIDING, "sliding_window": 8, "use_sliding_window": True}, "layer_types="),
    ({"logits_scaling": 4.0}, r"logits_scaling=4\.0"),
    ({"logit_scale": 0.5}, "logit_scale"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ({"query_pre_attn_scalar": 3}, "query_pre_attn_scalar=3"),
    ({"embedding_multiplier": 2.0}, "embedding_multiplier"),
    ({"residual_multiplier": 0.5}, "residual_multiplier"),
    ({"attention_multiplier": 0.5}, "attention_multiplier"),
    ({"attention_chunk_size": 8}, "attention_chunk_size=8"),
    ({"rope_interleave": True}, "rope_interleave=True"),
    ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]"),
    ({"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config="),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5: only whole heads"),
    ({"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": PLAIN}, "layer_types": FULL}, "full_attention"),
    ({"rope_parameters": "linear"}, "rope_parameters='linear': need a JSON object"),
    ({"rope_theta": None, "rope_parameters": None}, "rope_theta=None"),
    ({"rope_parameters": PLAIN | {"rope_theta": 0.0}}, r"rope_theta=0\.0"),
    ({"rope_parameters": LINEAR | {"factor": 0.0}}, r"factor=0\.0: need a number above 0"),
    ({"rope_parameters": LINEAR | {"factor": "4"}}, "factor='4'"),
    ({"rope_parameters": {"rope_type": "linear"}}, "lacks the entry 'factor'"),
    ({"rope_parameters": YARN | {"rope_theta": 1.0}}, r"rope_theta=1\.0 with yarn"),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": 0.0}}, r"low_freq_factor=0\.0"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' changes"),
    ({"rope_parameters": LONG}, "rope_type='longrope' has two sets of frequencies"),
    ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "rope_type='su' is not known"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
    ({"compression_config": {"format": "x"}}, "compression_config: the weights are quantised"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': need true or false"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'"),
    ({"num_hidden_layers": 2.5}, r"num_hidden_layers=2\.5: need a whole number"),
    ({"max_position_embeddings": "many"}, "max_position_embeddings='many'"),
]
OF_ONE_FAMILY: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"sliding_window": 8}, "sliding_window=8: only full attention"),
    ("llama", {"mlp_bias": True}, "mlp.up_proj.bias"),
    ("llama", {"attention_bias": True}, "q_proj.bias"),
    ("qwen2", WINDOW | {"max_window_layers": 1}, "use_sliding_window=True: layers from 1 on"),
    ("qwen3", WINDOW | {"max_window_layers": 0}, "layers from 0 on would see 8 tokens"),
    ("qwen3", {"attention_bias": True}, "q_proj.bias"),
]
TOKENS = torch.randint(0, 61, [120], generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: Any) -> dict[str, Path]:
    """A tiny model of each family, every parameter random, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folders: dict[str, Path] = {}
    for family in ("llama", "qwen2", "qwen3"):
        config = AutoConfig.for_model(family, **SIZES)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
        folders[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(folders[family])
    return folders


def with_entries(original: Path, entries: dict[str, Any], folder: Path) -> Path:
    """The model with these entries in its config.json; a tied head is not stored, nor a lost layer."""
    from safetensors.torch import load_file, save_file

    config = json.loads((original / "config.json").read_text()) | entries
    if config["model_type"] == "llama" or "layer_types" in entries:
        config |= {"layer_types": entries.get("layer_types")}
    else:  # transformers would otherwise not look at use_sliding_window
        del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(original / "model.safetensors")
    if config["tie_word_embeddings"] is True:
        del tensors["lm_head.weight"]
    if config["num_hidden_layers"] == 1:
        tensors = {name: t for name, t in tensors.items() if "layers.1." not in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def theirs(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS[None]).logits[0]


@torch.no_grad()
def ours(folder: Path) -> Tensor:
    decoder = load_model(folder)
    return decoder(TOKENS, torch.arange(len(TOKENS)), causal) @ decoder.head_weight.T


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    """fp32 rounding leaves a few 1e-6 of the spread; the smallest of these entries changes 1e-2."""
    assert torch.isfinite(wanted).all()
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.std())


@pytest.mark.parametrize("entries", SAME, ids=lambda entries: json.dumps(entries)[:90])
@pytest.mark.parametrize(
    "family",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2"))],
)
def test_entries_mean_what_they_mean_to_transformers(
    family: str, entries: dict[str, Any], originals: dict[str, Path], tmp_path: Path
) -> None:
    if family == "llama" and "use_sliding_window" in entries:
        entries = entries | {"sliding_window": None}  # Llama has no such switch
    folder = with_entries(originals[family], entries, tmp_path)
    wanted = theirs(folder)
    assert_equal(ours(folder), wanted)
    # and what is saved from it is the same model again, to both
    (tmp_path / "again").mkdir()
    save_model(load_model(folder), tmp_path / "again", source=folder)
    assert_equal(theirs(tmp_path / "again"), wanted)
    assert_equal(ours(tmp_path / "again"), wanted)


@pytest.mark.parametrize("entries, text", REFUSED, ids=lambda value: str(value)[:90])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_entries_that_are_not_computed_are_refused(
    family: str, entries: dict[str, Any], text: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedModel, ModelFileError), match=text) as caught:
        load_model(with_entries(originals[family], entries, tmp_path))
    assert "config.json'" in str(caught.value)


@pytest.mark.parametrize("family, entries, text", OF_ONE_FAMILY)
def test_entries_of_one_family_are_refused(
    family: str, entries: dict[str, Any], text: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedModel, ModelFileError), match=text):
        load_model(with_entries(originals[family], entries, tmp_path))


def test_equal_factors_of_llama3_are_a_step() -> None:
    """Six pairs; the trained window of 64 holds 10.2, 2.2, 0.5 ... turns of them: two are kept."""
    scaling = LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.0}
    shape = ModelShape(head_dim=12, rope_theta=10_000.0, rope_scaling=scaling)
    plain = [10_000.0 ** (-i / 6) for i in range(6)]
    wanted = [*plain[:2], *(f / 8 for f in plain[2:])]
    assert rope_frequencies(shape)[0] == pytest.approx(wanted)


# models that transformers computes


def edited(folder: Path, **entries: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


OTHER_FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"rope_parameters": PLAIN, "rope_scaling": LINEAR}),
    ("mistral", {"rope_parameters": YARN, "original_max_position_embeddings": 16}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"my_note": "x", "is_causal": True}),
    ("gemma2", {"final_logit_softcapping": 2.0}),
    ("granite", {"logits_scaling": 7.0, "attention_multiplier": 0.3}),
    ("phi3", {"partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize("family, entries", OTHER_FAMILIES, ids=str)
def test_other_families_are_what_transformers_makes_of_their_entries(
    family: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, case = edited(store(tmp_path, family), **entries), Case()
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted, _ = case.by_hand(module, 1.0, None)
        found, _ = case.forest.logprobs(load_transformers_model(folder, torch.float32, "cpu"))
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted[case.mask].std())


@pytest.mark.parametrize(
    "family, entries, text",
    [
        ("mistral", {"is_causal": False}, "is_causal=False: a token would also attend"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("mistral", {"compression_config": {"format": "x"}}, "weights are quantised"),
    ],
)
def test_other_families_refuse_what_is_no_policy(
    family: str, entries: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=text) as caught:
        load_transformers_model(edited(store(tmp_path, family), **entries), torch.float32, "cpu")
    assert "config.json'" in str(caught.value)


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 18},
        {"rope_parameters": LONG | {"original_max_position_embeddings": 18}},
    ],
    ids=["dynamic", "longrope"],
)
def test_texts_beyond_a_rope_that_depends_on_length_are_refused(
    entries: dict[str, Any], tmp_path: Path
) -> None:
    """One long row would change the numbers of the short ones that are computed with it."""
    folder = edited(store(tmp_path, "mistral"), sliding_window=None, **entries)
    model, case = load_transformers_model(folder, torch.float32, "cpu"), Case()
    assert model.shape.max_positions == 18
    assert any("up to 18 tokens can be trained" in note for note in model.notes)
    assert int(case.forest.positions.max()) >= 18
    with pytest.raises(UnsupportedModel, match=r"set rollout\.max_context=18 or less"):
        case.forest.logprobs(model)
