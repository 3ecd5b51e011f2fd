"""Actions, environments and checkpoints that do not belong together are refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from graft.config import Config, ConfigError, check
from graft.train.actions import actions_of, check_head, with_actions
from graft.train.build import build_run
from graft.train.model import load_tokenizer
from graft.train.run_dir.checkpoint import action_names
from tests.training import train_recipe

TINY = {
    "width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16,
    "max_positions": 64,
}  # fmt: skip


def recipe(folder: Path, syntax: str, file: str, **sections: dict[str, Any]) -> Config:
    return check(
        {
            "run": {"dir": str(folder), "name": "run", "eval_tasks": 0, "trackers": []},
            "model": {"shape": TINY},
            "task": {"env": "calculator", "args": {"syntax": syntax}},
            "actions": {"file": file},
            "rollout": {"tasks": 2, "samples": 2, "max_tokens": 6, "max_context": 40},
            "train": {"steps": 1},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("syntax", "file", "complaint"),
    [
        ("compact", "compact", "looks for them in the text; set task.args.syntax=actions"),
        ("actions", "compact-tags", "has none beyond the vocabulary"),
        ("actions", "", "has none beyond the vocabulary"),
    ],
)
def test_a_syntax_that_does_not_fit_the_file_is_refused(tmp_path, syntax, file, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build_run(recipe(tmp_path, syntax, file))


@pytest.mark.parametrize(("syntax", "file"), [("actions", "compact"), ("compact", "compact-tags")])
def test_a_syntax_that_fits_is_taken(tmp_path, syntax, file):
    assert build_run(recipe(tmp_path, syntax, file)).actions is not None


def test_tools_that_the_environment_does_not_have_are_refused(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(
        'tools:\n  - {name: guess, entry: "[", words: ["["], answer: "{};",\n'
        "     syntax: {arguments: {take: [digits]}}, "
        'groups: [{name: digits, actions: ["0", "1"]}]}\n'
    )
    with pytest.raises(ConfigError, match="has guess, and calculator answers only calculator"):
        build_run(recipe(tmp_path, "actions", str(other)))


def test_forcing_calls_requires_actions_of_these_tools(tmp_path):
    with pytest.raises(ConfigError, match="no actions to force"):
        build_run(recipe(tmp_path, "compact", "", algo={"name": "cpo"}))
    branch = {"counterfactual": {"tools": ["abacus"]}}
    rollout = {"tasks": 2, "samples": 2, "max_tokens": 6, "max_context": 40, "branch": branch}
    with pytest.raises(ValueError, match="cannot force abacus"):
        build_run(recipe(tmp_path, "actions", "compact", rollout=rollout))


def test_recorded_chats_go_with_actions(tmp_path):
    components = build_run(recipe(tmp_path, "actions", "compact", sft={"data": "chats.jsonl"}))
    assert components.actions is not None


def test_a_checkpoint_stores_what_its_rows_stand_for(tmp_path):
    config = recipe(tmp_path, "actions", "compact", algo={"name": "cpo"})
    checkpoint = Path(train_recipe(config)["checkpoint"])
    names = action_names(checkpoint)
    assert names[0] == "[" and names[-1] == "]" and len(names) == 15
    components = build_run(config, checkpoint)
    assert components.policy.shape.extra == 15
    text = Path("graft/actions/files/compact.yaml").read_text()
    swapped = tmp_path / "swapped.yaml"
    swapped.write_text(text.replace('["+", "-", "*"]', '["-", "+", "*"]'))
    other = recipe(tmp_path, "actions", str(swapped))
    with pytest.raises(ConfigError, match=r"the action '\+' where actions.file has '-'"):
        build_run(other, checkpoint)


def test_another_number_of_actions_than_the_checkpoint_s_is_refused(tmp_path):
    config = recipe(tmp_path, "actions", "compact", algo={"name": "cpo"})
    checkpoint = Path(train_recipe(config)["checkpoint"])
    components = build_run(config, checkpoint)
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(
        Path("graft/actions/files/compact.yaml")
        .read_text()
        .replace('["+", "-", "*"]', '["+", "-"]')
    )
    tokenizer = load_tokenizer(config, checkpoint)
    actions = actions_of(recipe(tmp_path, "actions", str(fewer)), tokenizer, tokenizer.vocab_size)
    assert actions is not None
    with pytest.raises(ConfigError, match=r"was trained with 15 actions .* has 14"):
        with_actions(components.policy, actions, checkpoint, config.actions)
    biased = recipe(tmp_path, "actions", "compact", actions={"file": "compact", "bias": True})
    with pytest.raises(ConfigError, match=r"was trained with actions\.bias=false; set it so"):
        build_run(biased, checkpoint)


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"file": "", "start": "calculator"}, "there is no file"),
        ({"file": "compact", "start": "compare"}, "is no tool of actions.file=compact; it has"),
        ({"file": "compact-tags", "freeze_base": True}, "'compact-tags' has none; give a file"),
        ({"file": "", "bias": True}, "actions.bias is for the head rows"),
    ],
)
def test_settings_of_actions_that_are_not_there_are_refused(tmp_path, section, complaint):
    syntax = "compact" if section["file"] != "compact" else "actions"
    config = recipe(tmp_path, syntax, "compact", actions=section)
    with pytest.raises(ConfigError, match=complaint):
        build_run(config)


@pytest.mark.parametrize("key", ["freeze_base", "bias"])
def test_a_head_in_parts_or_with_adapters_has_neither_frozen_base_nor_bias(tmp_path, key):
    section = {"file": "compact", key: True}
    config = recipe(tmp_path, "actions", "compact", actions=section)
    tokenizer = load_tokenizer(config, None)
    actions = actions_of(config, tokenizer, tokenizer.vocab_size)
    check_head(config, actions, is_split=False)
    with pytest.raises(ConfigError, match=f"actions.{key} is for a head in one piece"):
        check_head(config, actions, is_split=True)
    adapted = config.changed({"lora.rank": 2})
    with pytest.raises(ConfigError, match=f"actions.{key} with lora.rank=2"):
        check_head(adapted, actions, is_split=False)
