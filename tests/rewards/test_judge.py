"""The judge, against a real server on this machine that answers well, badly, late or not at all."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from graft.rewards import judge as judging
from graft.rewards.judge import Judge, prediction_of, question_of, says_correct
from graft.types import Author, Episode, Leaf, Span, Task, Trajectory

Answer = Callable[[BaseHTTPRequestHandler, int], None]


class Server(ThreadingHTTPServer):
    """Remembers what it was asked; `answer(handler, number)` writes the reply to request `number`."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                server.asked.append(json.loads(self.rfile.read(length)))
                server.headers.append(dict(self.headers))
                server.paths.append(self.path)
                answer(self, len(server.asked) - 1)

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *_: object) -> None: ...  # clients that hang up are part of the tests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def send(handler: BaseHTTPRequestHandler, body: bytes, code: int = 200) -> None:
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def saying(text: Any) -> Answer:
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
    return lambda handler, _: send(handler, body)


def in_turn(*answers: Answer) -> Answer:
    """The first answer to the first request and so on; the last one from then on."""
    return lambda handler, number: answers[min(number, len(answers) - 1)](handler, number)


def attempt(said: str, answer: object = "Barack Obama", **task: Any) -> tuple[Task, Trajectory]:
    asked = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"})
    made = Task("t", "toy", answer=answer, **{"prompt": asked, **task})
    episode = Episode(made)
    tip = episode.append(Span(None, Author.TASK, [], text="Who?"))
    tip = episode.append(Span(tip, Author.POLICY, [], text=said))
    episode.leaves.append(Leaf((tip,)))
    return made, next(episode.trajectories())


PARAPHRASE = attempt("<answer>\\boxed{the 44th president}</answer>")
EXACT = attempt("<answer>\\boxed{barack obama}</answer>")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "FIRST_PAUSE", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("JUDGE_URL", raising=False)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Correct", 1.0),
        ("The answer is CORRECT.", 1.0),
        ("Incorrect", 0.0),
        ("This is not correct.", 0.0),
        ("Correct? No, wrong.", 0.0),
        ("I cannot tell.", 0.0),
        ("<think>incorrect? no, it fits</think>\nCorrect", 1.0),
        ("<think>correct?</think>\nIncorrect", 0.0),
    ],
)
def test_the_reply_is_the_verdict(reply: str, reward: float):
    assert says_correct(reply) == bool(reward)
    with serving(saying(reply)) as server:
        judge = Judge(server.url)
        assert judge(*PARAPHRASE) == reward
        assert judge.counts == {"calls": 1, "cached": 0, "failures": 0}


def test_the_same_text_and_an_empty_answer_need_no_judge():
    with serving(saying("Incorrect")) as server:
        judge = Judge(server.url)
        assert judge(*EXACT) == 1.0
        assert judge(*attempt("nyc", answer=["New York", "NYC"])) == 1.0
        assert judge(*attempt("<answer> </answer>")) == 0.0
        assert server.asked == [] and judge.counts["calls"] == 0


def test_the_judge_is_shown_question_truths_and_prediction(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", " s3cret\n")
    with serving(saying("Correct")) as server:
        assert Judge(server.url, "big", api_key_env="MY_KEY")(
            *attempt("x <answer>it is \\boxed{\\text{No. 44}}</answer>", answer=["Obama", "B. O."])
        )
        assert Judge(f"{server.url}/chat/completions/")(*PARAPHRASE)
        named, unnamed = server.asked
        prompt = named.pop("messages")[0]["content"]
        assert named == {"model": "big", "temperature": 0} and "model" not in unnamed
        assert "<question>\nWho?\n</question>" in prompt
        assert "<accepted>\nObama\nB. O.\n</accepted>" in prompt
        assert "<answer>\nNo. 44\n</answer>" in prompt
        assert server.paths == ["/v1/chat/completions"] * 2
        assert server.headers[0]["Authorization"] == "Bearer s3cret"
        assert "Authorization" not in server.headers[1]  # no key, no header


def test_question_and_prediction_are_found_in_their_forms():
    parts = [{"type": "text", "text": "Who"}, {"type": "image"}, {"type": "text", "text": "is it?"}]
    assert question_of(Task("t", "e", meta={"question": "Q"}, prompt=EXACT[0].prompt)) == "Q"
    assert question_of(EXACT[0]) == "Who?"
    assert question_of(Task("t", "e", prompt=({"role": "user", "content": parts},))) == (
        "Who\n\nis it?"
    )
    assert question_of(Task("t", "e", prompt=({"role": "user", "content": None},))) == ""
    assert question_of(Task("t", "e")) == ""
    assert prediction_of(attempt("so \\boxed{7}")[1]) == "7"
    assert prediction_of(attempt(" plain words ")[1]) == "plain words"


def test_a_megabyte_of_prediction_is_cut_before_it_is_sent():
    with serving(saying("Incorrect")) as server:
        assert Judge(server.url)(*attempt("a " * 500_000 + "the end", prompt=())) == 0.0
        prompt = server.asked[0]["messages"][0]["content"]
        assert len(prompt) < 6000 and "the end\n</answer>" in prompt and "(not given)" in prompt


def hang(handler: BaseHTTPRequestHandler, _: int) -> None:
    time.sleep(8.0)


def hang_up(handler: BaseHTTPRequestHandler, _: int) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def drip(handler: BaseHTTPRequestHandler, _: int) -> None:
    """A byte now and then, for ever: no single wait is long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(400):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def half_an_error(handler: BaseHTTPRequestHandler, _: int) -> None:
    handler.send_response(500)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"it is")
    handler.wfile.flush()
    time.sleep(2.0)


FAULTS: dict[str, tuple[Answer, str]] = {
    "500": (lambda handler, _: send(handler, b"out of memory", 500), "answered 500: out of memory"),
    "429": (lambda handler, _: send(handler, b"", 429), "answered 429: Too Many Requests"),
    "half an error": (half_an_error, "answered 500"),
    "hangs": (hang, "gave no answer in time"),
    "drips": (drip, "gave no answer in time"),
    "hangs up": (hang_up, "cannot be reached"),
    "no JSON": (lambda handler, _: send(handler, b"<html>hello</html>"), "sent no usable reply"),
    "no UTF-8": (lambda handler, _: send(handler, b'{"a": "\xff\xfe"}'), "sent no usable reply"),
    "no choices": (lambda handler, _: send(handler, b'{"choices": []}'), "no choices"),
    "a list": (lambda handler, _: send(handler, b"[1]"), "no choices"),
    "nested": (lambda handler, _: send(handler, b"[" * 200_000), "sent no usable reply"),
    "no text": (saying(None), "the message has no text"),
    "10 MB": (saying("Correct" * 1_500_000), "more than 1048576 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_only_time(fault: str, caplog: pytest.LogCaptureFixture):
    broken, _ = FAULTS[fault]
    with serving(in_turn(broken, broken, saying("Correct"))) as server:
        judge = Judge(server.url, timeout=0.5, retries=2)
        assert judge(*PARAPHRASE) == 1.0
        assert len(server.asked) == 3
        assert judge.counts == {"calls": 1, "cached": 0, "failures": 0} and not caplog.records


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_leaves_the_comparison_of_texts_and_one_warning(
    fault: str, caplog: pytest.LogCaptureFixture
):
    broken, reason = FAULTS[fault]
    with serving(broken) as server:
        judge = Judge(server.url, timeout=0.3, retries=1)
        assert [judge(*PARAPHRASE), judge(*PARAPHRASE), judge(*EXACT)] == [0.0, 0.0, 1.0]
        assert len(server.asked) == 4  # two attempts each
        assert judge.counts == {"calls": 2, "cached": 0, "failures": 2}
    (warning,) = caplog.records
    assert reason in warning.message and "compared as texts" in warning.message


def test_a_refusal_is_not_repeated(caplog: pytest.LogCaptureFixture):
    with serving(lambda handler, _: send(handler, b'{"error": "bad key"}', 401)) as server:
        judge = Judge(server.url)
        assert judge(*PARAPHRASE) == 0.0
        assert len(server.asked) == 1 and judge.counts["failures"] == 1
    assert "answered 401" in caplog.text and "bad key" in caplog.text


def test_the_deadline_is_for_all_attempts_together():
    with serving(hang) as server:
        judge = Judge(server.url, timeout=0.2, retries=1000, deadline=0.5)
        start = time.monotonic()
        assert judge(*PARAPHRASE) == 0.0
        assert 0.3 < time.monotonic() - start < 5
        assert judge.counts["failures"] == 1


def test_the_deadline_is_also_for_the_wait_for_a_free_place(caplog: pytest.LogCaptureFixture):
    with serving(hang) as server:
        judge = Judge(server.url, timeout=5, retries=0, deadline=0.3, concurrency=1)
        rewards: list[float] = []
        threads = [
            threading.Thread(target=lambda: rewards.append(judge(*PARAPHRASE))) for _ in range(3)
        ]
        start = time.monotonic()
        with judge._places:  # somebody who never comes back
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
        assert rewards == [0.0] * 3 and time.monotonic() - start < 5
        assert judge.counts["failures"] == 3 and server.asked == []
    assert "no free place" in caplog.text


def test_a_server_that_goes_away_in_the_middle_is_survived():
    with serving(saying("Correct")) as server:
        judge = Judge(server.url, retries=1)
        assert judge(*PARAPHRASE) == 1.0
    assert judge(*PARAPHRASE) == 0.0
    assert judge(*EXACT) == 1.0
    assert judge.counts == {"calls": 2, "cached": 0, "failures": 1}


def test_no_more_questions_than_places_are_put_at_a_time():
    lock, now, most = threading.Lock(), [0], [0]

    def slow(handler: BaseHTTPRequestHandler, number: int) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        saying("Correct")(handler, number)

    with serving(slow) as server:
        judge = Judge(server.url, concurrency=2)
        rewards: list[float] = []
        threads = [
            threading.Thread(target=lambda: rewards.append(judge(*PARAPHRASE))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert rewards == [1.0] * 8 and most[0] == 2 and judge.counts["calls"] == 8


def test_a_cached_verdict_needs_no_server_and_belongs_to_its_model(tmp_path):
    path = tmp_path / "run" / "verdicts.db"
    with serving(saying("Correct")) as server:
        judge = Judge(server.url, "big", cache=path)
        assert [judge(*PARAPHRASE), judge(*PARAPHRASE)] == [1.0, 1.0]
        assert len(server.asked) == 1
        assert judge.counts == {"calls": 1, "cached": 1, "failures": 0}
        judge.close()
        other = Judge(server.url, "small", cache=path)
        assert other(*PARAPHRASE) == 1.0 and len(server.asked) == 2
        other.close()
    gone = Judge("http://127.0.0.1:9/v1", "big", cache=path)  # elsewhere, the same model
    assert gone(*PARAPHRASE) == 1.0
    assert gone.counts == {"calls": 0, "cached": 1, "failures": 0}
    gone.close()


def test_a_failure_is_not_cached(tmp_path):
    with serving(in_turn(FAULTS["500"][0], saying("Correct"))) as server:
        judge = Judge(server.url, retries=0, cache=tmp_path / "verdicts.db")
        assert [judge(*PARAPHRASE), judge(*PARAPHRASE)] == [0.0, 1.0]
        judge.close()


def test_a_cache_that_breaks_does_not_cost_the_verdict(tmp_path, caplog):
    path = tmp_path / "verdicts.db"
    with serving(saying("Correct")) as server:
        judge = Judge(server.url, cache=path)
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE answers")
        connection.close()
        assert [judge(*PARAPHRASE), judge(*PARAPHRASE)] == [1.0, 1.0]
        judge.close()
    assert [record.message[:33] for record in caplog.records] == [
        "the judge's cache cannot be read:"
    ]


CHILD = """
import sys
sys.path.insert(0, ".")
from graft.rewards.judge import Judge
judge = Judge(sys.argv[1], cache=sys.argv[2])
for n in range(int(sys.argv[3])):
    assert judge.is_correct("Who?", ["Barack Obama"], f"president {n}")
    print(n, judge.counts["calls"], flush=True)
"""


def test_processes_share_the_cache_and_a_killed_one_leaves_it_whole(tmp_path):
    path = tmp_path / "verdicts.db"

    def child(count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, server.url, str(path), str(count)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with serving(saying("Correct")) as server:
        killed = child(1_000_000)
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.startswith("20 "):
                killed.send_signal(signal.SIGKILL)
                break
        assert killed.wait(30) == -signal.SIGKILL
        killed.stdout.close()
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        told, _ = child(21).communicate(timeout=60)
    assert told.splitlines()[-1] == "20 0"  # 21 verdicts, and nothing was asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "JUDGE_URL"),
        ({"url": ""}, "JUDGE_URL"),
        ({"url": "localhost:8001"}, "not of the form http://host:port/v1"),
        ({"url": "http://h/v1", "timeout": 0}, "timeout=0"),
        ({"url": "http://h/v1", "deadline": -1}, "deadline=-1"),
        ({"url": "http://h/v1", "retries": -1}, "retries=-1"),
        ({"url": "http://h/v1", "concurrency": 0}, "concurrency=0"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_when_it_is_made(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Judge(**options)


def test_the_environment_may_name_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_URL", "http://h:1/v1/")
    assert Judge().url == "http://h:1/v1/chat/completions"
    assert Judge.blocking and Judge("https://other").url == "https://other/chat/completions"


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no database " * 100)
    with pytest.raises(ValueError, match=r"judge's replies in .*notes.txt.*name a file"):
        Judge("http://h/v1", cache=path)
    assert path.read_text().startswith("no database")
