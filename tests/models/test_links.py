"""Links in a folder of somebody else: none brings a file of this machine into what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graft
from graft.models.extra_actions import extend
from graft.models.io.load import load_model
from graft.models.io.model_card import read_origin
from graft.models.io.save import save_model
from graft.text.tokenizer import FastTokenizer
from graft.trust.links import OutsideLink, check_links
from tests.models.test_export import adapters, checkpoint, done, export  # noqa: F401

SECRET = "PRIVATE-KEY-0123456789"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "id_rsa"
    file.parent.mkdir()
    file.write_text(SECRET)
    return file


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "tokenizer_config.json",
        "generation_config.json",
        "actions.json",
        "README.md",
        "../../config.yaml",
        "../../summary.json",
    ],
)
def test_no_command_that_writes_a_model_follows_a_link(tmp_path, secret, export, name):  # noqa: F811
    folder = checkpoint(tmp_path)
    if name == "actions.json":
        save_model(extend(load_model(folder), [1]), folder)
    link(folder / name, secret)
    out = tmp_path / "out"
    code, printed, complained = export(folder, "--out", out)
    assert code != 0 and not out.exists()
    assert str(secret) in complained and SECRET not in printed + complained
    assert complained.count("\n") == 1 and Path(name).name in complained


def test_a_folder_that_is_a_link_inside_of_a_checkpoint(tmp_path, secret, export):  # noqa: F811
    folder = checkpoint(tmp_path)
    secret.rename(secret.with_suffix(".jinja"))
    (folder / "additional_chat_templates").symlink_to(secret.parent)
    code, _, complained = export(folder, "--out", tmp_path / "out")
    assert code != 0 and "additional_chat_templates" in complained


def test_adapters_and_their_base(tmp_path, secret, export):  # noqa: F811
    base = checkpoint(tmp_path)
    adapters(tmp_path / "alone", base)
    link(tmp_path / "alone" / "README.md", secret)
    code, _, complained = export(tmp_path / "alone", "--out", tmp_path / "out")
    assert code != 0 and str(secret) in complained
    (tmp_path / "alone" / "README.md").unlink()
    link(base / "chat_template.jinja", secret)
    code, _, complained = export(tmp_path / "alone", "--out", tmp_path / "out")
    assert code != 0 and str(secret) in complained and not (tmp_path / "out").exists()
    inner = base / "adapter" / "adapter_config.json"
    (base / "chat_template.jinja").unlink()
    link(inner, secret)
    code, _, complained = export(base, "--adapter", "--out", tmp_path / "out")
    assert code != 0 and str(secret) in complained


def test_a_policy_is_not_loaded_with_one_so_it_saves_none(tmp_path, secret):
    folder = checkpoint(tmp_path)
    link(folder / "chat_template.jinja", secret)
    with pytest.raises(OutsideLink, match="cp --remove-destination"):
        graft.load(folder)
    with pytest.raises(OutsideLink):
        FastTokenizer.load(folder)


def test_links_of_the_hubs_cache_inside_of_the_folder_and_to_it_are_followed(tmp_path, export):  # noqa: F811
    made = checkpoint(tmp_path)
    cache = tmp_path / "hub" / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "c1", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in made.iterdir():
        file.rename(blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"hash-of-{file.name}")
    (blobs / "own").write_text("{{ messages }}")
    link(snapshot / "chat_template.jinja", Path("../../blobs/own"))
    elsewhere = tmp_path / "local"  # as older versions of the hub's library filled a folder
    elsewhere.mkdir()
    for file in snapshot.iterdir():
        (elsewhere / file.name).symlink_to(file.resolve())
    (tmp_path / "short").symlink_to(snapshot)  # a link to the folder itself
    for number, source in enumerate((snapshot, elsewhere, tmp_path / "short")):
        assert done(export, source, "--out", tmp_path / f"out{number}")["files"]


def test_weights_may_lie_elsewhere_and_other_files_are_not_read(tmp_path, secret, export: Any):  # noqa: F811
    folder = checkpoint(tmp_path)
    disk = tmp_path / "large.safetensors"
    (folder / "model.safetensors").rename(disk)
    link(folder / "model.safetensors", disk)
    link(folder / "notes", secret)
    found = done(export, folder, "--out", tmp_path / "out")
    assert (
        "notes" not in found["files"] and not (tmp_path / "out" / "model.safetensors").is_symlink()
    )


def test_a_run_of_a_stranger_is_described_without_following_links(tmp_path, secret):
    folder = checkpoint(tmp_path)
    link(tmp_path / "quick" / "evaluations" / "e.json", secret)
    with pytest.raises(OutsideLink):
        read_origin(folder)
    check_links(tmp_path / "nowhere")  # nothing there, nothing to refuse
