"""Run folders as the page sees them: numbered, read only, read again with each request.

    runs = open_runs(["runs/a", "runs/b"])      run 0 is "a", run 1 is "b"
    runs[0].describe()    {"name": "a", "status": "running", "phase": "rl", "step": 12, ...}

The page names a run by its number and a file of episodes by its step, never by a path: what is not in
these tables cannot be requested.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft.files import parse_object
from graft.runs import RunRecord, find_runs
from graft.runs.settings import env_names
from graft.train.run_dir.names import named
from graft.train.run_dir.token_log import TokenRow, learned_path, read_learned
from graft.trust.bounds import is_endless
from graft.trust.links import check_shown_run
from graft.viewer.curves import metric_names
from graft.viewer.episodes import EpisodeFile
from graft.viewer.pieces import TokenTexts

MAX_ALARMS = 1000
KEPT_EPISODES = 8
KEPT_BYTES = 64 * 2**20


class NotThere(LookupError):
    """The requested run, step or line does not exist; the message says which."""


class ViewedRun:
    """One run folder. Concurrent requests are answered one at a time."""

    def __init__(self, path: Path, number: int, name: str) -> None:
        self.path, self.number, self.name = path, number, name
        self.lock = threading.RLock()
        self.record = RunRecord(path)
        self.pieces = TokenTexts(self.record)
        self._files: dict[str, EpisodeFile] = {}
        self._listed: tuple[int, ...] = ()
        self._episodes: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._learned: tuple[Any, dict[tuple[int, int, int], TokenRow]] = (None, {})

    def pulse(self) -> list[Any]:
        """Changes whenever there is something new to show."""
        with self.lock:
            self.record.refresh()
            self._list()
            files = ("metrics.jsonl", "alarms.jsonl", "summary.json")
            changed = [_changed(self.path / name) for name in files]
            return [str(self.record.status), len(self._files), *self._listed, *changed]

    def describe(self) -> dict[str, Any]:
        with self.lock:
            self.record.refresh()
            self._list()
            last, config = self.record.last or {}, self.record.config
            before, after = self.record.scores
            return {
                "run": self.number,
                "name": self.name,
                "folder": str(self.path),
                "status": str(self.record.status),
                "phase": last.get("phase", ""),
                "step": last.get("step", 0),
                "steps": self.record.total_steps(last["phase"], last) if last else None,
                "env": env_names(config),
                "algo": str(config.get("algo", {}).get("name", "")),
                "metrics": metric_names(self.record),
                "episodes": list(self._files),
                "alarms": self.record.alarms[-MAX_ALARMS:],
                "score": [before.get("sampled"), after.get("sampled")],
            }

    def file(self, step: str) -> EpisodeFile:
        files = self.files
        if step not in files:
            raise NotThere(f"run {self.name} has no episodes of step {step}")
        return files[step]

    @property
    def files(self) -> dict[str, EpisodeFile]:
        """Step -> its episodes, in order."""
        with self.lock:
            self._list()
            return dict(self._files)

    def episode(self, step: str, line: int) -> dict[str, Any]:
        """The parsed line; the last few stay in memory, since a page requests them part by part."""
        raw = self.file(step).read(line)
        if raw is None:
            raise NotThere(f"step {step} of run {self.name} has no line {line}")
        with self.lock:
            key = (step, line, hash(raw))
            episode = self._episodes.pop(key, None) or parse_object(raw)
            if episode is None or not isinstance(episode.get("spans"), list):
                raise NotThere(f"line {line} of step {step} of run {self.name} is not an episode")
            self._episodes[key] = episode  # the youngest is last
            most = 1 if len(raw) * KEPT_EPISODES > KEPT_BYTES else KEPT_EPISODES
            while len(self._episodes) > most:
                del self._episodes[next(iter(self._episodes))]
            return episode

    def learned(self, step: str, line: int, leaf: int, context: int) -> TokenRow | str:
        """The learner's numbers of one walk, or the reason why there are none.

        The last file stays in memory, since a page requests it part by part.
        """
        path = learned_path(self.path, int(step) if step.isdigit() else -1)
        try:
            seen = path.stat()
            key = (path, seen.st_ino, seen.st_mtime_ns, seen.st_size)
            if key != self._learned[0]:
                self._learned = key, read_learned(path)
        except FileNotFoundError:
            return "this step has no file under learned/: the run was made without one"
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            return f"{path.name} cannot be read: {error}"
        return self._learned[1].get((line, leaf, context), "the learner did not take this attempt")

    def _list(self) -> None:
        """List new files: "12" is episodes/step_000012.jsonl, "failed-12" the batch that stopped step 12."""
        folders = {"": self.path / "episodes", "failed-": self.path / "failed"}
        listed = tuple(_changed(folder) for folder in folders.values())
        if listed == self._listed:
            return
        found: dict[str, EpisodeFile] = {}
        for prefix, folder in folders.items():
            paths = {
                _step(path): path for path in folder.glob("step_*.jsonl") if not is_endless(path)
            }
            for step in sorted(step for step in paths if step >= 0):
                name = f"{prefix}{step}"
                found[name] = self._files.get(name) or EpisodeFile(paths[step])
        self._files, self._listed = found, listed


def open_runs(folders: Sequence[str]) -> list[ViewedRun]:
    """The runs named on a command line. A folder that holds run folders stands for all of them."""
    paths: list[Path] = []
    for given in folders:
        path = named(given)
        if not path.is_dir():
            raise ValueError(
                f"no run {given!r}: there is no such folder, nor one in runs/; "
                "`graft runs` lists them"
            )
        inside = find_runs(path)
        if not inside:
            raise ValueError(
                f"{path} holds no run: neither config.yaml nor metrics.jsonl, which `graft train` "
                "writes, is in it or in a folder of it"
            )
        paths += inside
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    for path in paths:
        check_shown_run(path)
    short = [path.name for path in paths]
    names = [
        path.name if short.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        for path in paths
    ]
    return [
        ViewedRun(path, i, name) for i, (path, name) in enumerate(zip(paths, names, strict=True))
    ]


def _step(path: Path) -> int:
    number = path.stem.removeprefix("step_")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 18 else -1


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
