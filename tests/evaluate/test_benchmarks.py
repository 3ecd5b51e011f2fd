r"""Every benchmark from a file in its published columns to a score: scripted model, judge and search."""

import base64
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from graft.config import ConfigError, TaskSection
from graft.data.errors import DataError
from graft.envs import make
from graft.envs.wrappers.tools import _built
from graft.evaluate.benchmarks import BENCHMARKS
from graft.evaluate.benchmarks.arpo import ARPO, with_prompt
from graft.evaluate.benchmarks.arpo_prompts import read_prompt
from graft.evaluate.benchmarks.benchmark import QUESTIONS
from graft.evaluate.benchmarks.gem import GEM
from graft.evaluate.benchmarks.judged import agreement_of
from graft.evaluate.benchmarks.prompt import FORM
from graft.evaluate.benchmarks.questions import BenchmarkQuestions, deciphered
from graft.evaluate.table import ScoreTable
from graft.evaluate.task_sets import read_sets
from graft.models.io.save import save_model
from graft.rewards import REWARDS
from graft.rewards.judge import Judge
from graft.text.tokenizer import FastTokenizer
from graft.types import Task
from tests.engine.engine_kit import tiny_decoder
from tests.evaluate.endpoint_kit import Served, serving
from tests.model_calls import evaluate_model

Row = dict[str, Any]


def enciphered(text: str, secret: str) -> str:
    """As xbench is published."""
    data = bytes(a ^ b for a, b in zip(text.encode(), cycle(secret.encode()), strict=False))
    return base64.b64encode(data).decode()


def read_rows() -> dict[str, list[tuple[Row, str, float]]]:
    """Set -> rows in the published columns, what the model answers to each, and what that earns."""
    made: dict[str, list[tuple[Row, str, float]]] = defaultdict(list)
    for line in Path(__file__).with_name("benchmark_rows.jsonl").read_text("utf-8").splitlines():
        one = json.loads(line)
        row = one["row"]
        if one["set"] == "xbench":
            row |= {key: enciphered(row[key], row["canary"]) for key in ("prompt", "answer")}
        made[one["set"]].append((row, one["answer"], one["reward"]))
    return made


MADE = read_rows()

LEFT_OUT = {"gaia": 1, "hle": 1}
"""The number of the row that comes with a file or an image."""


def questions_of(name: str) -> list[tuple[Row, str, float]]:
    return [one for number, one in enumerate(MADE[name]) if number != LEFT_OUT.get(name)]


def question_in(name: str, row: Row) -> str:
    key = next(key for key in ("problem", "question", "Question", "prompt") if key in row)
    return deciphered(row[key], row["canary"], "", key) if name == "xbench" else row[key]


ANSWERS = {
    question_in(name, row): answer for name in MADE for row, answer, _ in MADE[name]
}  # what the scripted model answers


def answer_to(text: str) -> str:
    """The answer to the question in a prompt."""
    return next(answer for question, answer in ANSWERS.items() if question in text)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, rows in MADE.items():
        file = tmp_path / "rows" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) for row, _, _ in rows]
        file.write_text("\n".join(lines), encoding="utf-8")
        found[name] = str(file)
    return found


@contextmanager
def answering(reply: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """A server of JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(reply(content)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


JUDGED: list[str] = []
SEARCHED: list[str] = []


def as_judge(content: dict[str, Any]) -> Any:
    """Knows two paraphrases."""
    prompt = content["messages"][0]["content"]
    JUDGED.append(prompt)
    if "NOT_ATTEMPTED" in prompt:
        letter = "A" if "Prof. Sugeno" in prompt else "C"
        return {"choices": [{"message": {"role": "assistant", "content": letter}}]}
    is_right = "the 21st of March" in prompt or "three" in prompt
    verdict = "Correct" if is_right else "Incorrect"
    return {"choices": [{"message": {"role": "assistant", "content": verdict}}]}


def as_search(content: dict[str, Any]) -> Any:
    SEARCHED.extend(content["queries"])
    document = {"id": "1", "contents": "A page\nIt says what is asked."}
    return {"result": [[{"document": document, "score": 1.0}] for _ in content["queries"]]}


@pytest.fixture(autouse=True)
def services(monkeypatch) -> Iterator[None]:
    JUDGED.clear()
    SEARCHED.clear()
    _built.cache_clear()  # tools are made once for all envs; here the next test has another service
    monkeypatch.delenv("GRAFT_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", os.devnull)
    with answering(as_judge) as judge, answering(as_search) as search:
        monkeypatch.setenv("JUDGE_URL", f"{judge}/v1")
        monkeypatch.setenv("SEARCH_URL", search)
        yield
    _built.cache_clear()


def tiny_model(folder: Path) -> str:
    """Random weights, and bytes for tokens."""
    tokenizer = FastTokenizer.bytes()
    save_model(tiny_decoder(vocab_size=tokenizer.vocab_size), folder / "model")
    tokenizer.save(folder / "model")
    return str(folder / "model")


def given(files: dict[str, str], names: list[str]) -> dict[str, Any]:
    return {"on": ",".join(names), "args": [f"{name}.data={files[name]}" for name in names]}


def behind(
    server: Served, files: dict[str, str], names: list[str], folder: Path, **how: Any
) -> tuple[ScoreTable, Path]:
    """Scores of the model of a server that gets messages."""
    table, where, _ = evaluate_model(
        "",
        **given(files, names),
        overrides=[f"run.dir={folder}"],
        endpoint=server.url,
        served="tiny",
        say=lambda text: None,
        **how,
    )
    return table, where


def check(table: Any, names: list[str], calls: dict[str, float]) -> None:
    assert table.problems == []
    for name in names:
        cell = table.rows["tiny"][name]
        assert cell.values("avg") == [reward for _, _, reward in questions_of(name)], name
        assert cell.tool_calls == calls.get(name, 0.0), name
        assert cell.failed == 0.0


def test_arpos_benchmarks_from_file_to_score_with_tools_in_its_tags(files, tmp_path):
    """The scripted model calls python, then search where there is one, and then answers in a box."""

    def agent(content: dict[str, Any]) -> str:
        prompt = content["prompt"]
        written = prompt.rpartition("assistant")[2]
        if "<python>" not in written:
            return "<think>hm</think>\n<python>print(6 * 7)</python> and more"
        assert "<result>\n42\n</result>" in written
        if "<search>...</search>" in prompt and "<search>" not in written:
            return "<search>what is asked</search>"
        assert "It says what is asked" in written or "<search>" not in prompt
        return f"<answer>It is \\boxed{{{answer_to(prompt)}}}.</answer>"

    names = [one.name for one in ARPO]
    assert len(names) == 14 and set(names) <= set(MADE)
    with serving() as served:
        served.reply, served.owner = agent, "vllm"
        table, folder, _ = evaluate_model(
            tiny_model(tmp_path),
            **given(files, names),
            overrides=[f"run.dir={tmp_path}", "model.chat_template=chatml"],
            endpoint=served.url,
            served="tiny",
            say=lambda text: None,
        )
    calls = {one.name: float(len(one.tools)) for one in ARPO}
    check(table, names, calls)
    with_search = sum(len(questions_of(one.name)) for one in ARPO if "search" in one.tools)
    assert ["what is asked"] * with_search == SEARCHED
    # simpleqa 2, webwalker 2, gaia 2, hle 1 and xbench 1: an answer equal to the gold text needs no judge
    assert len(JUDGED) == 8 and any("谁" not in prompt and "在哪里" in prompt for prompt in JUDGED)
    cells = table.rows["tiny"]
    assert cells["gaia"].sources == ["1", "2"] and cells["webwalker"].sources == ["easy", "hard"]
    assert cells["hle"].sources == ["Math", "Biology"]
    assert "| tiny | gaia | 1 | 1 | 1.000" in table.markdown()
    # em, acc, f1; not attempted, given attempted, F; tool use, calls, productivity 100 * 0.5 * 2 / 2.1
    graded = "| tiny | simpleqa | 0.000 | 0.000 | 0.250 | 0.500 | 1.000 | 0.667 |"
    assert f"{graded} 1.000 | 1.00 | 1.00 | 47.6 |" in table.markdown()
    assert "| tiny | hotpotqa | 0.000 | 0.500 | 0.250 |  |  |  | 1.000 | 1.00 |" in table.markdown()
    found = table.to_json()["rows"][0]["scores"]["simpleqa"]
    assert found["tools"] == {"python": 1.0, "search": 1.0}
    assert found["answers"]["F-score"] == pytest.approx(2 / 3)
    [samples] = (folder / "table.samples").glob("*gaia*")
    report = agreement_of(samples, BENCHMARKS["gaia"].task_set(files["gaia"]), Judge())
    assert (report.judge_only, report.both_no, report.count) == (1, 1, 2)
    [(item, is_correct)] = report.disagreements
    assert item[:3] == ("How many wolves?", ["3"], "three") and is_correct
    assert item.id.endswith(":0#0") and report.share == 0.5


def test_gems_sets_from_file_to_score_in_messages(files, tmp_path):
    """One call of the tool, whose result comes back as a message, then the answer in GEM's form."""

    def agent(content: dict[str, Any]) -> str:
        first, *later = (message["content"] for message in content["messages"])
        if "Print the" in first:
            return f"```python\n{answer_to(first)}\n```"
        if not later:
            return (
                "<search>louvre</search>" if "<search>" in first else "<python>print(42)</python>"
            )
        is_math = "42" in later[-1]
        assert is_math or "It says what is asked" in later[-1]
        return (
            f"\\boxed{{{answer_to(first)}}}" if is_math else f"<answer>{answer_to(first)}</answer>"
        )

    names = [one.name for one in GEM]
    assert len(names) == 14 and set(names) <= set(MADE)
    with serving() as served:
        served.reply = agent
        table, _ = behind(served, files, names, tmp_path)
    check(table, names, {one.name: float(len(one.tools)) for one in GEM})
    assert JUDGED == [] and len(SEARCHED) == 16


def test_without_tools_the_prompt_does_not_name_them(files, tmp_path):
    def agent(content: dict[str, Any]) -> str:
        system, user = content["messages"]
        assert (system["role"], system["content"]) == ("system", FORM)
        assert user["content"] in ANSWERS
        return f"<answer>\\boxed{{{answer_to(user['content'])}}}</answer>"

    names = ["math500", "hotpotqa", "xbench"]
    with serving() as served:
        served.reply = agent
        table, _ = behind(served, files, names, tmp_path, tools=False)
    check(table, names, {})


DIGESTS = {
    "code_search": "177a49a91ade2af5",
    "search": "87e802b6736cb316",
    "math": "40ab4ac1d82b3dd2",
    "base": "468c42d905e0447e",
    "code_search_cn": "f0298c1e209d2107",
}
"""Of the published texts."""


@pytest.mark.parametrize("name", DIGESTS)
def test_prompts_have_the_published_wording_and_bring_the_tools_they_name(files, name):
    prompt = read_prompt(name)
    assert sha256(prompt.text.encode()).hexdigest()[:16] == DIGESTS[name]
    [tasks] = read_sets("math500", [f"math500.data={files['math500']}"], TaskSection())
    env = with_prompt(tasks, prompt).factory(None)(Task("", tasks.env))
    (system, user), _ = env.reset(0)
    assert system == {"role": "system", "content": prompt.text} and user["role"] == "user"
    assert set(env.stop) == {f"</{tool}>" for tool in prompt.tools or ()}
    assert all((f"<{tool}>" in prompt.text) for tool in prompt.tools or ())


def test_a_named_prompt_keeps_the_tools_of_a_recipe_and_replaces_its_system_message(tmp_path):
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "system", "content": "Old."}, {"role": "user", "content": "2+2="}]
    rows.write_text(json.dumps({"prompt": chat, "answer": "4"}))
    use = {"use": [{"search": {"corpus": "small"}}], "format": "arpo", "instructions": ""}
    recipe = TaskSection(env="prompts", args={"data": str(rows)}, wrappers=[{"tools": use}])
    [tasks] = read_sets("", [], recipe)
    kept = with_prompt(tasks, read_prompt("search"))
    assert kept.wrappers[0] == {"tools": use} and kept.shows_answers
    [system, user], _ = kept.factory(None)(Task("", "prompts")).reset(0)
    assert (system["content"], user["content"]) == (read_prompt("search").text, "2+2=")
    mine = tmp_path / "mine.txt"
    mine.write_text("Be brief.\n")
    [system, _], _ = (
        with_prompt(tasks, read_prompt(str(mine))).factory(None)(Task("", "prompts")).reset(0)
    )
    assert system["content"] == "Be brief."
    with pytest.raises(ConfigError, match="the prompt names the tools search; use --prompt base"):
        with_prompt(replace(tasks, has_tools=False), read_prompt("search"))
    with pytest.raises(ConfigError, match="did you mean 'code_search'"):
        read_prompt("code_serch")


def test_a_real_model_goes_the_same_way(files, tmp_path):
    """Random weights on the native engine: no answer is right, and every attempt is counted."""
    names = ["math500", "gaia", "gem-2wiki"]
    table, _, _ = evaluate_model(
        tiny_model(tmp_path),
        **given(files, names),
        overrides=[f"run.dir={tmp_path}", "model.chat_template=chatml", "rollout.max_tokens=8"],
        samples=2,
        k=[1, 2],
        say=lambda text: None,
    )
    for name in names:
        [cell] = (row[name] for row in table.rows.values())
        assert cell.values("pass@2") == [0.0, 0.0] and cell.failed == 0.0 and cell.tokens <= 8


def test_a_judge_that_is_away_fails_attempts_and_makes_none_wrong(files, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    with serving() as served:
        served.reply = lambda content: f"\\boxed{{{answer_to(content['messages'][-1]['content'])}}}"
        table, folder = behind(served, files, ["xbench"], tmp_path, tools=False)
    cell = table.rows["tiny"]["xbench"]
    assert cell.values("avg") == [1.0, 0.0] and cell.failed == 0.5  # the gold text needs no judge
    assert "50% failed" in table.markdown()
    [samples] = (folder / "table.samples").glob("*xbench*")
    assert "cannot be reached" in samples.read_text(encoding="utf-8")


def posed(name: str, files: dict[str, str]) -> Any:
    [tasks] = read_sets(name, [f"{name}.data={files[name]}"], TaskSection())
    return tasks.factory(None)(Task("", tasks.env))


def test_the_system_prompt_has_arpos_tags_and_the_limit_of_each_tool(files):
    env = posed("hotpotqa", files)
    (system, user), info = env.reset(0)
    assert system["role"] == "system" and user == {
        "role": "user",
        "content": "Where is the Louvre?",
    }
    for tag in ("think", "python", "search", "result", "answer"):
        assert f"<{tag}>" in system["content"] and f"</{tag}>" in system["content"]
    assert "\\boxed{}" in system["content"]
    python, search = system["content"].splitlines()[-2:]
    assert python.startswith("- <python>...</python>: ") and python.endswith("At most 5 times.")
    assert search.startswith("- <search>...</search>: ") and search.endswith("At most 10 times.")
    assert info["meta"] == {"idx": 0, "question": "Where is the Louvre?"}
    assert env.task().prompt == (system, user) and env.task().answer == ["Paris", "Paris, France"]
    assert set(env.stop) == {"</python>", "</search>"} and env.observe_as == "inline"
    twin = env.fork()
    assert "42" in env.step("<python>print(42)</python>").observation
    assert "It says" in twin.step("<search>louvre</search>").observation
    twin.set_state(env.get_state())
    assert env.step("<answer>Paris</answer>").reward == 1.0
    assert twin.task().prompt == (system, user)


def test_each_tool_has_its_own_limit(files):
    env = posed("hotpotqa", files)
    env.reset(0)
    for _ in range(5):
        assert "42" in env.step("<python>print(42)</python>").observation
    assert "No calls are left" in env.step("<python>print(42)</python>").observation
    assert "It says" in env.step("<search>louvre</search>").observation
    assert env.step("<answer>\\boxed{Paris}</answer>").terminated


@pytest.mark.parametrize("one", BENCHMARKS.values(), ids=lambda one: one.name)
def test_a_definition_is_complete(one):
    assert BENCHMARKS[one.name] is one and one.title
    comes_with_a_package = one.name == "humaneval"
    assert comes_with_a_package or (one.hub.count("/") == 1 and one.split)
    assert ("greedy" if comes_with_a_package else "temperature 0.6") in one.published
    assert one.scorer in REWARDS or (one.env.startswith("eval:") and not one.scorer)
    assert set(one.tools) <= {"python", "search"}
    assert one.rows or one.unconfirmed  # an unknown number is marked as unconfirmed
    tasks = one.task_set()
    assert (tasks.label, tasks.is_whole, tasks.reward) == (one.name, True, one.reward)
    json.dumps(tasks.depends_on)
    if one.env == QUESTIONS:
        assert tasks.args["hub"] == one.hub and tasks.args["hub_split"] == one.split


def test_a_copy_of_the_whole_dataset_will_do(tmp_path, monkeypatch):
    """Of gsm8k the folder main is meant, and its test split; the other folder has the same files."""
    for folder, answer in (("main", "#### 7"), ("socratic", "#### 8")):
        for split in ("train", "test"):
            file = tmp_path / "openai" / "gsm8k" / folder / f"{split}-00000-of-00001.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"question": split, "answer": f"{folder} {answer}"}))
    whole = str(tmp_path / "openai" / "gsm8k")
    monkeypatch.setenv("GRAFT_DATA", str(tmp_path))
    for data in (None, whole, f"{whole}/main"):
        tasks = BENCHMARKS["gsm8k"].task_set(data)
        env = make(tasks.env, **tasks.args)
        assert env.reset(0)[0] == [{"role": "user", "content": "test"}]
        assert env.answer == "main #### 7" and len(env.numbers) == 1


def test_columns_of_ones_own_are_named_by_args(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"q": "Where?", "a": "Bern"}\n')
    arguments = [f"gaia.data={file}", "gaia.question_key=q", "gaia.answer_key=a"]
    [tasks] = read_sets("gaia", arguments, TaskSection())
    env = make(tasks.env, **tasks.args)
    assert env.reset(0)[0][0]["content"] == "Where?" and env.step("bern").reward == 1.0


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("aime24", [], "is empty"),
        (
            "aime24",
            [{"Problem": "x", "answer": "1"}],
            r"no column 'problem or question' \(found: Problem, answer\); choose one: question_key=",
        ),
        ("aime24", [{"problem": "x", "gold": "1"}], "no column 'answer'.*answer_key="),
        (
            "aime24",
            [{"problem": "x", "answer": "1"}, {"problem": " ", "answer": "1"}],
            "row 2: 'problem' holds ' ', not a question",
        ),
        (
            "aime24",
            [{"problem": "x", "answer": "1"}, {"problem": "y", "answer": None}],
            "row 2: 'answer' holds nothing; an answer is",
        ),
        ("aime24", [{"problem": "x", "answer": {"a": 1}}], "row 1: 'answer' holds"),
        ("hotpotqa", [{"question": "x", "answer": []}], r"row 1: 'answer' holds \[\]"),
        (
            "gaia",
            [{"Question": "x", "Final answer": "1", "file_name": "a.png"}],
            "every row has something in 'file_name'",
        ),
        (
            "xbench",
            [{"prompt": "not base64", "answer": "x", "canary": "k"}],
            "row 1: 'prompt' is not enciphered as its row says",
        ),
    ],
)
def test_rows_without_a_usable_question_are_errors_that_name_the_row(tmp_path, name, rows, message):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks = BENCHMARKS[name].task_set(str(file))
    with pytest.raises(DataError, match=message):
        make(tasks.env, **tasks.args)


def test_a_broken_line_is_an_error_before_the_first_question(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "x", "answer": "1"}\n{"problem": \n')
    with pytest.raises(DataError, match="line 2"):
        BenchmarkQuestions(data=str(file), question_key="problem")


def test_a_deciphered_file_is_read_as_it_is():
    rows = [
        {"prompt": "Who?", "answer": "Lem"},
        {"prompt": "Where?", "answer": "Lviv", "canary": ""},
    ]
    env = BenchmarkQuestions(rows=rows, question_key="prompt|question", cipher_key="canary")
    assert [env.reset(row)[0][0]["content"] for row in (0, 1)] == ["Who?", "Where?"]  # type: ignore[index]


def test_missing_data_is_an_error_that_names_the_download(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://nowhere.invalid")
    [tasks] = read_sets("hle", [], TaskSection())
    with pytest.raises(DataError, match="hf download --repo-type dataset cais/hle"):
        make(tasks.env, **tasks.args)


def test_a_benchmark_whose_search_has_no_service_is_an_error(files, monkeypatch):
    monkeypatch.delenv("SEARCH_URL")
    with pytest.raises(ValueError, match="SEARCH_URL"):
        posed("gaia", files)


def test_an_unknown_name_lists_the_benchmarks():
    with pytest.raises(ValueError, match="aime24"):
        read_sets("aime26", [], TaskSection())


def test_samples_that_are_not_there_are_an_error(files, tmp_path):
    tasks = BENCHMARKS["gaia"].task_set(files["gaia"])
    with pytest.raises(DataError, match="no file of samples"):
        agreement_of(tmp_path / "none.jsonl", tasks, Judge())
    (tmp_path / "empty.jsonl").write_text('{"of": {}}\n')
    with pytest.raises(DataError, match="no attempt that ended"):
        agreement_of(tmp_path / "empty.jsonl", tasks, Judge())
