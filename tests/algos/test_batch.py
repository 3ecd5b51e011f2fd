from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import fields

import pytest
import torch

from graft.algos.batch import Batch
from graft.algos.checked import checked
from graft.types import Episode, Task, Trajectory
from graft.user_code import UserCodeError


def test_lengths_count_trained_tokens_only(toy_batch):
    batch = toy_batch(mask=[[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    assert batch.num_rows == 3
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.num_tokens == 5
    assert batch.zeros().shape == (3, 3) and batch.zeros().dtype == torch.float32


def test_rows_slices_every_tensor_and_keeps_absent_ones_absent(toy_batch):
    batch = toy_batch(reward=[1, 2, 3], group=[0, 0, 5], values=[[1, 2], [3, 4], [5, 6]])
    part = batch.rows(slice(1, 3))
    assert part.reward.tolist() == [2, 3]
    assert part.group.tolist() == [0, 5]
    assert part.values is not None and part.values.tolist() == [[3, 4], [5, 6]]
    assert part.ref_logprobs is None
    swapped = batch.rows(torch.tensor([2, 0]))
    assert swapped.reward.tolist() == [3, 1] and swapped.actions.shape == (2, 2)


def test_a_batch_is_frozen_and_replace_leaves_the_old_one_alone(toy_batch):
    batch = toy_batch(reward=[1, 2])
    other = batch.replace(advantages=batch.zeros())
    assert batch.advantages is None and other.advantages is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.reward = other.reward


def test_to_moves_all_tensors(toy_batch):
    moved = toy_batch(reward=[1, 2], values=[[1, 2], [3, 4]]).to("meta")
    values = [getattr(moved, field.name) for field in dataclasses.fields(Batch)]
    assert {t.device.type for t in values if isinstance(t, torch.Tensor)} == {"meta"}


def test_rows_travel_with_their_trajectories(toy_batch):
    batch = toy_batch(reward=[1, 2, 3])
    episode = Episode(Task("t", "toy"), [], [])
    walks = [Trajectory(episode, number, 0, []) for number in range(3)]
    batch = batch.replace(trajectories=walks)
    swapped = batch.rows(torch.tensor([2, 0]))
    assert [row.leaf_index for row in swapped.trajectories] == [2, 0]
    assert [row.leaf_index for row in batch.rows(slice(1, 3)).trajectories] == [1, 2]
    chosen = batch.rows(torch.tensor([True, False, True]))
    assert [row.leaf_index for row in chosen.trajectories] == [0, 2]
    assert batch.to("meta").trajectories is walks
    assert batch.rows(torch.tensor([], dtype=torch.long)).num_rows == 0
    with pytest.raises(ValueError, match=r"Batch.trajectories has 2 rows"):
        batch.replace(trajectories=walks[:2])


def test_a_wrong_shape_or_a_float_mask_is_refused_by_name(toy_batch):
    batch = toy_batch(reward=[1, 2])
    with pytest.raises(ValueError, match=r"Batch.values has shape \(2,\).*give it \(2, 2\)"):
        batch.replace(values=torch.zeros(2))
    with pytest.raises(ValueError, match=r"Batch.reward has shape \(2, 2\).*give it \(2,\)"):
        batch.replace(reward=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"Batch.mask is torch.float32; give it torch.bool"):
        batch.replace(mask=torch.ones(2, 2))


def test_the_error_of_a_missing_tensor_names_what_fills_it(toy_batch):
    with pytest.raises(ValueError, match=r"Batch.values is None, but gae needs a critic"):
        toy_batch(reward=[1]).need("values", "gae needs a critic")


def test_a_field_that_is_not_there_is_named_with_the_nearest_and_all_others(toy_batch):
    batch = toy_batch(mask=[[1, 1]])
    with pytest.raises(AttributeError, match=r"'old_logp'; did you mean 'old_logprobs'\?") as seen:
        _ = batch.old_logp
    assert all(field.name in str(seen.value) for field in fields(Batch))
    assert not hasattr(batch, "unheard") and copy.deepcopy(batch).num_rows == 1
    assert pickle.loads(pickle.dumps(batch)).num_tokens == 2


def test_a_loss_of_ones_own_that_meets_none_is_told_which_fields_are(toy_batch):
    batch = toy_batch(mask=[[1, 1]], advantages=[[1, 1]])

    def mine(logp, entropy, batch):
        return -(logp - batch.old_logprobs).exp() * batch.advantages, {}

    logp = torch.zeros(1, 2, requires_grad=True)
    with pytest.raises(
        UserCodeError, match=r"mine .*NoneType.*None in this batch: .*old_logprobs"
    ) as seen:
        checked(mine, "loss")(logp, logp.detach(), batch)
    assert "log_ratio(logp, batch)" in str(seen.value)
    assert "advantages," not in str(seen.value).partition("None in this batch")[2]
