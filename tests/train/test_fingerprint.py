"""Fingerprints of weights: any bit, name, size and place counts; device and layout do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.io.tensor_names import weights_of
from graft.models.parallel.critic import sharded_critic
from graft.models.parallel.decoder import shard
from graft.models.shape import ModelShape
from graft.train.distributed.process_group import ALONE
from graft.train.distributed.process_group import ProcessGroup as Run
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.train.run_dir import fingerprint
from graft.train.run_dir.fingerprint import (
    StepRecord,
    StepRecorder,
    combine,
    differing,
    fingerprints,
    read_record,
    weights_prints,
)
from tests.train.test_torchrun import processes_at

SHAPE = ModelShape(
    family="llama",
    vocab_size=61,
    width=8,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=6,
    ff=12,
    tied=False,
    qkv_bias=True,
    extra=3,
)


def one(tensor: Tensor, **how) -> str:
    return fingerprints({"w": tensor}, **how)["w"]


def flipped(tensor: Tensor, number: int, bit: int) -> Tensor:
    kind = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    bits = tensor.clone().view(kind)
    mask = 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
    bits.view(-1)[number] ^= mask
    return bits.view(tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_counts(dtype):
    tensor = torch.tensor([[0.0, 1.0, -2.5], [3e-9, 0.0, 7.0]]).to(dtype)
    width = 8 * tensor.element_size()
    prints = {one(flipped(tensor, n, bit)) for n in range(6) for bit in range(width)}
    assert len(prints | {one(tensor)}) == 6 * width + 1


def test_the_sum_is_the_one_that_is_written_down():
    """In Python's integers, with its own splitmix64."""

    def odd(number: int, salt: int) -> int:
        x = (number + 1) * 0x9E3779B97F4A7C15
        x = (x + salt * (0xD1B54A32D192ED03 - 2**64) % 2**62) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> shift) * factor % 2**64
        return (x ^ x >> 31) | 1

    # 1.0 is 0x3f800000, 2.0 is 0x40000000, -0.0 is -0x80000000 as a signed integer
    bits = [[0x3F800000, 0x40000000], [-0x80000000, 0]]
    want = sum(bits[r][c] * odd(r, 2) * odd(c, 1) for r in (0, 1) for c in (0, 1)) % 2**64
    got = fingerprint._sum(torch.tensor([[1.0, 2.0], [-0.0, 0.0]]), None)
    assert int(got) % 2**64 == want


def test_numbers_rows_and_columns_that_change_places_are_detected():
    tensor = torch.arange(12.0).reshape(3, 4)
    others = [tensor.flip(0), tensor.flip(1), tensor[[1, 0, 2]], tensor[:, [0, 2, 1, 3]]]
    assert len({one(tensor), *map(one, others)}) == 5


def test_name_size_and_dtype_count():
    tensor = torch.ones(2, 3)
    assert one(tensor) != one(tensor.reshape(3, 2))
    assert one(tensor) != fingerprints({"v": tensor})["v"]
    assert one(torch.zeros(4)) != one(torch.zeros(4, dtype=torch.bfloat16))
    assert one(torch.zeros(4)) != one(torch.zeros(5))
    assert one(torch.tensor([0.0])) != one(torch.tensor([-0.0]))


def test_that_of_a_model_counts_names_and_their_order():
    prints = {"a": "1" * 16, "b": "2" * 16}
    assert combine(prints) != combine({"b": "2" * 16, "a": "1" * 16})
    assert combine(prints) != combine({"a": "2" * 16, "b": "1" * 16})
    assert combine(prints) == combine(dict(prints))
    assert differing(prints, {**prints, "b": "3" * 16, "c": ""}) == ["b", "c"]
    assert differing(prints, prints) == []


def test_how_the_numbers_lie_in_memory_does_not_count(monkeypatch):
    tensor = torch.randn(7, 5)
    whole = one(tensor)
    assert one(tensor.T.contiguous().T) == whole
    monkeypatch.setitem(fingerprint.CHUNKS, "cpu", 10)  # two rows at a time
    assert one(tensor) == whole


def test_odd_sizes_have_one_too():
    kinds = [torch.zeros(()), torch.zeros(0), torch.zeros(0, 3), torch.ones(2, 3, 4)]
    kinds += [torch.arange(3), torch.tensor([True, False])]
    assert len({one(tensor) for tensor in kinds}) == len(kinds)


def test_rounding_first_gives_the_print_of_what_is_rounded():
    tensor = torch.randn(4, 6)
    assert one(tensor, dtype=torch.bfloat16) == one(tensor.bfloat16())
    assert one(tensor, dtype=torch.bfloat16) != one(tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_finds_what_a_cpu_finds(dtype, monkeypatch):
    tensor = torch.randn(300, 70).to(dtype)
    assert one(tensor.cuda()) == one(tensor)
    monkeypatch.setitem(fingerprint.CHUNKS, "cuda", 1000)
    assert one(tensor.cuda()) == one(tensor)


# a learner


def learner_of(policy, critic=None, processes: Run = ALONE) -> Learner:
    def optimizer(module) -> Optimizer:
        return Optimizer([module], lr=1e-3, schedule=schedule("constant", 0, 1, 0.0))

    return Learner(
        policy,
        optimizer(policy),
        loss=None,  # type: ignore[arg-type]
        reduction=None,  # type: ignore[arg-type]
        tokens_per_micro=8,
        allowed=torch.ones(1, policy.shape.head_rows, dtype=torch.bool),
        critic=critic,
        critic_optimizer=critic and optimizer(critic),
        processes=processes,
    )


def decoder() -> Decoder:
    return Decoder(SHAPE).initialise(3)


def test_critic_and_policy_have_separate_fingerprints():
    policy = decoder()
    learner = learner_of(policy, Critic(policy))
    before = weights_prints(learner)
    assert learner.critic is not None
    with torch.no_grad():
        policy.norm.weight[2] += 1e-3
        dict(learner.critic.named_parameters())["body.norm.weight"][2] += 1e-3
    assert differing(weights_prints(learner), before) == [
        "critic/model.norm.weight",
        "policy/model.norm.weight",
    ]


def test_weights_are_read_once_between_two_updates(monkeypatch):
    calls: list[int] = []
    original = fingerprint.weights_prints
    monkeypatch.setattr(
        fingerprint, "weights_prints", lambda learner: [calls.append(1), original(learner)][1]
    )
    learner = learner_of(decoder())
    recorder = StepRecorder(learner, train_steps=9)
    records: list[StepRecord] = []
    for step in (1, 2):
        before = recorder.prints()
        with torch.no_grad():
            learner.policy.norm.weight += 1.0
        learner.optimizer.steps += 2
        records.append(recorder.record(step, before))
    assert len(calls) == 3
    assert [record.updates for record in records] == [0, 2]
    assert records[0].before != records[0].after == records[1].before != records[1].after


def test_a_record_reads_back_equal_and_half_a_one_is_none(tmp_path):
    recorder = StepRecorder(learner_of(decoder()), train_steps=9)
    record = recorder.record(7, recorder.prints())
    record.write(tmp_path)
    assert read_record(tmp_path, 7) == record
    path = tmp_path / "learned" / "step_000007.json"
    path.write_text(path.read_text()[:200])
    assert read_record(tmp_path, 7) is None
    assert read_record(tmp_path, 8) is None


# parts of a model

LAYOUTS = {"fsdp": 1, "tp": 2}


def prints_in_a_child(port: int, tp: int, dtype: torch.dtype) -> dict[str, str]:
    run = processes_at(port)
    policy = shard(SHAPE, run.mesh(tp), weights_of(decoder()).get, dtype=dtype)
    critic = sharded_critic(policy) if dtype == torch.float32 else None
    return weights_prints(learner_of(policy, critic, run))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_parts_has_the_prints_of_the_whole(four, layout, dtype):
    group, port = four
    policy = decoder().to(dtype)
    want = weights_prints(learner_of(policy, Critic(policy) if dtype == torch.float32 else None))
    assert set(map(len, want.values())) == {16}
    for prints in group.run(prints_in_a_child, port, LAYOUTS[layout], dtype):
        assert prints == want


def test_a_shape_without_actions_has_other_prints():
    plain = learner_of(Decoder(replace(SHAPE, extra=0)).initialise(3))
    changed = differing(weights_prints(plain), weights_prints(learner_of(decoder())))
    assert changed == ["policy/lm_head.weight"]
