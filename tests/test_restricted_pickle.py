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

from graft.restricted_pickle import dumps, loads
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
        b"cgraft.restricted_pickle\nsys.modules\n.",
        b"cgraft.files\nos\n.",
        b"cgraft.config\nPath\n.",
    ):
        with pytest.raises((pickle.UnpicklingError, AttributeError)):
            loads(text)
    nested = b"\x80\x04\x8c\x17graft.restricted_pickle\x8c\x0bsys.modules\x93."
    with pytest.raises(pickle.UnpicklingError):
        loads(nested)
