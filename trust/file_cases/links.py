"""Links of a model, a checkpoint or a run to a file of this machine: nothing may copy it."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import SECRET, Command, case, checkpoint, lookers, run_copy, some
from trust.file_cases.models import model_copy, model_openers

IN_A_MODEL = (
    "chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "config.json", "generation_config.json", "actions.json", "README.md",
    "adapter_config.json",
)  # fmt: skip
IN_A_RUN = ("config.yaml", "summary.json", "evaluations/table.json")


def secret_file(folder: Path, rng: Random, name: str) -> Path:
    """A file of the user, in a form that the name's reader would accept."""
    home = folder / "home"
    home.mkdir()
    text = rng.choice([SECRET, f'"{SECRET}"', f'{{"chat_template": "{SECRET}"}}', f"a: {SECRET}\n"])
    file = home / rng.choice(["id_rsa", "token", f"own{Path(name).suffix}"])
    file.write_text(text)
    return file


def plant(path: Path, target: Path, rng: Random) -> None:
    """Put a link in place of a file: absolute, relative, or through a second link beside it."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    way = rng.randrange(3)
    if way == 2:
        (path.parent / "second").symlink_to(target)
        target = path.parent / "second"
    path.symlink_to(os.path.relpath(target, path.parent) if way else target)


@case("links", IN_A_MODEL)
def link_of_a_model(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    plant(model_copy(folder, base) / variant, secret_file(folder, rng, variant), rng)
    export: Command = ["export", "model", "--out", "exported"]
    return [export, *some(rng, model_openers("model"), 1)]


@case("links", (*IN_A_MODEL, *IN_A_RUN))
def link_of_a_run(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    place = run if variant in IN_A_RUN else checkpoint(run)
    plant(place / variant, secret_file(folder, rng, variant), rng)
    return [["export", "theirs", "--out", "exported"], *some(rng, lookers("theirs"), 1)]


@case("links")
def link_to_a_folder(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    file = secret_file(folder, rng, "own.jinja")
    file.rename(file.with_name("tools.jinja"))
    (place / "additional_chat_templates").symlink_to(file.parent)
    return [["export", "model", "--out", "exported"]]
