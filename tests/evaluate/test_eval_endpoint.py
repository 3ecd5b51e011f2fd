"""`graft eval --endpoint`: from a server to a table, whatever the server does in between."""

import json
from pathlib import Path

import pytest

from graft.config import ConfigError
from graft.engine.errors import EngineError
from graft.engine.remote import endpoint
from graft.evaluate import evaluator as bench
from graft.text.tokenizer import FastTokenizer
from tests.command_line import graft
from tests.evaluate.endpoint_kit import Served, serving
from tests.model_calls import evaluate_model
from tests.training import train_recipe

ROWS = [
    {
        "data_source": "sums" if a < 3 else "products",
        "prompt": [{"role": "user", "content": f"{a}+{a}="}],
        "reward_model": {"ground_truth": str(2 * a)},
    }
    for a in range(6)
]
RECIPE = """
run: {{dir: "{folder}", name: run, eval_tasks: 0, trackers: []}}
model:
  shape: {{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 96}}
task: {{env: calculator, args: {{operands: [2, 2]}}, eval_args: {{split: test}}}}
rollout: {{tasks: 2, samples: 4, max_tokens: 10, max_turns: 4, max_context: 64}}
sft: {{steps: 1, batch: 4}}
train: {{steps: 0}}
"""


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(endpoint, "RETRIES", 2)
    with serving() as found:
        yield found


@pytest.fixture
def rows(tmp_path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def doubles(content: dict) -> str:
    """Right up to 3+3, and then always 7."""
    question = content["messages"][-1]["content"] if "messages" in content else content["prompt"]
    a = int(question.partition("+")[0])
    return f"<answer>{2 * a if a < 4 else 7}</answer>"


def quiet(text: str) -> None:
    pass


def chat_eval(server: Served, rows: Path, tmp_path: Path, **changes):
    arguments = {
        "on": "mine=prompts",
        "args": [f"mine.data={rows}", "mine.split=null"],
        "endpoint": server.url,
        "served": "tiny",
        "overrides": [f"run.dir={tmp_path}", "rollout.concurrency=4", "rollout.deadline=20"],
        "k": [1, 4],
        "say": quiet,
    }
    return evaluate_model("", **{**arguments, **changes})


@pytest.mark.parametrize("name", ["tiny", "someone/tiny"])
def test_a_named_model_of_a_server_needs_no_file(served, rows, tmp_path, monkeypatch, name):
    """Neither a folder nor on the hub: the name is the server's, and it gets messages."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    served.reply, served.models, said = doubles, [name], []
    arguments = {"on": "mine=prompts", "args": [f"mine.data={rows}", "mine.split=null"], "tasks": 2}
    overrides = [f"run.dir={tmp_path}"]
    table, folder, _ = evaluate_model(
        name, endpoint=served.url, overrides=overrides, say=said.append, **arguments
    )
    assert table.rows[name]["mine"].values("avg") == [1, 1]
    assert {one["model"] for one in served.requests} == {name} and served.requests[0]["messages"]
    assert folder == tmp_path / "tiny" / "evaluations"
    assert any("--api chat" in text and name in text for text in said)
    with pytest.raises(ConfigError, match=f"--api completions .*{name!r}"):
        evaluate_model(
            name, endpoint=served.url, api="completions", overrides=overrides, **arguments
        )


def test_the_tokenizer_of_a_served_model_is_enough_for_whole_prompts(served, rows, tmp_path):
    folder = tmp_path / "qwen"
    tokenizer = FastTokenizer.bytes()
    tokenizer.save(folder)
    served.reply = doubles
    table, _, _ = evaluate_model(
        str(folder),
        on="mine=prompts",
        args=[f"mine.data={rows}", "mine.split=null"],
        endpoint=served.url,
        served="tiny",
        tasks=2,
        overrides=[f"run.dir={tmp_path}", "model.chat_template=plain"],
        say=quiet,
    )
    assert table.rows["tiny"]["mine"].values("avg") == [1, 1]
    assert [one["path"] for one in served.requests] == ["/v1/completions"] * 2


def test_a_chat_model_is_scored_by_source_without_any_file_of_it(served, rows, tmp_path):
    served.reply, served.delay = doubles, 0.02
    table, folder, _ = chat_eval(served, rows, tmp_path)
    cell = table.rows["tiny"]["mine"]
    assert cell.tasks == [f"prompts:test:{row}" for row in range(6)]  # each row once
    assert cell.values("avg") == [1, 1, 1, 1, 0, 0] and cell.sources[2:4] == ["sums", "products"]
    assert cell.values("maj@4") == cell.values("pass@1") == [1, 1, 1, 1, 0, 0]
    assert table.problems == [] and cell.tokens == 3.0
    assert "| tiny | mine | products | 3 | 0.333" in table.markdown()
    assert len(served.requests) == 24 and served.most_at_a_time == 4
    assert len({request["seed"] for request in served.requests}) == 24
    assert folder == tmp_path / "tiny" / "evaluations"
    served.requests.clear()
    chat_eval(served, rows, tmp_path)
    assert served.requests == []


def test_a_moody_server_changes_no_score(served, rows, tmp_path, monkeypatch):
    served.reply = doubles
    served.faults = [429, 500, "garbage", "half", "nothing", "shape", 503, 408]
    monkeypatch.setattr(endpoint, "RETRIES", 8)  # one request may meet them all
    table, _, _ = chat_eval(served, rows, tmp_path, k=[], samples=2)
    assert table.rows["tiny"]["mine"].values("avg") == [1, 1, 1, 1, 0, 0]
    assert table.problems == [] and len(served.requests) == 12 + 8


def test_what_a_server_did_answer_is_kept_and_the_rest_is_made_later(served, rows, tmp_path):
    served.reply = doubles
    served.always = lambda content: 500 if len(served.requests) > 5 else None
    table, folder, _ = chat_eval(served, rows, tmp_path)
    [problem] = table.problems
    cell = table.rows["tiny"]["mine"]
    made = 24 - cell.missing
    assert made == 5 and f"lacks {cell.missing} attempts" in problem
    assert "attempts missing" in table.markdown() and cell.failed == 0.0
    assert not (folder / "table.jsonl").exists()  # no cell of it counts as measured
    served.always = None
    served.requests.clear()
    table, _, _ = chat_eval(served, rows, tmp_path)
    assert len(served.requests) == cell.missing and table.problems == []
    assert table.rows["tiny"]["mine"].values("avg") == [1, 1, 1, 1, 0, 0]


def test_a_server_that_is_down_ends_the_evaluation_soon(served, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "DOWN_AFTER", 3)
    served.always = 500
    printed: list[str] = []
    table, _, _ = chat_eval(served, rows, tmp_path, say=printed.append)
    assert table.rows["tiny"]["mine"].missing == 24 and len(table.problems) == 1
    assert len(served.requests) <= 3 * 7  # not 24 * 3
    assert any("3 attempts in a row were lost" in line for line in printed)
    assert any("answered 500: not now" in line for line in printed)


@pytest.mark.slow
def test_the_command_prints_what_there_is_and_exits_with_1(served, rows, tmp_path):
    served.faults = [401] * 3
    served.error_text, served.reply = "no such key", doubles
    done = graft(
        *("eval", "--endpoint", served.url, "--model", "tiny"),
        *("--on", "mine=prompts", "--args", f"mine.data={rows}", "--args", "mine.split=null"),
        *(f"run.dir={tmp_path}", "--greedy", "--json"),
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    [row] = report["rows"]
    assert row["scores"]["mine"]["missing"] == 3 and row["scores"]["mine"]["tasks"] == 3
    assert "no such key" in done.stderr and "Traceback" not in done.stderr


def test_tools_that_answer_inline_go_on_through_raw_completions(served, tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path))
    train_recipe(str(tmp_path / "tiny.yaml"))

    def agent(content: dict) -> str:
        prompt = content["prompt"]
        if "]" in prompt:
            return prompt.rpartition("]")[2].strip(";")  # the calculator's result
        return f"[{prompt.removesuffix('=')}]and more behind the call"

    served.reply = agent
    table, _, _ = evaluate_model(
        str(tmp_path / "run"), endpoint=served.url, served="tiny", tasks=3, say=quiet
    )
    cell = table.rows["tiny"]["calculator"]
    assert cell.reward == 1.0 and cell.tool_calls == 1.0
    assert [request["path"] for request in served.requests] == ["/v1/completions"] * 6
    with pytest.raises(ConfigError, match="--api chat takes whole messages only"):
        evaluate_model(
            str(tmp_path / "run"), endpoint=served.url, served="tiny", api="chat", say=quiet
        )
    table, _, _ = evaluate_model(
        str(tmp_path / "run"), endpoint=served.url, served="tiny", api="chat", tools=False, tasks=2,
        name="bare", say=quiet,
    )  # fmt: skip
    assert table.rows["tiny"]["calculator"].tool_calls == 0.0
    assert served.requests[-1]["messages"][0]["content"].endswith("=")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"api": "completions"}, ConfigError, "takes the model's tokenizer"),
        ({"api": "grpc"}, ConfigError, "must be completions or chat"),
        ({"every_checkpoint": True}, ConfigError, "it serves one model"),
        ({"endpoint": ""}, ConfigError, "belong to --endpoint"),
        ({"endpoint": "", "served": ""}, ConfigError, "nothing to sample from"),
        ({"endpoint": "ftp://x"}, EngineError, "http://host:8000/v1"),
        ({"served": "other"}, EngineError, "does not serve 'other', but tiny"),
        ({"on": ""}, ConfigError, "give --recipe"),
        ({"overrides": ["actions.file=calculator"]}, ConfigError, "which no server can apply"),
        ({"k": [8], "samples": 4}, ConfigError, "needs as many attempts"),
        ({"against": "nowhere"}, ConfigError, "no such file or folder"),
    ],
)
def test_a_mistake_is_an_error_before_the_first_request(
    served, rows, tmp_path, arguments, error, message
):
    with pytest.raises(error, match=message):
        chat_eval(served, rows, tmp_path, **arguments)
    assert served.requests == []


def test_several_servers_share_the_attempts_and_one_that_fails_loses_none(served, rows, tmp_path):
    """Both have tasks; then the second is down at the start, fails in between, or was never there."""
    served.reply = doubles
    with serving() as other:
        other.reply = doubles
        both = [f"{served.url},{other.url}"]
        found, _, _ = chat_eval(served, rows, tmp_path, endpoint=both, k=[1, 2], name="both")
        assert found.rows["tiny"]["mine"].values("avg") == [1, 1, 1, 1, 0, 0]
        assert served.requests and other.requests  # how many depends on which one is quicker
        assert len(served.requests) + len(other.requests) == 12
        other.always, before = 500, len(other.requests)
        found, _, _ = chat_eval(
            served, rows, tmp_path, endpoint=[served.url, other.url], name="failing"
        )
        assert found.rows["tiny"]["mine"].values("avg") == [1, 1, 1, 1, 0, 0]
        assert found.problems == [] and 0 < len(other.requests) - before < 12  # of 24 attempts
    gone = [other.url, served.url]  # its socket is closed now
    found, _, _ = chat_eval(served, rows, tmp_path, endpoint=gone, served="", name="gone")
    assert list(found.rows) == ["endpoint"] and found.problems == []
    with pytest.raises(EngineError, match="is named twice"):
        chat_eval(served, rows, tmp_path, endpoint=[served.url, f"{served.url}/"], name="twice")
    with serving() as third:
        third.models = ["another"]
        with pytest.raises(EngineError, match=r"different models \(another, tiny\)"):
            chat_eval(
                served, rows, tmp_path, endpoint=[served.url, third.url], served="", name="mixed"
            )


def test_a_set_without_tasks_is_an_error_that_names_it(served, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"set 'mine'.*empty"):
        chat_eval(served, empty, tmp_path)


def test_prompts_that_the_server_finds_too_long_are_counted(served, rows, tmp_path):
    served.always = lambda content: 400 if content["messages"][0]["content"] == "5+5=" else None
    served.error_text, served.reply = "maximum context length is 3 tokens", doubles
    table, _, _ = chat_eval(served, rows, tmp_path, k=[1])
    cell = table.rows["tiny"]["mine"]
    assert cell.overlong == 1 and cell.values("avg") == [1, 1, 1, 1, 0, 0]
    assert table.problems == [
        "tiny on mine: 1 prompts leave no space for an answer and count as 0; raise rollout.max_context"
    ]
