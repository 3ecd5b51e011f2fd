"""Sent weights arrive bit for bit, through the store and by broadcast."""

import threading
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from graft.cluster import weight_transfer as sending
from graft.cluster.weight_transfer import (
    BroadcastGroup,
    UnpackedWeights,
    connected,
    described,
    packed,
)


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(5, 3, generator=draw),
        "half": torch.randn(4, generator=draw).to(torch.bfloat16),
        "odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "turned": torch.randn(2, 6, generator=draw).T,
        "scale": torch.tensor(0.5, dtype=torch.float16),
        "count": torch.tensor([1, 2], dtype=torch.int64),
    }


def assert_same_bits(found: Any, given: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        a, b = (one.contiguous().view(-1).view(torch.uint8) for one in (found[name], tensor))
        assert torch.equal(a, b), name


def test_every_bit_survives_packing() -> None:
    given = weights()
    assert_same_bits(UnpackedWeights(packed(given)), given)


def test_what_was_sent_may_be_read_only_and_is_not_written_to() -> None:
    sent = packed({"w": torch.ones(3)})
    sent["w"][1].flags.writeable = False
    found = UnpackedWeights(sent)
    found["w"].zero_()
    assert found["w"].tolist() == [1.0, 1.0, 1.0]
    assert len(found) == 1


def test_packing_reads_each_tensor_once_and_in_order() -> None:
    """Those of a split model are brought together by all processes, each as it is read."""
    read: list[str] = []

    class Gathered(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    packed(Gathered({"b": torch.ones(1), "a": torch.ones(2)}))
    assert read == ["b", "a"]


def test_a_parameter_is_sent_without_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    dtype, bits = packed({"w": parameter})["w"]
    assert dtype == "float32"
    assert bits.tolist() == [np.float32(1).view(np.int32)] * 2


class PerThread(threading.local, UserDict[str, Any]):
    """A dict of its own in each thread, which stands for a process."""


@pytest.fixture
def group() -> Iterator[BroadcastGroup]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield BroadcastGroup("127.0.0.1", store.port, 0, 3, "1", "gloo", 10.0)
    del store  # it must outlive the group


def broadcast(
    group: BroadcastGroup, given: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """What two workers receive."""
    monkeypatch.setattr(sending, "_connected", PerThread())
    found: list[Any] = [None, None]

    def receive(number: int) -> None:
        try:
            found[number] = replace(group, rank=number + 1).receive(described(given))
        except RuntimeError as error:
            found[number] = error

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        group.send(given)
    finally:
        for thread in threads:
            thread.join(30)
    return found


def test_every_bit_survives_a_broadcast(
    group: BroadcastGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = weights()
    for found in broadcast(group, given, monkeypatch):
        assert_same_bits(found, given)


def test_a_broadcast_without_all_members_ends_at_its_deadline(group: BroadcastGroup) -> None:
    with pytest.raises(RuntimeError):
        replace(group, world=2, key="alone", deadline=1.0).send(weights())


def test_a_group_is_kept_until_another_is_made(
    group: BroadcastGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(key: str, *_: Any) -> str:
        made.append(key)
        return f"group {key}"

    monkeypatch.setattr(sending, "PrefixStore", lambda key, store: key)
    monkeypatch.setattr(sending, "dist", SimpleNamespace(ProcessGroupGloo=make))
    monkeypatch.setattr(sending, "_connected", {})
    keys = ["1", "1", "2", "2", "1"]
    found = [connected(replace(group, key=key)) for key in keys]
    assert found == [f"group {key}" for key in keys]
    assert made == ["1", "2", "1"]
