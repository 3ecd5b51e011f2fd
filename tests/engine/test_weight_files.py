"""Weights by file: whole or absent, read once, and those of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from graft.engine.errors import EngineError
from graft.engine.remote.weight_files import WeightFolder, check_names, names_in
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.text.tokenizer import FastTokenizer
from tests.engine.engine_kit import tiny_decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_model(tiny_decoder(0), path)
    FastTokenizer.characters("01234567890123456789").save(path)
    return path


class Gathered(Mapping[str, torch.Tensor]):
    """Tensors that are gathered when they are read, which every process must do in the same order."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights, self.read = weights, []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@pytest.mark.parametrize("shard_bytes", [10**9, 4000, 1])
def test_what_is_written_is_the_model_with_these_weights(folder, tmp_path, shard_bytes):
    decoder = tiny_decoder(1)
    weights = Gathered(hf_names(decoder))
    exchange = WeightFolder(tmp_path / "exchange", folder, "run")
    written = exchange.write(weights, shard_bytes)
    assert weights.read == list(weights.weights)  # each once, in order
    assert written.name == "run-000001" and (written / "tokenizer.json").is_file()
    shards = len(list(written.glob("*.safetensors")))
    assert (shards == 1) == (shard_bytes == 10**9)
    read = hf_names(load_model(written))
    for name, tensor in hf_names(decoder).items():
        torch.testing.assert_close(read[name], tensor, atol=0, rtol=0)


def test_earlier_versions_go_and_those_of_others_stay(folder, tmp_path):
    shared = tmp_path / "exchange"
    ours, theirs = WeightFolder(shared, folder, "a"), WeightFolder(shared, folder, "b")
    weights = hf_names(tiny_decoder(1))
    theirs.write(weights)
    ours.write(weights)
    ours.keep_only(ours.write(weights))
    assert sorted(path.name for path in shared.iterdir()) == ["a-000002", "b-000001"]
    ours.close()
    assert [path.name for path in shared.iterdir()] == ["b-000001"]


def test_weights_of_another_model_leave_nothing_behind(folder, tmp_path):
    exchange = WeightFolder(tmp_path / "exchange", folder, "a")
    weights = dict(hf_names(tiny_decoder(1)))
    weights["model.norm.bias"] = weights.pop("model.norm.weight")
    with pytest.raises(
        EngineError, match=r"missing \['model.norm.weight'\].*\['model.norm.bias'\]"
    ):
        exchange.write(weights)
    assert list((tmp_path / "exchange").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "file").write_text("no folder")
    exchange = WeightFolder(tmp_path / "file", folder, "a")
    with pytest.raises(EngineError, match=r"file'.*engine\.exchange"):
        exchange.write(hf_names(tiny_decoder(1)))


def test_a_head_may_be_written_though_it_is_the_embedding(folder, tmp_path):
    names = names_in(folder)
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    check_names([*names, "lm_head.weight"], names_in(folder), folder)
    with pytest.raises(EngineError, match="missing"):
        check_names(names - {"model.embed_tokens.weight"}, names, folder)
    assert names_in(tmp_path) == set()
    check_names(["anything"], names_in(tmp_path), tmp_path)  # a folder without weights: no check
