"""A value that YAML or an interpolation cannot read: one line with what came, why, and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.config import ConfigError, load_config, read_arguments

OVERRIDES = {
    "train.lr=[1": "not closed with ]",
    "train.lr={a: 1": "not closed with }",
    'train.lr="a': "a quotation mark is not closed",
    "task.prefill=a: b: c": "': ' is there twice",
    "task.prefill=*x": "refers to a mark",
    "task.prefill=@x": "cannot begin with this character",
    "task.prefill=`ls`": "cannot begin with this character",
    "task.prefill=[1]]": "follows the end",
    "task.prefill=!!python/name:os.system": "plain values only",
    "task.prefill=${": "${ is not closed",
    "task.prefill=${a b}": "not the name of a key",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_that_cannot_be_read_is_explained(override: str):
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", ["train.steps=1", override])
    message = str(error.value)
    assert message.startswith(f"override {override!r}: ") and OVERRIDES[override] in message
    assert "in quotation marks" in message
    for words in ("\n", "<unicode string>", "while parsing", "full_key", "object_type"):
        assert words not in message


def test_what_is_advised_can_be_read():
    config = load_config("quickstart", ['task.prefill="[1"'])
    assert config.task.prefill == "[1"


def test_arguments_of_an_environment_are_explained_too():
    with pytest.raises(ConfigError, match=r"override 'digits=\[2': .* not closed with \]"):
        read_arguments(["digits=[2"])
    assert read_arguments(["digits=[2,2]", "a.b=1", "a.c=x"]) == {
        "digits": [2, 2],
        "a": {"b": 1, "c": "x"},
    }
    assert read_arguments([]) == {}


@pytest.mark.parametrize(
    ("override", "seen"),
    [("train.lr=${foo}", "key 'foo' not found"), ("train.lr=${oc.env:NO_SUCH}", "'NO_SUCH' not")],
)
def test_an_interpolation_that_names_nothing_says_what_can_be_named(override: str, seen: str):
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", [override])
    message = str(error.value)
    assert seen in message and "${run.name}" in message and "${oc.env:NAME}" in message
    assert "\n" not in message


FILES = {
    b"model: {path: x\ntask: {env: a}\n": "line 2, column 5: a mapping is not closed with }",
    b"model:\n  path: x\n task: 1\n": "line 3, column 2: a line is indented otherwise",
    b"model:\n\tpath: x\n": "line 2, column 1: ",
    b"a: 1\na: 2\n": "line 2, column 1: found duplicate key a",
    b"\xff\xfe": "it is not UTF-8 text",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_cannot_be_read_is_explained_with_the_line(text: bytes, tmp_path: Path):
    (tmp_path / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "mine.yaml")
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'mine.yaml'} is not a recipe: {FILES[text]}")
    assert "\n" not in message


def test_a_folder_is_not_a_recipe_and_its_recipes_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is a folder; .* it has none"):
        load_config(tmp_path)
    (tmp_path / "mine.yaml").write_text("train: {steps: 1}\n")
    with pytest.raises(ConfigError, match=r"is a folder; .* it has .*mine\.yaml"):
        load_config(tmp_path)


def test_an_override_without_a_key_is_none():
    with pytest.raises(ConfigError, match="'=3' is not of the form key=value"):
        load_config("quickstart", ["=3"])
