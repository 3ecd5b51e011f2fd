"""Which rows a warm-up learns from, in what order, and its note on the others."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from graft.config import ConfigError, check
from graft.data.errors import DataError
from graft.train.build import build_run
from graft.train.errors import RunStopped
from graft.train.learner_build import sft_learner
from graft.train.monitor.display import Display
from graft.train.phases.context import RunContext
from graft.train.session import Session
from graft.train.sft import held_out_scores, sft_step
from graft.train.sft_dataset import Prefetcher, make_dataset
from tests.engine.engine_kit import dense_logits
from tests.text.text_templates import THINKING
from tests.train.sft_kit import chat, learned, message, recipe, trained, write


def dataset_of(tmp_path, rows, **sft):
    data = write(tmp_path / "rows.jsonl", rows)
    components = build_run(recipe(tmp_path, {"data": data, **sft}))
    return make_dataset(components), components


def ids(dataset, steps) -> list[list[str]]:
    return [[episode.task.id for episode in dataset.examples(step)] for step in steps]


def test_epochs_see_every_row_once_each_in_another_order(tmp_path):
    dataset, _ = dataset_of(tmp_path, [chat(f"q{n}", "a") for n in range(10)], epochs=3, batch=4)
    assert dataset.steps == math.ceil(3 * 10 / 4) == 8
    seen = [name for batch in ids(dataset, range(1, 9)) for name in batch]
    assert len(seen) == 30  # the last step has two
    for epoch in range(3):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == [f"row:{n}" for n in range(10)]
    assert seen[:10] != seen[10:20] != seen[20:]
    assert dataset.passes == pytest.approx(0.4)


def test_examples_are_a_function_of_the_step_also_when_prepared_ahead(tmp_path):
    dataset, _ = dataset_of(tmp_path, [chat(f"q{n}", "a") for n in range(5)], steps=6)
    straight = ids(dataset, range(1, 7))
    with Prefetcher(dataset) as ahead:
        assert [[e.task.id for e in ahead(step)] for step in range(4, 7)] == straight[3:]
    with Prefetcher(dataset) as ahead:  # another step is taken than the one that was prepared
        assert [[e.task.id for e in ahead(step)] for step in (1, 5, 2)] == [
            straight[0],
            straight[4],
            straight[1],
        ]


def test_held_out_rows_are_the_same_for_every_seed_and_never_learned(tmp_path):
    rows = [chat(f"q{n}", "a") for n in range(20)]
    data = write(tmp_path / "rows.jsonl", rows)
    found = []
    for seed in (1, 2):
        run = {"dir": str(tmp_path), "name": "r", "eval_tasks": 0, "trackers": [], "seed": seed}
        config = recipe(tmp_path, {"data": data, "epochs": 1, "eval_share": 0.25}, run=run)
        dataset = make_dataset(build_run(config))
        assert dataset.held_out is not None
        held_out = {episode.task.id for batch in dataset.held_out() for episode in batch}
        learnt = {name for batch in ids(dataset, range(1, dataset.steps + 1)) for name in batch}
        assert len(held_out) == 5 and len(learnt) == 15 and not held_out & learnt
        assert dataset.counts["rows"] == 15 and dataset.counts["held_out"] == 5
        found.append((held_out, dataset.examples(1)[0].task.id))
    assert found[0][0] == found[1][0]


def test_held_out_rows_may_have_a_file_of_their_own(tmp_path):
    apart = write(tmp_path / "test.jsonl", [chat("x", "y")])
    dataset, _ = dataset_of(tmp_path, [chat("q", "a")] * 3, epochs=1, eval_data=apart)
    assert dataset.held_out is not None and dataset.counts["rows"] == 3
    assert [e.task.data_source for batch in dataset.held_out() for e in batch] == [apart]


BAD = [
    ({"messages": 3}, "row 2: .*`messages`"),
    ({"messages": [message("user", "q")]}, "row 2: .*no assistant message"),
    ({"messages": [message("user", "q"), message("critic", "a")]}, "row 2: .*role 'critic'"),
    ({"messages": [message("user", ""), message("assistant", "a")]}, "row 2"),
    (chat("q", "a <result>5"), "row 2: '<result>' at character 2 is never closed"),
    (chat("q", "<result>5</result>"), None),  # the end of the turn is still learned
]


@pytest.mark.parametrize(("row", "complaint"), BAD)
def test_a_bad_row_stops_the_run_with_its_number_or_is_counted(tmp_path, row, complaint):
    rows = [chat("q", "a"), row, chat("b", "c")]
    marks = ["<result>", "</result>"]
    if complaint is None:
        assert dataset_of(tmp_path, rows, epochs=1, mask_results=marks)[0].counts["rows"] == 3
        return
    with pytest.raises(DataError, match=complaint):
        dataset_of(tmp_path, rows, epochs=1, mask_results=marks)
    dataset, _ = dataset_of(tmp_path, rows, epochs=1, mask_results=marks, skip_bad=True)
    assert dataset.counts["rows"] == 2 and dataset.counts["bad"] == 1
    assert dataset.steps == 1


def test_what_is_left_out_is_one_note(tmp_path):
    rows = [chat("q", "a"), chat("q", "a <r>5"), chat("q", "x" * 300)]
    sft = {"mask_results": ["<r>", "</r>"], "skip_bad": True, "overlong": "skip"}
    dataset, _ = dataset_of(tmp_path, rows, epochs=1, **sft)
    (note,) = dataset.notes
    assert "1 left out as bad, 1 left out, longer than rollout.max_context=200; the first: " in note
    assert "row 2: '<r>' at character 2 is never closed" in note


def test_a_file_without_rows_is_an_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match=r"rows\.jsonl has no rows"):
        dataset_of(tmp_path, [], epochs=1)
    with pytest.raises(DataError, match="no row is left to train on"):
        dataset_of(tmp_path, [chat("q" * 300, "a")] * 2, epochs=1, overlong="skip")
    with pytest.raises(DataError, match="none is left to train on"):
        dataset_of(tmp_path, [chat("q", "a")], epochs=1, eval_share=0.5)


def test_rows_longer_than_the_context_are_refused_cut_or_left_out(tmp_path):
    rows = [chat("q", "a"), chat("q", "b" * 250), chat("q" * 250, "c")]
    with pytest.raises(DataError, match=r"row 2 has 252 tokens, and rollout\.max_context is 200"):
        dataset_of(tmp_path, rows, epochs=1)
    dataset, _ = dataset_of(tmp_path, rows, epochs=1, overlong="skip")
    assert dataset.counts == {"rows": 1, "held_out": 0, "bad": 0, "cut": 0, "overlong": 2}
    # of the third nothing of the assistant's would be left
    with pytest.raises(DataError, match="row 3: the text before the assistant's fills all"):
        dataset_of(tmp_path, rows, epochs=1, overlong="cut")
    dataset, components = dataset_of(tmp_path, rows, epochs=1, overlong="cut", skip_bad=True)
    assert dataset.counts["cut"] == 1 and dataset.counts["bad"] == 1
    texts = {trained(e, components.tokenizer)[0] for e in dataset.examples(1)}
    assert texts == {"a<eos>", "b" * 199}
    assert any("1 cut to rollout.max_context=200" in note for note in dataset.notes)


@pytest.mark.parametrize("history", ["append", "template"])
def test_chats_in_a_template_that_rewrites_are_learned_and_noted(tmp_path, history):
    data = write(tmp_path / "rows.jsonl", [chat("q", "a"), chat("q", "a", "b", "c")])
    model = {
        "shape": {**recipe(tmp_path, {"data": data, "steps": 1}).model.shape},
        "alphabet": "bytes",
        "chat_template": THINKING,
        "history": history,
    }
    config = recipe(tmp_path, {"data": data, "epochs": 1}, model=model)
    components = build_run(config)
    (note,) = (note for note in components.notes if "model.history" in note)
    assert "rewrites turn 1 (assistant)" in note and f"model.history={history}:" in note
    (examples,) = (make_dataset(components).examples(step) for step in (1,))
    rows = sorted(len(list(episode.trajectories())) for episode in examples)
    assert rows == ([1, 1] if history == "append" else [1, 2])
    assert sum(any(s.mask) for episode in examples for s in episode.spans) == 3


def test_tools_of_a_row_stand_in_its_prompt(tmp_path):
    schema = {"type": "function", "function": {"name": "find", "parameters": {}}}
    row = {**chat("q", "a"), "tools": [schema]}
    data = write(tmp_path / "rows.jsonl", [row])
    shape = recipe(tmp_path, {"data": data, "steps": 1}).model.shape
    model = {"shape": shape, "alphabet": "bytes", "chat_template": "chatml"}
    rollout = {"max_tokens": 8, "max_context": 2000}
    components = build_run(
        recipe(tmp_path, {"data": data, "epochs": 1}, model=model, rollout=rollout)
    )
    (episode,) = make_dataset(components).examples(1)
    assert '"name": "find"' in learned(episode, components.tokenizer)[0][0]
    assert trained(episode, components.tokenizer) == ["a<|im_end|>"]


@pytest.mark.parametrize(
    ("sft", "complaint"),
    [
        ({"steps": 3, "epochs": 1, "data": "x"}, "exclude each other: set one to 0"),
        ({"epochs": 1}, "nothing to imitate"),
        ({"steps": 1, "data": "x", "eval_every": 5}, "needs held-out data"),
        ({"steps": 1, "data": "x", "stop_at": 0.5}, "needs held-out data"),
        ({"steps": 1, "data": "x", "eval_share": 0.1, "eval_data": "y"}, "choose one"),
        ({"steps": 1, "data": "x", "mask_results": ["<r>", ""]}, "the text that closes it"),
        ({"steps": 1, "data": "x", "overlong": "drop"}, "sft.overlong='drop'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, sft, complaint):
    with pytest.raises(ConfigError, match=complaint):
        recipe(tmp_path, sft)


def test_epochs_of_demonstrations_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"demonstrations never end: give sft\.steps"):
        recipe(tmp_path, {"epochs": 1}, task={"env": "calculator"})


def test_held_out_numbers_are_those_of_plain_logits(tmp_path):
    """Against the model run row by row, nothing packed: mean cross-entropy, and greedy matches."""
    rows = [chat("q", "abc"), chat("rs", "d"), chat("tuv", "efghi", "w", "jk")]
    dataset, components = dataset_of(tmp_path, rows, steps=2)
    learner = sft_learner(components, 2)
    learner.tokens_per_micro = 12  # several micro-batches
    for _ in range(3):  # so that some tokens are the likeliest
        sft_step(learner, dataset.examples(1))
    examples = [dataset.examples(1), dataset.examples(2)[:1]]
    found = held_out_scores(learner, examples)
    logp, hits = [], []
    for episode in (one for batch in examples for one in batch):
        (row,) = episode.trajectories()
        tokens = torch.tensor(row.tokens)
        mask = [flag for span in row.spans for flag in span.mask or [False] * len(span)]
        mask = torch.tensor(mask)[1:]
        logits = dense_logits(components.policy, row.tokens)[:-1][mask]
        labels = tokens[1:][mask]
        logp += logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].tolist()
        hits += (logits.argmax(-1) == labels).tolist()
    assert found["eval/num_tokens"] == len(logp) == 4 + 2 + 6 + 3
    assert found["eval/loss"] == pytest.approx(-sum(logp) / len(logp), rel=1e-5)
    assert found["eval/accuracy"] == pytest.approx(sum(hits) / len(hits)) and 0 < sum(hits) < len(
        hits
    )


def test_rows_do_not_stay_in_memory(tmp_path):
    dataset, _ = dataset_of(tmp_path, [chat(f"q{n}", "a") for n in range(50)], epochs=1)
    held = Counter(type(x).__name__ for x in vars_of(dataset.examples))
    assert held["array"] == 1 and held["Episode"] == held["dict"] == 0


def vars_of(function):
    cells = [cell.cell_contents for cell in function.__closure__]
    rows = next(cell for cell in cells if type(cell).__name__ == "SFTRows")
    return [rows.numbers, rows.chats]


def test_a_run_does_not_go_on_with_other_rows(tmp_path, monkeypatch):
    def row(n: int) -> str:
        messages = [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]
        return json.dumps({"messages": messages}) + "\n"

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(map(row, range(8))))
    recipe = {
        "run": {
            "dir": str(tmp_path),
            "name": "r",
            "save_every": 1,
            "eval_tasks": 0,
            "trackers": [],
        },
        "model": {
            "alphabet": "bytes",
            "shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16},
        },
        "sft": {"data": str(file), "epochs": 2, "batch": 4, "eval_share": 0, "eval_every": 0},
        "train": {"steps": 0},
    }

    class Killed(Exception):
        pass

    save = RunContext.save

    def save_twice(run, phase, step, learner):
        save(run, phase, step, learner)
        if step == 2:
            raise Killed

    monkeypatch.setattr(RunContext, "save", save_twice)
    with pytest.raises(Killed):
        Session(check(recipe), Display(0)).train()
    monkeypatch.undo()
    before = file.read_text()
    file.write_text("".join(map(row, range(1, 9))))
    with pytest.raises(RunStopped, match="are not those that this run began with"):
        Session(check(recipe), Display(0)).train()
    file.write_text(before)
    assert Session(check(recipe), Display(0)).train()["sft"]["rows"] == 8
