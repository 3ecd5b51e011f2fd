"""`graft recipes`: the bundled recipes, what each needs, and what of it is missing here.

The header of a recipe says what it trains, how it is started and what it needs:

    # GEM: guess the number with Qwen3-1.7B, REINFORCE with normalised returns.
    # start: torchrun --nproc-per-node 8 -m graft train gem/guess-the-number
    # needs: 8 GPUs of 80 GB
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.config import Config, bundled_recipes, load_config, recipes_folder
from graft.envs import ENVS
from graft.envs.entry import missing

MEMORY = "one-gpu.json"
"""What `graft plan` says about each recipe on one GPU, written by scripts/recipe_memory.py: torch would take
seconds to be imported."""

_FIELD = re.compile(r"(start|needs): +(.+)")
_GPUS = re.compile(r"(\d+) GPUs?\b")
_VARIABLE = re.compile(r"\$([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True, slots=True)
class RecipeHeader:
    """The comment at the top of a recipe."""

    title: str
    start: str
    needs: str
    notes: str = ""

    @property
    def num_gpus(self) -> int:
        found = _GPUS.search(self.needs)
        return int(found[1]) if found else 0


def read_header(text: str) -> RecipeHeader:
    """
    >>> read_header("# A toy.\\n# start: graft train toy\\n# needs: a CPU\\nrun: {}\\n").start
    'graft train toy'
    """
    fields = {"start": "", "needs": ""}
    free: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        content = line.lstrip("#").strip()
        if found := _FIELD.fullmatch(content):
            fields[found[1]] = found[2]
        else:
            free.append(content)
    title, *notes = free or [""]
    return RecipeHeader(title, notes="\n".join(notes).strip("\n"), **fields)


def list_recipes(pattern: str = "") -> list[dict[str, Any]]:
    """A row per bundled recipe whose name contains `pattern`, ignoring case; its own name: that one."""
    known, memory = bundled_recipes(), json.loads((recipes_folder() / MEMORY).read_text())
    wanted = [pattern] if pattern in known else [n for n in known if pattern.lower() in n.lower()]
    rows: list[dict[str, Any]] = []
    for name in wanted:
        path = known[name]
        header = read_header(path.read_text())
        absent = list(_missing(header, load_config(path)))
        rows.append(
            {
                "name": name,
                "trains": header.title,
                "start": header.start,
                "needs": header.needs,
                "notes": header.notes,
                "can_run": not absent,
                "missing": absent,
                "memory": memory.get(name),  # None: of a file that was added to the folder
            }
        )
    return rows


def _missing(header: RecipeHeader, config: Config) -> Iterator[str]:
    """What this machine lacks. Models and datasets of the hub are downloaded, so they do not count."""
    if header.num_gpus > (here := _gpus_here() if header.num_gpus else 0):
        yield f"{header.num_gpus} GPU{'s' * (header.num_gpus > 1)} ({here} here)"
    for name in _VARIABLE.findall(header.needs):
        if not os.environ.get(name):
            yield f"${name} is not set"
    used = {item.env for item in (*config.task.envs, *config.held_out_envs)}
    for env in sorted(used):
        if entry := ENVS.get(env):
            needs = tuple(need for need in entry.needs if not need.startswith("data:"))
            if lacking := missing(entry._replace(needs=needs)):
                yield lacking
    yield from _absent_files(config)


def _absent_files(config: Config) -> Iterator[str]:
    """Files that the recipe names, without those that are elsewhere by design (names on the hub)."""
    from graft.data.location import parse_location
    from graft.models.io.hub_names import split_name
    from graft.train.teachers.paths import teacher_paths

    for model in (config.model.path, *teacher_paths(config).values()):
        if model and not Path(model).exists() and split_name(model) is None:
            yield f"the model {model}"
    named = [config.task.args.get("data"), config.task.eval_args.get("data")]
    named += [config.sft.data, config.distill.data]
    for data in (text for text in named if text and isinstance(text, str)):
        location = parse_location(data)
        if not location.is_hub and not Path(location.path).exists():
            yield f"the file {location.path}"


def _gpus_here() -> int:
    """Count device files: torch takes seconds to be imported. It is asked about what is not NVIDIA's."""
    if any(Path(other).exists() for other in ("/dev/kfd", "/dev/dxg")):
        import torch

        return torch.cuda.device_count()
    count = len([*Path("/dev").glob("nvidia[0-9]*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    named = [name for name in visible.split(",") if name.strip() and not name.startswith("-")]
    return min(count, len(named))


def table(rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """The rows as lines of plain text; a single recipe with everything that its header says."""
    if not rows:
        yield "no bundled recipe has this text in its name; `graft recipes` lists all"
        return
    if len(rows) == 1:
        yield from _card(rows[0])
        return
    width = max(len(row["name"]) for row in rows)
    wide = max(len("GB of 1 GPU"), *(len(_gpus_for(row["memory"])) for row in rows))
    yield f"{'name':<{width}}  here  {'GB of 1 GPU':<{wide}}  needs"
    for row in rows:
        here, gpus = "yes" if row["can_run"] else "no", _gpus_for(row["memory"])
        yield f"{row['name']:<{width}}  {here:<4}  {gpus:<{wide}}  {row['needs']}"
    ready = sum(row["can_run"] for row in rows)
    yield f"{len(rows)} recipes, {ready} can run here; `graft recipes NAME` shows how one is started"


def _gpus_for(memory: dict[str, Any] | None) -> str:
    """
    >>> _gpus_for({"least": 27.9, "fits": [48, 80, 141]}), _gpus_for({"least": 156.1, "fits": []})
    ('48 80 141', 'needs 156.1')
    """
    if memory is None:
        return "graft plan"
    if "after" in memory:
        return f"see {memory['after']}"
    return " ".join(map(str, memory["fits"])) or f"needs {memory['least']}"


def _on_one_gpu(memory: dict[str, Any]) -> str:
    """
    >>> _on_one_gpu({"least": 27.9, "fits": [48, 80], "at_once": 0.5})
    'at least 27.9 GB; fits 48, 80 GB, and 48 GB have room for 50% of the attempts of a step at a time'
    """
    if "after" in memory:
        return f"known when {memory['after']} exists: graft plan"
    sizes = memory["fits"]
    if not sizes:
        return f"at least {memory['least']} GB, more than one GPU has"
    room = (
        f"{sizes[0]} GB have room for {memory['at_once']:.0%} of the attempts of a step at a time"
    )
    return f"at least {memory['least']} GB; fits {', '.join(map(str, sizes))} GB, and {room}"


def _card(row: dict[str, Any]) -> Iterator[str]:
    yield row["name"]
    yield f"  {row['trains']}"
    yield f"  start    {row['start']}"
    yield f"  needs    {row['needs']}"
    if row["memory"] is not None:
        yield f"  one GPU  {_on_one_gpu(row['memory'])}"
    yield f"  missing  {'; '.join(row['missing']) or 'nothing'}"
    for line in row["notes"].splitlines():
        yield f"  {line}"
