"""Weights in 64 bits, and what a step was computed with: `learned/step_000012.json`.

    {"step": 12, "updates": 12, "world": 1, "dtype": "float32", "device": "cpu (...)", ...,
     "before": {"policy/model.norm.weight": "9c0ffee15bad4d0f", ...},
     "after":  {"policy/model.norm.weight": "52f1a77d0e6b3c98", ...}}

The bits b of a matrix's numbers, read as integers, are added up, each times an odd number of its own:

    print = sum over r, c of  b[r, c] * R[r] * C[c]     modulo 2^64

    [[1.0, 2.0]]   b = 0x3f800000, 0x40000000     b0 * R0 * C0 + b1 * R0 * C1

A changed bit changes one term by d * odd, which is never 0 modulo 2^64; numbers that change places, or
several changes at once, are missed by an accident of 1 in 2^32 or less. Sums of integers have no
rounding and no order, so a GPU finds what a CPU finds, and processes that hold parts of a matrix add
up the sums of their parts: nothing is brought together, and no layout shows. Name, size and kind of a
tensor go into its fingerprint; names and order of all tensors into that of a model.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.files import write_json
from graft.models.parallel.parts import bounds, is_split, local, part
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.learner import Learner
from graft.train.run_dir.optimizer_state import layout_free

Prints = Mapping[str, str]
"""Name of a tensor -> its fingerprint, 16 hexadecimal digits."""

CHUNKS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Numbers that are added up at a time, 8 bytes each: what a cache holds, what a full GPU has room for."""

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def fingerprints(
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    processes: ProcessGroup = ALONE,
) -> dict[str, str]:
    """Of each tensor. Where some are split, all processes call it together.

    `dtype` is what floating-point numbers are rounded to first (parts of a bf16 model are kept in
    fp32), `device` where sums of several processes are added up.
    """
    with torch.no_grad():
        sums = [_sum(tensor, dtype) for tensor in tensors.values()]
    totals = torch.stack([s.to(device or sums[0].device) for s in sums]) if sums else None
    if totals is not None and any(map(is_split, tensors.values())):
        whole = torch.tensor([not is_split(t) for t in tensors.values()], device=totals.device)
        added = totals.masked_fill(whole, 0)
        processes.add([added], "the fingerprint of the weights")
        totals = torch.where(whole, totals, added)
    found: dict[str, str] = {}
    for (name, tensor), total in zip(
        tensors.items(), totals.tolist() if totals is not None else [], strict=True
    ):
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        found[name] = _short([name, str(kind), list(tensor.shape), total])
    return found


def combine(prints: Prints) -> str:
    """One fingerprint of all; names and their order count."""
    return _short(list(prints.items()))


def weights_prints(learner: Learner) -> dict[str, str]:
    """Of everything that a learner trains and computes with, by names that know no layout."""
    modules: dict[str, Any] = {
        "policy": learner.policy,
        "adapter": learner.lora,
        "critic": learner.critic,
    }
    found: dict[str, str] = {}
    for owner, module in modules.items():
        if module is not None:
            # adapters, and a critic, are kept in the precision that they are trained in
            kind = learner.policy.dtype if owner == "policy" else None
            prints = fingerprints(
                layout_free(module, dict(module.named_parameters())),
                dtype=kind,
                device=learner.policy.device,
                processes=learner.processes,
            )
            found |= {f"{owner}/{name}": value for name, value in prints.items()}
    return dict(sorted(found.items()))  # a split model has its parameters in another order


def _sum(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Of this process's part, modulo 2^64; nothing where another process adds the same numbers."""
    rows, columns = _corner(tensor)
    own = local(tensor)
    total = torch.zeros((), dtype=torch.int64, device=own.device)
    if not own.numel() or not _is_first_copy(tensor):
        return total
    matrix = own.reshape(len(own), -1) if own.ndim else own.reshape(1, 1)
    height, width = matrix.shape
    keys_C = _odd(columns, width, 1, own.device)
    keys_R = _odd(rows, height, 2, own.device)
    step = max(CHUNKS.get(own.device.type, CHUNKS["cpu"]) // width, 1)
    for start in range(0, height, step):
        some = matrix[start : start + step]
        if dtype is not None and some.is_floating_point():
            some = some.to(dtype)
        bits = some.contiguous().view(BITS[some.element_size()])
        total += ((bits * keys_C).sum(1) * keys_R[start : start + step]).sum()
    return total


def _corner(tensor: Any) -> tuple[int, int]:
    """Row and column of the whole matrix at which this process's part begins."""
    if not is_split(tensor):
        return 0, 0
    mesh = tensor.device_mesh
    if mesh.ndim > 1:
        starts = [where.start for where in bounds(tensor)]
    else:
        placement, starts = tensor.placements[0], [0] * tensor.ndim
        if not placement.is_replicate():
            size, index = tensor.shape[placement.dim], mesh.get_local_rank()
            starts[placement.dim] = part(size, mesh.size(), index)[0]
    if any(starts[2:]):
        raise ValueError(f"a tensor {list(tensor.shape)} is split beyond its second dimension")
    rows, columns = (*starts, 0, 0)[:2]
    return rows, columns * (tensor.shape[2:].numel() if tensor.ndim > 2 else 1)


def _is_first_copy(tensor: Any) -> bool:
    if not is_split(tensor):
        return True
    at = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(index == 0 for index, placement in at if placement.is_replicate())


def _odd(start: int, count: int, salt: int, device: torch.device) -> Tensor:
    """Odd numbers that look random, the same for a row or column wherever it is (splitmix64)."""
    x = torch.arange(start + 1, start + count + 1, device=device, dtype=torch.int64)
    x = x * _signed(0x9E3779B97F4A7C15) + salt * _signed(0xD1B54A32D192ED03) % (1 << 62)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in: torch copies the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _short(values: Any) -> str:
    text = json.dumps(values, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What has to be the same for a step to come out the same, besides its episodes."""

    step: int
    updates: int
    """Optimizer steps before it: mini-batches are shuffled by their number."""
    train_steps: int
    """How long the run was meant to be: schedules of the learning rate depend on it."""
    rates: Mapping[str, Any]
    """Settings of the learning rate, which may change when a run is resumed: see `setup.rates_of`."""
    tokens_per_micro: int
    world: int
    """Processes that learned."""
    dtype: str
    device: str
    threads: int
    torch: str
    before: Prints
    after: Prints

    def write(self, folder: Path) -> None:
        path = record_path(folder, self.step)
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(self))


class StepRecorder:
    """Looks at the weights around a step; those behind one step are those before the next."""

    def __init__(
        self, learner: Learner, train_steps: int, rates: Mapping[str, Any] | None = None
    ) -> None:
        self.learner, self.train_steps, self.rates = learner, train_steps, rates or {}
        self._seen: tuple[int, Prints] | None = None

    def prints(self) -> tuple[int, Prints]:
        """Optimizer steps that were made, and the weights behind them."""
        updates = self.learner.optimizer.steps
        if self._seen is None or self._seen[0] != updates:
            self._seen = updates, weights_prints(self.learner)
        return self._seen

    def record(self, step: int, before: tuple[int, Prints]) -> StepRecord:
        """All processes call it together."""
        learner = self.learner
        return StepRecord(
            step=step,
            updates=before[0],
            train_steps=self.train_steps,
            rates=self.rates,
            tokens_per_micro=learner.tokens_per_micro,
            world=learner.processes.world,
            dtype=str(learner.policy.dtype).removeprefix("torch."),
            device=device_name(learner.policy.device),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            before=before[1],
            after=self.prints()[1],
        )


def device_name(device: torch.device) -> str:
    """What computes: another processor may have other instructions, which round otherwise."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    return f"cpu ({model}, {torch.backends.cpu.get_cpu_capability()})"


def record_path(folder: Path, step: int) -> Path:
    return folder / "learned" / f"step_{step:06d}.json"


def read_record(folder: Path, step: int) -> StepRecord | None:
    """None: there is none, or it is none of ours."""
    try:
        values = {"rates": {}} | json.loads(record_path(folder, step).read_text(encoding="utf-8"))
        return StepRecord(**{field.name: values[field.name] for field in fields(StepRecord)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def differing(seen: Prints, recorded: Prints) -> list[str]:
    """Names of tensors that are not the same, or are on one side only; in order."""
    names: Iterable[str] = dict.fromkeys((*recorded, *seen))
    return [name for name in names if seen.get(name) != recorded.get(name)]
