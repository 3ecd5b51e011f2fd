"""Attempts of a model as rows: only those that went well, none sampled twice, none lost."""

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from graft import cli
from graft.actions.actions import load_actions
from graft.config import ConfigError
from graft.data.readers import ChatRow
from graft.data.rows import read_rows
from graft.datagen import rejection_sampling
from graft.datagen.accepted_rows import RejectionSampling
from graft.datagen.attempt_log import AttemptLog
from graft.engine.errors import EngineError
from graft.engine.remote import endpoint
from graft.envs import ENVS, make, register
from graft.envs.calculator import Expression
from graft.rollout.action_spelling import ActionSpeller
from graft.rollout.demonstration import decided, plain_decisions
from graft.rollout.examples import example
from graft.rollout.filters import read_condition
from graft.rollout.recorded import (
    NotRecordable,
    outcome_of,
    prompt_of_context,
    spans_of_attempt,
)
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.errors import RunStopped
from graft.types import Author, Episode, Leaf, Span, Status, Task
from tests.command_line import start
from tests.evaluate.endpoint_kit import Served, serving
from tests.full_disk import small_files
from tests.model_calls import sample_model

ARGS = {"operands": [2, 2], "digits": [1, 1], "operators": "+"}
RECIPE = """
run: {{dir: "{folder}/runs", name: {name}, eval_tasks: 4, trackers: []}}
model: {{{model}}}
task: {{env: calculator, args: {{operands: [2, 2], digits: [1, 1], operators: +}}}}
rollout: {{tasks: 2, samples: 2, max_tokens: 8, max_turns: 3, max_context: 32}}
train: {{steps: 0}}
sft: {{steps: {steps}, batch: 16, lr: 0.01, warmup: 5, data: "{data}"}}
"""
SHAPE = (
    "shape: {width: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, ff: 64, max_positions: 48}"
)


def graft(*arguments: str) -> None:
    cli.app(list(arguments), standalone_mode=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A model that has learned from rows of `graft data make` to call the calculator, mostly."""
    folder = tmp_path_factory.mktemp("sample")
    data = folder / "taught.jsonl"
    easy = ("operands=[2,2]", "digits=[1,1]", "operators=+", "demo_args.tool_rate=0.9")
    graft("data", "make", "calculator", *easy, "--n", "40", "--out", str(data))
    recipe = RECIPE.format(folder=folder, name="taught", model=SHAPE, steps=60, data=data)
    (folder / "recipe.yaml").write_text(recipe)
    graft("sft", str(folder / "recipe.yaml"), "--json")
    return folder / "runs" / "taught"


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """What an uninterrupted command writes."""
    out = tmp_path_factory.mktemp("whole") / "good.jsonl"
    sample_model(str(run), "calculator", str(out), tasks=40, samples=3, say=lambda _: None)
    return out


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kept_rows_replay_to_the_reward_they_claim(whole):
    env = make("calculator", **ARGS)
    rows = lines(whole)
    assert len(rows) > 5
    for row in rows:
        prompt, _ = env.reset(row["extra_info"]["seed"])
        assert row["messages"] == [{"role": "user", "content": prompt}]
        earned, observed = 0.0, []
        for span in row["spans"]:
            if span["author"] == "env":
                assert span["text"] == observed[-1]
            else:
                turn = env.step(span["text"])
                earned, observed = earned + turn.reward, [*observed, turn.observation]
        assert earned == row["extra_info"]["reward"] > 0
        calls = sum(span["author"] == "env" for span in row["spans"])
        assert calls == row["extra_info"]["tool_calls"]


def test_every_attempt_is_counted_once_and_no_text_is_written_twice(whole, tmp_path, run):
    found = sample_model(
        str(run), "calculator", str(whole), tasks=40, samples=3, resume=True, say=len
    )
    attempts = [a for line in lines(Path(found.attempts_file))[1:] for a in line["attempts"]]
    assert found.attempts == len(attempts) == 120
    assert found.rows + found.rejected + found.duplicates == 120
    assert found.rejected == sum(attempt["reward"] <= 0 for attempt in attempts)
    assert found.reward == pytest.approx(sum(a["reward"] for a in attempts) / 120)
    rows = [json.dumps([row["messages"], row["spans"]]) for row in lines(whole)]
    assert len(set(rows)) == len(rows) == found.rows


def test_attempts_that_are_there_are_not_sampled_again(whole, run, tmp_path, monkeypatch):
    """A finished file takes another condition, and another ending, without a model."""
    journal = tmp_path / "good.attempts.jsonl"
    journal.write_bytes((whole.parent / "good.attempts.jsonl").read_bytes())
    monkeypatch.setattr(
        rejection_sampling, "build_run", lambda *_, **__: pytest.fail("sampled again")
    )
    out = tmp_path / "good.parquet"
    found = sample_model(
        str(run),
        "calculator",
        str(out),
        tasks=40,
        samples=3,
        keep="reward == 0",
        resume=True,
        say=len,
    )
    assert found.rows == len(list(read_rows(str(out)))) > 0
    assert all(row["extra_info"]["reward"] == 0 for row in read_rows(str(out)))


@pytest.mark.parametrize("keep_lines", [1, 8])
def test_a_torn_log_goes_on_to_the_same_rows(keep_lines, whole, run, tmp_path):
    """All of it is read; the half line of a killed process is dropped, and its task done again."""
    before = (whole.parent / "good.attempts.jsonl").read_bytes().splitlines(keepends=True)
    journal = tmp_path / "good.attempts.jsonl"
    journal.write_bytes(b"".join(before[:keep_lines]) + before[keep_lines][:50])
    out = tmp_path / "good.jsonl"
    sample_model(str(run), "calculator", str(out), tasks=40, samples=3, resume=True, say=len)
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(journal.read_bytes().splitlines()) == sorted(b"".join(before).splitlines())


def test_more_tasks_go_on_from_fewer(whole, run, tmp_path):
    out = tmp_path / "good.jsonl"
    for tasks in (5, 40):
        sample_model(str(run), "calculator", str(out), tasks=tasks, samples=3, resume=True, say=len)
    assert out.read_bytes() == whole.read_bytes()


def test_a_killed_command_goes_on_where_it_stopped(run, tmp_path):
    out, journal = tmp_path / "good.jsonl", tmp_path / "good.attempts.jsonl"
    command = ("data", "sample", str(run), "calculator", "rollout.concurrency=2")
    options = ("--n", "2000", "--samples", "2", "--out", str(out))
    process = start(*command, *options)
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 4):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    done = journal.read_bytes().rpartition(b"\n")[0]
    assert not out.exists()
    sample_model(str(run), "calculator", str(out), tasks=12, samples=2, resume=True, say=len)
    assert journal.read_bytes().startswith(done)
    assert {row["extra_info"]["index"] for row in lines(out)} <= set(range(12))


def test_a_full_disk_keeps_what_was_finished(whole, run, tmp_path):
    out = tmp_path / "good.jsonl"
    arguments = {"tasks": 40, "samples": 3, "say": len}
    kept = "earlier attempts are kept: continue with --resume"
    with small_files(8_000), pytest.raises(RunStopped, match=kept):
        sample_model(str(run), "calculator", str(out), **arguments)
    assert not out.exists()
    sample_model(str(run), "calculator", str(out), resume=True, **arguments)
    assert out.read_bytes() == whole.read_bytes()


def test_what_was_sampled_can_be_learned_from(whole, run, tmp_path, capsys):
    model = f'path: "{run}"'
    recipe = RECIPE.format(folder=tmp_path, name="again", model=model, steps=3, data=whole)
    (tmp_path / "again.yaml").write_text(recipe)
    capsys.readouterr()
    graft("sft", str(tmp_path / "again.yaml"), "--json")
    assert "after" in json.loads(capsys.readouterr().out.strip().splitlines()[-1])


class Shaky(Expression):
    """An environment whose answers fail while `broken` is set."""

    broken = True

    def respond(self, action):
        if Shaky.broken:
            raise OSError("the server is down")
        return super().respond(action)


@pytest.fixture
def shaky(monkeypatch):
    monkeypatch.setattr(Shaky, "broken", True)
    register("shaky", Shaky)
    yield
    del ENVS["shaky"]


def test_attempts_that_failed_are_made_again_once_the_tool_is_back(
    shaky, run, tmp_path, monkeypatch
):
    out = str(tmp_path / "good.jsonl")
    always = {"keep": "reward >= 0", "say": len}
    with pytest.raises(
        RunStopped, match=r"no attempt ended; most frequent reason: .*server is down"
    ):
        sample_model(str(run), "shaky", out, tasks=4, samples=2, **always)
    assert not Path(out).exists()
    monkeypatch.setattr(Shaky, "broken", False)
    found = sample_model(str(run), "shaky", out, tasks=4, samples=2, resume=True, **always)
    assert (found.failed, found.attempts) == (0, 8) and found.rows > 0


def test_a_broken_environment_is_detected_early(shaky, run, tmp_path):
    out, few = str(tmp_path / "good.jsonl"), ["rollout.concurrency=8"]
    with pytest.raises(RunStopped, match="server is down"):
        sample_model(str(run), "shaky", out, tasks=5000, samples=8, overrides=few, say=len)
    assert len(lines(tmp_path / "good.attempts.jsonl")) < 50


def test_nothing_kept_is_an_error_and_the_attempts_are_used_again(run, tmp_path):
    out = tmp_path / "good.jsonl"
    arguments = {"tasks": 4, "samples": 2, "say": len}
    with pytest.raises(RunStopped, match="none of 8 attempts passes 'reward > 5'"):
        sample_model(str(run), "calculator", str(out), keep="reward > 5", **arguments)
    assert not out.exists()
    with pytest.raises(ConfigError, match="--resume continues it"):
        sample_model(str(run), "calculator", str(out), keep="reward >= 0", **arguments)
    again = sample_model(
        str(run), "calculator", str(out), keep="reward >= 0", resume=True, **arguments
    )
    assert again.rows + again.duplicates == 8


@pytest.mark.parametrize(
    ("how", "fragment"),
    [
        ({"samples": 4}, "samples: 2 -> 4"),
        ({"temperature": 0.5}, "temperature: 1.0 -> 0.5"),
        ({"seed": 9}, "seed: 0 -> 9"),
        ({"overrides": ["rollout.max_turns=2"]}, "rollout.max_turns: 3 -> 2"),
        ({"overrides": ["task.args.digits=[1,2]"]}, r"task.args.digits: \[1, 1\] -> \[1, 2\]"),
    ],
)
def test_attempts_under_other_settings_are_not_mixed(how, fragment, run, tmp_path):
    out = str(tmp_path / "good.jsonl")
    arguments = {"tasks": 2, "samples": 2, "keep": "reward >= 0", "say": len}
    sample_model(str(run), "calculator", out, **arguments)
    with pytest.raises(RunStopped, match=fragment):
        sample_model(str(run), "calculator", out, resume=True, **{**arguments, **how})


@pytest.mark.parametrize(
    ("env", "how", "fragment"),
    [
        ("calculator", {"temperature": 0.0}, "greedy attempts"),
        ("calculator", {"overrides": ["task.args.wings=2"]}, "cannot be posed: .*wings"),
        ("calculator", {"overrides": ["rollout.wings=2"]}, "unknown key 'rollout.wings'"),
        ("calculater", {}, "unknown env|cannot"),
        ("calculator", {"keep": "reward = 1"}, "cannot be parsed near"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_a_model_is_read(
    env, how, fragment, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        rejection_sampling, "build_run", lambda *_, **__: pytest.fail("read a model")
    )
    with pytest.raises(ValueError, match=fragment):
        sample_model(str(run), env, str(tmp_path / "x.jsonl"), **{"tasks": 2, "samples": 2, **how})
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_run_needs_no_recipe(run, tmp_path):
    bare = tmp_path / "model"
    bare.mkdir()
    for file in (run / "checkpoints" / "sft-000060").iterdir():
        if file.is_file() and file.name != "state.json":
            (bare / file.name).write_bytes(file.read_bytes())
    found = sample_model(
        str(bare),
        "calculator",
        str(tmp_path / "good.jsonl"),
        tasks=6,
        samples=2,
        overrides=["rollout.max_tokens=8", "rollout.max_context=32", "task.args.operators=+"],
        keep="reward >= 0",
        say=len,
    )
    assert found.attempts == 12


def test_conditions_are_read_and_never_run():
    one = {"reward": 1.0, "turns": 2, "tool_calls": 1, "length": 12, "status": "truncated"}

    def keeps(text: str) -> bool:
        return read_condition(text)(one)

    assert keeps("reward>0") and not keeps("reward > 1") and keeps("0 < reward <= 1")
    assert keeps("reward == 1 and not (turns > 2 or length >= 13)")
    assert keeps("status == truncated") and keeps("status != 'done'") and keeps("reward > -0.5")
    for text, fragment in {
        "": "cannot be parsed",
        "reward": "not compared with anything",
        "rewrad > 0": "did you mean 'reward'",
        "status > done": "== or !=",
        "status == 1": "compares a number with a text",
        "reward in (1, 2)": "use one of > >=|neither a name nor a number",
        "reward > True": "neither a number nor a status",
        "__import__('os').system('true')": "not a condition",
        "reward > len('x')": "neither a name nor a number",
        "(" * 300 + "reward>0" + ")" * 300: "--keep",
        "not " * 200 + "reward > 0": "500 are allowed",
    }.items():
        with pytest.raises(ConfigError, match=fragment):
            read_condition(text)


def test_a_call_made_by_actions_is_written_as_a_call_and_read_back_to_the_same_tokens():
    tokenizer = FastTokenizer.bytes()
    chat, actions = Chat(tokenizer, "chatml"), load_actions("sorting", tokenizer)
    call = actions.spell("compare", ("A", "B"))
    text = plain_decisions(tokenizer.encode("I look."), actions)
    turn = decided(0, call._replace(**{
        name: getattr(text, name) + getattr(call, name) for name in ("tokens", "actions", "modes")
    }))  # fmt: skip
    turn.info["finish"] = "exit"
    result = actions.render("compare", "A < B")
    messages = [{"role": "user", "content": "Sort."}]
    episode = Episode(Task("t", "sort", prompt=tuple(messages)))
    episode.append(Span(None, Author.TASK, chat.prompt(messages), text="Sort."))
    episode.append(turn)
    episode.append(Span(1, Author.ENV, tokenizer.encode_plain(result), text=result))
    end = tokenizer.encode("Done." + chat.end_text)
    episode.append(decided(2, plain_decisions(end, actions), "Done."))
    episode.leaves.append(Leaf((3,), reward=1.0, metrics={"turns": 2.0, "tool_calls": 1.0}))
    [row] = episode.trajectories()
    spans = spans_of_attempt(row, chat, actions)
    assert spans == [
        {"author": "policy", "text": "I look."},
        {
            "author": "policy",
            "text": tokenizer.decode(call.tokens),
            "call": {"tool": "compare", "arguments": ["A", "B"]},
        },
        {"author": "env", "text": "A < B"},
        {"author": "policy", "text": "Done."},
    ]
    assert messages == prompt_of_context(row)
    speller = ActionSpeller(actions, tokenizer)
    read = example(episode.task, ChatRow(messages, spans=spans), chat, speller=speller)
    tokens = [token for span in read.spans for token in span.tokens]
    trained = [flag for span in read.spans for flag in span.mask or [False] * len(span)]
    assert tokens == row.tokens
    assert trained == [flag for span in row.spans for flag in span.mask or [False] * len(span)]
    length = len(turn) + len(end)
    assert outcome_of([row], episode.leaves[0]) == {
        "reward": 1.0,
        "turns": 2,
        "tool_calls": 1,
        "length": length,
        "status": "done",
    }


def test_an_attempt_that_was_cut_is_not_taught_to_end_there():
    chat = Chat(FastTokenizer.bytes(), "chatml")
    episode = Episode(Task("t", "e", prompt=({"role": "user", "content": "Go"},)))
    episode.append(Span(None, Author.TASK, chat.prompt(episode.task.prompt)))
    episode.append(decided(0, plain_decisions(chat.tokenizer.encode("on and on")), "on and on"))
    episode.leaves.append(Leaf((1,), status=Status.TRUNCATED))
    [row] = episode.trajectories()
    assert spans_of_attempt(row, chat) == [{"author": "policy", "text": "on and on", "end": False}]
    episode.spans[1].text = "on and \ufffd"  # the model of bytes was cut within a character
    with pytest.raises(NotRecordable, match="an incomplete character"):
        spans_of_attempt(row, chat)


def test_a_rewritten_history_is_a_row_for_every_prompt(tmp_path):
    """A wrapper gave a second prompt; the attempt has two contexts, and each is an example."""
    chat = Chat(FastTokenizer.bytes(), "chatml")
    first, second = ({"role": "user", "content": text} for text in ("Guess.", "Guess. 7: higher."))
    episode = Episode(Task("t", "e", prompt=(first,), seed=5))
    for parent, message, answer in ((None, first, "7"), (None, second, "9")):
        root = Span(parent, Author.TASK, chat.prompt([message]), text=message["content"])
        tip = episode.append(root)
        ended = chat.tokenizer.encode(answer + chat.end_text)
        episode.append(decided(tip, plain_decisions(ended), answer))
    episode.leaves.append(Leaf((1, 3), reward=1.0, metrics={"turns": 2.0}))
    log = AttemptLog(tmp_path / "good.attempts.jsonl", {})
    setting = SimpleNamespace(chat=chat, actions=None)
    rejection_sampling.SampleWork(None, setting, log, {}, 1, len).note(0, episode)  # type: ignore[arg-type]
    found = RejectionSampling(str(tmp_path / "good.jsonl"), str(log.path), tasks=1)
    rejection_sampling.gather(log, read_condition("turns == 2"), found, "")
    log.close()
    rows = lines(tmp_path / "good.jsonl")
    assert [row["messages"] for row in rows] == [[first], [second]]
    assert [row["spans"][0]["text"] for row in rows] == ["7", "9"]
    assert (found.attempts, found.rows) == (1, 2)


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(endpoint, "RETRIES", 1)
    with serving() as found:
        yield found


def total(prompt: str) -> str:
    return str(sum(map(int, re.findall(r"\d+", prompt.partition("=")[0]))))


def from_server(server: Served, out: Path, model: str = "", env: str = "calculator", **changes):
    """Two attempts at four tasks; by messages the calculator is not there, so there is one turn."""
    arguments = {
        "tasks": 4,
        "samples": 2,
        "endpoint": server.url,
        "served": "tiny",
        "overrides": [
            "task.args={operands: [2,2], digits: [1,1], operators: +}",
            "rollout.concurrency=4",
            *([] if model else ["rollout.max_turns=1"]),
        ],
        "say": len,
    }
    return sample_model(model, env, str(out), **{**arguments, **changes})


def test_a_server_that_takes_messages_gives_rows_of_messages_that_can_be_learned_from(
    served, run, tmp_path, capsys
):
    served.reply, served.delay = lambda content: total(content["messages"][-1]["content"]), 0.02
    out = tmp_path / "good.jsonl"
    easy = "task.args={operands: [2,2], digits: [1,1], operators: +}"
    command = ("data", "sample", "calculator", easy, "rollout.max_turns=1", "rollout.concurrency=4")
    server = ("--endpoint", served.url, "--model", "tiny")
    graft(*command, *server, "--n", "4", "--samples", "2", "--out", str(out), "--json")
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (report["attempts"], report["reward"], report["failed"]) == (8, 1.0, 0)
    assert [request["path"] for request in served.requests] == ["/v1/chat/completions"] * 8
    assert served.most_at_a_time == 4 and len({request["seed"] for request in served.requests}) == 8
    rows = lines(out)
    assert report["rows"] == len(rows) == 4  # both attempts have the same text
    for row in rows:
        question, answered = row["messages"]
        assert answered == {"role": "assistant", "content": total(question["content"])}
        assert "spans" not in row and row["extra_info"]["reward"] == 1.0
    graft("data", "show", str(out), "--json")  # exit 1, were a row bad
    shown = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert shown["rows"] == 4 and not shown["bad"]
    model = f'path: "{run}"'
    recipe = RECIPE.format(folder=tmp_path, name="from-server", model=model, steps=2, data=out)
    (tmp_path / "again.yaml").write_text(recipe)
    graft("sft", str(tmp_path / "again.yaml"), "--json")
    assert "after" in json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_game_by_messages_is_one_conversation(served, tmp_path):
    def bisect(content: dict) -> str:
        first = content["messages"][0]["content"]
        low, high = map(int, re.findall(r"between (\d+) and (\d+)", first)[0])
        for message in content["messages"]:
            for guess, way in re.findall(r"(\d+)\. The hidden number is (\w+)", message["content"]):
                low, high = (int(guess) + 1, high) if way == "higher" else (low, int(guess) - 1)
        return f"\\boxed{{{(low + high) // 2}}}"

    served.reply = bisect
    out = tmp_path / "games.jsonl"
    game = "game:GuessTheNumber-v0-easy"
    found = from_server(served, out, env=game, samples=1, overrides=["rollout.max_turns=10"])
    assert (found.attempts, found.reward, found.unwritable) == (4, 1.0, 0)
    assert found.rows + found.duplicates == 4 and found.rows > 1
    for row in lines(out):
        turns = row["extra_info"]["turns"]
        assert [one["role"] for one in row["messages"]] == ["user", "assistant"] * turns
    most = max(row["extra_info"]["turns"] for row in lines(out))
    assert most > 1 and max(len(request["messages"]) for request in served.requests) == 2 * most - 1


def test_a_server_goes_on_from_raw_prompts_of_a_model_that_is_here(served, run, tmp_path):
    def agent(content: dict) -> str:
        prompt = content["prompt"]
        if "]" in prompt:
            return prompt.rpartition("]")[2].strip(";")  # the calculator's result
        return f"[{prompt.removesuffix('=')}]and more behind the call"

    served.reply = agent
    out = tmp_path / "good.jsonl"
    found = from_server(served, out, str(run))
    assert (found.attempts, found.reward) == (8, 1.0)
    assert {request["path"] for request in served.requests} == {"/v1/completions"}
    for row in lines(out):
        question, answer = row["messages"][0]["content"], total(row["messages"][0]["content"])
        assert row["spans"] == [
            {"author": "policy", "text": f"[{question.removesuffix('=')}]"},
            {"author": "env", "text": f"{answer};"},
            {"author": "policy", "text": answer},
        ]


def test_an_answer_that_a_server_cut_off_is_no_message(served, tmp_path):
    served.reply, served.finish = lambda content: "4", "length"
    with pytest.raises(RunStopped, match=r"8 of 8 attempts pass .* none can be written"):
        from_server(served, tmp_path / "good.jsonl", keep="reward >= 0")
    [attempt, *_] = lines(tmp_path / "good.attempts.jsonl")[1]["attempts"]
    assert "truncated" in attempt["unwritable"] and attempt["status"] == "truncated"


def test_a_server_that_went_down_ends_the_command_and_a_later_one_goes_on(served, tmp_path):
    served.reply = lambda content: total(content["messages"][-1]["content"])
    served.always = lambda content: 500 if len(served.requests) > 2 else None
    out = tmp_path / "good.jsonl"
    with pytest.raises(RunStopped, match=r"16 attempts in a row were lost, .*500: not now"):
        from_server(served, out, tasks=200)
    assert len(served.requests) < 100 and not out.exists()  # not 400 attempts, each requested twice
    served.always = None
    found = from_server(served, out, resume=True)
    assert (found.attempts, found.failed, found.reward) == (8, 0, 1.0)
    with pytest.raises(RunStopped, match="served: 'tiny' -> ''"):
        from_server(served, out, resume=True, served="")


@pytest.mark.parametrize(
    ("how", "fragment"),
    [
        ({"endpoint": ""}, "belong to --endpoint"),
        ({"overrides": []}, "goes on in the middle of an answer.*or rollout.max_turns=1"),
        ({"overrides": ["actions.file=sorting"]}, "makes calls that no server can"),
        ({"served": "other"}, "does not serve 'other', but tiny"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_a_request(served, how, fragment, tmp_path):
    with pytest.raises((ValueError, EngineError), match=fragment):
        from_server(served, tmp_path / "x.jsonl", **how)
    assert served.requests == [] and list(tmp_path.iterdir()) == []
