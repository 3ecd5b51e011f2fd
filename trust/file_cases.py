"""Hostile files by seed: runs, recipes, states, tables of rows, GGUF files, models, tokenizers, templates.

A case is a function `(folder, rng, base) -> commands`: it writes files into an empty folder and says which
commands of graft open them there. `base` holds a whole run of a small model, `run/`, to start from.
Code in these files would write the file CANARY.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

CANARY = "canary"
"""Written by the code of a hostile file, in the folder of its case."""
CODE = f"open({CANARY!r}, 'w').write('code ran')"
MODULE = f"{CODE}\ndef __getattr__(name):\n    {CODE}\n    raise AttributeError(name)\n"

Command = list[str]


@dataclass(frozen=True)
class FileCase:
    """One attack: `make` writes the files and returns the commands that open them."""

    group: str
    name: str
    variant: Any
    make: Callable[[Path, Random, Path, Any], list[Command]]


KINDS: list[list[FileCase]] = []
"""The variants of each kind of attack."""


def case(
    group: str, variants: Sequence[Any] = (None,)
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a kind of attack, with one case for each variant."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        name = make.__name__
        KINDS.append(
            [FileCase(group, f"{name} {n}", variant, make) for n, variant in enumerate(variants)]
        )
        return make

    return add


def chosen(count: int, seed: int) -> Iterator[tuple[FileCase, Random]]:
    """`count` cases, one of each kind in turn; after the last variant they begin again, with other draws."""
    rng = Random(seed)
    kinds = [rng.sample(kind, len(kind)) for kind in KINDS]
    order = [
        kind[turn] for turn in range(max(map(len, kinds))) for kind in kinds if turn < len(kind)
    ]
    for number in range(count):
        yield order[number % len(order)], Random(f"{seed} {number}")


class Payload:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (CODE,))


def evil(folder: Path) -> None:
    (folder / "evil.py").write_text(MODULE)


def run_copy(folder: Path, base: Path, changes: dict[str, Any] | None = None) -> Path:
    """The run of `base` as a download: no signature of this user; with keys of its config.yaml changed."""
    import yaml

    target = folder / "theirs"
    shutil.copytree(base / "run", target)
    (target / "config.yaml.sig").unlink(missing_ok=True)
    if changes:
        config = yaml.safe_load((target / "config.yaml").read_text())
        for key, value in changes.items():
            section, _, name = key.partition(".")
            config[section][name] = value
        (target / "config.yaml").write_text(yaml.safe_dump(config))
    return target


def checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def lookers(run: str) -> list[Command]:
    """Every command that looks at a run."""
    return [
        ["eval", run, "--tasks", "1"],
        ["rollout", run],
        ["replay", run, "--step", "1"],
        ["doctor", f"{run}/config.yaml"],
        ["plan", f"{run}/config.yaml", "--no-probe"],
        ["export", run, "--out", "exported"],
        ["report", run, "--out", "report.html"],
        ["runs", "."],
        ["generate", run, "--prompt", "1+1=", "--max-tokens", "2"],
        ["data", "sample", run, "calculator", "--out", "rows.jsonl", "--n", "1", "--samples", "1"],
    ]


def some(rng: Random, commands: list[Command], most: int = 2) -> list[Command]:
    return rng.sample(commands, min(most, len(commands)))


# runs and recipes that name code


NAMED: list[dict[str, Any]] = [
    {"task.env": "evil:Env"},
    {"task.env": [{"id": "evil:Env"}]},
    {"task.env": "subprocess:Popen", "task.args": {"args": ["touch", CANARY]}},
    {"task.env": "os:system", "task.args": {"command": f"touch {CANARY}"}},
    {"task.env": "builtins:exec"},
    {"task.env": "graft.registry:load", "task.args": {"path": "evil:Env"}},
    {"task.reward": "evil:reward"},
    {"task.reward": [{"evil:Grader": {"a": 1}}]},
    {"task.wrappers": ["evil:wrap"]},
    {"task.wrappers": [{"tools": {"tools": ["evil:tool"]}}]},
    {"task.wrappers": [{"tools": {"tools": [{"mcp": ["touch", CANARY]}]}}]},
    {
        "task.wrappers": [
            {"tools": {"tools": [{"mcp": {"mcpServers": {"a": {"command": "touch"}}}}]}}
        ]
    },
    {"task.wrappers": [{"python_tool": {"sandbox": "none"}}]},
    {"eval.env": "evil:Env"},
    {"algo.loss": "evil:loss"},
    {"algo.credit": ["evil:credit"]},
    {"algo.name": "evil:preset"},
    {"rollout.branch": "evil:branch"},
    {"engine.name": "evil:Engine"},
    {"run.trackers": ["evil:Tracker"]},
    {"model.chat_template": "evil.py"},
    {"actions.file": "evil.yaml"},
]


@case("runs", NAMED)
def run_that_names_code(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run_copy(folder, base, variant)
    evil(folder)
    evil(folder / "theirs")
    (folder / "evil.yaml").write_text("syntax: evil:syntax\ntools: []\n")
    return some(rng, lookers("theirs"), 3)


@case("recipes", NAMED)
def recipe_that_names_code(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base, variant)
    (run / "config.yaml").rename(folder / "recipe.yaml")
    evil(folder)
    model = str(checkpoint(run))
    on = ["--recipe", "recipe.yaml"]
    return [
        ["doctor", "recipe.yaml"],
        ["plan", "recipe.yaml", "--no-probe"],
        ["rollout", model, *on],
    ]


@case("runs", range(6))
def forged_signature(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base, {"task.env": "evil:Env"})
    evil(folder)
    given = [rng.randbytes(32).hex(), "", "0" * 64, "ü" * 50, "a" * 10_000_000]
    own = (base / "run" / "config.yaml.sig").read_text()  # of another text, by the right key
    (run / "config.yaml.sig").write_text([*given, own][variant])
    return [["eval", "theirs", "--tasks", "1"]]


@case("runs", range(4))
def environment_variables(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    """A run that would send a variable away."""
    url = "http://127.0.0.1:9/${oc.env:HOME}"
    changes = [
        {"task.reward": {"judge": {"url": url}}},
        {"task.wrappers": [{"tools": {"tools": [{"mcp": url}]}}]},
        {"run.name": "${oc.decode:'${oc.env:HOME}'}"},
        {"model.chat_template": "{{ '${oc.env:PATH}' }}"},
    ]
    run_copy(folder, base, changes[variant])
    return some(rng, lookers("theirs")[:5])


@case("runs", range(8))
def links_out_of_the_folder(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    name = rng.choice(["config.yaml", "metrics.jsonl", "summary.json", "episodes", "checkpoints"])
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(
        rng.choice(["/dev/zero", "/etc/passwd", "/proc/self/mem", "/", "loop", str(run)])
    )
    (run / "loop").symlink_to("loop")
    return some(
        rng, [["runs", "."], ["report", "theirs", "--out", "r.html"], *lookers("theirs")[:3]]
    )


@case("runs", range(7))
def logs_without_end(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    deep = rng.randrange(10_000, 200_000)
    lines = [
        lambda: b"[" * deep,
        lambda: b'{"step":' * deep,
        lambda: b'{"step": 1, "x": "' + b"a" * 200_000_000,
        lambda: b'{"step": ' + b"9" * 100_000 + b', "phase": "rl"}\n',
        lambda: b'{"step": 1e999, "phase": "rl", "loss": NaN}\n' * 1000,
        lambda: b'{"step": -1, "phase": "\\ud800", "loss": "x"}\n' * 1000,
        lambda: b"\0" * 1_000_000,
    ]
    files = ["metrics.jsonl", "alarms.jsonl", "summary.json", "stopped.json", "changes.jsonl"]
    (run / rng.choice([*files, "episodes/step_000001.jsonl"])).write_bytes(lines[variant]())
    return [["runs", "."], ["report", "theirs", "--out", "r.html"]]


# states of a trainer


@case("states")
def pickled_state(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    """The state as older versions wrote it."""
    run = run_copy(folder, base)
    place = checkpoint(run)
    shutil.rmtree(place / "trainer")
    (place / "trainer").mkdir()
    (place / "trainer" / ".metadata").write_bytes(pickle.dumps(Payload()))
    (place / "trainer.pt").write_bytes(pickle.dumps(Payload()))
    own = base / "recipe.yaml"
    train = ["train", str(own), "run.dir=.", "run.name=theirs", "train.steps=3"]
    return [["replay", "theirs", "--step", "2"], train]


@case("states", range(8))
def damaged_state(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    place = checkpoint(run)
    parts = ["state.json", "trainer/state.json", "trainer/state.safetensors"]
    parts += ["trainer/part-00000.safetensors"]
    target = place / rng.choice(parts)
    whole = target.read_bytes()
    damaged = [
        lambda: b"",
        lambda: whole[: len(whole) // 2],
        lambda: b"[" * 100_000,
        lambda: struct.pack("<Q", 1 << 62) + b"{}",
        lambda: struct.pack("<Q", 90_000_000) + b" " * 1000,
        lambda: json.dumps(
            {"steps": "x", "random": {"python": [3, ["a"], None], "numpy": [1]}}
        ).encode(),
        lambda: pickle.dumps(Payload()),
        lambda: bytes(rng.randrange(256) for _ in range(5000)),
    ]
    target.write_bytes(damaged[variant]())
    own = base / "recipe.yaml"
    train = ["train", str(own), "run.dir=.", "run.name=theirs", "train.steps=3"]
    return some(rng, [["replay", "theirs", "--step", "2"], train], 1)


@case("states")
def pickled_weights(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    place = checkpoint(run)
    (place / "model.safetensors").unlink()
    payload = pickle.dumps(Payload())
    name = rng.choice(["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.safetensors"])
    (place / name).write_bytes(payload)
    verl = folder / "verl"
    shutil.copytree(place, verl)
    (verl / "model_world_size_1_rank_0.pt").write_bytes(payload)
    return [
        ["generate", "theirs", "--prompt", "1+1="],
        ["export", "--from-verl", "verl", "--out", "exported"],
    ]


# recipes that grow


def aliases(rng: Random) -> str:
    """Billion laughs."""
    width, depth = rng.randrange(5, 12), rng.randrange(8, 40)
    lines = ["a0: &a0 [lol, lol]"]
    for level in range(1, depth):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def interpolations(rng: Random) -> str:
    width, depth = rng.randrange(2, 10), rng.randrange(20, 60)
    lines = ["a0: lolololololol"]
    for level in range(1, depth):
        lines.append(f"a{level}: '" + f"${{a{level - 1}}}" * width + "'")
    return "\n".join(lines)


RECIPES: list[Callable[[Random], str]] = [
    aliases,
    interpolations,
    lambda rng: "a: " + "[" * rng.randrange(1000, 100_000),
    lambda rng: "a: " + "{b: " * rng.randrange(1000, 50_000),
    lambda rng: "\n".join(" " * n + "a:" for n in range(rng.randrange(1000, 5000))),
    lambda rng: f'model: !!python/object/apply:exec ["{CODE}"]',
    lambda rng: "model: !!python/name:os.system",
    lambda rng: "model: &a {path: *a}",
    lambda rng: "task: {env: '" + "${task.env}" * rng.randrange(1, 1000) + "'}",
    lambda rng: "run: {name: '${run.dir}', dir: '${run.name}'}",
    lambda rng: "model: {path: '" + "a" * 50_000_000 + "'}",
    lambda rng: "\n".join(f"k{n}: 1" for n in range(300_000)),
    lambda rng: "train: {steps: " + "9" * 10_000 + "}",
    lambda rng: "train: {steps: 0x" + "f" * rng.randrange(5000, 500_000) + "}",
    lambda rng: "train: {steps: " + ":".join(["59"] * rng.randrange(2000, 50_000)) + "}",
    lambda rng: 'task: {env: "ev\\x1b[2J\\x1b]0;owned\\x07\\u202eil:Env"}',
    lambda rng: "train: {steps: .inf, lr: .nan}",
    lambda rng: "model: {shape: {width: 1e18, layers: 1e18}}\ntask: {env: calculator}",
    lambda rng: (
        "model: {alphabet: '', shape: {width: 1000000, layers: 100000}}\ntask: {env: calculator}"
    ),
    lambda rng: "\0\0\0",
    lambda rng: "\ufeff" + "? " * rng.randrange(1000, 100_000),
    lambda rng: "a: " + "!!binary " + "A" * 40_000_000,
    lambda rng: "<<: " * 3000,
    lambda rng: "run: {name: ../../../../tmp/escaped, dir: /proc}\ntask: {env: calculator}",
]


@case("recipes", RECIPES)
def growing_recipe(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    (folder / "recipe.yaml").write_text(variant(rng), encoding="utf-8")
    return some(
        rng, [["config", "recipe.yaml"], ["doctor", "recipe.yaml"], ["plan", "recipe.yaml"]]
    )


@case("recipes", RECIPES)
def growing_config_of_a_run(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    text = variant(rng)
    if rng.random() < 0.3:
        text = (run / "config.yaml").read_text() + "\n" + text
    (run / "config.yaml").write_text(text, encoding="utf-8")
    return [
        ["runs", "."],
        ["report", "theirs", "--out", "r.html"],
        *some(rng, lookers("theirs"), 1),
    ]


# rows


def wide_parquet(file: Path, rng: Random) -> None:
    """Equal values: a megabyte becomes gigabytes."""
    import pyarrow
    import pyarrow.parquet

    rows, length = rng.choice([(8_000_000, 1000), (200, 20_000_000), (2_000_000, 4000)])
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 1000 if rows < 1000 else [0] * rows, pyarrow.int32()),
        pyarrow.array(["a" * length]),
    )
    table = pyarrow.table({"question": text[:rows], "answer": text[:rows]})
    pyarrow.parquet.write_table(
        table, file, compression="zstd", row_group_size=rng.choice([rows, 100_000_000])
    )


def compressed_parquet(file: Path, rng: Random) -> None:
    """One group of plain pages that compress 1000 to 1."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=False, write_statistics=False
    ) as writer:
        text = "b" * 1_000_000
        batch = pyarrow.record_batch([pyarrow.array([text] * 100)] * 2, schema)
        for _ in range(rng.randrange(8, 16)):
            writer.write_batch(batch)


def nested_parquet(file: Path, rng: Random) -> None:
    import pyarrow
    import pyarrow.parquet

    kind: Any = pyarrow.int32()
    value: Any = 1
    for _ in range(rng.randrange(50, 150)):
        kind, value = pyarrow.list_(kind), [value]
    table = pyarrow.table({"prompt": pyarrow.array([value], kind)})
    pyarrow.parquet.write_table(table, file)


def damaged_parquet(file: Path, rng: Random) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"question": ["a", "b"] * 500, "answer": ["c", "d"] * 500})
    pyarrow.parquet.write_table(table, file)
    whole = bytearray(file.read_bytes())
    for _ in range(rng.randrange(1, 30)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    file.write_bytes(whole)


PARQUET = [wide_parquet, compressed_parquet, nested_parquet, damaged_parquet]


@case("rows", PARQUET)
def parquet(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    variant(folder / "rows.parquet", rng)
    return rows_openers("rows.parquet", rng)


def rows_openers(name: str, rng: Random) -> list[Command]:
    train = ["sft", "quickstart", f"sft.data={name}", "task.env=", "sft.steps=1", "run.dir=out"]
    return some(rng, [["data", "show", name], train], 1)


@case("rows", range(3))
def arrow(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    import pyarrow

    file = folder / "rows.arrow"
    table = pyarrow.table({"question": ["a" * 1000] * 50_000, "answer": ["c"] * 50_000})
    codec = [None, "zstd", "lz4"][variant]
    with pyarrow.ipc.new_file(
        file, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        repeats = 40 if codec else 1
        for batch in table.to_batches() * repeats:
            writer.write_batch(batch)
    whole = bytearray(file.read_bytes())
    for _ in range(rng.randrange(0, 20)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    file.write_bytes(whole)
    return rows_openers("rows.arrow", rng)


@case("rows", range(10))
def text_rows(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    deep = rng.randrange(1000, 500_000)
    good = b'{"question": "1+1", "answer": "2"}\n'
    contents = [
        lambda: b'{"question": "' + b"a" * 300_000_000,
        lambda: b"[" * deep + b"]" * deep + b"\n",
        lambda: good + b'{"question": ' * deep,
        lambda: b'{"question": "x", "answer": ' + b"9" * deep + b"}\n",
        lambda: (
            b'{"question": "x", "answer": 1e400}\n' + b'{"question": "\\ud800", "answer": "x"}\n'
        ),
        lambda: b"\xff\xfe" * 1000,
        lambda: b"\0" * 10_000_000,
        lambda: gzip.compress(good * 1_000_000),
        lambda: good * 10 + b'{"messages": ' + b'[{"role": "user", "content": ' * deep,
        lambda: b'{"' + b'a": 1, "' * 1_000_000 + b'": 1}\n',
    ]
    ending = rng.choice(["jsonl", "json", "csv"])
    (folder / f"rows.{ending}").write_bytes(contents[variant]())
    return rows_openers(f"rows.{ending}", rng)


@case("rows", range(4))
def folders_of_rows(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    rows = folder / "rows"
    rows.mkdir()
    match variant:
        case 0:
            (rows / "train.jsonl").symlink_to("/dev/zero")
        case 1:
            (rows / "again").symlink_to(rows)
            (rows / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
        case 2:
            os.mkfifo(rows / "train.jsonl")
        case _:
            inner = rows
            for _ in range(200):
                inner /= "d"
                inner.mkdir()
            (inner / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return [["data", "show", "rows"]]


# GGUF


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_file(listed: list[bytes], sizes: list[bytes] | None = None, **counts: int) -> bytes:
    """A file; `counts` are what its head says instead of the truth."""
    sizes = sizes or []
    tensors, entries = counts.get("tensors", len(sizes)), counts.get("entries", len(listed))
    head = b"GGUF" + struct.pack("<IQQ", counts.get("version", 3), tensors, entries)
    return head + b"".join(listed) + b"".join(sizes) + b"\0" * 64


def entry(key: str, kind: int, value: bytes) -> bytes:
    return gguf_text(key.encode()) + struct.pack("<I", kind) + value


ARCHITECTURE = entry("general.architecture", 8, gguf_text(b"llama"))
U32, TEXT, ARRAY, U64 = 4, 8, 9, 10


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return gguf_text(name) + sizes + struct.pack("<IQ", kind, offset)


def gguf_cases(rng: Random) -> list[Callable[[], bytes]]:
    many = rng.randrange(1_000_000, 4_000_000)
    nested = struct.pack("<IQ", ARRAY, 1) * rng.randrange(100, 100_000) + struct.pack("<IQ", U32, 0)
    return [
        lambda: gguf_file([ARCHITECTURE], entries=1 << 62),
        lambda: gguf_file([ARCHITECTURE], tensors=1 << 62),
        lambda: gguf_file([ARCHITECTURE], tensors=1 << 31),
        lambda: gguf_file([struct.pack("<Q", 1 << 62) + b"a"]),
        lambda: gguf_file([struct.pack("<Q", (1 << 64) - 1) + b"a"]),
        lambda: gguf_file([entry("a", TEXT, struct.pack("<Q", 1 << 40) + b"x")]),
        lambda: gguf_file([ARCHITECTURE, entry("a", ARRAY, struct.pack("<IQ", U32, 1 << 60))]),
        lambda: gguf_file([ARCHITECTURE, entry("a", ARRAY, struct.pack("<IQ", TEXT, 1 << 40))]),
        lambda: gguf_file(
            [ARCHITECTURE, entry("a", ARRAY, struct.pack("<IQ", TEXT, many) + b"\0" * 8 * many)]
        ),
        lambda: gguf_file([ARCHITECTURE, entry("a", ARRAY, nested)]),
        lambda: gguf_file([ARCHITECTURE, entry("general.alignment", U32, struct.pack("<I", 0))]),
        lambda: gguf_file(
            [ARCHITECTURE, entry("general.alignment", U32, struct.pack("<I", 1 << 31))]
        ),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"token_embd.weight", [1 << 40, 1 << 40])]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"token_embd.weight", [4, 4], offset=1 << 60)]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"a", [2] * 1000)]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"a", [4], kind=9999)]),
        lambda: gguf_file([ARCHITECTURE], [tensor(b"a", [])] * 2),
        lambda: gguf_file([entry("general.architecture", U32, struct.pack("<I", 3))]),
        lambda: gguf_file(
            [ARCHITECTURE, entry("llama.block_count", U64, struct.pack("<Q", 1 << 60))]
        ),
        lambda: gguf_file([ARCHITECTURE, ARCHITECTURE]),
        lambda: gguf_file([entry("a" * 100, 77, b"")]),
        lambda: gguf_file([], version=99),
        lambda: b"GGUF",
        lambda: b"",
        lambda: b"GGUF" + rng.randbytes(1000),
        lambda: gguf_file([entry(f"k{n}", U32, struct.pack("<I", n)) for n in range(200_000)]),
    ]


@case("gguf", range(26))
def gguf(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    (folder / "model.gguf").write_bytes(gguf_cases(rng)[variant]())
    commands = [
        ["generate", "model.gguf", "--prompt", "1+1="],
        ["export", "model.gguf", "--out", "exported"],
        ["eval", "model.gguf", "--on", "calculator", "--tasks", "1"],
    ]
    return some(rng, commands, 1)


@case("gguf", range(6))
def damaged_gguf(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    """A whole file with some bytes changed."""
    whole = bytearray((base / "model.gguf").read_bytes())
    for _ in range(rng.randrange(1, 10)):
        place = rng.randrange(min(len(whole), rng.choice([100, 2000, len(whole)])))
        whole[place] = rng.randrange(256)
    (folder / "model.gguf").write_bytes(whole)
    return [["generate", "model.gguf", "--prompt", "1+1=", "--max-tokens", "2"]]


# models


def config_changes(rng: Random) -> list[Any]:
    huge = 10 ** rng.randrange(9, 30)
    keys = ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "head_dim"]
    keys += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]
    values = [huge, -1, 0, 1e308, "9" * 50, [1] * 1000, None, {}, True, float("nan")]
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    return [
        {rng.choice(keys): rng.choice(values)},
        {rng.choice(keys): huge},
        {"num_hidden_layers": huge, "layer_types": ["full_attention"] * 10},
        {"auto_map": code},
        {"model_type": "evil", "auto_map": code, "architectures": ["Evil"]},
        {"model_type": "../../evil"},
        {"model_type": "gpt2", "n_layer": 10**6, "n_embd": 10**6},
        {"rope_scaling": {"rope_type": "yarn", "factor": huge}},
        {"rope_theta": "x" * 1_000_000},
        {"quantization_config": {"quant_method": "evil", "load_in_8bit": True}},
    ]


@case("models", range(8))
def config_of_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    evil(folder)
    evil(place)
    config = json.loads((place / "config.json").read_text())
    texts = [
        lambda: json.dumps(config | rng.choice(config_changes(rng))),
        lambda: json.dumps(config | rng.choice(config_changes(rng))),
        lambda: json.dumps(config | rng.choice(config_changes(rng))),
        lambda: "[" * rng.randrange(1000, 500_000),
        lambda: '{"a":' * rng.randrange(1000, 500_000),
        lambda: '{"hidden_size": ' + "9" * 100_000 + "}",
        lambda: json.dumps(config)[:-1] + ', "x": "' + "a" * 200_000_000 + '"}',
        lambda: json.dumps(config)[:-1] + ', "x": [' + "0," * 40_000_000 + "0]}",
    ]
    (place / "config.json").write_text(texts[variant]())
    return [rng.choice(model_openers("model"))]


def model_copy(folder: Path, base: Path) -> Path:
    return Path(shutil.copytree(base / "model", folder / "model"))


def model_openers(name: str) -> list[Command]:
    return [
        ["generate", name, "--prompt", "1+1=", "--max-tokens", "2"],
        ["export", name, "--out", "exported"],
        ["eval", name, "--on", "calculator", "--tasks", "1"],
        ["rollout", name, "--env", "calculator"],
    ]


@case("models", range(12))
def tensors_of_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    file = place / "model.safetensors"
    whole = file.read_bytes()
    name = "model.embed_tokens.weight"
    one = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}

    def headed(header: Any, size: int | None = None, data: bytes = b"\0" * 64) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if size is None else size) + text + data

    overlapping = {
        f"t{n}": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for n in range(1000)
    }
    contents = [
        lambda: b"",
        lambda: whole[: len(whole) - 7],
        lambda: struct.pack("<Q", (1 << 64) - 1),
        lambda: headed(b"{}", 1 << 40),
        lambda: headed({name: one}),
        lambda: headed(overlapping),
        lambda: headed({name: {"dtype": "F32", "shape": [-4], "data_offsets": [0, 64]}}),
        lambda: headed({name: {"dtype": "EVIL", "shape": [16], "data_offsets": [0, 64]}}),
        lambda: headed(b'{"a":' * 100_000),
        lambda: headed({"__metadata__": {"x": "y" * 90_000_000}}),
        lambda: headed(
            {
                f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for n in range(600_000)
            }
        ),
        lambda: whole[:8] + bytes(b ^ (rng.random() < 0.01) for b in whole[8:2000]) + whole[2000:],
    ]
    file.write_bytes(contents[variant]())
    return [rng.choice(model_openers("model"))]


@case("models", range(6))
def index_of_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    """Shards that lie elsewhere."""
    place = model_copy(folder, base)
    (place / "model.safetensors").rename(folder / "outside.safetensors")
    places = [
        "../outside.safetensors",
        str(folder / "outside.safetensors"),
        "/etc/passwd",
        "/dev/zero",
    ]
    shard: Any = rng.choice([*places, "", ".", 7, ["a"], None, "a" * 10_000, "\0", "missing"])
    weights = {f"t{n}": shard for n in range(rng.choice([1, 100]))}
    index: Any = rng.choice([{"weight_map": weights}, {"weight_map": [1]}, {"weight_map": 3}, {}])
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return [rng.choice(model_openers("model"))]


@case("models", range(8))
def links_in_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    files = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
    file = place / rng.choice(
        [*files, "tokenizer_config.json", "chat_template.jinja", "actions.json"]
    )
    file.unlink(missing_ok=True)
    file.symlink_to(rng.choice(["/dev/zero", "/proc/self/mem", "loop", "/etc", "/dev/tty"]))
    (place / "loop").symlink_to("loop")
    return [rng.choice(model_openers("model"))]


# tokenizers


def tokenizer_texts(rng: Random, whole: dict[str, Any]) -> list[Callable[[], str]]:
    slow = {
        "type": "Split",
        "pattern": {"Regex": r"(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    worse = {**slow, "pattern": {"Regex": r"(\w+\s?)*\w+#"}}
    words = {f"w{n}": n for n in range(1_500_000)}
    added = [
        {"id": n, "content": f"<{n}>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for n in range(200_000)
    ]  # fmt: skip

    def changed(part: str, value: Any) -> Callable[[], str]:
        return lambda: json.dumps(whole | {part: value})

    doubled = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
    empty = {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}
    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    return [
        changed("pre_tokenizer", rng.choice([slow, worse])),
        changed("pre_tokenizer", {"type": "Sequence", "pretokenizers": [slow] * 20}),
        changed("normalizer", empty),
        changed(
            "normalizer", {"type": "Sequence", "normalizers": [doubled] * rng.randrange(30, 60)}
        ),
        changed("model", {"type": "WordLevel", "vocab": words, "unk_token": "w0"}),
        changed("added_tokens", added),
        changed("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]] * 1000}),
        changed("model", {"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 9}),
        changed("model", {"type": "WordLevel", "vocab": {"a": 4_000_000_000}, "unk_token": "a"}),
        changed("truncation", {"max_length": -1}),
        changed("padding", padding),
        lambda: json.dumps(whole)[:-1] + ', "x": "' + "a" * 300_000_000 + '"}',
        lambda: "[" * rng.randrange(1000, 500_000),
        lambda: '{"version":' * rng.randrange(1000, 500_000),
        lambda: "{}",
        lambda: "null",
        lambda: "",
    ]


@case("tokenizers", range(17))
def tokenizer(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    file = place / "tokenizer.json"
    file.write_text(tokenizer_texts(rng, json.loads(file.read_text()))[variant]())
    prompt = rng.choice(["1+1=", "a" * 40 + "!", "1" * 50])
    return [["generate", "model", "--prompt", prompt, "--max-tokens", "2", "--raw"]]


@case("tokenizers", range(4))
def tokenizer_with_code(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    if rng.random() < 0.7:
        (place / "tokenizer.json").unlink()
    evil(folder)
    (place / "tokenizer.py").write_text(MODULE)
    (place / "evil.py").write_text(MODULE)
    classes = {"AutoTokenizer": ["tokenizer.Evil", "tokenizer.Evil"]}
    config = {
        "tokenizer_class": rng.choice(["Evil", "evil.Evil", "LlamaTokenizer"]),
        "auto_map": classes,
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "tokenizer.model").write_bytes(rng.choice([b"", rng.randbytes(1000), b"\x0a" * 1000]))
    return [rng.choice(model_openers("model"))]


# chat templates


TEMPLATES: list[str] = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format('a') }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ 'a\\na' | indent(1000000000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "{% set ns = namespace(s='a') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 2 ** 1000000000 }}",
    "{{ (10 ** 100000) ** 100000 }}",
    "{{ ([0] * 1000000000) | length }}",
    "{{ range(99999) | list | permutations }}",
    "{{ (range(99999) | batch(1, 0)) | list | length }}",
    "{{ [0] | batch(10000000000, 0) | list }}",
    "{{ [0] | slice(1000000000) | list }}",
    "{{ lipsum(n=1000000) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "{{ self._TemplateReference__context.namespace.__init__.__globals__ }}",
    "{{ ('%s' | attr('__mod__')) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ messages.append(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch canary') }}",
    "{{ strftime_now('%Y' * 100000000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ '" + "(" * 100_000 + "' }}",
    "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "{{ " + "1 + " * 20_000 + "1 }}",
    "{% if a %}" * 2_000,
    "{{ raise_exception('x' * 100000000) }}",
    "{{ 'a' | urlize(10000000000) }}",
    "{{ ('a ' * 1000000) | wordwrap(1) | wordcount }}",
    "{{ ('a' * 200000) | replace('', 'b' * 200000) }}",
    "{{ (('a' * 100000) | list | join('c' * 100000)) | length }}",
    "{{ 'x' | format('a' * 10) }}",
    "{% set x = 'a' * 5000000 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
    "{% set x = 'a' * 5000000 %}{% for i in range(99999) %}{% if x in x + 'b' %}{% endif %}{% endfor %}",
    "{{ [messages] * 90000000 }}",
]


@case("templates", TEMPLATES)
def chat_template(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    text = variant
    if rng.random() < 0.5:
        (place / "chat_template.jinja").write_text(text)
    else:
        file = place / "tokenizer_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(config | {"chat_template": text}))
    return [["generate", "model", "--prompt", "1+1=", "--max-tokens", "2"]]


@case("templates", TEMPLATES[::3])
def chat_template_of_a_run(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run_copy(folder, base, {"model.chat_template": variant, "model.template_args": {}})
    return some(rng, lookers("theirs")[:4], 1)
