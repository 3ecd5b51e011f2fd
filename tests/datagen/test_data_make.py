"""Tasks and demonstrations as rows: the same as in a run, whole or absent."""

import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from graft import cli
from graft.data.chats import open_chats
from graft.data.errors import DataError
from graft.data.rows import read_rows
from graft.datagen.demonstrations import make_rows
from graft.datagen.row_file import new_rows
from graft.envs import make
from graft.envs.calculator import Expression
from graft.rollout.demonstration import demonstration
from graft.rollout.examples import example
from graft.rollout.recorded import spans_of_attempt, spans_of_trace
from graft.rollout.setup import draw_key
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.errors import RunStopped
from graft.train.tasks import TaskStream, held_out_tasks
from graft.types import Author, CallText
from tests.command_line import start
from tests.full_disk import small_files

TASKS = [
    "calculator",
    "countdown",
    "earl:sort-4",
    "hops",
    "game:GuessTheNumber-v0",
    "game:TowerofHanoi-v0",
]


def graft(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["graft", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def trajectories_of(path: Path) -> list[dict]:
    return list(read_rows(str(path)))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("env_id", TASKS)
def test_a_row_read_back_is_the_demonstration_that_a_run_would_see(env_id, ending, tmp_path):
    out = str(tmp_path / f"rows.{ending}")
    make_rows(env_id, make(env_id), out, rows=4, seed=3, duplicates=True)
    chat = Chat(FastTokenizer.bytes(), "chatml")
    for row, task in zip(open_chats(out), TaskStream(env_id, seed=3), strict=False):
        shown = demonstration(task, make(env_id), chat, seed=draw_key(3, task.id, 0))
        read = example(task, row, chat)
        assert [(s.author, s.tokens, s.mask) for s in read.spans] == [
            (s.author, s.tokens, s.mask) for s in shown.spans
        ]


@pytest.mark.parametrize("env_id", ["calculator", "game:GuessTheNumber-v0", "countdown"])
def test_the_tokens_of_an_attempt_give_the_spans_of_its_trace(env_id):
    """The episode of a rollout holds the role of each text and where turns ended."""
    chat, env = Chat(FastTokenizer.bytes(), "chatml"), make(env_id)
    for task, _ in zip(TaskStream(env_id, seed=1), range(6), strict=False):
        env.reset(task.seed)
        trace = [(author, str(text)) for author, text in env.demonstrate(random.Random(task.seed))]
        episode = demonstration(task, make(env_id), chat, seed=task.seed)
        [row] = episode.trajectories()
        assert spans_of_attempt(row, chat) == spans_of_trace(trace, env.observe_as, env.stop)


def test_an_end_is_written_only_where_it_is_not_obvious():
    call = CallText("[2+3]", "calculator", ("2", "+", "3"))
    trace = [(Author.POLICY, call), (Author.ENV, "5;"), (Author.POLICY, "[5"), (Author.POLICY, "]")]
    assert spans_of_trace(trace, "inline", ("]",)) == [
        {
            "author": "policy",
            "text": "[2+3]",
            "call": {"tool": "calculator", "arguments": ["2", "+", "3"]},
        },
        {"author": "env", "text": "5;"},
        {"author": "policy", "text": "[5"},
        {"author": "policy", "text": "]", "end": False},  # a call without an answer
    ]
    assert spans_of_trace([(Author.POLICY, "7"), (Author.ENV, "no")], "user", ()) == [
        {"author": "policy", "text": "7"},
        {"author": "env", "text": "no", "role": "user"},
    ]


def test_the_seed_decides_every_byte(tmp_path):
    def written(seed: int, name: str) -> bytes:
        make_rows("countdown", make("countdown"), str(tmp_path / name), rows=20, seed=seed)
        return (tmp_path / name).read_bytes()

    assert written(5, "a.jsonl") == written(5, "b.jsonl") != written(6, "c.jsonl")
    assert written(5, "a.parquet") == written(5, "b.parquet")
    lines = trajectories_of(tmp_path / "a.jsonl")
    for row, other in zip(trajectories_of(tmp_path / "a.parquet"), lines, strict=True):
        assert (row["messages"], row["extra_info"]) == (other["messages"], other["extra_info"])
        assert [{k: v for k, v in s.items() if v is not None} for s in row["spans"]] == other[
            "spans"
        ]


def test_test_rows_are_what_runs_are_scored_on(tmp_path, monkeypatch, capsys):
    small = ("operands=[2,2]", "digits=[1,1]", "--form", "tasks", "--n", "20")
    for split in ("train", "test"):
        out = str(tmp_path / f"{split}.jsonl")
        done = graft(
            monkeypatch,
            capsys,
            "data",
            "make",
            "calculator",
            *small,
            "--split",
            split,
            "--out",
            out,
        )
        assert done[0] == 0, done
    train, test = (
        trajectories_of(tmp_path / "train.jsonl"),
        trajectories_of(tmp_path / "test.jsonl"),
    )
    prompts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
    assert len(prompts[0]) == len(prompts[1]) == 20 and not prompts[0] & prompts[1]
    first = test[0]["extra_info"]
    assert first == {"index": 0, "seed": held_out_tasks("calculator", 1)[0].seed, "split": "test"}


def test_tasks_are_read_back_as_prompts_with_their_answers(tmp_path):
    for ending in ("jsonl", "parquet"):
        out = tmp_path / f"tasks.{ending}"
        make_rows("arithmetic", make("arithmetic"), str(out), rows=3, seed=0, form="tasks")
        env = make("prompts", data=str(out))
        for row in trajectories_of(out):
            posed, info = env.reset(idx=row["extra_info"]["index"])
            assert posed == row["prompt"] and info["data_source"] == "arithmetic"
            assert env.step(f"#### {row['reward_model']['ground_truth']}").reward == 1.0
    [row] = [row for row in trajectories_of(out) if row["extra_info"]["index"] == 0]
    assert (row["ability"], row["reward_model"]["style"]) == ("arithmetic", "rule")


def test_answers_with_a_form_of_their_own_survive_parquet(tmp_path):
    out = tmp_path / "tasks.parquet"
    make_rows("countdown", make("countdown"), str(out), rows=5, seed=0, form="tasks")
    env = make("countdown")
    for row in trajectories_of(out):
        _, info = env.reset(row["extra_info"]["seed"])
        assert row["reward_model"]["ground_truth"] == info["answer"]


def test_a_task_is_written_once_unless_repeats_are_allowed(tmp_path, monkeypatch, capsys):
    few = ("data", "make", "calculator", "operands=[2,2]", "digits=[1,1]", "operators=+")
    out = str(tmp_path / "few.jsonl")
    code, _, err = graft(monkeypatch, capsys, *few, "--n", "500", "--out", out)
    assert code == 1 and "different tasks" in err and list(tmp_path.iterdir()) == []
    known = int(err.partition(" posed ")[2].split()[0])
    assert graft(monkeypatch, capsys, *few, "--n", str(known), "--out", out)[0] == 0
    prompts = [row["messages"][0]["content"] for row in trajectories_of(Path(out))]
    assert len(set(prompts)) == known
    code, last, _ = graft(
        monkeypatch, capsys, *few, "--n", "500", "--duplicates", "--out", out, "--json"
    )
    assert code == 0 and json.loads(last.splitlines()[-1])["rows"] == 500


def test_hidden_boards_are_different_rows_though_their_prompts_are_one(tmp_path):
    env = make("game:GuessTheNumber-v0")
    made = make_rows("game:GuessTheNumber-v0", env, str(tmp_path / "rows.jsonl"), rows=10, seed=0)
    rows = trajectories_of(tmp_path / "rows.jsonl")
    assert made.rows == 10 and len({json.dumps(row["messages"]) for row in rows}) == 1
    assert len({json.dumps(row["spans"]) for row in rows}) == 10


class Unsure(Expression):
    """A teacher who cannot do products."""

    def demonstrate(self, rng):
        if "*" in self.expression:
            raise NotImplementedError("no products")
        return [(Author.POLICY, self.answer)]


def test_tasks_that_the_teacher_cannot_do_are_left_out_and_counted(tmp_path):
    out = tmp_path / "rows.jsonl"
    made = make_rows("unsure", Unsure(operators="*-", operands=(2, 2)), str(out), rows=30, seed=0)
    assert made.unsolved > 0 and made.rows == len(trajectories_of(out)) == 30
    assert not any("*" in row["messages"][0]["content"] for row in trajectories_of(out))
    with pytest.raises(ValueError, match="has no demonstration"):
        make_rows("unsure", Unsure(operators="*"), str(out), rows=3, seed=0)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_failure_halfway_leaves_the_older_file_and_no_part(ending, tmp_path):
    out = tmp_path / f"rows.{ending}"
    make_rows("calculator", make("calculator"), str(out), rows=3, seed=0)
    before = out.read_bytes()
    with pytest.raises(ZeroDivisionError), new_rows(out) as file:
        file.append({"messages": []})
        raise ZeroDivisionError
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_full_disk_is_one_line_and_nothing_is_lost(ending, tmp_path):
    out = tmp_path / f"rows.{ending}"
    out.write_text("older")
    message = "MB are free there, and the older file"
    with small_files(20_000), pytest.raises(RunStopped, match=message):
        make_rows("calculator", make("calculator"), str(out), rows=9000, seed=0)
    assert out.read_text() == "older" and list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
def test_a_killed_command_leaves_no_file_under_the_name(tmp_path):
    out, part = tmp_path / "rows.jsonl", tmp_path / ".rows.jsonl.partial"
    process = start("data", "make", "calculator", "--n", "1000000", "--out", str(out))
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert part.exists() and not out.exists()
    make_rows("calculator", make("calculator"), str(out), rows=2, seed=0)
    assert len(trajectories_of(out)) == 2 and not part.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["calculator", "--out", "rows.csv"], 2, "write .jsonl or .parquet"),
        (["calculator"], 2, "--out FILE is missing"),
        (["calculator", "--form", "poems", "--out", "r.jsonl"], 2, "none of chats, tasks"),
        (["calculator", "--split", "dev", "--out", "r.jsonl"], 2, "one of train, test"),
        (["calculator", "split=test", "--out", "r.jsonl"], 2, "--split train"),
        (["calculator", "wings=2", "--out", "r.jsonl"], 2, "has no argument 'wings'"),
        (["calculator", "demo_args.wings=2", "--out", "r.jsonl"], 2, "it takes tool_rate"),
        (["game:Mintsweeper-v0", "--out", "r.jsonl"], 2, "did you mean"),
        (
            ["game:Minesweeper-v0", "--form", "tasks", "--out", "r.jsonl"],
            2,
            "has no answer to compare",
        ),
        (
            ["game:TowerofHanoi-v0", "--wrappers", "concat", "--out", "r.jsonl"],
            2,
            "rewrites the history",
        ),
    ],
)
def test_what_cannot_be_made_is_an_error_with_the_reason(
    arguments, code, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    seen = graft(monkeypatch, capsys, "data", "make", *arguments)
    assert (seen[0], message in seen[2]) == (code, True), seen
    assert list(tmp_path.iterdir()) == []


def test_rows_of_several_forms_do_not_become_columns_by_losing_keys(tmp_path):
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    with (
        pytest.raises(DataError, match="no column for tool_calls"),
        new_rows(tmp_path / "rows.parquet") as file,
    ):
        file.append({"messages": [message]})
    assert list(tmp_path.iterdir()) == []
