"""Weights in 64 bits, and what a step was computed with: `learned/step_000012.json`.

    {"step": 12, "updates": 12, "world": 1, "dtype": "float32", "device": "cpu (...)", ...,
     "before": {"policy/model.norm.weight": "9c0ffee15bad4d0f", ...},
     "after":  {"policy/model.norm.weight": "52f1a77d0e6b3c98", ...}}

The bits b of a matrix's numbers, read as integers, are summed, each multiplied by its own odd number:

    print = sum over r, c of  b[r, c] * R[r] * C[c]     modulo 2^64

    [[1.0, 2.0]]   b = 0x3f800000, 0x40000000     b0 * R0 * C0 + b1 * R0 * C1

A changed bit changes one term by d * odd, which is never 0 modulo 2^64; swapped numbers or several changes
are missed with a probability of 2^-32 or less. Integer sums have no rounding and no order, so a GPU and a CPU
agree, and processes that hold parts of a matrix add the sums of their parts: nothing is gathered, and the
result does not depend on the layout. Name, size and dtype of a tensor go into its fingerprint; names and
order of all tensors into that of a model.
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
from graft.models.parallel.shards import is_sharded, local, local_slices, shard_range
from graft.train.learner import Learner
from graft.train.processes import SINGLE, Processes
from graft.train.run_dir.optimizer_state import layout_free

Prints = Mapping[str, str]
"""Name of a tensor -> its fingerprint, 16 hexadecimal digits."""

CHUNKS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Numbers that are summed at a time, 8 bytes each: what fits into a cache, or into a nearly full GPU."""

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def fingerprints(
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    processes: Processes = SINGLE,
) -> dict[str, str]:
    """The fingerprint of each tensor. A collective operation where some are split.

    Floating-point numbers are first rounded to `dtype` (parts of a bf16 model are kept in fp32); `device`
    is where the sums of several processes are added.
    """
    with torch.no_grad():
        sums = [_sum(tensor, dtype) for tensor in tensors.values()]
    totals = torch.stack([s.to(device or sums[0].device) for s in sums]) if sums else None
    if totals is not None and any(map(is_sharded, tensors.values())):
        whole = torch.tensor([not is_sharded(t) for t in tensors.values()], device=totals.device)
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
    """Fingerprints of all weights of a learner, under names that do not depend on the layout."""
    modules: dict[str, Any] = {
        "policy": learner.policy,
        "adapter": learner.lora,
        "critic": learner.critic,
    }
    found: dict[str, str] = {}
    for owner, module in modules.items():
        if module is not None:
            # adapters and critic keep the precision that they are trained in
            kind = learner.policy.dtype if owner == "policy" else None
            prints = fingerprints(
                layout_free(module, dict(module.named_parameters())),
                dtype=kind,
                device=learner.policy.device,
                processes=learner.processes,
            )
            found |= {f"{owner}/{name}": value for name, value in prints.items()}
    return dict(sorted(found.items()))  # a split model has another order of parameters


def _sum(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The sum of this process's part, modulo 2^64; 0 where another process adds the same numbers."""
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
    if not is_sharded(tensor):
        return 0, 0
    mesh = tensor.device_mesh
    if mesh.ndim > 1:
        starts = [where.start for where in local_slices(tensor)]
    else:
        placement, starts = tensor.placements[0], [0] * tensor.ndim
        if not placement.is_replicate():
            size, index = tensor.shape[placement.dim], mesh.get_local_rank()
            starts[placement.dim] = shard_range(size, mesh.size(), index)[0]
    if any(starts[2:]):
        raise ValueError(f"a tensor {list(tensor.shape)} is split beyond its second dimension")
    rows, columns = (*starts, 0, 0)[:2]
    return rows, columns * (tensor.shape[2:].numel() if tensor.ndim > 2 else 1)


def _is_first_copy(tensor: Any) -> bool:
    if not is_sharded(tensor):
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
    """Shift right and fill with zeros: torch would copy the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _short(values: Any) -> str:
    text = json.dumps(values, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything beside the episodes that determines the result of a step."""

    step: int
    updates: int
    """Optimizer steps before it: the seed of shuffled mini-batches."""
    train_steps: int
    """Planned length of the run, which schedules of the learning rate depend on."""
    rates: Mapping[str, Any]
    """Settings of the learning rate, which may change when a run is resumed: see `build.rates_of`."""
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
    """Takes fingerprints before and after a step; those after one step are those before the next."""

    def __init__(
        self, learner: Learner, train_steps: int, rates: Mapping[str, Any] | None = None
    ) -> None:
        self.learner, self.train_steps, self.rates = learner, train_steps, rates or {}
        self._seen: tuple[int, Prints] | None = None

    def prints(self) -> tuple[int, Prints]:
        """The number of optimizer steps so far, and the fingerprints after them."""
        updates = self.learner.optimizer.steps
        if self._seen is None or self._seen[0] != updates:
            self._seen = updates, weights_prints(self.learner)
        return self._seen

    def record(self, step: int, before: tuple[int, Prints]) -> StepRecord:
        """A collective operation."""
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
    """The name of the processor: another one may have instructions that round differently."""
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
    """None if there is no readable record."""
    try:
        values = {"rates": {}} | json.loads(record_path(folder, step).read_text(encoding="utf-8"))
        return StepRecord(**{field.name: values[field.name] for field in fields(StepRecord)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def differing(seen: Prints, recorded: Prints) -> list[str]:
    """Names of tensors that differ or exist on one side only, in order."""
    names: Iterable[str] = dict.fromkeys((*recorded, *seen))
    return [name for name in names if seen.get(name) != recorded.get(name)]
