"""The house rules about imports: files import from lower floors, heavy libraries are imported late.

Floors, from the ground: 0 types, protocols, registry, config and the like; 1a text, actions, data,
tools, rewards, envs; 1b algos; 2 models, engine; 3 rollout, and gateway above it; 4 train; 5 evaluate,
datagen, replay, planning, cluster, runs; 6 the rest (api, viewer, doctor, commands, cli). Lazy and
type-only imports count like any other, and no two modules import each other, directly or through others.
graft imports none of the packages beside it, which it finds by entry points; they see its floors 0 and 1a,
verl's shards models too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LOOKS_AT: dict[str, set[str]] = {}
"""Room -> the rooms it may import from. A room is a file or folder directly under graft/."""

GROUND = {
    "serving", "types", "protocols", "registry", "spelling", "config", "recipe", "version", "files", "http",
    "deadlines", "tolerances", "user_code", "user_tasks", "trust", "callable_package", "garbage",
    "ours", "plugins", "signatures", "structure",
}  # fmt: skip
for room in GROUND:
    LOOKS_AT[room] = GROUND
below = set(GROUND)
for room in ("text", "actions", "data", "tools", "rewards", "envs"):  # downhill in this order
    LOOKS_AT[room] = {room} | below
    below |= {room}
BESIDE = {
    "graft_sandbox": set(),
    "graft_search": below,
    "graft_interop": below,
    "graft_envs": {"graft_search", "graft_sandbox"} | below,
}
"""Package -> what else it may import from; the sandbox needs the standard library alone."""
for package, others in BESIDE.items():
    LOOKS_AT[package] = {package} | others
NO_TORCH = below | set(BESIDE)  # floors 0 and 1a, and the packages that see them
LOOKS_AT["transfer"] = {"transfer"}  # tensors to a device
LOOKS_AT["row_sums"] = {"row_sums"}  # of tensors
LOOKS_AT["algos"] = {
    "algos",
    "transfer",
    "row_sums",
} | GROUND  # maths of tensors only: nothing of floor 1a
below |= {"algos", "transfer", "row_sums"}
# reads weights, and is imported by `graft export --from-verl` alone
VERL_SHARDS = "graft_interop.verl_shards"
LOOKS_AT[VERL_SHARDS] = {"models"} | below
# each of these may import from those before it
for room in ("models", "engine", "rollout", "gateway", "train"):
    LOOKS_AT[room] = {room} | below
    below |= {room}
for room in ("evaluate", "datagen", "replay", "planning", "cluster", "runs"):  # above train
    LOOKS_AT[room] = {room} | below
    below |= {room}

MAX_FILES = 22
"""Of one folder, `__init__.py` not counted: beyond that a folder holds more than one noun."""

HEAVY = {
    "transformers", "huggingface_hub", "datasets", "trl", "wandb", "tensorboard", "gguf", "math_verify",
    "ray", "vllm", "sglang", "mcp", "pyarrow", "reasoning_gym", "bm25s", "faiss", "sentence_transformers",
    "starlette", "uvicorn", "httptools", "httpx", "msgpack", "gymnasium", "verifiers", "openenv", "gem",
    "skyrl_gym", "verl", "openrlhf", "RL2", "llguidance",
}  # fmt: skip
MORE_THAN_ONE_FILE: dict[str, set[str]] = {
    # old tokenizer files on floor 1a, which may not see models/; models of families that have no decoder
    # of ours
    "transformers": {
        "graft/models/transformers/files.py",
        "graft/text/tokenizer_files.py",
    },
    # two servers that have nothing in common: documents for rollouts, pages for people
    "starlette": {"graft_search/server.py", "graft/viewer/server.py"},
    # its server, and its connections
    "uvicorn": {"graft/serving/connections.py", "graft/serving/listening.py"},
    # its files, the types of the values in them, and a file that is written
    "pyarrow": {
        "graft/data/arrow.py",
        "graft/data/arrow_bounds.py",
        "graft/data/arrow_values.py",
        "graft/datagen/row_file.py",
    },
}
"""Heavy library -> the files that share it, where one is truly not enough; each with its reason."""


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Import:
    """One imported module, by the file that imports it."""

    file: str
    target: str
    is_lazy: bool
    """Inside a function: paid for by the first caller."""
    is_for_types: bool
    """Under `if TYPE_CHECKING`: never runs."""

    def __str__(self) -> str:
        return f"{self.file} imports {self.target}"


def imports(source: str, file: str, modules: set[str]) -> list[Import]:
    """Every import of a file, wherever it stands; `from a import b` is a.b if that is a module."""
    package = file.removesuffix(".py").split("/")[:-1]  # graft/envs/base.py -> graft, envs
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool, types: bool) -> None:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inner = [f"{module}.{alias.name}" for alias in node.names]
            targets = [name if name in modules else module for name in inner]
        else:
            targets = []
        found.extend(Import(file, target, lazy, types) for target in dict.fromkeys(targets))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        guards = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else ():
                if isinstance(child, STATEMENTS):  # expressions hold no imports
                    visit(child, lazy or is_function, types or (guards and name == "body"))

    visit(ast.parse(source, file), lazy=False, types=False)
    return found


def room_of(module: str) -> str:
    """graft.envs.base -> envs, graft_envs.games.guess -> graft_envs; graft itself is on the top floor."""
    if module == VERL_SHARDS:
        return module
    package, *inner = module.split(".")
    return package if package in BESIDE else [*inner, ""][0]


def library_of(target: str) -> str:
    return "tensorboard" if target.startswith("torch.utils.tensorboard") else target.split(".")[0]


def uphill(found: list[Import]) -> list[str]:
    """Imports of a room that is not below; the top floor may import everything."""
    faults: list[str] = []
    for one in found:
        room = room_of(one.file.removesuffix(".py").replace("/", "."))
        allowed = LOOKS_AT.get(room)
        if library_of(one.target) not in ("graft", *BESIDE):
            continue
        if allowed is None:  # the top floor: all of graft
            allowed = set() if library_of(one.target) in BESIDE else {room_of(one.target)}
        if room_of(one.target) not in allowed:
            faults.append(f"{one}, but may only see {', '.join(sorted(allowed))}")
    return faults


def early_torch(found: list[Import]) -> list[str]:
    return [
        str(one)
        for one in found
        if room_of(one.file.removesuffix(".py").replace("/", ".")) in NO_TORCH
        and library_of(one.target) == "torch"
        and not one.is_lazy
        and not one.is_for_types
    ]


def early_heavy(found: list[Import]) -> list[str]:
    return [
        f"{one} when it is itself imported; do so in the function that needs it"
        for one in found
        if library_of(one.target) in HEAVY and not one.is_lazy and not one.is_for_types
    ]


def scattered_heavy(found: list[Import]) -> list[str]:
    files: dict[str, set[str]] = defaultdict(set)
    for one in found:
        if library_of(one.target) in HEAVY and not one.is_for_types:
            files[library_of(one.target)].add(one.file)
    return [
        f"{library} is imported in {', '.join(sorted(where))}; one of them should serve the others"
        for library, where in files.items()
        if len(where) > 1 and where != MORE_THAN_ONE_FILE.get(library)
    ]


def whole_package() -> dict[str, str]:
    """Module name -> its file, relative to the root."""
    paths = sorted(path for name in ("graft", *BESIDE) for path in (ROOT / name).rglob("*.py"))
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths]
    return {
        name.removesuffix(".__init__"): path.relative_to(ROOT).as_posix()
        for name, path in zip(names, paths, strict=True)
    }


@pytest.fixture(scope="module")
def every_import() -> list[Import]:
    files = whole_package()
    assert "graft.types" in files
    return [
        one
        for file in files.values()
        for one in imports((ROOT / file).read_text("utf-8"), file, set(files))
    ]


@pytest.mark.parametrize("faults", [uphill, early_torch, early_heavy, scattered_heavy])
def test_files_import_from_lower_floors_and_heavy_libraries_late_and_in_one_file(
    every_import, faults
):
    assert faults(every_import) == []


def test_the_exceptions_are_still_needed(every_import):
    shared = {library: set() for library in MORE_THAN_ONE_FILE}
    for one in every_import:
        if library_of(one.target) in shared:
            shared[library_of(one.target)].add(one.file)
    assert shared == MORE_THAN_ONE_FILE


def test_no_modules_import_each_other_not_even_late_or_for_types(every_import):
    modules = {file: name for name, file in whole_package().items()}
    graph: dict[str, set[str]] = {name: set() for name in modules.values()}
    for one in every_import:
        if one.target in graph and one.target != modules[one.file]:
            graph[modules[one.file]].add(one.target)
    TopologicalSorter(graph).prepare()  # CycleError has the modules, in their order


def test_no_folder_has_more_files_than_a_reader_can_survey():
    files: dict[str, int] = defaultdict(int)
    for file in whole_package().values():
        files[file.rpartition("/")[0]] += not file.endswith("/__init__.py")
    crowded = {folder: count for folder, count in files.items() if count > MAX_FILES}
    assert crowded == {}


def test_a_class_name_is_defined_once_in_the_package():
    """One name, one thing: a reader who searches for a class finds one definition."""
    texts = {file: (ROOT / file).read_text("utf-8") for file in whole_package().values()}
    written = re.compile(r"^\s*class (\w+)", re.M)  # perhaps in a text: only such files are parsed
    counts = Counter(name for text in texts.values() for name in written.findall(text))
    twice = {name for name, count in counts.items() if count > 1}
    defined = Counter(
        node.name
        for text in texts.values()
        if twice & {*written.findall(text)}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name in twice if defined[name] > 1] == []


def test_graft_and_all_of_floors_0_and_1a_load_no_torch_and_nothing_heavy():
    """In a fresh process, for what the text of a file cannot show: a library that brings torch along."""
    low = [name for name in whole_package() if room_of(name) in NO_TORCH]
    assert low
    code = "\n".join(f"import {name}" for name in ("graft", *low))
    show = "import json, sys; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout.splitlines()[-1])) & (HEAVY | {"torch"})


# the checks themselves, on sources small enough to see


def read(source: str, file: str = "graft/envs/base.py") -> list[Import]:
    return imports(source, file, {"graft", "graft.types", "graft.envs", "graft.envs.games"})


def test_triton_is_imported_by_kernels_alone(every_import):
    files = {one.file for one in every_import if one.target.partition(".")[0] == "triton"}
    assert files and all("/kernels/" in file for file in files), files


def test_an_import_is_found_in_each_of_its_forms():
    forms = {
        "import graft.types": "graft.types",
        "from graft import types": "graft.types",
        "from graft.types import Task": "graft.types",
        "from . import games": "graft.envs.games",
        "from .games import Guess": "graft.envs.games",
        "from .. import types": "graft.types",
        "from graft import make": "graft",
        "try:\n    import a\nexcept ImportError:\n    import b": "a b",
    }
    for source, targets in forms.items():
        assert " ".join(one.target for one in read(source)) == targets, source


def test_imports_at_import_time_in_functions_and_for_types_are_distinguished():
    source = (
        "import one\n"
        "class C:\n    import two\n    def f(self):\n        import three\n"
        "if TYPE_CHECKING:\n    import four\nelse:\n    import five\n"
    )
    kinds = {one.target: (one.is_lazy, one.is_for_types) for one in read(source)}
    plain, lazy, typed = (False, False), (True, False), (False, True)
    assert kinds == {"one": plain, "two": plain, "three": lazy, "four": typed, "five": plain}


@pytest.mark.parametrize(
    ("file", "source", "is_fine"),
    [
        ("graft/types.py", "import graft.config", True),
        ("graft/types.py", "import graft.text", False),
        ("graft/tools/calling.py", "import graft.envs.base", False),
        ("graft/envs/base.py", "import graft_envs.hops", False),
        ("graft/cli.py", "def f():\n    import graft_search", False),
        ("graft_envs/hops/tools.py", "import graft_search", True),
        ("graft_envs/hops/env.py", "import graft.rollout", False),
        ("graft_search/tool.py", "import graft_envs.hops", False),
        ("graft_sandbox/run.py", "import graft.types", False),
        ("graft/algos/masked.py", "import graft.text.parse", False),
        ("graft/engine/native/engine.py", "import graft.models.decoder", True),
        ("graft/rollout/collect.py", "def f():\n    import graft.train.rl", False),
        ("graft/rollout/collect.py", "if TYPE_CHECKING:\n    import graft.train.rl", False),
        ("graft/train/rl.py", "import graft.evaluate.run", False),
        ("graft/evaluate/run.py", "import graft.datagen.row_file", False),
        ("graft/train/rl.py", "from graft import make", False),
        ("graft/cli.py", "import graft.train.rl", True),
    ],
)
def test_rooms_see_what_lies_below_them(file, source, is_fine):
    assert (uphill(read(source, file)) == []) is is_fine


def test_torch_is_seen_in_low_rooms_only_and_only_when_it_runs():
    assert early_torch(read("from torch import Tensor", "graft/text/chat.py"))
    assert not early_torch(read("def f():\n    import torch", "graft/text/chat.py"))
    assert not early_torch(read("if TYPE_CHECKING:\n    import torch", "graft/text/chat.py"))
    assert not early_torch(read("import torch", "graft/algos/masked.py"))


def test_heavy_libraries_are_seen_at_module_level_and_in_a_second_file():
    eager, lazy = "import transformers.models", "def f():\n    from transformers import AutoConfig"
    assert early_heavy(read(eager))
    assert not early_heavy(read(lazy))
    assert early_heavy(read("from torch.utils.tensorboard import SummaryWriter"))
    assert not scattered_heavy(read(lazy))
    assert scattered_heavy(read(lazy) + read(lazy, "graft/text/chat.py"))
