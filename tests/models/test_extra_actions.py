"""Head rows beyond the vocabulary: where they start, that nothing else changes, how they are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.models.action_rows import extra_rows
from graft.models.critic import Critic
from graft.models.decoder import Decoder, causal
from graft.models.extra_actions import extend, load_rows
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.io.tensors import ModelFileError
from graft.models.shape import ModelShape, UnsupportedModel
from graft.train.memory.footprint import num_parameters

TIED = ModelShape(
    family="qwen3", vocab_size=11, width=8, layers=2, heads=4, kv_heads=2, head_dim=6, ff=10
)
UNTIED = replace(TIED, tied=False)
EITHER = pytest.mark.parametrize("shape", [TIED, UNTIED], ids=["tied", "untied"])


def logits(decoder: Decoder) -> torch.Tensor:
    tokens = torch.tensor([3, 1, 10, 0, 7])
    with torch.no_grad():
        return decoder.logits(decoder(tokens, torch.arange(5), causal))


def test_rows_behind_the_vocabulary_come_in_sixty_fours():
    assert [replace(TIED, extra=n).head_rows for n in (0, 1, 64, 65)] == [11, 75, 75, 139]
    with pytest.raises(UnsupportedModel, match="extra=-1"):
        replace(TIED, extra=-1)


@EITHER
def test_extra_actions_draw_no_other_weight_differently(shape: ModelShape):
    plain, wide = Decoder(shape).initialise(5), Decoder(replace(shape, extra=2)).initialise(5)
    for name, weight in hf_names(plain).items():
        assert torch.equal(hf_names(wide)[name], weight), name
    torch.testing.assert_close(logits(wide)[:, :11], logits(plain), atol=1e-6, rtol=0)
    assert wide.head_weight.shape == (75, 8)
    assert len(wide.embed.weight) == (75 if shape.tied else 11)
    assert extra_rows(wide).std() > 0.1 and not wide.head_weight[13:].any()


@EITHER
def test_an_action_starts_as_likely_as_its_token(shape: ModelShape):
    plain = Decoder(shape).initialise(5)
    before = logits(plain)
    wide = extend(plain, [7, None, 2])
    after = logits(wide)
    assert wide.shape == replace(shape, extra=3) and after.shape == (5, 75)
    torch.testing.assert_close(after[:, :11], before, atol=1e-6, rtol=0)
    torch.testing.assert_close(after[:, [11, 13]], before[:, [7, 2]], atol=1e-6, rtol=0)
    drawn = extra_rows(wide)[1]
    assert 0 < float(drawn.abs().max()) <= 8**-0.5
    assert torch.equal(
        extra_rows(extend(plain, [None, None]))[0], extra_rows(extend(plain, [None]))[0]
    )
    assert wide.blocks is plain.blocks and wide.norm is plain.norm  # nothing else is copied
    assert wide.head_weight.requires_grad and not wide.head_weight[14:].any()


@EITHER
def test_extending_again_replaces_the_actions(shape: ModelShape):
    wide = extend(extend(Decoder(shape).initialise(5), [7, 8, 9]), [4])
    assert wide.shape.extra == 1 and wide.head_weight.shape == (75, 8)
    assert torch.equal(extra_rows(wide)[0], wide.head_weight[4])
    assert not wide.head_weight[12:].any()
    assert extend(wide, []).shape == shape and extend(wide, []).head_weight.shape == (11, 8)


def test_an_action_of_a_token_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="token 11: the model has 11 tokens"):
        extend(Decoder(TIED), [3, 11])


@EITHER
def test_every_parameter_is_counted(shape: ModelShape):
    wide = extend(Decoder(shape), [1, 2])
    counted = sum(weight.numel() for weight in wide.parameters())
    assert num_parameters(wide.shape) == counted
    assert wide.shape.num_params - shape.num_params == 64 * 8


@EITHER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_actions_come_back_from_their_own_file(
    shape: ModelShape, dtype: torch.dtype, tmp_path: Path
):
    wide = extend(Decoder(shape).initialise(5).to(dtype), [7, None, 2])
    save_model(wide, tmp_path)
    assert "extra" not in (tmp_path / "config.json").read_text()
    plain = load_model(tmp_path, dtype=dtype)
    assert plain.shape == shape and torch.equal(plain.head_weight, wide.head_weight[:11])
    back = load_rows(plain, tmp_path)
    assert back is not None and back.shape == wide.shape and back.dtype == dtype
    for name, weight in wide.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    assert not list(tmp_path.glob("*.partial"))


@EITHER
def test_transformers_opens_the_folder_as_the_plain_model(shape: ModelShape, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    wide = extend(Decoder(shape).initialise(5), [7, 2])
    save_model(wide, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        theirs = peer(torch.tensor([[3, 1, 10, 0, 7]])).logits[0]
    torch.testing.assert_close(logits(wide)[:, :11], theirs, atol=1e-5, rtol=0)


def test_a_model_without_actions_leaves_none_of_an_earlier_save(tmp_path: Path):
    plain = Decoder(TIED).initialise(5)
    save_model(extend(plain, [7, 2]), tmp_path)
    assert (tmp_path / "actions.safetensors").exists()
    save_model(plain, tmp_path)
    assert load_rows(plain, tmp_path) is None and load_rows(plain, tmp_path / "x.gguf") is None


def test_rows_of_another_model_are_refused(tmp_path: Path):
    plain, file = Decoder(TIED), tmp_path / "actions.safetensors"
    save_file({"rows": torch.zeros(2, 9)}, file)
    with pytest.raises(ModelFileError, match=r"\[2, 9\], and the model is 8 wide"):
        load_rows(plain, tmp_path)
    save_file({"row": torch.zeros(2, 8)}, file)
    with pytest.raises(ModelFileError, match="holds row, not the tensor 'rows'"):
        load_rows(plain, tmp_path)
    file.write_bytes(b"cut")
    with pytest.raises(ModelFileError, match="not a whole safetensors file"):
        load_rows(plain, tmp_path)


def test_the_file_holds_the_actions_and_no_padding(tmp_path: Path):
    save_model(extend(Decoder(TIED).initialise(5), [7, 2]), tmp_path)
    (rows,) = load_file(tmp_path / "actions.safetensors").values()
    assert torch.equal(rows, load_model(tmp_path).head_weight[[7, 2]])


@EITHER
def test_a_critic_of_a_policy_with_actions_reads_the_same_states(shape: ModelShape):
    policy = extend(Decoder(shape).initialise(5), [7])
    critic = Critic(policy)
    torch.nn.init.ones_(critic.value.weight)
    tokens, positions = torch.tensor([3, 1, 10]), torch.arange(3)
    with torch.no_grad():
        want = policy(tokens, positions, causal).sum(-1)
        torch.testing.assert_close(critic(tokens, positions, causal), want)
