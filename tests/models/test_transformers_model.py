"""Models computed by transformers give the log-probs of each path alone, with or without a tree mask."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from graft.models.io.load import ModelFileError, load_model
from graft.models.shape import UnsupportedModel
from graft.models.transformers.files import write_folder
from graft.models.transformers.load import load_transformers_model
from graft.models.transformers.mask import TreeMask
from graft.models.transformers.model import TransformersModel
from graft.models.transformers.rows import path_rows
from graft.models.tree.forest import Forest
from graft.models.tree.packing import pack
from graft.types import Trajectory
from tests.trees import group, random_tree

V = 97
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "vocab_size": V,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING, FULL = "sliding_attention", "full_attention"
CASES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL | {"sliding_window": 5},
    "gemma2": SMALL | {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": SMALL
    | {"sliding_window": 5, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]},
    "phi3": SMALL | {"tie_word_embeddings": True},
    "phi": SMALL,
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SMALL | EXPERTS,
    "granite": SMALL | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "gpt2": GPT2,
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {k: GPT2[k] for k in ("vocab_size", "n_layer", "n_head")} | {"hidden_size": 32},
    "mpt": {"vocab_size": V, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "mamba": {k: SMALL[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")}
    | {"state_size": 4},
}
PLAIN = {"bloom", "mpt", "mamba"}
"""Models with padding masks only, positions counted along the list, or a recurrent state."""


def store(folder: Path, family: str, **changes: Any) -> Path:
    """A tiny model of a family, every parameter random: unit norms and zero biases would hide errors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(CASES[family] | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> TransformersModel:
    return load_transformers_model(folder, torch.float32, "cpu")


def theirs(folder: Path) -> Any:
    """The same model in transformers, with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


class Case:
    """Rows of two random trees in two modes, the mask of trained tokens, and weights of a loss."""

    def __init__(self, seeds: tuple[int, ...] = (3, 11)) -> None:
        rng = random.Random(0)
        self.rows = [row for s in seeds for row in random_tree(s, vocab=V).trajectories()]
        self.allowed = torch.rand(2, V, generator=torch.Generator().manual_seed(1)) > 0.4
        for span in {id(span): span for row in self.rows for span in row.spans}.values():
            if span.modes:
                span.modes = [rng.randrange(2) for _ in span.modes]
                self.allowed[span.modes, span.tokens] = True
        widths = [sum(map(len, row.spans[1:])) for row in self.rows]
        self.mask = torch.zeros(len(self.rows), max(widths), dtype=torch.bool)
        for number, row in enumerate(self.rows):
            trained = [flag for span in row.spans[1:] for flag in span.mask or [False] * len(span)]
            self.mask[number, : len(trained)] = torch.tensor(trained)
        generator = torch.Generator().manual_seed(2)
        self.weights = torch.randn(2, *self.mask.shape, generator=generator) * self.mask
        self.forest = Forest(self.rows, self.mask, torch.device("cpu"))

    def loss(self, logp_NT: Tensor, entropy_NT: Tensor) -> Tensor:
        return (logp_NT * self.weights[0] + entropy_NT * self.weights[1]).sum()

    def by_hand(self, module: Any, temperature: float, allowed: Tensor | None) -> Any:
        """[N, T] log-probs and entropies, each row in a separate call of the whole module."""
        logp_NT, entropy_NT = torch.zeros(self.mask.shape), torch.zeros(self.mask.shape)
        for number, row in enumerate(self.rows):
            tokens = torch.tensor([token for span in row.spans for token in span.tokens])
            first = len(row.spans[0])
            z = module(input_ids=tokens[None]).logits[0, first - 1 : -1].float() / temperature
            if allowed is not None:
                modes = [m for span in row.spans[1:] for m in span.modes or [0] * len(span)]
                z = z.masked_fill(~allowed[modes], -1e30)
            log_p = z.log_softmax(-1)
            kept = self.mask[number, : len(z)]
            chosen = log_p.gather(1, tokens[first:, None])[:, 0]
            logp_NT[number, : len(z)] = torch.where(kept, chosen, 0.0)
            spread = -(log_p.exp() * log_p).sum(-1)
            entropy_NT[number, : len(z)] = torch.where(kept, spread, 0.0)
        return logp_NT, entropy_NT


def gradients(module: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def same(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", CASES)
def test_numbers_and_gradients_of_a_tree_are_those_of_its_rows(family: str, tmp_path: Path) -> None:
    case, folder = Case(), store(tmp_path, family)
    model, peer = load(folder), theirs(folder)
    assert (model.tree_mask is None) == (family in PLAIN), model.notes
    assert any("plain packing" in note for note in model.notes) == (family in PLAIN)
    assert model.body is not None

    found = case.forest.logprobs(model, 0.7, case.allowed)
    wanted = case.by_hand(peer, 0.7, case.allowed)
    same(found, wanted)
    case.loss(*found).backward()
    case.loss(*wanted).backward()
    ours, others = gradients(model.module), gradients(peer)
    assert ours.keys() == others.keys()
    for name, gradient in others.items():
        same(ours[name], gradient, 3e-4)

    with torch.no_grad():
        same(case.forest.logprobs(model), case.by_hand(peer, 1.0, None))


@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen3_moe", "mixtral", "gpt2", "mamba"])
def test_what_is_saved_opens_in_transformers_with_equal_logits(family: str, tmp_path: Path) -> None:
    folder = store(tmp_path / "theirs", family)
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # as if trained
    model.save(tmp_path / "ours")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = model.module(input_ids=tokens).logits
        same(theirs(tmp_path / "ours")(input_ids=tokens).logits, wanted, 1e-5)
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert {name: list(w.shape) for name, w in model.hf_weights().items()} == sizes
    assert {f.name for f in (tmp_path / "ours").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_experts_of_a_gathered_state_dict_are_exported_as_single_matrices(
    tmp_path: Path,
) -> None:
    model = load(store(tmp_path, "qwen3_moe"))
    gathered = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
    stored = load_file(tmp_path / "model.safetensors")
    weights = model.hf_weights(gathered)
    assert weights.keys() == stored.keys()
    assert weights["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (32, 16)
    for name, tensor in stored.items():
        same(weights[name], tensor * 2, 0)


def test_a_save_in_half_precision_keeps_the_config_and_replaces_older_shards(
    tmp_path: Path,
) -> None:
    folder = store(tmp_path / "theirs", "gpt2", resid_pdrop=0.25)
    model = load(folder)
    weights = model.hf_weights()
    write_folder(weights, {}, tmp_path / "ours", torch.float32, set(), shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()

    model.save(tmp_path / "ours", torch.bfloat16, source=folder)
    assert [f.name for f in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["resid_pdrop"] == 0.25  # off while training, and kept in the saved config
    assert config["dtype"] == "bfloat16"
    for name, tensor in load_file(tmp_path / "ours" / "model.safetensors").items():
        same(tensor, weights[name].bfloat16(), 0)


def test_buffers_are_saved_as_they_are(tmp_path: Path) -> None:
    balance, weight = torch.tensor([0.50048828125]), torch.tensor([0.50048828125])
    tensors = {"balance": balance, "weight": weight, "count": torch.tensor([300])}
    write_folder(tensors, {}, tmp_path, torch.bfloat16, {"balance"})
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["balance"].item() == 0.50048828125 and stored["weight"].item() == 0.5
    assert stored["count"].item() == 300


def test_llama_equals_the_native_decoder(tmp_path: Path) -> None:
    case, folder = Case(), store(tmp_path, "llama")
    model, decoder = load(folder), load_model(folder)
    how = (case.forest, 0.7, case.allowed, V - 10)
    for ours, others in zip(
        model.action_logprobs(*how), decoder.action_logprobs(*how), strict=True
    ):
        same(ours, others)
    logp, is_best = model.greedy_match(case.forest, case.allowed)
    want_logp, want_best = decoder.greedy_match(case.forest, case.allowed)
    same(logp, want_logp)
    assert is_best.equal(want_best) and not logp.requires_grad
    shared = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ff", "tied")
    for name in (*shared, "max_positions", "extra", "head_rows", "q_size", "kv_size", "family"):
        assert getattr(model.shape, name) == getattr(decoder.shape, name), name
    assert model.shape.num_params == sum(p.numel() for p in decoder.parameters())


def test_nothing_is_dropped_while_training(tmp_path: Path) -> None:
    noise = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    case, folder = Case(), store(tmp_path, "gpt2", **noise)
    model, peer = load(folder), theirs(folder)
    for recompute in (False, True):
        model.recompute = recompute
        model.train()
        same(case.forest.logprobs(model), case.by_hand(peer, 1.0, None))


def test_routers_are_not_jittered_while_training(tmp_path: Path) -> None:
    case, folder = Case(), store(tmp_path, "mixtral", router_jitter_noise=0.5)
    model, peer = load(folder), theirs(folder)
    model.recompute = True
    same(case.forest.logprobs(model), case.by_hand(peer, 1.0, None))


@pytest.mark.parametrize("family", ["mistral", "mamba"])
def test_recompute_runs_blocks_again_and_changes_no_gradient(family: str, tmp_path: Path) -> None:
    case, model = Case(), load(store(tmp_path, family))
    calls: list[int] = []
    (block,) = model.block_classes()
    for part in model.modules():
        if type(part) is block:
            part.register_forward_pre_hook(lambda *_: calls.append(1))
    found: list[dict[str, Tensor]] = []
    counts: list[int] = []
    for recompute in (False, True, False):
        model.recompute = recompute
        assert model.recompute is recompute
        calls.clear()
        model.zero_grad()
        case.loss(*case.forest.logprobs(model)).backward()
        found.append(gradients(model))
        counts.append(len(calls))
    assert counts == [2, 4, 2]  # one pass over two blocks, or two
    for name, gradient in found[0].items():
        same(found[1][name], gradient, 1e-6)


def test_a_head_in_chunks_gives_the_same_and_holds_few_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, model = Case(), load(store(tmp_path, "gemma2"))  # its head caps logits
    sizes: list[int] = []
    head = model.module.get_output_embeddings()
    head.register_forward_hook(lambda _m, _i, out: sizes.append(out.shape[-2]))
    found: list[Any] = []
    for elements in (1 << 22, 7 * V):
        monkeypatch.setattr("graft.models.logprobs.CHUNK_ELEMENTS", elements)
        sizes.clear()
        model.zero_grad()
        numbers = model.action_logprobs(case.forest, 0.7, case.allowed)
        torch.stack(numbers).sum().backward()
        found.append((numbers, gradients(model)))
    count = len(case.forest.actions)
    assert (
        max(sizes) == 7 and sum(sizes) == 2 * count
    )  # once in the forward and once in the backward pass
    same(found[0], found[1], 1e-5)


@pytest.mark.parametrize("family", ["mistral", "mamba", "qwen3_moe"])
def test_a_forest_with_nothing_to_train_still_reaches_every_weight(
    family: str, tmp_path: Path
) -> None:
    model = load(store(tmp_path, family))
    rows = list(group([1, 2], [[11, 12], [14]], [1.0, 0.0]).trajectories())
    nothing = Forest(rows, torch.zeros(2, 2, dtype=torch.bool), torch.device("cpu"))
    logp, entropy = model.action_logprobs(nothing, 1.0, torch.ones(1, V, dtype=torch.bool))
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    assert model.greedy_match(nothing)[1].dtype == torch.bool


def test_a_window_counts_along_the_path() -> None:
    rows = list(group([1, 2], [[11, 12, 13], [14, 15]], [1.0, 0.0]).trajectories())
    packed = pack(rows)
    masks = TreeMask((FULL, SLIDING), window=3).masks(packed.ends, packed.positions, None)

    def seen(kind: str, query: int) -> list[int]:
        return masks[kind][0, 0, query].nonzero()[:, 0].tolist()

    assert (seen(FULL, 4), seen(FULL, 6)) == ([0, 1, 2, 3, 4], [0, 1, 5, 6])
    assert (seen(SLIDING, 4), seen(SLIDING, 6)) == ([2, 3, 4], [1, 5, 6])
    added = TreeMask((SLIDING,), window=3).masks(packed.ends, packed.positions, torch.float32)
    assert added[0, 0, 6].tolist().count(0.0) == 3
    assert added.min() == torch.finfo(torch.float32).min


def test_paths_become_rows_and_each_token_is_read_once() -> None:
    rows: list[Trajectory] = list(
        group([1, 2], [[11, 12, 13], [14, 15]], [1.0, 0.0]).trajectories()
    )
    index, cells = path_rows(pack(rows).runs)
    assert index.tolist() == [[0, 1, 2, 3, 4], [0, 1, 5, 6, 6]]
    assert cells.tolist() == [0, 1, 2, 3, 4, 7, 8]


def test_a_window_wider_than_the_probe_is_narrowed_and_restored(tmp_path: Path) -> None:
    model = load(store(tmp_path, "mistral", sliding_window=100))
    assert model.tree_mask == TreeMask((SLIDING,), window=100)
    assert model.module.config.sliding_window == 100


def test_unknown_limits_of_attention_lead_to_plain_packing(tmp_path: Path) -> None:
    shape = {"vocab_size": V, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    CASES["gpt_neo"] = shape | {"attention_types": [[["global", "local"], 1]], "window_size": 6}
    case, folder = Case(), store(tmp_path, "gpt_neo", max_position_embeddings=64)
    model = load(folder)
    assert any("plain packing" in n and "window_size=6" in n for n in model.notes)
    same(case.forest.logprobs(model), case.by_hand(theirs(folder), 1.0, None))


def test_a_probe_in_half_precision_distinguishes_tree_from_plain(tmp_path: Path) -> None:
    for family in ("mistral", "mixtral", "gemma2", "bloom"):
        model = load_transformers_model(store(tmp_path / family, family), torch.bfloat16, "cpu")
        assert model.dtype == torch.bfloat16
        assert (model.tree_mask is None) == (family in PLAIN), (family, model.notes)


def test_only_the_device_of_a_loaded_model_changes(tmp_path: Path) -> None:
    model = load(store(tmp_path, "llama"))
    assert model.to(device="cpu", dtype=torch.float32) is model.to(torch.float32) is model
    with pytest.raises(ValueError, match=r"in torch\.float32 cannot be cast to torch\.bfloat16"):
        model.to(torch.bfloat16)


def config_only(folder: Path, **entries: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"model_type": "t5"}, "t5 has an encoder beside its decoder"),
        ({"model_type": "vit"}, "no causal language model for vit"),
        ({"model_type": "mistral", "quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "gemma3", "text_config": {"quantization_config": {"a": 1}}}, "quantised"),
        ({"model_type": "new", "auto_map": {"AutoModel": "x.y"}}, "Python code .* never runs"),
        ({"model_type": "new"}, "model_type='new', which transformers .* does not support"),
    ],
)
def test_what_cannot_be_trained_is_refused(entries: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(config_only(tmp_path, **entries))


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    CASES["bert"] = {k: v for k, v in SMALL.items() if k != "head_dim"}
    with pytest.raises(UnsupportedModel, match="depends on more than the tokens before it"):
        load(store(tmp_path, "bert"))


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model at"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(ModelFileError, match="transformers cannot load"):
        load(config_only(tmp_path / "empty", model_type="mistral"))
    with pytest.raises(ModelFileError, match=r"config\.json' is not accepted"):
        load(config_only(tmp_path / "odd", model_type="mistral", hidden_size="wide"))
    folder = store(tmp_path / "torn", "mistral")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks weights .* model\.layers\.1\.mlp\.up_proj"):
        load(folder)


def test_unused_tensors_are_reported(tmp_path: Path) -> None:
    folder = store(tmp_path, "mistral")
    weights = load_file(folder / "model.safetensors") | {"model.mtp.weight": torch.zeros(2)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert any("1 tensors" in n and "model.mtp.weight" in n for n in load(folder).notes)
