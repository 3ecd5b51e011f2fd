"""Every eos id of generation_config.json ends a sample, and the file survives checkpoints and export."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.config import check
from graft.evaluate.generate import Generator
from graft.files import write_json
from graft.models.decoder import Decoder
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.save import save_model
from graft.rollout.options import RolloutOptions
from graft.text.tokenizer import FastTokenizer
from graft.text.tokenizer_files import TokenizerNotFound, read_eos_ids
from graft.train.build import build_run
from graft.train.model import load_tokenizer, new_shape
from graft.train.run_dir.checkpoint import latest_model
from graft.types import Finish, Task, Trajectory
from tests.models.test_export import chatml_tokenizer, checkpoint, done, export  # noqa: F401
from tests.training import train_recipe

PROMPT = "12+3="


def config_of(folder: Path, source: Path | None = None) -> Any:
    sizes = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32}
    return check(
        {
            "run": {
                "dir": str(folder),
                "name": "run",
                "save_every": 1,
                "eval_tasks": 2,
                "trackers": [],
            },
            "model": {"shape": sizes} if source is None else {"path": str(source)},
            "task": {"env": "calculator", "reward": "tests.models.test_eos_ids:ended"},
            "rollout": {"tasks": 2, "samples": 2, "max_tokens": 40, "max_context": 128},
            "algo": {"name": "grpo"},
            "train": {"steps": 1},
        }
    )


def ended(task: Task, row: Trajectory) -> float:
    return float(len(row.tokens) % 2)


@torch.no_grad()
def continued(folder: Path, tokens: list[int], **how: Any) -> list[int]:
    """Greedy tokens as transformers generates them from this folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = torch.tensor([tokens])
    given = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **how)
    return given[0, len(tokens) :].tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose greedy text comes, after a few tokens, to an id that is an eos in
    generation_config.json alone."""
    config = config_of(tmp_path)
    tokenizer = load_tokenizer(config, None)
    decoder = Decoder(new_shape(config, tokenizer)).initialise(5)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0)  # new weights repeat one token for ever
    folder = tmp_path / "model"
    save_model(decoder, folder)
    tokenizer.save(folder)
    text = continued(folder, tokenizer.encode(PROMPT), max_new_tokens=40)
    later = next(t for i, t in enumerate(text) if 4 < i < 30 and t not in text[:i])
    assert later != tokenizer.eos_id
    ends = [later, tokenizer.eos_id, 7]
    generation = {"eos_token_id": ends, "temperature": 0.6, "top_k": 20, "max_new_tokens": 40}
    write_json(folder / "generation_config.json", generation)
    return folder


def generation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "generation_config.json").read_text())


def test_a_sample_ends_where_transformers_ends_it(folder: Path) -> None:
    tokenizer = open_tokenizer(folder)
    wanted = continued(folder, tokenizer.encode(PROMPT))
    assert 4 < len(wanted) < 40 and wanted[-1] != tokenizer.eos_id
    options = RolloutOptions(temperature=0.0, max_tokens=40)
    generator = Generator.open(folder)
    [[answer]] = asyncio.run(generator.complete([PROMPT], options, raw=True))
    assert answer["tokens"] == wanted and answer["finish"] == Finish.STOP
    assert answer["text"] == tokenizer.decode(wanted[:-1])


def test_rollouts_stop_at_all_of_them_and_a_checkpoint_keeps_the_file(
    folder: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path / "runs", folder)
    components = build_run(config)
    ends = generation(folder)["eos_token_id"]
    assert components.engine.eos_ids == set(ends)  # type: ignore[attr-defined]
    components.engine.close()
    train_recipe(config)
    saved = latest_model(str(tmp_path / "runs" / "run"))
    assert saved != tmp_path / "runs" / "run"
    assert generation(saved) == generation(folder)
    episodes = [json.loads(line) for file in (tmp_path / "runs" / "run" / "episodes").glob("*.jsonl")
                for line in file.read_text().splitlines()]  # fmt: skip
    sampled = [s for e in episodes for s in e["spans"] if s["author"] == "policy" and s["tokens"]]
    assert sampled and not any(token in ends for span in sampled for token in span["tokens"][:-1])


def test_an_export_has_the_generation_config_of_its_input(
    folder: Path,
    tmp_path: Path,
    export: Any,  # noqa: F811
) -> None:
    result = done(export, folder, "--out", tmp_path / "out")
    assert generation(tmp_path / "out") == generation(folder)
    assert not result["notes"]
    one = {"eos_token_id": generation(folder)["eos_token_id"][1], "foo": {"bar": [1]}}
    write_json(folder / "generation_config.json", one)
    done(export, folder, "--out", tmp_path / "other")
    assert generation(tmp_path / "other") == one


def test_the_end_of_a_turn_is_among_them(tmp_path: Path, export: Any) -> None:  # noqa: F811
    source = checkpoint(tmp_path, tokenizer=chatml_tokenizer())
    write_json(source / "generation_config.json", {"eos_token_id": [5, 258]})
    done(export, source, "--out", tmp_path / "out")
    assert generation(tmp_path / "out") == {"eos_token_id": [5, 258, 260]}
    assert FastTokenizer.load(tmp_path / "out").eos_ids == (5, 258, 260)


@pytest.mark.parametrize(
    "files, ends",
    [
        ({"generation_config.json": [7, 8], "config.json": 9}, (7, 8, 1)),
        ({"generation_config.json": 7}, (7, 1)),
        ({"generation_config.json": None, "config.json": [9]}, (9, 1)),
        ({"config.json": 1}, (1,)),
        ({}, (1,)),
    ],
)
def test_ids_come_from_the_files_that_transformers_reads(
    files: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    FastTokenizer.characters("0123456789").save(tmp_path)  # its <eos> is 1
    for name, value in files.items():
        write_json(tmp_path / name, {"eos_token_id": value})
    assert FastTokenizer.load(tmp_path).eos_ids == ends


@pytest.mark.parametrize("value", ["2", [2, None], -1, True, 2.5])
def test_ids_that_are_none_are_named(value: Any, tmp_path: Path) -> None:
    FastTokenizer.characters("0123456789").save(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(TokenizerNotFound, match=r"generation_config\.json' has eos_token_id="):
        FastTokenizer.load(tmp_path)


def test_eos_ids_of_a_text_part_are_read(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"eos_token_id": None, "text_config": {"eos_token_id": 7}})
    assert read_eos_ids(tmp_path) == [7]
    write_json(tmp_path / "config.json", {"eos_token_id": 5, "text_config": {"eos_token_id": 7}})
    assert read_eos_ids(tmp_path) == [5]
