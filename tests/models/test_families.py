"""One suite over the table of families.

Each computes what transformers computes (logits and gradients of 30 random configs, in fp32), and every
invariant of the decoder holds for it. `engine/test_bits.py` has the bits.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models.decoder import Attend, Decoder, causal
from graft.models.families.table import (
    FAMILIES,
    config_of,
    make_shape,
    read_shape,
    why_not_native,
)
from graft.models.io.export import open_source
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names, hf_rows, own_name
from graft.models.layers.experts import describe_loads, route, take_loads
from graft.models.lora.files import save_adapters
from graft.models.lora.training import ALL, HEAD, Lora, num_trained
from graft.models.shape import Experts, ModelShape, UnsupportedModel
from graft.models.transformers.files import folder_names
from graft.models.tree.attention import attention_over
from graft.models.tree.forest import Forest
from graft.models.tree.packing import TokenRun, pack
from graft.train.memory.footprint import num_parameters
from tests.trees import random_tree

CONFIGS = range(30)
VOCABULARY, LENGTH = 53, 40
CPU = torch.device("cpu")


def common(draw: random.Random) -> dict[str, Any]:
    """Sizes that every family has."""
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3])
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * draw.choice([4, 8]),
        "intermediate_size": draw.choice([20, 32]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([4, 8, 12]),
        "max_position_embeddings": 128,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([100.0, 10_000.0])},
    }


def biased(draw: random.Random) -> dict[str, Any]:
    return {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}


def softmax_experts(draw: random.Random) -> dict[str, Any]:
    count = draw.choice([2, 5, 8])
    return {
        "attention_bias": draw.random() < 0.5,
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "moe_intermediate_size": draw.choice([8, 12]),
        "norm_topk_prob": draw.random() < 0.5,
        "mlp_only_layers": draw.choice([[], [0]]),
        "decoder_sparse_step": draw.choice([1, 2]),
    }


def sigmoid_experts(draw: random.Random) -> dict[str, Any]:
    count = draw.choice([4, 8])
    groups = draw.choice([1, 2])
    return {
        "attention_bias": draw.random() < 0.5,
        "use_qk_norm": draw.random() < 0.5,
        "n_routed_experts": count,
        "num_experts_per_tok": draw.randint(1, count // 2),
        "moe_intermediate_size": draw.choice([8, 12]),
        "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "n_shared_experts": draw.choice([1, 2]),
        "first_k_dense_replace": draw.choice([0, 1]),
        "num_mtp_layers": 0,
        "partial_rotary_factor": draw.choice([0.5, 1.0]),
    }


def olmoe(draw: random.Random) -> dict[str, Any]:
    count, kv_heads = draw.choice([2, 5, 8]), draw.choice([1, 2])
    heads, size = kv_heads * draw.choice([1, 2, 3]), draw.choice([4, 8])
    return {
        "pad_token_id": None,
        "hidden_size": heads * size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,  # norms over all heads are as wide as the model
        "attention_bias": draw.random() < 0.5,
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "norm_topk_prob": draw.random() < 0.5,
    }


def granite(draw: random.Random) -> dict[str, Any]:
    count = draw.choice([2, 5, 8])
    return {
        "attention_bias": draw.random() < 0.5,
        "num_local_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "embedding_multiplier": draw.choice([1.0, 12]),
        "residual_multiplier": draw.choice([1.0, 0.22]),
        "attention_multiplier": draw.choice([1.0, 0.0078125]),
        "logits_scaling": draw.choice([1.0, 6.0]),
    }


def gpt_oss(draw: random.Random) -> dict[str, Any]:
    count, window = draw.choice([2, 5, 8]), {"sliding_window": draw.choice([3, 8, 30])}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
    return {
        **({"rope_parameters": yarn} if draw.random() < 0.7 else {}),
        **window,
        "attention_bias": draw.random() < 0.8,
        "num_local_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "swiglu_limit": draw.choice([7.0, 0.5]),
        "swiglu_alpha": draw.choice([1.702, 1.2]),
    }


def gemma(draw: random.Random) -> dict[str, Any]:
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.choice([500.0, 1e6])}
    if draw.random() < 0.3:
        full |= {"rope_type": "linear", "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4])}
    return {
        "pad_token_id": None,  # torch gives the row of a padding token no gradient
        "sliding_window": draw.choice([3, 8, 30]),
        "sliding_window_pattern": draw.choice([1, 2, 3]),
        "query_pre_attn_scalar": draw.choice([4, 8, 16]),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "attention_bias": draw.random() < 0.3,
    }


def ministral(draw: random.Random) -> dict[str, Any]:
    layers, kinds = draw.choice([1, 2, 3]), ["sliding_attention", "full_attention"]
    chosen = {"layer_types": [draw.choice(kinds) for _ in range(layers)]}
    return {
        "num_hidden_layers": layers,
        "sliding_window": draw.choice([3, 8, 30]),
        **(chosen if draw.random() < 0.7 else {}),
    }


def deltas(draw: random.Random) -> dict[str, Any]:
    layers, kinds = draw.choice([2, 3, 4]), ["linear_attention", "full_attention"]
    chosen = [draw.choice(kinds) for _ in range(layers - 2)]
    key_heads = draw.choice([1, 2])
    return {
        "num_hidden_layers": layers,
        "layer_types": [kinds[0], *chosen, kinds[1]],
        "attention_bias": draw.random() < 0.3,
        "partial_rotary_factor": draw.choice([0.5, 1.0]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2]),
        "linear_key_head_dim": draw.choice([4, 6]),
        "linear_value_head_dim": draw.choice([4, 8]),
        "linear_conv_kernel_dim": draw.choice([2, 4]),
    }


def deltas_with_experts(draw: random.Random) -> dict[str, Any]:
    count = draw.choice([2, 5, 8])
    return deltas(draw) | {
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "moe_intermediate_size": draw.choice([8, 12]),
        "shared_expert_intermediate_size": draw.choice([8, 12]),
    }


def qwen3_next(draw: random.Random) -> dict[str, Any]:
    return deltas_with_experts(draw) | {
        "norm_topk_prob": draw.random() < 0.5,
        "mlp_only_layers": draw.choice([[], [0]]),
    }


def granite_hybrid(draw: random.Random) -> dict[str, Any]:
    """With and without experts, layers that attend alone, positions and limits."""
    layers, kinds = draw.choice([2, 3, 4]), ["linear_attention", "full_attention"]
    first = kinds[draw.random() < 0.15]  # some attend everywhere
    chosen = [first, *(draw.choice(kinds) for _ in range(layers - 2))]
    groups = draw.choice([1, 2])
    count = draw.choice([0, 0, 2, 5])
    return granite(draw) | {
        "num_hidden_layers": layers,
        "layer_types": [*chosen, kinds[1]],
        "position_embedding_type": draw.choice([None, "nope", "rope"]),
        "num_local_experts": count,
        "num_experts_per_tok": draw.randint(min(count, 1), count),
        "shared_intermediate_size": draw.choice([8, 12]),
        "mamba_expand": draw.choice([1, 2]),
        "mamba_n_heads": groups * draw.choice([1, 2]),
        "mamba_n_groups": groups,
        "mamba_d_state": draw.choice([4, 6]),
        "mamba_d_conv": draw.choice([2, 4]),
        "mamba_conv_bias": draw.random() < 0.5,
        "mamba_proj_bias": draw.random() < 0.3,
        "mamba_chunk_size": 16,
        **({"time_step_limit": [0.3, draw.choice([1.0, math.inf])]} if draw.random() < 0.4 else {}),
    }


def convolutions(draw: random.Random) -> dict[str, Any]:
    layers, kinds = draw.choice([2, 3, 4]), ["conv", "full_attention"]
    first = kinds[draw.random() < 0.15]  # some attend everywhere
    chosen = [first, *(draw.choice(kinds) for _ in range(layers - 2))]
    return {
        "pad_token_id": None,  # torch gives the row of a padding token no gradient
        "num_hidden_layers": layers,
        "layer_types": [*chosen, kinds[1]],
        "norm_eps": draw.choice([1e-5, 1e-6]),
        "conv_L_cache": draw.choice([1, 2, 3, 4]),
        "conv_bias": draw.random() < 0.5,
    }


def lfm2(draw: random.Random) -> dict[str, Any]:
    return convolutions(draw) | {
        "block_auto_adjust_ff_dim": draw.random() < 0.7,
        "block_ffn_dim_multiplier": draw.choice([1.0, 1.3]),
        "block_multiple_of": draw.choice([1, 4, 6]),
    }


def lfm2_experts(draw: random.Random) -> dict[str, Any]:
    count = draw.choice([2, 5, 8])
    return convolutions(draw) | {
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "moe_intermediate_size": draw.choice([8, 12]),
        "num_dense_layers": draw.choice([0, 1, 1]),
        "norm_topk_prob": draw.random() < 0.6,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "use_expert_bias": draw.random() < 0.6,
    }


def nemotron_h(draw: random.Random) -> dict[str, Any]:
    """Any kind of layer may be the last."""
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    chosen = [kinds[1], *(draw.choice(kinds) for _ in range(draw.choice([1, 2, 4])))]
    expert_groups = draw.choice([1, 1, 2])
    draw.shuffle(chosen)
    groups = draw.choice([1, 2])
    return {
        "num_hidden_layers": len(chosen),
        "layers_block_type": chosen,
        "tie_word_embeddings": False,  # transformers ties none
        "layer_norm_epsilon": draw.choice([1e-5, 1e-6]),
        "mlp_bias": draw.random() < 0.5 and "moe" not in chosen,
        "n_routed_experts": 6,
        "num_experts_per_tok": draw.choice([1, 3]),
        "moe_intermediate_size": draw.choice([8, 12]),
        "moe_shared_expert_intermediate_size": draw.choice([8, 20]),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "n_group": expert_groups,
        "topk_group": draw.randint(1, expert_groups),
        "use_bias": draw.random() < 0.3,
        "use_conv_bias": draw.random() < 0.5,
        "n_groups": groups,
        "mamba_num_heads": groups * draw.choice([1, 2]),
        "mamba_head_dim": draw.choice([4, 6]),
        "ssm_state_size": draw.choice([4, 6]),
        "conv_kernel": draw.choice([2, 4]),
        "time_step_min": draw.choice([0.001, 0.3]),
        "chunk_size": 16,
    }


OWN = {
    "llama": biased,
    "mistral": lambda draw: {"sliding_window": draw.choice([None, 5, 13, 128, 4096])},
    "ministral": ministral,
    "qwen2": lambda draw: {},
    "qwen3": lambda draw: {"attention_bias": draw.random() < 0.5},
    "qwen3_moe": softmax_experts,
    "glm4_moe": sigmoid_experts,
    "olmoe": olmoe,
    "granitemoe": granite,
    "granitemoehybrid": granite_hybrid,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_experts,
    "nemotron_h": nemotron_h,
    "gpt_oss": gpt_oss,
    "gemma3_text": gemma,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": deltas,
    "qwen3_5_moe_text": deltas_with_experts,
}
"""The entries of each family, drawn at random."""


def peer(family: str, number: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    draw = random.Random(f"{family} {number}")
    config = AutoConfig.for_model(family, **common(draw) | OWN[family](draw))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(number)
    # states sum rounding errors up over all tokens, and large weights multiply them
    recurrent = bool(FAMILIES[family].recurrence)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25 if recurrent else 0.4, generator=generator)
        for name, buffer in model.named_buffers():
            if (
                "correction" in name or "expert_bias" in name
            ):  # part of the choice, not trained by gradients
                buffer.normal_(0.0, 0.4, generator=generator)
    return model


def gradients_by_name(decoder: Decoder) -> dict[str, Tensor]:
    """Gradients under the names that tensors have in a folder."""
    parameters = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    assert all(parameter.grad is not None for parameter in parameters.values())
    return {
        name: where.view(parameters[where.parameter].grad)
        for name, where in hf_rows(decoder.shape).items()
        if where.parameter in parameters
    }


def one_sequence(decoder: Decoder, length: int) -> Attend:
    """`causal`, for layers with windows too."""
    run, ends = TokenRun(0, length, []), torch.full((length,), length)
    heads = decoder.shape.heads, decoder.shape.kv_heads
    return attention_over([run], ends, *heads, decoder.device, windows=decoder.shape.windows)


def test_every_family_is_drawn() -> None:
    assert set(OWN) == set(FAMILIES)


@pytest.mark.parametrize("number", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_transformers(family: str, number: int, tmp_path: Path) -> None:
    model = peer(family, number)
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path)
    assert read_shape(config_of(decoder.shape)) == decoder.shape

    generator = torch.Generator().manual_seed(number)
    tokens_T = torch.randint(0, VOCABULARY, [LENGTH], generator=generator)
    weight_TV = torch.randn(LENGTH, VOCABULARY, generator=generator)
    theirs_TV = model(tokens_T[None]).logits[0]
    attend = one_sequence(decoder, LENGTH)
    ours_TV = decoder.logits(decoder(tokens_T, torch.arange(LENGTH), attend))
    torch.testing.assert_close(ours_TV, theirs_TV, atol=2e-4, rtol=2e-4)

    (theirs_TV.log_softmax(-1) * weight_TV).sum().backward()
    (ours_TV.log_softmax(-1) * weight_TV).sum().backward()
    ours = gradients_by_name(decoder)
    theirs = folder_names(model, {name: p.grad for name, p in model.named_parameters()})
    assert set(ours) == set(theirs)
    for name, grad in theirs.items():
        scale = float(grad.abs().max()) + 0.05  # some are 0 but for rounding
        torch.testing.assert_close(ours[name], grad, atol=2e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_files_load_in_transformers_to_the_bit(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = peer(family, 0)
    model.save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


def drawn_shape(family: str, number: int = 0) -> ModelShape:
    from transformers import AutoConfig

    draw = random.Random(f"{family} {number}")
    config = AutoConfig.for_model(family, **common(draw) | OWN[family](draw))
    return read_shape(config.to_dict())


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted(family: str, number: int) -> None:
    shape = drawn_shape(family, number)
    decoder = Decoder(shape)
    assert num_parameters(shape) == sum(p.numel() for p in decoder.parameters())
    assert shape.num_active_params <= shape.num_params
    targets = [ALL] if shape.tied else [ALL, HEAD]
    lora = Lora(decoder, rank=2, alpha=2, targets=targets)
    assert num_trained(shape, 2, targets) == sum(p.numel() for p in lora.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_forest_equals_its_rows_in_values_and_gradients(family: str) -> None:
    """Rows in one forest, and each alone: the gradients of a shared prefix are added up."""
    decoder = Decoder(drawn_shape(family, 1)).initialise(1)
    rows = [row for seed in range(4) for row in random_tree(seed).trajectories()]
    packed = pack(rows)
    mask = packed.source < len(packed)
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(3))
    values, gradients = [], []
    for parts in ([list(range(len(rows)))], [[number] for number in range(len(rows))]):
        found = torch.zeros(mask.shape)
        decoder.zero_grad()
        for part in parts:
            forest = Forest([rows[i] for i in part], mask[part], torch.device("cpu"))
            logp, _ = forest.logprobs(decoder, temperature=0.8)
            (logp * weight[part]).sum().backward()
            found[part] = logp.detach()
        values.append(found)
        gradients.append([p.grad.clone() for p in decoder.parameters() if p.grad is not None])
    torch.testing.assert_close(*values, atol=2e-5, rtol=0)
    for together, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(together, alone, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_have_the_same_gradients(family: str) -> None:
    decoder = Decoder(drawn_shape(family, 2)).initialise(1)
    tokens_T = torch.randint(0, VOCABULARY, [LENGTH], generator=torch.Generator().manual_seed(1))
    found = []
    for decoder.recompute in (False, True):
        decoder.zero_grad()
        attend = one_sequence(decoder, LENGTH)
        hidden_TD = decoder(tokens_T, torch.arange(LENGTH), attend)
        decoder.logits(hidden_TD).log_softmax(-1)[:, 3].sum().backward()
        found.append([p.grad.clone() for p in decoder.parameters() if p.grad is not None])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again, atol=1e-6, rtol=1e-5)


def test_adapters_of_an_expert_get_its_gradient() -> None:
    """dA = s Bᵀ dW, dB = s dW Aᵀ, for the rows of each expert."""
    shape = ModelShape(
        family="qwen3_moe", vocab_size=13, width=8, layers=1, heads=2, kv_heads=2, head_dim=4,
        experts=Experts(3, 2, 5),
    )  # fmt: skip
    decoder = Decoder(shape).initialise(1)
    plain = Decoder(shape)
    plain.load_state_dict(decoder.state_dict())
    lora = Lora(decoder, rank=2, alpha=4, targets=["up_proj", "down_proj"])
    assert [target.name for target in lora.targets[2:4]] == [
        "model.layers.0.mlp.experts.1.up_proj",
        "model.layers.0.mlp.experts.1.down_proj",
    ]
    tokens_T = torch.arange(13)
    for model in (decoder, plain):
        model.logits(model(tokens_T, tokens_T, causal)).log_softmax(-1)[:, 0].sum().backward()
    weights = {"up": plain.blocks[0].mlp.gate_up.weight, "down": plain.blocks[0].mlp.down.weight}
    for number, target in enumerate(lora.targets):
        grad = weights["up" if "up_proj" in target.name else "down"].grad[target.rows]
        torch.testing.assert_close(lora.down[number].grad, 2 * lora.up[number].T @ grad)
        torch.testing.assert_close(lora.up[number].grad, 2 * grad @ lora.down[number].T)
    assert any(float(up.grad.abs().sum()) > 0 for up in lora.up)


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.has_experts])
def test_adapters_of_experts_are_merged_with_the_base_folder(family: str, tmp_path: Path) -> None:
    """As in training, also where a checkpoint has one tensor for all experts of a layer."""
    drawn = (drawn_shape(family, number) for number in range(3, 30))
    decoder = Decoder(next(shape for shape in drawn if shape.experts is not None)).initialise(1)
    save_model(decoder, tmp_path / "base")
    usual = "k_proj", *(["gate_proj"] if decoder.shape.is_gated else []), "up_proj", "down_proj"
    targets = [own_name(family, name) for name in usual]
    lora = Lora(decoder, rank=2, alpha=4, targets=targets)
    lora.load_state_dict(lora.random_snapshot())
    lora.merge()
    save_adapters(lora, tmp_path / "adapters")
    with open_source(tmp_path / "adapters", tmp_path / "base") as stored:
        stored.check()
        for name, wanted in hf_names(decoder).items():
            torch.testing.assert_close(stored.read(name), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_a_family_is_native(family: str) -> None:
    config = config_of(drawn_shape(family))
    assert not why_not_native(config, CPU)
    assert bool(why_not_native(config, torch.device("cuda"))) == bool(FAMILIES[family].recurrence)


def test_an_unknown_family_is_named() -> None:
    assert "mamba" in why_not_native({"model_type": "mamba"}, CPU)


def test_the_worked_case_of_loads() -> None:
    shape = ModelShape(family="qwen3_moe", layers=1, experts=Experts(4, 1, 8))
    layer = Decoder(shape).blocks[0].mlp
    layer.load = torch.tensor([6, 2, 0, 0])
    load_LE = take_loads(layer, CPU)
    assert load_LE is not None and load_LE.tolist() == [[6, 2, 0, 0]]
    assert not take_loads(layer, CPU).any()
    assert describe_loads(load_LE / 2) == {"experts/max_load": 3.0, "experts/unused": 0.5}
    assert take_loads(Decoder(ModelShape(layers=1)), CPU) is None


def test_the_worked_case_of_a_router() -> None:
    logits_TE = torch.tensor([[2.0, 0.0, 1.0]])
    weights, chosen = route(logits_TE, Experts(3, 2, 4))
    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.6652, 0.2447]]), atol=1e-4, rtol=0)
    weights, _ = route(logits_TE, Experts(3, 2, 4, renormalise=True))
    torch.testing.assert_close(weights, torch.tensor([[0.7311, 0.2689]]), atol=1e-4, rtol=0)


def test_experts_of_no_tokens() -> None:
    """An engine asks for no token of a prompt that is only appended."""
    shape = ModelShape("qwen3_moe", width=16, experts=Experts(4, top_k=2, ff=8))
    layer = Decoder(shape).initialise(0).blocks[0].mlp
    x, delta = layer(torch.zeros(0, 16), None)
    assert x.shape == delta.shape == (0, 16)


def test_groups_limit_the_choice_and_corrections_do_not_weigh() -> None:
    """Four experts in two groups: 1 is best, but 2 and 3 are the better pair, by a correction of 3."""
    experts = Experts(4, 2, 8, router="sigmoid", groups=2, top_groups=1, scaling=2.0)
    logits_TE = torch.tensor([[0.0, 2.0, 1.5, 0.0]])
    weights, chosen = route(logits_TE, experts, torch.tensor([0.0, 0.0, 0.0, 0.9]))
    assert chosen.tolist() == [[3, 2]]  # 0.5 + 0.9 before 0.82
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.6351]]), atol=1e-4, rtol=0)
    _, chosen = route(logits_TE, experts, torch.zeros(4))
    assert chosen.tolist() == [[1, 0]]  # 0.88 + 0.5 before 0.82 + 0.5


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = peer("glm4_moe", 3)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = f"model.layers.{model.config.num_hidden_layers}.enorm.weight"
    save_file(tensors | {further: torch.ones(4)}, tmp_path / "model.safetensors")
    decoder = load_model(tmp_path)
    assert decoder.shape.layers == model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        ({"num_experts_per_tok": 9}, "experts.top_k"),
        ({"num_experts": -1}, "num_experts"),
        ({"moe_intermediate_size": "8"}, "moe_intermediate_size"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"decoder_sparse_step": -1}, "decoder_sparse_step"),
    ],
)
def test_entries_of_experts_that_cannot_be_meant_are_named(
    changes: dict[str, Any], entry: str
) -> None:
    shape = ModelShape(family="qwen3_moe", experts=Experts(8, 2, 16))
    config = config_of(shape)
    del config["num_local_experts"]
    with pytest.raises(UnsupportedModel) as error:
        read_shape(config | changes)
    assert entry in str(error.value) and str(next(iter(changes.values()))) in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "entry"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"head_dim": 1024}, "head_dim"),
        ("olmoe", {"sliding_window": 16}, "sliding_window"),
        ("olmoe", {"attention_bias": "yes"}, "attention_bias"),
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling"),
        ("granitemoe", {"residual_multiplier": "0.2"}, "residual_multiplier"),
        ("granitemoe", {"attention_multiplier": -1.0}, "attention_multiplier"),
        ("granitemoehybrid", {"mamba_d_head": 7}, "mamba_d_head"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "key_heads"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 2}, "layer_types"),
        ("granitemoehybrid", {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ("granitemoehybrid", {"time_step_limit": "none"}, "time_step_limit"),
        ("granitemoehybrid", {"num_local_experts": -1}, "num_local_experts"),
        ("granitemoehybrid", {"shared_intermediate_size": -1}, "shared_intermediate_size"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "layer_types"),
        ("lfm2", {"conv_L_cache": -1}, "conv_L_cache"),
        ("lfm2", {"conv_bias": "yes"}, "conv_bias"),
        ("lfm2", {"conv_dim": 7}, "conv_dim"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc"),
        ("lfm2", {"block_auto_adjust_ff_dim": 1}, "block_auto_adjust_ff_dim"),
        ("lfm2", {"norm_eps": "small"}, "norm_eps"),
        ("lfm2", {"tie_embedding": "yes"}, "tie_embedding"),
        ("lfm2_moe", {"layer_types": None}, "layer_types"),
        ("lfm2_moe", {"use_expert_bias": "yes"}, "use_expert_bias"),
        ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers"),
        ("nemotron_h", {"layers_block_type": ["full_attention", "moes"]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}, "layers_block_type"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("nemotron_h", {"attention_head_dim": 7}, "attention_head_dim"),
        ("nemotron_h", {"sliding_window": 16}, "sliding_window"),
        ("nemotron_h", {"sliding_window": "16"}, "sliding_window"),
        ("qwen3_next", {"num_key_value_heads": 7}, "num_key_value_heads"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("gpt_oss", {"swiglu_alpha": -2.0}, "swiglu_alpha"),
        ("gpt_oss", {"layer_types": ["chunked_attention"]}, "layer_types"),
    ],
)
def test_entries_of_one_family_that_are_not_computed_are_named(
    family: str, changes: dict[str, Any], entry: str
) -> None:
    config = config_of(drawn_shape(family))
    read_shape(config)
    with pytest.raises(UnsupportedModel) as error:
        read_shape(config | changes)
    assert entry in str(error.value) and str(*changes.values()) in str(error.value)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"nemotron_h"}))  # it lists its layers
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(family: str) -> None:
    config = config_of(drawn_shape(family)) | {"num_hidden_layers": 1 << 24}
    with pytest.raises(UnsupportedModel, match="num_hidden_layers=16777216"):
        read_shape({name: value for name, value in config.items() if name != "layer_types"})


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        ("layer_types", {"layer_types": ["linear_attention"] * 3}),
        ("full_attention_interval", {"layer_types": None, "full_attention_interval": 4}),
        ("full_attention_interval", {"layer_types": None}),
        ("partial_rotary_factor", {"rope_parameters": None, "partial_rotary_factor": 0.25}),
    ],
)
def test_what_gated_delta_nets_refuse_is_named_by_its_entry(
    family: str, entry: str, changes: dict[str, Any]
) -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = config_of(drawn_shape(family)) | {"num_hidden_layers": 3, "layer_types": kinds}
    config |= {"rope_scaling": None, "head_dim": 12}
    with pytest.raises(UnsupportedModel, match=f"^{entry}="):
        read_shape(config | changes)


def test_the_first_releases_of_lfm2_are_read_as_transformers_reads_them() -> None:
    from transformers import AutoConfig

    released = {  # LFM2-350M, smaller
        "block_auto_adjust_ff_dim": True,
        "block_dim": 48,
        "block_ff_dim": 200,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 32,
        "block_use_swiglu": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 48,
        "conv_dim_out": 48,
        "full_attn_idxs": [2, 3],
        "hidden_size": 48,
        "norm_eps": 1e-05,
        "num_attention_heads": 4,
        "num_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "use_pos_enc": True,
        "vocab_size": VOCABULARY,
    }
    shape = read_shape({"model_type": "lfm2", **released})
    theirs = AutoConfig.for_model("lfm2", **released)
    assert shape == read_shape(theirs.to_dict())
    assert (shape.ff, shape.recurrent_layers, shape.tied) == (160, (0, 1), True)
    assert read_shape({"model_type": "lfm2", **released, "tie_embedding": False}).tied is False
    with pytest.raises(UnsupportedModel, match="full_attn_idxs"):
        read_shape({"model_type": "lfm2", **released, "full_attn_idxs": [9]})


def test_the_first_releases_of_nemotron_h_are_read_as_transformers_reads_them() -> None:
    from transformers import AutoConfig

    released = {  # Nemotron-H-8B, smaller
        "attention_head_dim": 128,
        "hidden_size": 48,
        "hybrid_override_pattern": "M-M*-",
        "intermediate_size": 64,
        "layer_norm_epsilon": 1e-05,
        "mamba_d_conv": 3,
        "mamba_dt_min": 0.01,
        "mamba_head_dim": 8,
        "mamba_n_groups": 2,
        "mamba_num_heads": 4,
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    shape = read_shape({"model_type": "nemotron_h", **released})
    theirs = AutoConfig.for_model("nemotron_h", **released)
    assert shape == read_shape(theirs.to_dict())
    assert (shape.recurrent_layers, shape.mlp_layers, shape.head_dim) == ((0, 2), (1, 4), 128)
    assert shape.recurrence is not None and shape.recurrence.taps == 3
    with pytest.raises(UnsupportedModel, match=r"hybrid_override_pattern.*'X'"):
        read_shape({"model_type": "nemotron_h", **released, "hybrid_override_pattern": "MX*"})


NEMOTRON_3 = {  # Nano 30B-A3B, smaller
    "attention_bias": False,
    "chunk_size": 16,
    "conv_kernel": 4,
    "head_dim": 16,
    "hidden_size": 48,
    "hybrid_override_pattern": "MEM*E-",
    "intermediate_size": 40,
    "mamba_head_dim": 8,
    "mamba_num_heads": 4,
    "mlp_bias": False,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_group": 1,
    "n_groups": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 12,
    "topk_group": 1,
    "vocab_size": VOCABULARY,
}


def test_the_first_release_of_nemotron_3_is_read_as_transformers_reads_it() -> None:
    from transformers import AutoConfig

    shape = read_shape({"model_type": "nemotron_h", **NEMOTRON_3})
    theirs = AutoConfig.for_model("nemotron_h", **NEMOTRON_3)
    assert shape == read_shape(theirs.to_dict())
    assert (shape.mlp_layers, shape.dense_layers, shape.expert_layers) == ((1, 4, 5), (5,), [1, 4])
    assert shape.experts == Experts(8, 3, 40, True, router="sigmoid", scaling=2.5, shared_ff=56)
    # Mamba 2 x (48 x 116 + 32 x 48), attention 48 x 16 x 12, an MLP of 2 x 48 x 40, and in each of two
    # layers a router of 48 x 8, 8 experts of 2 x 48 x 40 and a shared one of 2 x 48 x 56
    ends = 2 * VOCABULARY * 48
    layers = 2 * (48 * 116 + 32 * 48) + 48 * 16 * 12 + 2 * 48 * 40
    assert shape.num_params == ends + layers + 2 * (48 * 8 + 8 * 2 * 48 * 40 + 2 * 48 * 56)


@pytest.mark.parametrize(
    ("changes", "entry"),
    [({"moe_latent_size": 24}, "moe_latent_size"), ({"mlp_bias": True}, "mlp_bias")],
)
def test_experts_of_nemotron_3_that_are_not_computed_are_named(
    changes: dict[str, Any], entry: str
) -> None:
    with pytest.raises(UnsupportedModel, match=entry):
        read_shape({"model_type": "nemotron_h", **NEMOTRON_3, **changes})


def test_every_second_layer_of_nemotron_h_from_a_recipe_is_an_mlp() -> None:
    shape = make_shape({"family": "nemotron_h", "layers": 10})
    assert shape.mlp_layers == (1, 3, 5, 7, 9) and shape.recurrent_layers == (0, 2, 4)
    assert [shape.ordinal(layer) for layer in (6, 8)] == [0, 1]
    assert read_shape(config_of(shape)) == shape


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.has_experts])
def test_a_shape_from_a_recipe_needs_the_sizes_of_experts_alone(family: str) -> None:
    """What the family decides (its router, its biases) need not be said."""
    shape = make_shape({"family": family, "experts": {"count": 4, "top_k": 2, "ff": 24}})
    assert shape.experts is not None and shape.experts.ff == 24
    assert read_shape(config_of(shape)) == shape
