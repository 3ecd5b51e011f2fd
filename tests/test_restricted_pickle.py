"""Messages between processes: data arrives, code does not run."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graft.train.distributed.stores import keep_local
from graft.trust.restricted_pickle import dumps, loads
from graft.types import Author, CallText, Episode, Finish, Leaf, Sampling, Span, Status, Task


def test_data_arrives_as_it_was():
    episode = Episode(
        Task("t", "e", meta={"size": (1, 2)}),
        [Span(None, Author.TASK, [1, 2]), Span(0, Author.POLICY, [3], info={"x": np.float32(0.5)})],
        [Leaf([1], 1.0, Status.DONE)],
    )
    values = [episode, Sampling(top_k=3), Finish.STOP, Counter(a=2), {1, 2}, b"x", Path("a"), None]
    assert loads(dumps(values)) == values
    assert loads(dumps(values) + b"\0" * 9) == values  # padding of a collective operation
    call = loads(dumps(CallText("a", "tool", ("x",))))
    assert (call, call.tool, call.arguments) == ("a", "tool", ("x",))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.tensor([[1, 0], [2, 1]]).to(dtype)
        assert torch.equal(loads(dumps({"a": tensor[:, :1]}))["a"], tensor[:, :1])
    assert loads(dumps(torch.empty(0, 3))).shape == (0, 3)
    assert loads(dumps(torch.tensor(2.5))).item() == 2.5
    array = loads(dumps(np.arange(6).reshape(2, 3)[:, ::2]))
    assert array.tolist() == [[0, 2], [3, 5]]


def test_enums_arrive_where_python_would_pickle_them_by_getattr(monkeypatch: pytest.MonkeyPatch):
    by_name = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731  as Python 3.11.2 does
    monkeypatch.setattr(Status, "__reduce_ex__", by_name)
    assert loads(dumps([Status.DONE, Finish.STOP])) == [Status.DONE, Finish.STOP]


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


@pytest.mark.parametrize(
    "attack",
    [
        lambda to: Call(os.system, f"touch {to}"),
        lambda to: Call(subprocess.Popen, ["touch", to]),
        lambda to: Call(eval, f"open({to!r}, 'w')"),
        lambda to: Call(getattr, str, "format"),
        lambda to: Call(torch.load, to),
        lambda to: Call(torch.storage._load_from_bytes, b""),
        lambda to: Call(__import__("graft.registry").registry.resolve, "os:system", {}, "x"),
        lambda to: Call(__import__("graft.files").files.write_text, Path(to), "x"),
        lambda to: [1, {"a": Call(exec, f"open({to!r}, 'w')")}],
        lambda to: Call,
    ],
)  # fmt: skip
def test_a_pickle_of_a_stranger_calls_nothing(attack: Any, tmp_path: Path):
    to = tmp_path / "called"
    with pytest.raises(pickle.UnpicklingError, match="which is not data"):
        loads(pickle.dumps(attack(str(to))))
    assert not to.exists()


def test_names_are_not_reached_through_others():
    for text in (
        b"cgraft.trust.restricted_pickle\nsys.modules\n.",
        b"cgraft.files\nos\n.",
        b"cgraft.config\nPath\n.",
    ):
        with pytest.raises((pickle.UnpicklingError, AttributeError)):
            loads(text)
    nested = b"\x80\x04\x8c\x1dgraft.trust.restricted_pickle\x8c\x0bsys.modules\x93."
    with pytest.raises(pickle.UnpicklingError):
        loads(nested)


def test_a_shared_secret_is_checked_before_anything_is_read(monkeypatch: pytest.MonkeyPatch):
    unsigned = dumps([1, 2])
    monkeypatch.setenv("GRAFT_SECRET", "one")
    signed = dumps([1, 2])
    assert loads(signed + b"\0" * 9) == [1, 2]
    changed = signed[:-2] + bytes([signed[-2] ^ 1]) + signed[-1:]
    longer = signed[:32] + (2**62).to_bytes(8, "little") + signed[40:]
    for content in (unsigned, changed, longer, signed[:20], b"", b"\0" * 40):
        with pytest.raises(
            pickle.UnpicklingError, match="not signed with this process's GRAFT_SECRET"
        ):
            loads(content)
    monkeypatch.setenv("GRAFT_SECRET", "another")
    with pytest.raises(pickle.UnpicklingError, match="Set GRAFT_SECRET to one random text"):
        loads(signed)


def test_several_machines_without_a_secret_are_warned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert "GRAFT_SECRET is not set" in keep_local()
    monkeypatch.setenv("GRAFT_SECRET", "one")
    assert keep_local() == ""
    monkeypatch.delenv("GRAFT_SECRET")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert keep_local() == ""
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # started by hand: nobody elsewhere can join
    assert keep_local() == ""
