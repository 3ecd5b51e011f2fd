"""The folder of a run, read while it grows: what was asked, how far it is, how it stands.

    record = find_run("quickstart")
    record.status             Status.RUNNING
    record.last               {"phase": "rl", "step": 12, "reward": 0.5, ...}
    record.refresh()          12 steps are new
    record.curves["rl"]["reward"]        array('d', [0.01, ..., 0.5])

Nothing here writes or locks anything, so a look never disturbs a run, and no torch is loaded. Files
may be in the middle of being written. `refresh` reads only what was added since the last time; a run
that is resumed cuts its metrics back, and then all is read anew.
"""

from graft.record.curves import Curves, is_step, numbers
from graft.record.find import find_run, find_runs
from graft.record.lines import JsonLines, parse_object, read_object
from graft.record.lock import is_held
from graft.record.run import Alarm, Record, Saved, Status
from graft.train.labels import PHASE_WORDS
from graft.train.run_names import is_run

__all__ = [
    "PHASE_WORDS",
    "Alarm",
    "Curves",
    "JsonLines",
    "Record",
    "Saved",
    "Status",
    "find_run",
    "find_runs",
    "is_held",
    "is_run",
    "is_step",
    "numbers",
    "parse_object",
    "read_object",
]
