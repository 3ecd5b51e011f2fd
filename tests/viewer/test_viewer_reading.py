"""What the viewer reads off a run folder: curves, indices of episodes, pieces of text, walks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from graft.runs import RunRecord
from graft.text.tokenizer import FastTokenizer
from graft.types import Author, Episode, Leaf, Span, Status, Task
from graft.viewer import walks
from graft.viewer.curves import metric_names, points, table
from graft.viewer.episodes import EpisodeFile, glance_at
from graft.viewer.pieces import pieces
from graft.viewer.runs import NotThere, open_runs
from graft.viewer.search import search
from tests.viewer.folders import episode, leaf, span, write_run, write_step

LINES = [
    {"phase": "sft", "step": 1, "loss": 3.0, "step_time": 2.0},
    {"phase": "rl", "step": 1, "reward": 0.25, "step_time": 2.0},
    {"phase": "rl", "step": 2, "reward": 0.75, "step_time": 3.0, "eval/greedy": 1.0},
]


def two_attempts(task: str = "sum:1") -> dict:
    """ "2+3=" -> "6", reward 0; and "[2+3]" -> "5;" -> "5", reward 1."""
    spans = [
        span(None, "task", "2+3="),
        span(0, "policy", "6"),
        span(0, "policy", "[2+3]", info={"tool_calls": 1}),
        span(2, "env", "5;"),
        span(3, "policy", "5"),
    ]
    metrics = {"turns": 2.0, "tool_calls": 1.0}
    return episode(task, spans, [leaf(1), leaf(4, 1.0, "truncated", metrics=metrics)])


# curves


def opened(folder) -> RunRecord:
    record = RunRecord(folder)
    record.refresh()
    return record


def test_seconds_are_the_sum_of_step_times_over_the_phases(tmp_path):
    record = opened(write_run(tmp_path / "a", metrics=LINES))
    found = points(record, "rl", ["reward", "eval/greedy", "absent"])
    assert found["step"] == [1, 2]
    assert found["seconds"] == [4.0, 7.0]
    assert found["values"] == {"reward": [0.25, 0.75], "eval/greedy": [None, 1.0]}
    written = (tmp_path / "a" / "metrics.jsonl").stat().st_mtime
    assert found["wall"] == pytest.approx([written - 3, written])


def test_a_time_that_was_written_down_is_believed(tmp_path):
    lines = [{**row, "time": 1000.0 + i} for i, row in enumerate(LINES)]
    record = opened(write_run(tmp_path / "a", metrics=lines))
    assert points(record, "rl", ["reward"])["wall"] == [1001.0, 1002.0]
    assert "time" not in metric_names(record)["rl"]


def test_a_long_curve_is_thinned_by_means_and_the_table_is_not(tmp_path):
    lines = [{"phase": "rl", "step": i + 1, "reward": float(i)} for i in range(10)]
    record = opened(write_run(tmp_path / "a", metrics=lines))
    found = points(record, "rl", ["reward"], most=5)
    assert found["step"] == [2, 4, 6, 8, 10]
    assert found["values"]["reward"] == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert [row[2] for row in table(record, "rl", ["reward"])] == [float(i) for i in range(10)]


# episodes


def test_a_glance_reads_rewards_and_tokens_without_the_middle():
    raw = (json.dumps(two_attempts()) + "\n").encode()
    glance = glance_at(raw, 0, 0)
    assert (glance.task, glance.prompt, glance.attempts) == ("sum:1", "2+3=", 2)
    assert (glance.reward, glance.best, glance.spread) == (0.5, 1.0, 0.5)
    assert glance.tokens == (1 + 5 + 1) / 2
    assert (glance.turns, glance.tools) == (1.0, 0.5)
    assert glance.statuses == {"done": 1, "truncated": 1}
    # JSON written without blanks is read whole, to the same end
    compact = (json.dumps(two_attempts(), separators=(",", ":")) + "\n").encode()
    assert glance_at(compact, 0, 0).to_json() == glance.to_json()


def test_a_glance_reads_what_an_episode_writes_of_itself():
    made = Episode(
        Task("t", "made", ({"role": "user", "content": '], "leaves": [ "author": "policy"'},)),
        [
            Span(None, Author.TASK, [1]),
            Span(0, Author.POLICY, [4, 5], [4, 5], text='], "leaves": ['),
        ],
        [Leaf((1,), 0.25, Status.DONE)],
    )
    glance = glance_at((made.dumps() + "\n").encode(), 0, 0)
    assert (glance.fault, glance.tokens, glance.reward) == ("", 2.0, 0.25)


@pytest.mark.parametrize("line", [b"{}\n", b"[1]\n", b"\xff\n", b'{"task": 1}\n', b"null\n"])
def test_a_line_that_is_no_episode_is_a_row_with_the_fault(line):
    assert glance_at(line, 0, 0).fault.startswith("not an episode")


def test_the_index_grows_with_the_file_and_half_a_line_waits(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    first, second = (json.dumps(two_attempts(name)) + "\n" for name in "ab")
    path.write_text(first + second[:50], encoding="utf-8")
    file = EpisodeFile(path)
    assert file.index() and [g.task for g in file.glances] == ["a"]
    path.write_text(first + second, encoding="utf-8")
    assert file.index() and [g.task for g in file.glances] == ["a", "b"]
    assert file.read(1) == second.encode() and file.read(2) is None
    assert file.find("b") == 1
    # another file in its place is read anew
    aside = tmp_path / "aside"
    aside.write_text(second, encoding="utf-8")
    aside.replace(path)
    assert file.index() and [g.task for g in file.glances] == ["b"]


def test_rows_are_sorted_and_filtered(tmp_path):
    rewards = {"a": 0.0, "b": 1.0, "c": 0.5}
    made = [
        episode(name, [span(None, "task", name), span(0, "policy", name * 3)], [leaf(1, reward)])
        for name, reward in rewards.items()
    ]
    made[2]["leaves"][0]["status"] = "timeout"
    file = EpisodeFile(write_step(write_run(tmp_path / "r"), 1, made))
    file.index()
    assert file.order("reward", True, "", "") == [1, 2, 0]
    assert file.order("reward", False, "", "") == [0, 2, 1]
    assert file.order("status", True, "", "")[0] == 2
    assert file.order("line", False, "timeout", "") == [2]
    assert file.order("line", False, "", "B") == [1]


# pieces


def test_the_pieces_of_a_text_add_up_to_it():
    tokenizer, text = FastTokenizer.bytes(), "né 🙂 <eos>x"
    tokens = tokenizer.encode(text)
    whole = pieces(tokenizer, tokens, 0, len(tokens))
    assert "".join(whole) == text
    assert whole[:3] == ["n", "", "é"]
    # a page that begins in the middle has the same
    assert pieces(tokenizer, tokens, 3, 6) == whole[3:6]


def test_half_a_character_at_the_end_is_shown_as_such():
    assert pieces(FastTokenizer.bytes(), [110, 195], 0, 2) == ["n", "\ufffd"]


# walks


def test_a_walk_has_one_number_per_token_and_none_where_nothing_was_sampled(tmp_path):
    made = two_attempts()
    made["spans"][4]["logprobs"] = [-0.125]
    run = open_runs([str(write_run(tmp_path / "r", {3: [made]}))])[0]
    found = walks.tokens(run, "3", 0, 1, 0, 0, 100)
    assert found["total"] == 4 + 5 + 2 + 1
    assert found["spans"] == [[0, 4], [2, 5], [3, 2], [4, 1]]
    assert "".join(found["pieces"]) == "2+3=[2+3]5;5"
    assert found["logprobs"] == [None] * 4 + [-0.5] * 5 + [None] * 2 + [-0.125]
    assert found["mask"] == [None] * 4 + [True] * 5 + [None] * 2 + [True]
    assert found["advantages"] == [] and "learned" in found["no_learned"]
    page = walks.tokens(run, "3", 0, 1, 0, 8, 3)
    assert (page["start"], page["end"], page["pieces"]) == (8, 11, ["]", "5", ";"])
    assert page["logprobs"] == [-0.5, None, None]
    with pytest.raises(NotThere, match="no leaf 2"):
        walks.tokens(run, "3", 0, 2, 0, 0, 1)


def test_what_the_learner_wrote_lies_behind_the_prompt(tmp_path):
    folder = write_run(tmp_path / "r", {3: [two_attempts()]})
    (folder / "learned").mkdir()
    np.savez(
        folder / "learned" / "step_000003.npz",
        rows=np.array([[0, 0, 0], [0, 1, 0]], np.int32),
        lengths=np.array([1, 8], np.int32),
        advantages=np.array([-1, *[0.5] * 5, 0, 0, 0.25], np.float32),
        logprobs=np.array([-1.5, *[-0.75] * 5, math.nan, math.nan, -2], np.float32),
    )
    run = open_runs([str(folder)])[0]
    found = walks.tokens(run, "3", 0, 1, 0, 0, 100)
    assert found["advantages"] == [None] * 4 + [0.5] * 5 + [0.0, 0.0, 0.25]
    assert found["learner"] == [None] * 4 + [-0.75] * 5 + [None, None, -2.0]
    assert walks.tokens(run, "3", 0, 0, 0, 0, 9)["advantages"] == [None] * 4 + [-1.0]


def test_a_broken_file_of_the_learner_is_a_reason(tmp_path):
    folder = write_run(tmp_path / "r", {})
    (folder / "learned").mkdir()
    (folder / "learned" / "step_000001.npz").write_bytes(b"PK not really")
    [run] = open_runs([str(folder)])
    assert "cannot be read" in str(run.learned("1", 0, 0, 0))
    assert "no file" in str(run.learned("2", 0, 0, 0))


def test_extra_actions_have_their_names(tmp_path):
    made = two_attempts()
    made["spans"][1]["actions"] = [258]  # behind the 258 tokens of the vocabulary
    run = open_runs([str(write_run(tmp_path / "r", {1: [made]}))])[0]
    found = walks.tokens(run, "1", 0, 0, 0, 0, 9)
    assert found["actions"][-1] == 258 and found["names"] == {258: "compare"}


def test_a_tree_that_leads_nowhere_is_refused(tmp_path):
    made = two_attempts()
    made["spans"][2]["parent"] = 4  # a ring
    run = open_runs([str(write_run(tmp_path / "r", {1: [made]}))])[0]
    with pytest.raises(NotThere, match="leads to no root"):
        walks.tokens(run, "1", 0, 1, 0, 0, 9)


# search


def test_search_finds_words_of_either_case_and_goes_on_where_it_stopped(tmp_path):
    steps = {
        step: [
            episode(
                f"t{i}",
                [span(None, "task", "q"), span(0, "policy", "say Grüße, Friend")],
                [leaf(1)],
            )
            for i in range(40)
        ]
        for step in (1, 2)
    }
    run = open_runs([str(write_run(tmp_path / "r", steps))])[0]
    found = search(run, ["1", "2"], "FRIEND", "1", 0)
    assert len(found["hits"]) == 50 and found["next"] == ["2", 10]
    assert found["hits"][0] == {
        "step": "1", "line": 0, "span": 1, "task": "t0",
        "before": "say Grüße, ", "match": "Friend", "after": "",
    }  # fmt: skip
    rest = search(run, ["1", "2"], "friend", *found["next"])
    assert len(rest["hits"]) == 30 and rest["next"] is None
    assert search(run, ["1"], "grüsse", "1", 0)["hits"] == []
    assert len(search(run, ["1"], "GRÜ", "1", 0)["hits"]) == 40


# runs


def test_a_folder_of_runs_stands_for_them(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / name, bytes_tokenizer=False)
    assert [run.name for run in open_runs([str(tmp_path)])] == ["a", "b"]
    with pytest.raises(ValueError, match="no run"):
        open_runs([str(tmp_path / "c")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no run"):
        open_runs([str(tmp_path / "empty")])


def test_what_a_failed_step_left_behind_can_be_read(tmp_path):
    folder = write_run(tmp_path / "r")
    (folder / "failed").mkdir()
    made = two_attempts()
    made["spans"][1]["logprobs"] = [math.nan]
    text = json.dumps(made) + "\n"
    (folder / "failed" / "step_000007.jsonl").write_text(text, encoding="utf-8")
    run = open_runs([str(folder)])[0]
    assert list(run.files) == ["failed-7"]
    assert walks.tokens(run, "failed-7", 0, 0, 0, 0, 9)["logprobs"][-1] is None


def test_without_a_tokenizer_tokens_are_numbers_and_the_reason_is_given(tmp_path):
    run = open_runs([str(write_run(tmp_path / "r", {1: [two_attempts()]}, bytes_tokenizer=False))])
    found = walks.tokens(run[0], "1", 0, 0, 0, 0, 9)
    assert found["pieces"] is None and "no checkpoint yet" in found["no_pieces"]
    assert walks.text(run[0], "1", 0, 2, 1) == {"text": "2+3]", "start": 1, "total": 5}
