"""Every checkpoint of a run on several sets of held-out tasks: what `graft eval` does.

    graft eval runs/sort --on earl:sort-4,earl:sort-4-5 --all-checkpoints --greedy

fills the cells of a table, one after the other. Each is in `runs/sort/evaluations/table.jsonl` as
soon as it is computed; a second call computes what is missing, such as the checkpoints that a run
has written meanwhile. `table.md` and `table.json` beside it show all cells of these settings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from graft.config import Config, ConfigError, load_config
from graft.evaluate.cells import Cell, Ledger
from graft.evaluate.run import evaluate
from graft.evaluate.sets import TaskSet, pose_one, read_sets
from graft.evaluate.table import Table
from graft.models.gguf import open_gguf
from graft.models.load import INDEX, ModelFileError, read_config, read_json, shape_of
from graft.models.save import write_json, write_whole
from graft.text.chat import Chat
from graft.train.acting import with_actions
from graft.train.checkpoint import PHASES, checkpoints
from graft.train.describe import commonest_failure, is_dead
from graft.train.folder import RunStopped, out_of_disk
from graft.train.rl import held_out_tasks
from graft.train.setup import Parts, assemble, load_policy, load_tokenizer

DEFAULT_TASKS = 200
"""Where the recipe itself never evaluates (run.eval_tasks=0)."""

NOT_OF_A_SCORE: dict[str, Any] = {
    "run": True,  # its seed aside
    "model": {"path", "shape", "alphabet", "device"},  # the cell knows its weights
    "task": {"env", "args", "eval_args"},  # the set says them
    "rollout": {
        "tasks", "samples", "branch", "temperature", "dynamic_rounds", "concurrency", "deadline",
    },
    "engine": {"kv_tokens", "page_size"},
    "algo": True, "train": True, "sft": True,
}  # fmt: skip
"""Keys of a recipe that held-out scores do not depend on; any other, when changed, is another cell."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to evaluate: a row of the table."""

    name: str
    path: Path
    weights: str
    """A short name for what the files hold, other than where they lie."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured, apart from the model."""

    config: Config
    sets: list[TaskSet]
    tasks: int
    samples: int
    temperature: float

    def settings(self, tasks: TaskSet) -> dict[str, Any]:
        """Everything that the score of a given model on this set depends on."""
        values = {
            "env": tasks.env,
            "args": tasks.args,
            "tasks": self.tasks,
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.config.run.seed,
            **self.config.model_dump(mode="json", exclude=NOT_OF_A_SCORE),
        }
        mine = Path(self.config.actions.file)
        if mine.is_file():  # not a bundled one, so it may have been edited meanwhile
            values["actions_digest"] = blake2b(mine.read_bytes(), digest_size=8).hexdigest()
        return json.loads(json.dumps(values, default=str))  # as it reads back: tuples are lists

    @property
    def caption(self) -> str:
        attempts = "one attempt" if self.samples == 1 else f"{self.samples} attempts"
        how = f"at temperature {self.temperature:g}" if self.temperature else "greedy"
        return (
            f"Mean reward ± half of its 95% interval over {self.tasks} held-out tasks, {attempts} "
            f"each, {how}; tool calls per attempt."
        )


def evaluate_checkpoints(
    source: str,
    *,
    on: str = "",
    args: Sequence[str] = (),
    recipe: str = "",
    overrides: Sequence[str] = (),
    every_checkpoint: bool = False,
    tasks: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    name: str = "table",
    say: Callable[[str], None] = print,
) -> tuple[Table, Path]:
    """Compute what is missing of the table; the table, and the folder that holds it.

    source       a run folder, one checkpoint of it, or a model (which needs a `recipe`)
    on, args     the sets; see `graft.evaluate.sets`
    temperature  None: the recipe's; 0 is greedy
    name         of the files: another table of the same run
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} names files; give one word, without folders")
    run = run_behind(Path(source))
    if not recipe:
        if run is None or not (run / "config.yaml").is_file():
            raise ConfigError(
                f"'{run or source}' has no config.yaml of a run, so nothing says which environment "
                "and limits to evaluate with; give --recipe"
            )
        recipe = str(run / "config.yaml")
    config = load_config(recipe, overrides)
    folder = (run or Path(config.run.dir) / config.run.name) / "evaluations"
    if temperature is None:
        temperature = config.rollout.temperature
    if not temperature and samples > 1:
        raise ConfigError(
            f"{samples} greedy attempts at a task are {samples} times the same; give a temperature, "
            "or one attempt"
        )
    asked = Evaluation(
        config=config,
        sets=read_sets(on, args, config.task),
        tasks=tasks or config.run.eval_tasks or DEFAULT_TASKS,
        samples=samples,
        temperature=temperature,
    )
    found = candidates(Path(source), run, every_checkpoint, say)
    _check_sets(asked, found[-1])
    ledger = Ledger(folder / f"{name}.jsonl")
    if ledger.broken:
        say(f"{ledger.path} has {ledger.broken} unreadable line(s), of a process that was killed")
    try:
        table = fill(asked, found, ledger, say)
    except KeyboardInterrupt:
        say(f"interrupted; what was finished is in {ledger.path}, the same command does the rest")
        raise
    with out_of_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = table.markdown()
        write_whole(folder / f"{name}.md", lambda to: to.write_text(text, encoding="utf-8"))
        write_json(folder / f"{name}.json", table.to_json())
    return table, folder


def run_behind(path: Path) -> Path | None:
    """The run that a path is, or that it is a checkpoint of."""
    if not path.exists():
        raise ConfigError(f"no run or model at '{path}': there is no such folder or file")
    if (path / "checkpoints").is_dir() or (path / "config.yaml").is_file():
        return path
    above = path.absolute().parent
    is_checkpoint = (path / "state.json").is_file() and above.name == "checkpoints"
    return above.parent if is_checkpoint else None


def candidates(
    path: Path, run: Path | None, every: bool, say: Callable[[str], None]
) -> list[Candidate]:
    """The models to evaluate, oldest first, each found to be readable."""
    if run is None:
        check_readable(path)
        return [
            Candidate(
                path.stem if path.is_file() else path.absolute().name, path, fingerprint(path)
            )
        ]
    if path != run:
        check_readable(path)
        return [Candidate(path.absolute().name, path, fingerprint(path))]
    listed = checkpoints(run / "checkpoints")
    if not listed:
        raise ConfigError(f"'{run}' has no complete checkpoint yet; try again after its first")
    found: list[Candidate] = []
    for checkpoint in listed if every else listed[-1:]:
        try:
            check_readable(checkpoint.path)
            found.append(
                Candidate(checkpoint.path.name, checkpoint.path, fingerprint(checkpoint.path))
            )
        except (ModelFileError, OSError) as error:
            if not is_gone(checkpoint.path):
                raise ModelFileError(
                    f"checkpoint {checkpoint.path.name} cannot be read: {error}. Remove its folder, "
                    f"or evaluate the others one by one: graft eval {run}/checkpoints/NAME"
                ) from error
            say(f"{checkpoint.path.name} was deleted meanwhile; skipped")
    if not found:
        raise ConfigError(f"the checkpoints of '{run}' were deleted meanwhile; try again")
    return found


def is_gone(path: Path, patience: float = 1.0) -> bool:
    """Whether a checkpoint that was listed has been deleted: file by file, so it may take a moment."""
    waited_until = time.monotonic() + patience
    while path.exists():
        if time.monotonic() > waited_until:
            return False
        time.sleep(0.05)
    return True


def check_readable(path: Path) -> None:
    """Complain about files that are missing, cut off or of an unknown kind; weights are not read."""
    if path.suffix == ".gguf":
        open_gguf(path)
        return
    shape_of(read_config(path), path / "config.json")
    files = set(path.glob("*.safetensors"))
    if (path / INDEX).exists():
        files |= {path / shard for shard in read_json(path / INDEX).get("weight_map", {}).values()}
    if not any(file.name.startswith("model") for file in files):
        raise ModelFileError(f"'{path}' holds no model*.safetensors; save or download it again")
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):  # reads the header, and that the file is as long
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"'{file}' is not a whole safetensors file ({error}); save or download it again"
            ) from error


def fingerprint(path: Path) -> str:
    """What tells these weights from others of the same name, wherever the folder is moved to.

    A checkpoint's state holds the run's clock, which no second run repeats. Of other models the
    files' sizes and times have to do: they are too large to be read for this.
    """
    if (path / "state.json").is_file():
        seen = (path / "state.json").read_bytes()
    else:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        seen = json.dumps(stats).encode()
    return blake2b(seen, digest_size=8).hexdigest()


def _check_sets(asked: Evaluation, model: Candidate) -> None:
    tokenizer = load_tokenizer(asked.config, model.path)
    chat = Chat(tokenizer, asked.config.model.chat_template or None)
    for tasks in asked.sets:
        [first] = held_out_tasks(tasks.env, 1)
        pose_one(tasks, first, chat, asked.config.rollout.max_turns)


def fill(
    asked: Evaluation, found: Sequence[Candidate], ledger: Ledger, say: Callable[[str], None]
) -> Table:
    """Compute every cell that the ledger lacks, oldest checkpoint first: it is the next to go."""
    settings = {tasks.label: asked.settings(tasks) for tasks in asked.sets}
    bench = Bench(asked)
    try:
        for model in found:
            lacking = [
                tasks
                for tasks in asked.sets
                if not ledger.find(tasks.label, settings[tasks.label], model.name, model.weights)
            ]
            if lacking and not bench.mount(model):
                say(f"{model.name} was deleted meanwhile; skipped")
                continue
            for tasks in lacking:
                cell = bench.measure(model, tasks, settings[tasks.label], say)
                with out_of_disk(ledger.path.parent):
                    ledger.append(cell)
                say(f"{model.name} on {tasks.label}: {cell.reward:.3f} in {cell.seconds:.1f} s")
    finally:
        bench.close()
    return to_table(asked, settings, found, ledger)


class Bench:
    """Holds one assembled model at a time; the next one's weights replace it in place."""

    def __init__(self, asked: Evaluation) -> None:
        self.asked = asked
        self.parts: Parts | None = None
        self.mounted = 0

    def mount(self, model: Candidate) -> bool:
        """Make this the model that is measured; False if it is no longer there."""
        config = self.asked.config
        try:
            if self.parts is None:
                self.parts = assemble(config, weights=model.path)
                return True
            parts = self.parts
            policy = load_policy(config, model.path, parts.tokenizer)
            if parts.actions is not None:
                policy = with_actions(
                    policy, parts.actions, model.path, config.actions.init_from_base
                )
        except (ModelFileError, OSError):
            if is_gone(model.path):
                return False
            raise
        with torch.no_grad():
            parts.policy.load_state_dict(policy.state_dict())
        self.mounted += 1
        parts.engine.load(None, version=self.mounted)
        return True

    def measure(
        self,
        model: Candidate,
        tasks: TaskSet,
        settings: dict[str, Any],
        say: Callable[[str], None],
    ) -> Cell:
        """One cell. If nothing came to its end, a tool or environment is down: that is no score."""
        assert self.parts is not None, "mount() comes first"
        asked, parts = self.asked, self.parts
        started = time.perf_counter()
        score = evaluate(
            held_out_tasks(tasks.env, asked.tasks),
            replace(parts.held_out, make_env=tasks.factory(parts.tokenizer)),
            temperature=asked.temperature,
            samples=asked.samples,
            concurrency=asked.config.rollout.concurrency,
        )
        if is_dead(score.episodes):
            raise RunStopped(
                f"{model.name} on {tasks.label}: no attempt came to its end, and "
                f"{score.failed:.0%} failed, mostly: {commonest_failure(score.episodes)}. Repair the "
                "environment or tool and run the same command again; finished cells are kept"
            )
        if score.failed:
            reason = commonest_failure(score.episodes)
            say(f"{model.name} on {tasks.label}: {score.failed:.0%} failed, mostly: {reason}")
        return Cell.of(
            score,
            time.perf_counter() - started,
            checkpoint=model.name,
            set=tasks.label,
            settings=settings,
            weights=model.weights,
        )

    def close(self) -> None:
        if self.parts is not None:
            self.parts.engine.close()


def to_table(
    asked: Evaluation,
    settings: dict[str, dict[str, Any]],
    found: Sequence[Candidate],
    ledger: Ledger,
) -> Table:
    """All cells of these settings, also of checkpoints that a run has deleted since."""
    now = {model.name: model.weights for model in found}
    rows: dict[str, dict[str, Cell]] = {}
    for label, wanted in settings.items():
        for cell in ledger.under(label, wanted):
            if now.get(cell.checkpoint, cell.weights) == cell.weights:  # not of an older namesake
                rows.setdefault(cell.checkpoint, {}).setdefault(label, cell)
    ordered = {name: rows[name] for name in sorted(rows, key=_place)}
    return Table([tasks.label for tasks in asked.sets], ordered, asked.caption)


def _place(name: str) -> tuple[int, int, str]:
    """Untrained models, then the warm-up, then RL, by step."""
    phase, _, step = name.partition("-")
    with suppress(ValueError):
        return PHASES.index(phase) + 1, int(step), name
    return 0, 0, name
