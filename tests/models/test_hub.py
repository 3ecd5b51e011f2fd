"""Models by their name on the hub, against a stand-in for it on 127.0.0.1."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graft import cli
from graft.config import check, dump_config
from graft.models.decoder import Decoder
from graft.models.io import hub as hub_module
from graft.models.io.hub import HubError, find_model, origin_of
from graft.models.io.hub_names import split_name
from graft.models.io.load import load_model
from graft.models.io.model_card import read_origin
from graft.models.io.save import ids_of, save_model
from graft.models.io.tensor_names import hf_names
from graft.text.tokenizer import FastTokenizer
from graft.train.model import new_shape, pin_model, recipe_shape
from graft.train.run_dir.checkpoint import latest_model
from graft.types import Task, Trajectory
from tests.hub_server import TOKEN, HubServer
from tests.training import train_recipe

SIZES = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32}
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
BESIDE = {
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"the same again",
    "onnx/config.json": b"{}",
    "consolidated.safetensors": b"the same again",
    "LICENSE": b"...",
}
"""What repositories hold beside a model."""


def tokens_low(task: Task, row: Trajectory) -> float:
    return float(len(row.tokens) % 2)


def config_of(folder: Path, path: str = "", **sections: Any) -> Any:
    return check(
        {
            "run": {
                "dir": str(folder),
                "name": "run",
                "save_every": 1,
                "eval_tasks": 2,
                "trackers": [],
            },
            "model": {"path": path} if path else {"shape": SIZES},
            "task": {"env": "calculator", "reward": "tests.models.test_hub:tokens_low"},
            "rollout": {
                "tasks": 2,
                "samples": 2,
                "max_tokens": 4,
                "max_turns": 2,
                "max_context": 64,
            },
            "algo": {"name": "grpo"},
            "train": {"steps": 1},
            **sections,
        }
    )


def files_of(folder: Path) -> dict[str, bytes]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> dict[str, bytes]:
    """The files of a tiny model in two shards, and what lies beside such files on the hub."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = FastTokenizer.characters("0123456789+-*=()[]<>, .?")
    decoder = Decoder(new_shape(config_of(folder), tokenizer)).initialise(2)
    total = sum(parameter.numel() * 4 for parameter in decoder.parameters())
    save_model(decoder, folder, special=ids_of(tokenizer), shard_bytes=int(total * 0.6))
    tokenizer.save(folder)
    found = files_of(folder)
    assert set(SHARDS) < set(found)
    return found | BESIDE


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    import huggingface_hub

    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in (
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_OFFLINE",
        ):
            monkeypatch.delenv(name, raising=False)
        # the tests must not use the login of the user who runs them
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.chdir(tmp_path)
        hub_module._copy_of.cache_clear()
        yield server
        huggingface_hub.close_session()
    hub_module._copy_of.cache_clear()


def again() -> None:
    """Forget what this process has found, as in a new one."""
    hub_module._copy_of.cache_clear()


# what a name is


@pytest.mark.parametrize(
    "path",
    ["./me/tiny", "/me/tiny", "a/b/c", "tiny", "me/tiny.gguf", "me/", "~/x", "../x", "me/.x", ""],
)
def test_a_name_in_the_form_of_a_path_makes_no_request(path: str, hub: HubServer) -> None:
    assert split_name(path) is None
    assert latest_model(path) == Path(path)
    assert not hub.requests


def test_a_folder_of_that_name_wins(hub: HubServer, model: Any, tmp_path: Path) -> None:
    hub.add("me/tiny", model)
    (tmp_path / "me" / "tiny").mkdir(parents=True)
    assert latest_model("me/tiny") == Path("me/tiny")
    (tmp_path / "runs" / "me" / "other").mkdir(parents=True)
    assert latest_model("me/other") == Path("runs/me/other")
    assert not hub.requests


# download


def test_a_model_in_two_shards_is_fetched_once_without_what_lies_beside(
    hub: HubServer, model: Any, tmp_path: Path, capfd: Any
) -> None:
    commit = hub.add("me/tiny", model)
    folder = latest_model("me/tiny")
    assert origin_of(folder) == ("me/tiny", commit)
    assert folder.is_relative_to(tmp_path / "cache")
    wanted = set(model) - set(BESIDE)
    assert set(files_of(folder)) == wanted and set(hub.fetched()) == wanted
    assert f"of me/tiny (main, commit {commit})" in capfd.readouterr().err
    for name, content in model.items():
        assert name not in wanted or (folder / name).read_bytes() == content
    load_model(folder)
    again()
    hub.requests.clear()
    assert latest_model("me/tiny") == folder and not hub.fetched()
    assert "downloading" not in capfd.readouterr().err


def test_revisions_are_branches_tags_and_commits(hub: HubServer, model: Any) -> None:
    old = hub.add("me/tiny", model)
    new = hub.add("me/tiny", model | {"config.json": model["config.json"] + b" "})
    hub.add("me/tiny", model | {"README.md": b"hi"}, ref="v1")
    assert find_model("me/tiny").name == new
    assert find_model(f"me/tiny@{old}").name == old
    assert (find_model("me/tiny@v1") / "README.md").read_text() == "hi"
    with pytest.raises(HubError, match=r"'me/tiny' has no revision 'v2'; .* listed at http"):
        find_model("me/tiny@v2")


def test_sizes_are_planned_without_the_weights(hub: HubServer, model: Any, tmp_path: Path) -> None:
    hub.add("me/tiny", model)
    shape = recipe_shape(config_of(tmp_path, "me/tiny"))
    assert (shape.width, shape.layers) == (32, 2)
    assert hub.fetched() and not any(name.endswith(".safetensors") for name in hub.fetched())
    assert set(SHARDS) <= set(files_of(find_model("me/tiny")))  # and then all of it


@pytest.mark.parametrize(
    "name, login, how, text",
    [
        ("me/tiyn", "", {}, "no public model of this name"),
        ("me/tiyn", TOKEN, {}, "no model of this name that your login may see"),
        ("me/secret", "", {"private": True}, "A private one needs a login: hf auth login"),
        ("me/gated", "", {"gated": True}, "is gated: .* http.*/me/gated"),
        ("me/gated", TOKEN, {"gated": True}, "is gated: accept its terms .* as the same user"),
    ],
)
def test_errors_distinguish_name_login_and_terms(
    name: str, login: str, how: Any, text: str, hub: HubServer, model: Any, monkeypatch: Any
) -> None:
    if how:
        hub.add(name, model, **how)
    if login:
        monkeypatch.setenv("HF_TOKEN", login)
    with pytest.raises(HubError, match=text):
        latest_model(name)


def test_a_login_opens_what_is_private(hub: HubServer, model: Any, monkeypatch: Any) -> None:
    commit = hub.add("me/secret", model, private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert latest_model("me/secret").name == commit


@pytest.mark.parametrize("kind", ["refused", "503"])
def test_without_a_network_the_cache_serves_or_the_network_is_named(
    kind: str, hub: HubServer, model: Any, monkeypatch: Any, capfd: Any
) -> None:
    commit = hub.add("me/tiny", model)
    folder = latest_model("me/tiny")
    again()
    if kind == "refused":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.broken = 503
    assert latest_model("me/tiny") == folder
    assert f"cannot be reached; using the copy of me/tiny in the cache, commit {commit}" in (
        capfd.readouterr().err
    )
    with pytest.raises(
        HubError, match=r"'me/other' is no folder .* cannot be reached .*HF_ENDPOINT"
    ):
        latest_model("me/other")


def test_offline_the_cache_serves_without_a_request(
    hub: HubServer, model: Any, monkeypatch: Any
) -> None:
    hub.add("me/tiny", model)
    folder = latest_model("me/tiny")
    again()
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert latest_model("me/tiny") == latest_model(f"me/tiny@{folder.name}") == folder
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set, and the cache .* unset it"):
        latest_model("me/other")
    assert not hub.requests


def test_an_interrupted_download_is_not_taken_for_a_whole_one(
    hub: HubServer, model: Any, monkeypatch: Any
) -> None:
    hub.add("me/tiny", model)
    real = hub_module._wanted
    monkeypatch.setattr(
        hub_module, "_wanted", lambda *a: [name for name in real(*a) if name != SHARDS[1]]
    )
    folder = latest_model("me/tiny")  # as a process leaves it that is killed before the last file
    assert not (folder / SHARDS[1]).exists()
    monkeypatch.setattr(hub_module, "_wanted", real)
    again()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=f"lacks {SHARDS[1]}"):
        latest_model("me/tiny")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.requests.clear()
    assert (latest_model("me/tiny") / SHARDS[1]).read_bytes() == model[SHARDS[1]]
    assert hub.fetched() == [SHARDS[1]]  # it goes on where it stopped


def test_a_connection_that_breaks_within_a_file_gives_the_whole_file(
    hub: HubServer, model: Any
) -> None:
    hub.add("me/tiny", model)
    hub.cut[SHARDS[0]] = 1000
    assert (latest_model("me/tiny") / SHARDS[0]).read_bytes() == model[SHARDS[0]]
    assert not hub.cut


@pytest.mark.parametrize(
    "dropped, added, text",
    [
        ([*SHARDS], {}, "has no model.safetensors: pickles"),
        (["config.json"], {"q8.gguf": b""}, "no config.json.*hf download me/tiny q8.gguf"),
    ],
)
def test_repositories_without_a_readable_model_are_refused(
    dropped: list[str], added: Any, text: str, hub: HubServer, model: Any
) -> None:
    hub.add("me/tiny", {name: c for name, c in model.items() if name not in dropped} | added)
    with pytest.raises(HubError, match=text):
        latest_model("me/tiny")
    assert not hub.fetched()


# commands and runs


def command(monkeypatch: Any, capsys: Any, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["graft", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_commands_take_the_name(
    hub: HubServer, model: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    hub.add("me/tiny", model)
    code, output, wrong = command(
        monkeypatch, capsys, "generate", "me/tiny", "-p", "1+1=", "--max-tokens", "2", "--json"
    )
    assert code == 0, wrong
    assert json.loads(output.splitlines()[-1])["model"] == "me/tiny"
    code, output, wrong = command(
        monkeypatch, capsys, "eval", "me/tiny", "rollout.max_tokens=3", "rollout.max_turns=1",
        "--on", "calculator", "--tasks", "2", "--greedy",
    )  # fmt: skip
    assert code == 0, wrong
    assert "| tiny |" in output and (tmp_path / "runs" / "tiny" / "evaluations").is_dir()
    code, _, wrong = command(monkeypatch, capsys, "export", "me/tiny", "--out", "out")
    assert code == 0, wrong
    ours, theirs = load_model(Path("out")), load_model(latest_model("me/tiny"))
    assert all(torch.equal(hf_names(ours)[name], t) for name, t in hf_names(theirs).items())
    code, _, wrong = command(monkeypatch, capsys, "generate", "me/tiyn", "-p", "1")
    assert code == 1 and wrong.startswith("graft: 'me/tiyn' is no folder or file here, and the hub")
    assert "Traceback" not in wrong


def test_a_run_keeps_the_name_and_the_commit_it_began_with(
    hub: HubServer, model: Any, tmp_path: Path
) -> None:
    old = hub.add("me/tiny", model)
    config = config_of(tmp_path / "runs", "me/tiny", lora={"rank": 2})
    summary = train_recipe(config)
    run = tmp_path / "runs" / "run"
    assert "path: me/tiny\n" in (run / "config.yaml").read_text()
    assert summary["model"] == {"name": "me/tiny", "commit": old}
    adapter = json.loads(next(run.glob("checkpoints/*/*/adapter_config.json")).read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("me/tiny", old)
    new = hub.add("me/tiny", model | {"README.md": b"new"})
    again()
    assert latest_model("me/tiny").name == new
    more = config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})})
    assert train_recipe(more)["model"] == {"name": "me/tiny", "commit": old}


def test_a_run_without_a_checkpoint_goes_on_with_its_commit(
    hub: HubServer, model: Any, tmp_path: Path
) -> None:
    old = hub.add("me/tiny", model)
    config = config_of(tmp_path, "me/tiny")
    pinned, note = pin_model(config, tmp_path)
    assert pinned.model.path == f"me/tiny@{old}" and old in note
    hub.add("me/tiny", model | {"README.md": b"new"})
    again()
    assert pin_model(config, tmp_path)[0].model.path == f"me/tiny@{old}"
    other, _ = pin_model(config_of(tmp_path, "me/tiny@main"), tmp_path)
    assert other.model.path != pinned.model.path  # another recipe is another run
    local, note = pin_model(config_of(tmp_path), tmp_path)
    assert not local.model.path and not note


# the card, and back to the hub

CARD = b"""---
license: other
license_name: tiny-license
license_link: LICENSE
base_model: another/base
---
# Tiny
"""


def test_the_card_names_base_and_license_and_no_path_of_this_machine(
    hub: HubServer, model: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    hub.add("me/tiny", model | {"README.md": CARD})
    train_recipe(config_of(tmp_path / "runs", "me/tiny"))
    assert str(tmp_path) in (tmp_path / "runs" / "run" / "config.yaml").read_text()
    code, _, wrong = command(monkeypatch, capsys, "export", "run", "--out", tmp_path / "out")
    assert code == 0, wrong
    card = (tmp_path / "out" / "README.md").read_text()
    assert '\nbase_model: "me/tiny"\nlicense: "other"\nlicense_name: "tiny-license"\n' in card
    assert 'license_link: "https://huggingface.co/me/tiny/blob/main/LICENSE"' in card
    assert "which started from `me/tiny`" in card and "`tiny-license`, the license of" in card
    assert str(tmp_path) not in card and "dir: .../runs" in card
    # a run that started from this one has the same base
    later = config_of(tmp_path / "runs", str(tmp_path / "runs" / "run"))
    later = later.model_copy(update={"run": later.run.model_copy(update={"name": "later"})})
    (tmp_path / "runs" / "later" / "checkpoints").mkdir(parents=True)
    saved = (tmp_path / "runs" / "run" / "checkpoints" / "rl-000001").rename(
        tmp_path / "runs" / "later" / "checkpoints" / "rl-000001"
    )
    (tmp_path / "runs" / "later" / "config.yaml").write_text(dump_config(later))
    origin = read_origin(saved)
    assert (origin.base.name, origin.base.license["license"]) == ("me/tiny", "other")


def test_a_card_does_not_invent_a_name_or_license_of_the_base(
    hub: HubServer, model: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    folder = tmp_path / "a-person" / "models" / "qwen"
    folder.mkdir(parents=True)
    for name, content in model.items():
        if name not in BESIDE:
            (folder / name).write_bytes(content)
    code, _, wrong = command(monkeypatch, capsys, "export", folder, "--out", "out")
    assert code == 0, wrong
    card = Path("out/README.md").read_text()
    assert "base_model:" not in card and "license:" not in card and "a-person" not in card
    assert "no license was found in the card of the base model `qwen`" in card


@pytest.mark.parametrize("public", [False, True])
def test_push_uploads_the_folder_privately_unless_public_is_set(
    public: bool, hub: HubServer, model: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    hub.add("me/tiny", model)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, output, wrong = command(
        monkeypatch, capsys, "export", "me/tiny", "--out", "out", "--push", "me/new",
        *(["--public"] if public else []), "--json",
    )  # fmt: skip
    assert code == 0, wrong
    assert json.loads(output.splitlines()[-1])["pushed"] == f"{hub.url}/me/new"
    repository = hub.repositories["me/new"]
    assert repository.private is not public
    assert repository.files("main") == files_of(tmp_path / "out")
    assert b'from_pretrained("me/new"' in repository.files("main")["README.md"]  # type: ignore[index]
    assert find_model("me/new").name == repository.refs["main"]  # and it is a model again


def test_push_names_what_is_missing(
    hub: HubServer, model: Any, monkeypatch: Any, capsys: Any
) -> None:
    hub.add("me/tiny", model)

    def refused(*arguments: str) -> tuple[int, str]:
        code, _, wrong = command(monkeypatch, capsys, "export", "me/tiny", *arguments)
        return code, wrong

    assert "--out" in refused("--push", "me/n")[1]
    assert "--public needs --push" in refused("--out", "a", "--public")[1]
    assert "a name on the hub is OWNER/NAME" in refused("--out", "a", "--push", "new")[1]
    assert refused("--out", "a", "--push", "me/new") == (
        1,
        "graft: --push me/new needs a login with the right to write: hf auth login (or HF_TOKEN=...)\n",
    )
    assert not Path("a").exists() and "me/new" not in hub.repositories
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, wrong = refused("--out", "a", "--push", "others/new")
    assert code == 1 and "your login may not do this with 'others/new'" in wrong
    assert Path("a/model.safetensors").exists()  # what was written stays
    code, wrong = refused("--out", "b", "--push", "me/tiny")
    assert code == 1 and "'me/tiny' is a public repository on the hub already" in wrong
    hub.broken = 503
    code, wrong = refused("--out", "c", "--push", "me/new")
    assert code == 1 and "Traceback" not in wrong


def test_the_path_of_a_missing_run_is_no_name_on_the_hub():
    assert split_name("runs/mine") is None
