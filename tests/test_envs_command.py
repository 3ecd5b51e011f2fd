"""`graft envs`, `graft play`, `graft doctor`: what a person at a terminal meets."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from graft.cli import app
from graft.commands.envs import list_envs, open_env, play, table
from graft.doctor import Check, examine
from graft.envs import ENVS, make
from graft.gateway.supervisor import CGROUP, NAMESPACE, SUBREAPER

run = CliRunner().invoke


def typed(*lines: str):
    """A person who types these lines and then leaves."""
    waiting = list(lines)

    def read_line(prompt: str) -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return read_line


def test_the_list_names_every_env_once_with_what_it_needs():
    rows = list_envs()
    assert [row["id"] for row in rows] == sorted(
        ENVS, key=lambda i: (i.partition(":")[0] if ":" in i else "graft", i)
    )
    assert all(row["can_run"] == (row["missing"] == "") for row in rows)
    ready = {row["id"] for row in rows if row["can_run"]}
    assert {"calculator", "game:Wordle-v0-hard", "game:WikiGame-v0"} <= ready
    lines = list(table(rows))
    assert lines[0].split() == ["id", "family", "turns", "here", "needs"]
    assert lines[-1] == f"{len(ENVS)} environments, {len(ready)} can run here"


def test_absent_data_is_named():
    (row,) = list_envs("math:GSM8K")
    assert not row["can_run"]
    assert "axon-rl/GSM-8k" in row["missing"]


def test_the_list_as_json_is_one_object():
    result = run(app, ["envs", "sudoku", "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["envs"]
    assert {row["family"] for row in rows} == {"earl", "game", "rg"}
    hard = next(row for row in rows if row["id"] == "game:Sudoku-v0-hard")
    assert (hard["turns"], hard["needs"], hard["can_run"]) == (50, [], True)


def test_a_person_plays_a_game_without_typing_boxes():
    env = make("game:GuessTheNumber-v0", min_number=1, max_number=3, max_turns=5)
    printed: list[str] = []
    _, info = env.reset(4)
    wrong = "1" if info["answer"] != 1 else "2"
    result = play(env, 4, printed.append, typed(wrong, f"perhaps \\boxed{{{info['answer']}}}"))
    assert (result["turns"], result["reward"], result["terminated"]) == (2, 1.0, True)
    assert "[reward 1, 1 in all]" in printed[-2]
    assert printed[-1].endswith(f"the answer was {info['answer']}")


def test_leaving_early_is_no_error_and_a_line_can_go_on():
    env = make("countdown")
    printed: list[str] = []
    assert play(env, 0, printed.append, typed(":quit"))["turns"] == 0
    assert play(env, 0, printed.append, typed())["turns"] == 0
    result = play(env, 0, printed.append, typed("<answer>1\\", "+1</answer>"))
    assert (result["turns"], result["reward"]) == (1, 0.1)
    assert play(env, 0, printed.append, typed(":random"))["turns"] == 1


def test_arguments_are_typed_as_in_a_recipe():
    env = open_env("countdown", "", ["count=[2,2]", "format_reward=0.3"])
    assert (env.count, env.format_reward) == ((2, 2), 0.3)
    env = open_env("game:Wordle-v0", "[{max_history: {turns: 2}}, episode_tracking]", [])
    assert env.observe_as == "prompt"
    with pytest.raises(ValueError, match="not key=value"):
        open_env("countdown", "", ["count"])
    with pytest.raises(ValueError, match=r"'countdown' has no argument 'colour'"):
        open_env("countdown", "", ["colour=3"])


def test_a_wrong_argument_is_answered_with_the_right_ones():
    with pytest.raises(
        ValueError, match=r"did you mean 'word_length'.*known: word_length, max_turns"
    ):
        open_env("game:Wordle-v0", "", ["wordlength=5"])
    with pytest.raises(
        ValueError, match=r"its signature is Wordle\(\*, word_length=5, max_turns=15"
    ):
        open_env("game:Wordle-v0", "", ["word_length=abc"])


def test_a_person_shops_without_typing_boxes():
    printed: list[str] = []
    result = play(make("webshop:train-text"), 3, printed.append, typed("search[lamp]", ":quit"))
    assert (result["turns"], result["reward"]) == (1, 0.0)
    assert "Search: lamp" in printed[-2]
    assert printed[-1] == "left after 1 turn, reward 0"


def test_the_last_line_names_an_answer_only_where_there_is_one():
    printed: list[str] = []
    play(make("game:Minesweeper-v0-easy"), 3, printed.append, typed("dig"))
    assert printed[-1] == "over after 1 turn, reward -0.1"


def test_play_reads_from_a_pipe():
    result = run(app, ["play", "countdown", "--seed", "3", "--json"], input="nothing\n")
    assert result.exit_code == 0
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["env"], last["seed"], last["turns"], last["reward"]) == ("countdown", 3, 1, 0.0)


def test_the_doctor_checks_everything_and_names_the_sandbox():
    checks = {check.name: check for check in examine()}
    assert set(checks) == {
        "python",
        "packages",
        "device",
        "sandbox",
        "agents",
        "extras",
        "disk",
    }
    assert any(way in checks["agents"].seen for way in (CGROUP, NAMESPACE, SUBREAPER))
    assert checks["python"].verdict == "pass"
    assert any(way in checks["sandbox"].seen for way in ("bubblewrap", "namespaces", "landlock"))
    result = run(app, ["doctor", "--json"])
    assert result.exit_code == 0
    checks_done = json.loads(result.stdout.splitlines()[-1])["checks"]
    assert [check["name"] for check in checks_done] == list(checks)


def test_a_check_shows_its_remedy_below():
    assert str(Check("disk", "warn", "1 GiB", "buy one")).splitlines()[1].strip() == "-> buy one"
