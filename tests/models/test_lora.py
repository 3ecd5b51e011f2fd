"""Adapters: the chain rule by hand and by autograd, merged weights, files that PEFT reads."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from graft.models.action_rows import extra_rows
from graft.models.decoder import Decoder, causal
from graft.models.extra_actions import extend
from graft.models.io.load import ModelFileError, load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.lora.files import ADAPTER, base_of, load_adapters, save_adapters
from graft.models.lora.training import ALL, HEAD, Lora, num_trained, target_sizes
from graft.models.shape import ModelShape

SHAPE = ModelShape(vocab_size=30, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff=48)
LINEARS = [ALL]
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def lora_on(decoder: Decoder, targets=LINEARS, rank: int = 3, **more) -> Lora:
    return Lora(decoder, rank=rank, alpha=6.0, targets=targets, **more)


def stir(lora: Lora, size: float = 0.1) -> None:
    """Non-zero adapters, as after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for up in lora.up:
            up.copy_(torch.randn(up.shape, generator=generator) * size)
    lora.merge()


def logits(decoder: Decoder) -> Tensor:
    return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), causal))


def test_the_numbers_of_the_module_docstring():
    shape = ModelShape(vocab_size=2, width=2, layers=1, heads=1, kv_heads=1, head_dim=2, ff=1)
    decoder = Decoder(shape).initialise(0)
    with torch.no_grad():
        decoder.blocks[0].mlp.gate_up.weight[0] = torch.tensor([10.0, 20.0])
    lora = Lora(decoder, rank=1, alpha=2.0, targets=["gate_proj"])
    with torch.no_grad():
        lora.down[0].copy_(torch.tensor([[1.0, 3.0]]))
        lora.up[0].fill_(0.5)
    lora.merge()
    weight = decoder.blocks[0].mlp.gate_up.weight
    assert weight[0].tolist() == [11.0, 23.0]
    weight.backward(torch.tensor([[1.0, -1.0], [7.0, 7.0]]))  # the second row is up_proj's
    assert lora.down[0].grad.tolist() == [[1.0, -1.0]]
    assert lora.up[0].grad.tolist() == [[-4.0]]
    assert weight.grad is None
    weight.backward(torch.tensor([[1.0, -1.0], [7.0, 7.0]]))  # a second micro-batch adds up
    assert lora.down[0].grad.tolist() == [[2.0, -2.0]]


@pytest.mark.parametrize("targets", [LINEARS, ["q_proj"], ["v_proj", "down_proj", "lm_head"]])
def test_gradients_are_those_of_autograd_through_the_sum(targets):
    shape = replace(SHAPE, tied=False, family="qwen2", qk_norm=False, qkv_bias=True)
    decoder = Decoder(shape).initialise(1).double()
    lora = lora_on(decoder, targets)
    stir(lora)
    (logits(decoder).log_softmax(-1) ** 2).sum().backward()

    free = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    names = {id(p): name for name, p in decoder.named_parameters()}
    downs = [p.detach().clone().requires_grad_() for p in lora.down]
    ups = [p.detach().clone().requires_grad_() for p in lora.up]
    for target, down, up in zip(lora.targets, downs, ups, strict=True):
        name, rows = names[id(target.weight)], target.rows
        start, stop, _ = rows.indices(len(free[name]))
        whole = free[name]
        free[name] = torch.cat([whole[:start], target.base + 2.0 * up @ down, whole[stop:]])

    class Out(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder

        def forward(self) -> Tensor:
            return logits(self.model)

    explicit = functional_call(Out(), {f"model.{name}": p for name, p in free.items()}, ())
    (explicit.log_softmax(-1) ** 2).sum().backward()
    for mine, wanted in zip([*lora.down, *lora.up], [*downs, *ups], strict=True):
        assert float(wanted.grad.abs().sum()) > 0
        torch.testing.assert_close(mine.grad, wanted.grad, atol=1e-11, rtol=1e-9)
    assert all(p.grad is None for p in decoder.parameters())


def test_new_adapters_change_no_bit_and_later_ones_only_their_rows():
    decoder = Decoder(SHAPE).initialise(1)
    before = {name: view.clone() for name, view in hf_names(decoder).items()}
    addresses = [p.data_ptr() for p in decoder.parameters()]
    lora = lora_on(decoder, ["q_proj", "up_proj"])
    lora.merge()
    assert all(torch.equal(view, before[name]) for name, view in hf_names(decoder).items())
    stir(lora)
    for name, view in hf_names(decoder).items():
        is_target = "q_proj" in name or "up_proj" in name
        assert torch.equal(view, before[name]) != is_target, name
    assert [p.data_ptr() for p in decoder.parameters()] == addresses


def test_a_bf16_model_is_rounded_once_from_fp32_adapters():
    decoder = Decoder(SHAPE).initialise(1).to(torch.bfloat16)
    base = copy.deepcopy(decoder)
    lora = lora_on(decoder)
    stir(lora, 1e-3)  # what a single weight gets is mostly below bf16's resolution of it
    assert {p.dtype for p in lora.parameters()} == {torch.float32}
    first = lora.targets[0]
    exact = base.blocks[0].attention.qkv.weight[:64].float() + 2.0 * (lora.up[0] @ lora.down[0])
    assert torch.equal(first.weight[first.rows], exact.detach().bfloat16())
    logits(decoder).float().square().sum().backward()
    assert {p.grad.dtype for p in lora.parameters()} == {torch.float32}


def test_only_adapters_are_parameters_and_they_are_counted_without_creating_them():
    shape = replace(SHAPE, tied=False)
    for targets in (LINEARS, ["k_proj"], [ALL, HEAD]):
        lora = lora_on(Decoder(shape).initialise(0), targets)
        counted = sum(p.numel() for p in lora.parameters())
        assert counted == num_trained(shape, 3, targets)
        made = [tuple(target.base.shape) for target in lora.targets]
        assert sorted(target_sizes(shape, targets)) == sorted(made)
    # q 64x32, k and v 32x32, o 32x64, gate and up 48x32, down 32x48; two layers, rank 3
    assert num_trained(SHAPE, 3, LINEARS) == 2 * 3 * (96 + 64 + 64 + 96 + 80 + 80 + 80)
    decoder = Decoder(SHAPE).initialise(0)
    lora_on(decoder, ["o_proj"])
    trained = [name for name, p in decoder.named_parameters() if p.requires_grad]
    assert trained == ["blocks.0.attention.out.weight", "blocks.1.attention.out.weight"]


def test_using_other_adapters_is_undone_bit_for_bit():
    decoder = Decoder(SHAPE).initialise(1)
    at_first = logits(decoder).detach()
    lora = lora_on(decoder)
    start = lora.snapshot()
    stir(lora)
    now = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    with lora.using(start):
        assert torch.equal(logits(decoder), at_first)
    assert all(torch.equal(p, now[name]) for name, p in decoder.named_parameters())
    with pytest.raises(RuntimeError, match="inside"), lora.using(lora.random_snapshot()):
        assert float((logits(decoder).detach() - at_first).abs().mean()) > 0.05
        raise RuntimeError("inside")
    assert all(torch.equal(p, now[name]) for name, p in decoder.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_actions_are_trained_whole(tied: bool):
    decoder = extend(Decoder(replace(SHAPE, tied=tied)).initialise(1), [9, None, 12])
    before = decoder.head_weight.detach().clone()
    lora = lora_on(decoder, ["q_proj"])
    assert lora.rows is not None and lora.rows.shape == (3, 32)
    logits(decoder).log_softmax(-1)[:, 31].sum().backward()  # the second action
    assert float(lora.rows.grad[1].abs().sum()) > 0
    assert decoder.head_weight.grad is None
    with torch.no_grad():
        lora.rows += 1.0
    lora.merge()
    torch.testing.assert_close(extra_rows(decoder), before[30:33] + 1.0)
    after = decoder.head_weight.detach()
    assert torch.equal(after[:30], before[:30]) and torch.equal(after[33:], before[33:])


def saved(tmp_path: Path, **changes) -> tuple[Path, Path, Decoder, Lora]:
    base = tmp_path / "base"
    decoder = Decoder(replace(SHAPE, **changes)).initialise(1)
    save_model(decoder, base)
    targets = LINEARS if decoder.shape.tied else [ALL, HEAD]
    lora = lora_on(decoder, targets, origin=str(base))
    stir(lora)
    save_adapters(lora, tmp_path / "adapter")
    return base, tmp_path / "adapter", decoder, lora


def test_loading_restores_what_was_saved_bit_for_bit(tmp_path):
    base, folder, decoder, lora = saved(tmp_path)
    assert base_of(folder) == str(base)
    merged = copy.deepcopy(decoder)  # as a checkpoint holds it
    again = lora_on(merged, base=load_model(base), origin=str(base), seed=7)
    load_adapters(again, folder)
    for mine, other in zip(again.parameters(), lora.parameters(), strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(merged.parameters(), decoder.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_another_base_another_rank_and_lost_files_are_refused(tmp_path):
    base, folder, _, _ = saved(tmp_path)
    changed = load_model(base)
    with torch.no_grad():
        changed.blocks[1].mlp.down.weight[0, 0] += 1.0
    with pytest.raises(ModelFileError, match="trained on other weights"):
        load_adapters(lora_on(changed, origin=str(base)), folder)
    with pytest.raises(ModelFileError, match="rank 4"):
        load_adapters(lora_on(load_model(base), rank=4, origin=str(base)), folder)
    (folder / ADAPTER).unlink()
    with pytest.raises(ModelFileError, match=ADAPTER):
        load_adapters(lora_on(load_model(base), origin=str(base)), folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelFileError, match="gone"):
        base_of(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["qproj"]}, "unknown target 'qproj'"),
        ({"targets": ["embed_tokens"]}, "unknown target"),
        ({"targets": ["lm_head"]}, "its embedding"),
        ({"targets": []}, "no targets"),
        ({"rank": 0}, "rank=0"),
    ],
)
def test_impossible_adapters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        lora_on(Decoder(SHAPE).initialise(0), **changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "tied": False}],
    ids=["qwen3", "qwen2 with a head"],
)
def test_peft_computes_the_same_from_base_and_adapter(tmp_path, changes):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base, folder, decoder, lora = saved(tmp_path, **changes)
    names = set(json.loads((folder / "adapter_config.json").read_text())["target_modules"])
    assert names == set(lora.names)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        bare = plain(TOKENS[None]).logits[0]
        theirs = peft.PeftModel.from_pretrained(plain, folder)
        got = theirs(TOKENS[None]).logits[0]
    mine = logits(decoder).detach()
    assert float((mine - bare).abs().mean()) > 0.01  # the adapters change it
    torch.testing.assert_close(mine, got, atol=2e-5, rtol=1e-4)
    layer = theirs.base_model.model.model.layers[1].self_attn.v_proj
    assert torch.equal(layer.lora_A["default"].weight, lora.down[7 + 2])
    assert torch.equal(layer.lora_B["default"].weight, lora.up[7 + 2])


def test_kernels_give_adapters_the_gradients_of_plain_products(kernel_device, monkeypatch):
    shape = ModelShape(vocab_size=32, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ff=32)

    def gradients(has_kernels: bool) -> list[Tensor]:
        for module in ("decoder", "ops"):
            monkeypatch.setattr(f"graft.models.{module}.has_kernels", lambda _: has_kernels)
        decoder = Decoder(shape).initialise(1).to(kernel_device)
        lora = lora_on(decoder)
        stir(lora)
        tokens = TOKENS.to(kernel_device)
        hidden = decoder(tokens, torch.arange(len(tokens), device=kernel_device), causal)
        (decoder.logits(hidden).log_softmax(-1) ** 2).sum().backward()
        assert all(p.grad is None for p in decoder.parameters())
        return [p.grad for p in lora.parameters()]

    for mine, plain in zip(gradients(True), gradients(False), strict=True):
        assert float(plain.abs().sum()) > 0
        torch.testing.assert_close(mine, plain, atol=1e-3, rtol=1e-3)
