"""Attempts are stored one by one: kill -9 costs those under way, and a second call makes the rest."""

import json
import signal
from pathlib import Path

import pytest

from graft.evaluate.attempts import make_attempts
from graft.evaluate.samples import SampleFile, SamplesInUse, StoredSample, file_name
from tests.command_line import python
from tests.model_calls import evaluate_model
from tests.training import train_recipe

RECIPE = """
run: {{dir: "{folder}", name: run, keep_last: 9, eval_tasks: 0, trackers: []}}
model:
  shape: {{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 96}}
task: {{env: calculator, args: {{operands: [2, 2], digits: [1, 1]}}, eval_args: {{split: test}}}}
rollout: {{tasks: 2, samples: 4, max_tokens: 10, max_turns: 4, max_context: 64, concurrency: 3}}
sft: {{steps: 30, batch: 16, warmup: 0, lr: 1.0e-2}}
train: {{steps: 0}}
"""

KILLED = """
import os, signal, sys
from graft.evaluate.samples import SampleFile
from tests.model_calls import evaluate_model
from tests.command_line import python

append, made = SampleFile.append, []

def dies(self, sample):
    append(self, sample)
    made.append(sample)
    if len(made) == 9:
        self._log._file.write(b'{"task": "half a li')
        self._log._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

SampleFile.append = dies
evaluate_model(sys.argv[1], **eval(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    train_recipe(str(folder / "tiny.yaml"))
    return folder / "run"


@pytest.fixture
def made(monkeypatch) -> list[StoredSample]:
    """Samples as they are stored."""
    seen: list[StoredSample] = []
    append = SampleFile.append

    def watched(self, sample: StoredSample) -> None:
        seen.append(sample)
        append(self, sample)

    monkeypatch.setattr(SampleFile, "append", watched)
    return seen


def quiet(text: str) -> None:
    pass


def stored(run: Path, name: str) -> list[dict]:
    [file] = (run / "evaluations" / f"{name}.samples").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()][1:]


def without_time(table) -> str:
    """The table as JSON, its clocks aside."""
    report = table.to_json()
    for row in report["rows"]:
        for scores in row["scores"].values():
            scores.pop("seconds")
    return json.dumps(report)


@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        ("sampled", {"samples": 4, "tasks": 6, "temperature": 1.0, "k": [1, 4]}),
        ("greedy", {"tasks": 24, "temperature": 0.0}),
    ],
)
def test_after_kill_9_the_same_command_makes_only_what_is_missing(trained, made, how, arguments):
    whole, _, _ = evaluate_model(str(trained), **arguments, name=f"{how}-whole", say=quiet)
    assert len(made) == 24 and len({(one.task, one.sample) for one in made}) == 24
    named = {**arguments, "name": f"{how}-killed"}
    killed = python(KILLED, str(trained), repr(named))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [file] = (trained / "evaluations" / f"{how}-killed.samples").iterdir()
    assert file.read_bytes().endswith(b'{"task": "half a li')
    made.clear()
    printed: list[str] = []
    again, _, _ = evaluate_model(str(trained), **named, say=printed.append)
    assert len(made) == 15 and "9 attempts are stored already, 15 are missing" in printed[0]
    assert without_time(again) == without_time(whole)
    assert again.markdown() == whole.markdown()
    texts = [
        {(one["task"], one["sample"]): one["text"] for one in stored(trained, f"{how}-{which}")}
        for which in ("whole", "killed")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 24


def test_more_attempts_and_more_tasks_go_on_from_those_that_are_there(trained, made):
    few, _, _ = evaluate_model(str(trained), tasks=3, samples=2, name="grows", say=quiet)
    made.clear()
    many, _, _ = evaluate_model(str(trained), tasks=5, samples=4, name="grows", say=quiet)
    assert len(made) == 5 * 4 - 3 * 2
    [small] = few.rows.values()
    [large] = many.rows.values()
    for task in range(3):
        assert large["calculator"].rewards[task][:2] == small["calculator"].rewards[task]


def test_a_sample_has_its_task_text_status_and_counts(trained):
    evaluate_model(str(trained), tasks=4, samples=2, name="samples", say=quiet)
    for one in stored(trained, "samples"):
        assert one["task"] == f"calculator:test:{one['seed']}" and one["sample"] in (0, 1)
        assert one["source"] == "calculator" and one["status"] in ("done", "truncated")
        assert one["prompt_tokens"] == 4 and one["tokens"] >= 1 and one["seconds"] >= 0
        if one["tool_calls"] == 0 and one["status"] == "done":
            assert one["answer"] == one["text"].strip()
        if one["status"] == "truncated":
            assert one["answer"] == ""


def test_prompts_longer_than_the_context_are_counted_and_earn_nothing(trained):
    printed: list[str] = []
    table, _, _ = evaluate_model(
        str(trained),
        tasks=3,
        name="long",
        args=["calculator.operands=[9,9]", "calculator.digits=[2,2]"],
        overrides=["rollout.max_context=20"],
        say=printed.append,
    )
    [row] = table.rows.values()
    assert row["calculator"].overlong == 3 and row["calculator"].reward == 0.0
    assert "3 prompts leave no space for an answer" in printed[0]
    assert "(3 prompts too long)" in table.markdown()
    assert {one["status"] for one in stored(trained, "long")} == {"truncated"}
    narrow = [
        "calculator.operands=[40,40]",
        "calculator.digits=[2,2]",
    ]  # the model has 96 positions
    table, _, _ = evaluate_model(
        str(trained), tasks=2, name="window", args=narrow, overrides=["rollout.max_context=400"],
        say=quiet,
    )  # fmt: skip
    [row] = table.rows.values()
    assert row["calculator"].overlong == 2


def test_a_torn_last_line_is_dropped_and_a_bad_line_hides_nothing(tmp_path):
    def sample(number: int, **changes) -> StoredSample:
        known = {
            "task": "t",
            "seed": 0,
            "sample": number,
            "source": "s",
            "text": "é",
            "answer": "7",
        }
        rest = {"reward": 1.0, "status": "done", "prompt_tokens": 1, "tokens": 1, "tool_calls": 0}
        return StoredSample(**{**known, **rest, "seconds": 0.0, **changes})

    path = tmp_path / "deep" / "a.jsonl"
    file = SampleFile(path, {"set": "a"})
    file.append(sample(0))
    file.append(sample(1, status="engine_error"))
    with pytest.raises(SamplesInUse, match="another process"):
        SampleFile(path, {"set": "a"})
    file.close()
    written = path.read_bytes()
    lines = written.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b"\xff\xfe nonsense\n" + lines[2] + lines[1][:-5])
    again = SampleFile(path, {"set": "a"})
    assert sorted(again.kept) == [("t", 0), ("t", 1)] and again.unreadable == 1
    assert again.kept["t", 1].has_failed and again.kept["t", 0].text == ""
    again.append(sample(1, reward=0.5))  # made again: the later line counts
    again.close()
    last = SampleFile(path, {"set": "a"})
    assert last.kept["t", 1].reward == 0.5
    last.close()
    path.write_bytes(lines[0][:7])  # killed in its first line
    empty = SampleFile(path, {"set": "a"})
    assert empty.kept == {} and path.read_bytes() == lines[0]
    empty.close()


def test_files_are_named_by_what_their_samples_depend_on():
    first = file_name("rl-000020", "earl:sort/4", {"seed": 0})
    assert first.startswith("rl-000020.earl_sort_4.") and first.endswith(".jsonl")
    assert first == file_name("rl-000020", "earl:sort/4", {"seed": 0})
    assert first != file_name("rl-000020", "earl:sort/4", {"seed": 1})
    assert first != file_name("rl-000020", "earl:sort_4", {"seed": 0})


def test_no_task_waits_for_another(trained):
    """Task 0 is slow; with room for two attempts all others are made beside it."""
    import asyncio

    from graft.config import load_config
    from graft.train.build import build_run
    from graft.train.tasks import held_out_tasks

    components = build_run(
        load_config(str(trained / "config.yaml")), trained / "checkpoints/sft-000030"
    )
    tasks = held_out_tasks("calculator", 6)
    ended: list[str] = []
    opened = []
    real = components.engine.open

    def open_slowly(tokens, key=None):
        context = real(tokens, key)
        opened.append(context)
        if len(opened) == 1:
            fork = context.fork

            def slow_fork(key=None, at=None):
                twin = fork(key, at)
                sample = twin.sample

                async def slow(*arguments):
                    for _ in range(600):  # until all others have ended, if they can
                        if len(ended) == len(tasks) - 1:
                            break
                        await asyncio.sleep(0.05)
                    return await sample(*arguments)

                twin.sample = slow
                return twin

            context.fork = slow_fork
        return context

    components.engine.open = open_slowly
    make_attempts(
        [(task, [0]) for task in tasks],
        components.held_out,
        lambda sample: ended.append(sample.task),
        at_a_time=2,
    )
    assert ended[-1] == tasks[0].id and set(ended) == {task.id for task in tasks}
    components.engine.close()
