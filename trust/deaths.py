"""Process death at every change of the disk: the run that resumes must end as if nothing had happened.

For each kind of training (`tiny_runs.KINDS`) one run is watched (`moments.py`), and the disk is copied as a
death would leave it: before, in the middle of and after each write, rename, removal and fsync, and each time
also as a power cut would. Every different disk is resumed by a new process and compared with the run that was
not disturbed: the same steps, episodes, rewards and losses to the bit, and no file left behind. The same is
done for a process that resumes, until it trains. Some runs end with a real SIGKILL at their moment.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import Completed, python
from trust.bank import Row
from trust.moments import Disk, disks_in
from trust.tiny_runs import KINDS, Comparison, compare, new_place, recipe_of

SMALL = 8
"""Two kinds of training, by the seed, and one attempt for each of their rows."""
FULL = 1_000_000
"""More than there are: every moment of every kind."""
REAL = 20
"""Real SIGKILLs per kind, at most."""
ROWS = 4
AT_A_TIME = 2
PATIENCE = 120.0
REPETITIONS = 2
CODE = """
import sys
from pathlib import Path
from tests.training import train_recipe
from trust.moments import arm
{arm}
train_recipe(*sys.argv[1:])
"""


def run(count: int, seed: int) -> Iterator[Row]:
    """`ROWS` rows per kind of training."""
    with new_place("deaths") as name:
        place = Path(name)
        base = place / "base"
        _check(_train("sft", base, base), "the run for the base model")
        num_kinds = min(len(KINDS), max(1, count // ROWS))
        for kind in random.Random(seed).sample([*KINDS], num_kinds):
            share = max(1, count // (ROWS * num_kinds))
            bank = _Bank(kind, place / kind, base / "run", seed, share)
            yield from bank.rows()
            shutil.rmtree(place / kind)


@dataclass(frozen=True)
class _Bank:
    """The deaths of one kind; `share` is the attempts of a row."""

    kind: str
    place: Path
    base: Path
    seed: int
    share: int

    def rows(self) -> Iterator[Row]:
        disks = self._watch(self.place / "whole", self.place / "disks")
        plain = [disk for disk in disks if not disk.is_power_cut]
        cuts = [disk for disk in disks if disk.is_power_cut]
        yield self._row("", plain, self._resume)
        yield self._row(", power cut", cuts, self._resume)
        yield self._row(", when resuming", self._second_deaths(plain), self._resume)
        real = random.Random(self.seed).sample(plain, min(REAL, len(plain)))
        yield self._row(", SIGKILL", real, self._kill)

    def _row(
        self, group: str, disks: list[Disk], attempt: Callable[[Disk, Path], Comparison]
    ) -> Row:
        chosen = random.Random(f"{self.seed} {self.kind} {group}").sample(
            disks, min(self.share, len(disks))
        )
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            found = list(pool.map(lambda disk: self._attempt(disk, attempt), chosen))
        pairs = zip(chosen, found, strict=True)
        failures = [f"{disk}: {fault}" for disk, outcome in pairs for fault in outcome.faults]
        measured = {
            "moments": sum(len(disk.moments) for disk in chosen),
            "different disks in all": len(disks),
            "largest difference of diagnostics": max((one.largest for one in found), default=0.0),
        }
        return Row("deaths", self.kind + group, len(chosen), failures, measured)

    def _attempt(self, disk: Disk, attempt: Callable[[Disk, Path], Comparison]) -> Comparison:
        """Where sampling and learning overlap, new weights may reach an attempt a token earlier or later
        on a busy machine: only such a run may be repeated."""
        found = Comparison()
        for _ in range(1 + REPETITIONS * (self.kind == "async")):
            with tempfile.TemporaryDirectory(prefix="death-", dir=self.place) as name:
                try:
                    found = attempt(disk, Path(name))
                except TimeoutError:
                    found = Comparison([f"still ran after {PATIENCE:g} s"])
            if not found.faults:
                break
        return found

    def _resume(self, disk: Disk, folder: Path) -> Comparison:
        """Go on with the disk that a death has left."""
        shutil.copytree(disk.folder, folder, dirs_exist_ok=True)
        return self._finish(folder)

    def _kill(self, disk: Disk, folder: Path) -> Comparison:
        """Die at the first moment that leaves this disk, and go on."""
        moment = next(name for name, loss in disk.moments if not loss)
        died = _train(self.kind, folder, self.base, f"arm(Path({str(folder)!r}), fatal={moment!r})")
        if died.returncode != -9:
            return Comparison(
                [f"did not die but ended with {died.returncode}: {died.stderr[-300:]}"]
            )
        left = _names(folder / "run") ^ _names(disk.folder / "run")
        if self.kind == "async":  # two threads write, in an order that differs from run to run
            left = set()
        found = self._finish(folder)
        found.faults += [f"{name} is on one of the two disks only" for name in sorted(left)]
        return found

    def _finish(self, folder: Path) -> Comparison:
        done = _train(self.kind, folder, self.base)
        if done.returncode:
            return Comparison([f"does not resume ({done.returncode}): {done.stderr[-300:]}"])
        return compare(folder / "run", self.place / "whole" / "run")

    def _watch(self, folder: Path, keep: Path) -> list[Disk]:
        """The disks of a run that is not disturbed."""
        how = f"arm(Path({str(folder)!r}), keep=Path({str(keep)!r}))"
        _check(_train(self.kind, folder, self.base, how), f"a run of {self.kind}")
        return disks_in(keep)

    def _second_deaths(self, disks: list[Disk]) -> list[Disk]:
        """Of the process that resumes after the first checkpoint but one lost its end."""
        names = [disk for disk in disks if "rename run/checkpoints/" in str(disk)]
        again = self.place / "again"
        shutil.copytree(names[len(names) // 2].folder, again)
        found = self._watch(again, self.place / "second")
        trains = [n for n, disk in enumerate(found) if "write run/checkpoints" in str(disk)]
        return found[: trains[0] if trains else None]


def _names(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.name != ".lock"}


def _train(kind: str, folder: Path, base: Path, arm: str = "") -> Completed:
    """A run in a process of its own, in which `moments.arm` is called first where it is given."""
    return python(CODE.format(arm=arm), *recipe_of(kind, folder, base), timeout=PATIENCE)


def _check(done: Completed, what: str) -> None:
    if done.returncode:
        raise RuntimeError(f"{what} failed: {done.stderr[-2000:]}")
