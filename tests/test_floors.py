"""The house rules about imports: files look downhill, heavy libraries wait until they are needed.

Floors, from the ground: 0 types, protocols, registry, config, other_names, waits, border; 1a text, actions,
data, tools, rewards, envs; 1b algos; 2 models, engine; 3 rollout; 4 train, evaluate; 5 the
rest (cli, doctor, ...).
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "graft"

LOOKS_AT: dict[str, set[str]] = {}
"""Room -> the rooms it may import from. A room is a file or folder directly under graft/."""

VERSION = "graft.__version__"  # a constant: anybody may ask for it
GROUND = {
    "types",
    "protocols",
    "registry",
    "config",
    "other_names",
    "waits",
    "border",
    "__version__",
}
for room in GROUND:
    LOOKS_AT[room] = GROUND
below = set(GROUND)
for room in ("text", "actions", "data", "tools", "rewards", "envs"):  # downhill in this order
    LOOKS_AT[room] = {room} | below
    below |= {room}
NO_TORCH = below.copy()  # floors 0 and 1a
LOOKS_AT["transfer"] = {"transfer"}  # tensors to a device
LOOKS_AT["algos"] = {"algos", "transfer"} | GROUND  # maths of tensors only: nothing of floor 1a
below |= {"algos", "transfer"}
LOOKS_AT["models"] = {"models"} | below
LOOKS_AT["engine"] = {"engine", "models"} | below
below |= {"models", "engine"}
LOOKS_AT["rollout"] = {"rollout"} | below
below |= {"rollout"}
LOOKS_AT["evaluate"] = {"evaluate"} | below
LOOKS_AT["train"] = {"train", "evaluate"} | below  # a run scores itself before and after

HEAVY = {
    "transformers",
    "huggingface_hub",
    "datasets",
    "trl",
    "wandb",
    "tensorboard",
    "gguf",
    "math_verify",
    "ray",
    "vllm",
    "sglang",
    "mcp",
    "pyarrow",
    "reasoning_gym",
    "bm25s",
    "faiss",
    "sentence_transformers",
    "starlette",
    "uvicorn",
    "httpx",
    "msgpack",
    "gymnasium",
    "verifiers",
    "openenv",
    "gem",
}
MORE_THAN_ONE_FILE: dict[str, set[str]] = {
    # old tokenizer files on floor 1a, which may not see models/; GGUF vocabularies in models/; models
    # of families that have no decoder of ours
    "transformers": {
        "graft/models/foreign/files.py",
        "graft/models/gguf.py",
        "graft/text/tokenizer.py",
    },
    # one reads such files, the other writes them
    "gguf": {"graft/models/gguf.py", "graft/models/gguf_write.py"},
    # two servers that have nothing in common: documents for rollouts, pages for people
    "starlette": {"graft/tools/search/server.py", "graft/viewer/server.py"},
    "uvicorn": {"graft/tools/search/server.py", "graft/viewer/server.py"},
    # its files, the types of the values in them, and a file that is written
    "pyarrow": {"graft/data/arrow.py", "graft/data/arrow_values.py", "graft/train/row_file.py"},
}
"""Heavy library -> the files that share it, where one is truly not enough; each with its reason."""


@dataclass(frozen=True)
class Import:
    """One imported module, by the file that asks for it."""

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
            targets = [name if name in modules | {VERSION} else module for name in inner]
        else:
            targets = []
        found.extend(Import(file, target, lazy, types) for target in dict.fromkeys(targets))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guards = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, lazy or is_function, types or (guards and field == "body"))

    visit(ast.parse(source, file), lazy=False, types=False)
    return found


def room_of(module: str) -> str:
    """graft.envs.games.guess -> envs; graft itself is on the top floor."""
    return [*module.split("."), ""][1]


def library_of(target: str) -> str:
    return "tensorboard" if target.startswith("torch.utils.tensorboard") else target.split(".")[0]


def uphill(found: list[Import]) -> list[str]:
    """Imports that look at a room they may not see; the top floor may see everything."""
    faults: list[str] = []
    for one in found:
        room = room_of(one.file.removesuffix(".py").replace("/", "."))
        allowed = LOOKS_AT.get(room)
        if allowed is None or library_of(one.target) != "graft":
            continue
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
    paths = sorted(PACKAGE.rglob("*.py"))
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


def test_files_import_only_from_lower_floors_or_their_own_folder(every_import):
    assert uphill(every_import) == []


def test_floors_0_and_1a_do_not_import_torch(every_import):
    assert early_torch(every_import) == []


def test_heavy_libraries_are_imported_inside_functions(every_import):
    assert early_heavy(every_import) == []


def test_each_heavy_library_is_imported_in_one_file(every_import):
    assert scattered_heavy(every_import) == []


def test_the_exceptions_are_still_needed(every_import):
    shared = {library: set() for library in MORE_THAN_ONE_FILE}
    for one in every_import:
        if library_of(one.target) in shared:
            shared[library_of(one.target)].add(one.file)
    assert shared == MORE_THAN_ONE_FILE


def loaded_after(code: str) -> set[str]:
    """Top-level modules in memory after `code`, in a fresh process."""
    tell = "import json, sys; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_graft_loads_neither_torch_nor_transformers():
    assert not loaded_after("import graft") & {"torch", "transformers"}


def test_importing_all_of_floors_0_and_1a_loads_no_torch_and_nothing_heavy():
    """What the text of a file cannot show: a library that brings torch along."""
    low = [name for name in whole_package() if room_of(name) in NO_TORCH]
    assert low
    loaded = loaded_after("\n".join(f"import {name}" for name in low))
    assert not loaded & (HEAVY | {"torch"})


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


def test_an_import_knows_whether_it_runs_at_once():
    source = (
        "import one\n"
        "class C:\n    import two\n    def f(self):\n        import three\n"
        "if TYPE_CHECKING:\n    import four\nelse:\n    import five\n"
    )
    kinds = {one.target: (one.is_lazy, one.is_for_types) for one in read(source)}
    assert kinds == {
        "one": (False, False),
        "two": (False, False),
        "three": (True, False),
        "four": (False, True),
        "five": (False, False),
    }


@pytest.mark.parametrize(
    ("file", "source", "is_fine"),
    [
        ("graft/types.py", "import graft.config", True),
        ("graft/types.py", "import graft.text", False),
        ("graft/envs/base.py", "import graft.tools.python", True),
        ("graft/tools/python.py", "import graft.envs.base", False),
        ("graft/algos/losses.py", "import graft.types", True),
        ("graft/algos/losses.py", "import graft.text.parse", False),
        ("graft/engine/native/engine.py", "import graft.models.decoder", True),
        ("graft/models/load.py", "import graft.engine.errors", False),
        ("graft/rollout/collect.py", "def f():\n    import graft.train.rl", False),
        ("graft/evaluate/run.py", "import graft.train.rl", False),
        ("graft/train/rl.py", "import graft.cli", False),
        ("graft/train/rl.py", "from graft import make", False),
        ("graft/train/rl.py", "from graft import __version__", True),
        ("graft/cli.py", "import graft.train.rl", True),
        ("graft/__init__.py", "import graft.types", True),
    ],
)
def test_rooms_see_what_lies_below_them(file, source, is_fine):
    assert (uphill(read(source, file)) == []) is is_fine


def test_torch_is_seen_in_low_rooms_only_and_only_when_it_runs():
    assert early_torch(read("from torch import Tensor", "graft/text/chat.py"))
    assert not early_torch(read("def f():\n    import torch", "graft/text/chat.py"))
    assert not early_torch(read("if TYPE_CHECKING:\n    import torch", "graft/text/chat.py"))
    assert not early_torch(read("import torch", "graft/algos/losses.py"))


def test_heavy_libraries_are_seen_at_module_level_and_in_a_second_file():
    eager, lazy = "import transformers.models", "def f():\n    from transformers import AutoConfig"
    assert early_heavy(read(eager))
    assert not early_heavy(read(lazy))
    assert early_heavy(read("from torch.utils.tensorboard import SummaryWriter"))
    assert not scattered_heavy(read(lazy))
    assert scattered_heavy(read(lazy) + read(lazy, "graft/text/chat.py"))
