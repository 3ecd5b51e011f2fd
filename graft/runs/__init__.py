"""Read the folder of a run while the run writes it: settings, progress, status.

    record = find_run("quickstart")
    record.status             RunStatus.RUNNING
    record.last               {"phase": "rl", "step": 12, "reward": 0.5, ...}
    record.refresh()          12 steps are new
    record.curves["rl"]["reward"]        array('d', [0.01, ..., 0.5])

Nothing here writes or locks a file, so reading never disturbs a run, and torch is not imported. Files
may be in the middle of being written. `refresh` reads only what was added since the last time; a run
that is resumed truncates its metrics, and then everything is read again.
"""

from graft.runs.curves import Curves, is_step, numbers
from graft.runs.json_lines import GrowingJsonl
from graft.runs.lock import is_held
from graft.runs.record import RunRecord, RunStatus, find_run, find_runs
from graft.train.monitor.labels import PHASE_WORDS

__all__ = [
    "PHASE_WORDS",
    "Curves",
    "GrowingJsonl",
    "RunRecord",
    "RunStatus",
    "find_run",
    "find_runs",
    "is_held",
    "is_step",
    "numbers",
]
