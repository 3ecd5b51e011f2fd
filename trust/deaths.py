"""Process death at every change of the disk: a run ends there with SIGKILL, resumes, and is compared.

For each kind of training (`tiny_runs.KINDS`) one run names its moments (`moments.py`). Then a run dies at
each of them, a second process resumes it, and it must end as if nothing had happened: the same steps,
episodes, rewards and losses to the bit, and no file left behind. A process that resumes dies as well, at
every change that it makes before it trains. Power cuts, which also take what was not synced, are simulated.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import Completed, graft, python
from trust.bank import Row
from trust.moments import Loss, distinct
from trust.tiny_runs import KINDS, Comparison, command_of, compare

SMALL = 24
FULL = 1_000_000
"""More than there are: every moment of every kind."""
AT_A_TIME = 2
PATIENCE = 120.0
REPETITIONS = 2
CODE = "from trust.moments import arm; from pathlib import Path; arm({}); from graft.cli import main; main()"
POWER_CUTS: list[Loss] = ["data", "names"]


@dataclass(frozen=True)
class Death:
    """A run of `kind` that dies at `moment`; `start` is the folder that it begins with, if any."""

    kind: str
    moment: str
    loss: Loss = ""
    start: Path | None = None

    def __str__(self) -> str:
        power = f", power cut ({self.loss} lost)" if self.loss else ""
        return f"{self.moment}{power}{', when resuming' if self.start else ''}"


def run(count: int, seed: int) -> Iterator[Row]:
    """One row per kind and way to die; power cuts last."""
    with tempfile.TemporaryDirectory(prefix="graft-deaths-") as name:
        place = Path(name)
        base = place / "base"
        _check(
            graft(*command_of("sft", base, base), timeout=PATIENCE), "the run for the base model"
        )
        bank = _Bank(place, base / "run", seed, max(1, count // (3 * len(KINDS))))
        moments = {kind: _record(kind, place / kind / "whole", base / "run") for kind in KINDS}
        for kind, names in moments.items():
            yield bank.row(kind, [Death(kind, one) for one in distinct(names)])
            half = place / kind / "half"
            yield bank.row(f"{kind}, when resuming", _resumptions(kind, half, base / "run", names))
        for kind, names in moments.items():
            cuts = [Death(kind, one, loss) for one in distinct(names) for loss in POWER_CUTS]
            yield bank.row(f"{kind}, power cut", cuts)


@dataclass(frozen=True)
class _Bank:
    """`place / kind / "whole"` is the run that was not disturbed; `share` is the attempts of a row."""

    place: Path
    base: Path
    seed: int
    share: int

    def row(self, group: str, deaths: list[Death]) -> Row:
        chosen = random.Random(f"{self.seed} {group}").sample(deaths, min(self.share, len(deaths)))
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            found = list(pool.map(self.attempt, chosen))
        failures = [
            f"{death}: {fault}"
            for death, outcome in zip(chosen, found, strict=True)
            for fault in outcome.faults
        ]
        largest = max((outcome.largest for outcome in found), default=0.0)
        measured = {"of all moments": len(deaths), "largest difference of diagnostics": largest}
        return Row("deaths", group, len(chosen), failures, measured)

    def attempt(self, death: Death) -> Comparison:
        """What is wrong after a death and a resumption.

        Where sampling and learning overlap, new weights may reach an attempt a token earlier or later
        on a busy machine: such a run may be repeated.
        """
        found = self._attempt(death)
        for _ in range(REPETITIONS if death.kind == "async" and found.faults else 0):
            found = self._attempt(death)
            if not found.faults:
                break
        return found

    def _attempt(self, death: Death) -> Comparison:
        with tempfile.TemporaryDirectory(prefix="death-", dir=self.place) as name:
            folder = Path(name)
            if death.start is not None:
                shutil.copytree(death.start, folder / "run")
            how = f"Path({name!r}), fatal={death.moment!r}, loss={death.loss!r}"
            with suppress(TimeoutError):
                died = _armed(death.kind, folder, self.base, how)
                if died.returncode != -9:
                    return Comparison(
                        [f"did not die but ended with {died.returncode}: {died.stderr[-300:]}"]
                    )
                done = graft(*command_of(death.kind, folder, self.base), timeout=PATIENCE)
                if done.returncode:
                    return Comparison(
                        [f"does not resume ({done.returncode}): {done.stderr[-300:]}"]
                    )
                return compare(folder / "run", self.place / death.kind / "whole" / "run")
            return Comparison([f"still ran after {PATIENCE:g} s"])


def _record(kind: str, folder: Path, base: Path) -> list[str]:
    """The moments of a run that is not disturbed, in order."""
    record = folder / "moments.txt"
    done = _armed(kind, folder, base, f"Path({str(folder)!r}), Path({str(record)!r})")
    _check(done, f"a run of {kind}")
    return record.read_text(encoding="utf-8").splitlines()


def _resumptions(kind: str, folder: Path, base: Path, moments: list[str]) -> list[Death]:
    """Deaths of the process that resumes a run that died while it wrote its second checkpoint."""
    names = [m for m in moments if m.startswith("before rename") and _is_checkpoint(m)]
    _armed(kind, folder, base, f"Path({str(folder)!r}), fatal={names[1]!r}")
    start = folder / "run"
    again = folder / "again"
    shutil.copytree(start, again / "run")
    names = distinct(_record(kind, again, base))
    trains = next(
        (n for n, name in enumerate(names) if "write run/checkpoints" in name), len(names)
    )
    return [Death(kind, name, start=start) for name in names[:trains]]


def _is_checkpoint(moment: str) -> bool:
    place = moment.split()[-2]
    return (
        place.startswith("run/checkpoints/") and place.count("/") == 2 and ".removed" not in place
    )


def _armed(kind: str, folder: Path, base: Path, how: str) -> Completed:
    """A run in a process of its own in which `moments.arm` was called."""
    return python(CODE.format(how), *command_of(kind, folder, base), timeout=PATIENCE)


def _check(done: Completed, what: str) -> None:
    if done.returncode:
        raise RuntimeError(f"{what} failed: {done.stderr[-2000:]}")
