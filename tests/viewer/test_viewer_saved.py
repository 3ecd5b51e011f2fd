"""`graft report`: the viewer's page as one file, with the numbers of the run, inert, small, complete."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from graft.commands.runs import runs
from graft.commands.view import report
from graft.runs import Curves, RunRecord, find_run
from graft.trust.links import OutsideLink
from graft.trust.ownership import sign
from graft.types import Author, Leaf, Span
from graft.viewer.runs import open_runs
from graft.viewer.saved import bundle, page, saved_answers
from graft.viewer.server import static_files
from graft.viewer.summary import summary, tokens_per_second
from tests.runs.test_record import attempt, held, make_run, save, step
from tests.viewer.conftest import watched_page

app = typer.Typer()
app.command("report")(report)

HOSTILE = (
    "<script>alert(1)</script><img src=http://evil/x onerror=alert(2)>\x1b[2J\u202egnp.exe"
    "</pre></style></title><!-- & \"' \ud800"
)


class Page(HTMLParser):
    """The elements that a browser finds, and the text of the data element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.saved = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][1].get("id") == "saved":
            self.saved += data


def is_inert(text: str) -> bool:
    """Only the page's own elements, and nothing that loads from elsewhere."""
    own = Page(static_files()["index.html"].decode()).elements
    found = Page(text).elements
    names = [tag for tag, _ in found]
    outward = [a for _, a in found if {"src", "srcset", "action", "data", "srcdoc"} & a.keys()]
    links = [a["href"] for tag, a in found if tag == "a" and not (a["href"] or "").startswith("#")]
    allowed = {tag for tag, _ in own} | {"style"}
    return set(names) <= allowed and names.count("script") == 2 and not outward and not links


def rows_of(record: RunRecord, title: str, *seeds: RunRecord) -> list[list[str]]:
    tables = summary(record, seeds)["tables"]
    return next((table["rows"] for table in tables if table["title"] == title), [])


def finished(folder: Path) -> RunRecord:
    """Two warm-up steps, three of RL, all of it scored."""
    best, worst = attempt("right", 1.0, "sum/1"), attempt("wrong", 0.0, "sum/2")
    record = make_run(
        folder,
        step(1, "sft", loss=3.5, step_time=1.0, tokens_per_second=700.0),
        step(2, "sft", loss=2.5, step_time=1.0, tokens_per_second=700.0),
        *(
            step(n, reward=n / 4, entropy=1.5, step_time=4.0, tokens_per_second=100.0 * n)
            for n in (1, 2, 3)
        ),
        summary={
            "before": {"sampled": 0.31, "greedy": 0.35},
            "after": {"sampled": 0.952, "greedy": 0.35},
            "seconds_per_phase": {"sft": 62.0, "rl": 3675.0, "eval": 9.0},
            "parameters": 1115520,
            "checkpoint": "x/rl-000003",
            "versions": {"graft": "0.1.0", "torch": "2.13.0+cpu"},
            "machine": {"device": "cpu", "threads": 2},
        },
        episodes={1: [worst], 3: [worst, best]},
        config="train: {steps: 3, lr: 0.003}\nsft: {steps: 2}\nalgo: {name: grpo}\n"
        "task: {env: calculator}\nrollout: {tasks: 16, samples: 8}\n",
    )
    alarm = {"phase": "rl", "step": 2, "metric": "entropy", "level": "warn", "text": "it fell"}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return record


def test_the_numbers_of_a_run_are_in_its_summary(tmp_path):
    record = finished(tmp_path / "calc")
    found = summary(record)
    assert found["status"] == "done" and found["state"] == ""
    assert found["about"] == (
        "GRPO on calculator, 3 steps of 16 x 8 attempts, after a warm-up of 2 steps, "
        "from random weights."
    )
    assert rows_of(record, "Held-out scores") == [
        ["sampled", "0.310", "0.952", "+0.642"],
        ["greedy", "0.350", "0.350", "+0.000"],
    ]
    assert rows_of(record, "Time") == [
        ["warm-up", "2", "0:02", "1 s", "700"],
        ["reinforce", "3", "0:12", "4 s", "200"],  # 100, 200 and 300 tokens/s for 4 seconds each
    ]
    assert ["reinforce", "1:01:15"] in rows_of(record, "Time of the whole run")
    assert ["reward", "0.25", "0.75", "0.25", "0.75"] in rows_of(
        record, "Every metric of reinforce"
    )
    assert ["train.lr", "0.003", "1e-06"] in rows_of(
        record, "Settings that differ from the defaults"
    )
    assert ["torch", "2.13.0+cpu"] in rows_of(record, "Environment")
    assert ["parameters", "1,115,520"] in rows_of(record, "Environment")


def test_settings_that_differ_come_before_all_of_them(tmp_path):
    record = finished(tmp_path / "a")
    changed = [row[0] for row in rows_of(record, "Settings that differ from the defaults")]
    assert "train.lr" in changed and "rollout.tasks" not in changed  # 16 is the default
    assert ["rollout.tasks", "16"] in rows_of(record, "All settings")


def test_secrets_are_left_out(tmp_path):
    config = "engine: {args: {api_key: abc123, max_tokens: 7}}\n"
    text = page(open_runs([str(make_run(tmp_path / "a", config=config).path)]))
    assert "abc123" not in text and "***" in text and "max_tokens" in text


def test_a_run_that_goes_on_has_that_state(tmp_path):
    record = make_run(tmp_path / "a", step(2, reward=0.5), train=8)
    save(record, "rl-000000", before={"sampled": 0.25}, seconds={"rl": 61.0})
    with held(record.path / ".lock"):
        assert "still going on, at reinforce step 2 of 8" in summary(record)["state"]
    assert rows_of(record, "Held-out scores") == [["sampled", "0.250", "-", "-"]]
    assert rows_of(record, "Time of the whole run") == [["reinforce", "1:01"]]


def test_a_run_that_died_shows_its_last_step_and_what_was_saved(tmp_path):
    record = make_run(tmp_path / "a", step(2, reward=0.5), '{"phase": "rl", "st', train=8)
    where = "stopped at reinforce step 2 of 8, before its end."
    assert f"{where} Nothing was saved." in summary(record)["state"]
    save(record, "rl-000002")
    assert "Its last checkpoint is rl-000002." in summary(record)["state"]
    (record.path / "failed").mkdir()
    (record.path / "failed" / "step_000003.jsonl").touch()
    why = "failed after reinforce step 2 of 8: numbers that were not finite"
    assert why in summary(record)["state"]


def test_a_run_that_never_began_still_has_a_page(tmp_path):
    record = make_run(tmp_path / "a")
    assert "stopped before its first step" in summary(record)["state"]
    assert is_inert(page(open_runs([str(record.path)])))


def test_a_supervised_run_shows_its_rows(tmp_path):
    record = make_run(
        tmp_path / "a",
        step(1, "sft", loss=3.5),
        step(2, "sft", loss=2.25),
        train=0,
        sft=2,
        summary={"before": {}, "after": {}, "sft": {"rows": 640, "eval/loss": 2.5}},
    )
    rows = rows_of(record, "Held-out rows after the warm-up")
    assert rows == [["rows", "640"], ["eval/loss", "2.5"]]


def test_tokens_per_second_counts_each_step_by_its_time():
    curves = Curves()
    for speed, took in ((100.0, 3.0), (500.0, 1.0)):
        row = {"phase": "rl", "step": len(curves) + 1, "tokens_per_second": speed}
        curves.add({**row, "step_time": took})
    assert tokens_per_second(curves) == 200.0


def seeds(folder: Path, *afters: float | None, lr: str = "0.1") -> list[RunRecord]:
    """Runs of 3, 2, 1 ... steps with the seed as their reward's start; one without `after` goes on."""
    made: list[RunRecord] = []
    for seed, after in enumerate(afters):
        summary = {
            "before": {"sampled": 0.1 + 0.1 * seed},
            "after": {"sampled": after},
            "checkpoint": "c/rl-000003",
        }
        lines = [step(n + 1, reward=seed + n / 10) for n in range(len(afters) - seed)]
        config = f"run: {{name: s{seed}, seed: {seed}}}\ntrain: {{steps: 3, lr: {lr}}}\n"
        made.append(
            make_run(
                folder / f"s{seed}",
                *lines,
                config=config,
                summary=summary if after is not None else None,
            )
        )
    return made


def test_several_seeds_have_their_means_and_spread(tmp_path):
    made = seeds(tmp_path, 0.7, 0.8, 0.9)
    title = "Held-out scores over 3 seeds"
    row = ["sampled", "0.200 ± 0.100", "0.800 ± 0.100", "+0.600", "3, 3 of 3"]
    assert rows_of(made[0], title, *made) == [row]
    found = saved_answers(open_runs([str(one.path) for one in made]))
    assert [run["seeds"] for run in found["runs"]] == [[0, 1, 2]] * 3
    assert found["summary"][0]["tables"][0]["rows"] == [row]
    # steps 1, 2, 3: means of 0 1 2, of 0.1 1.1, of 0.2
    assert found["band"]["0,1,2"]["rl"]["reward"]["mean"] == pytest.approx([1.0, 0.6, 0.2])


def test_a_seed_without_a_score_is_left_out_of_the_mean_and_counted(tmp_path):
    made = seeds(tmp_path, 0.7, 0.8, None)
    [row] = rows_of(made[0], "Held-out scores over 3 seeds", *made)
    assert row[2] == "0.750 ± 0.071" and row[4] == "2, 2 of 3"


def test_hostile_text_stays_data(tmp_path):
    tree = attempt(HOSTILE.removesuffix("\ud800"), 1.0, task=f"<b>{HOSTILE[:80]}")
    tree.spans[2].text = "x" * 1_000_000
    tree.spans[1].info["error"] = HOSTILE[:60]
    record = make_run(
        tmp_path / 'a"><script>alert(3)<',
        step(1, reward=1.0, **{f"eval/{HOSTILE[:60]}": 0.5}),
        summary={"before": {HOSTILE: 0.0}, "after": {HOSTILE: 1.0}, "machine": {HOSTILE: HOSTILE}},
        episodes={1: [tree]},
        config=f"task: {{env: {json.dumps(HOSTILE[:90])}}}\n",
    )
    alarm = {"phase": HOSTILE, "step": 1, "metric": HOSTILE, "level": HOSTILE, "text": HOSTILE}
    (record.path / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    text = page(open_runs([str(record.path)]))
    assert is_inert(text)
    assert json.loads(Page(text).saved)["summary"][0]["tables"][0]["rows"][0][0] == HOSTILE
    assert len(text) < 400_000


READ_FILES = [
    "config.yaml", "summary.json", "metrics.jsonl", "alarms.jsonl", "checkpoints/rl-000001/state.json",
    "episodes/step_000001.jsonl", "episodes", "checkpoints",
]  # fmt: skip


@pytest.mark.parametrize("name", READ_FILES)
def test_a_page_of_a_strangers_run_holds_no_file_of_the_reader(tmp_path, monkeypatch, name):
    theirs, own = tmp_path / "runs" / "theirs", finished(tmp_path / "runs" / "own")
    finished(theirs)
    save(find_run(str(theirs)), "rl-000001")
    private = tmp_path / "private"
    (theirs / name).rename(private)  # what its reader would accept
    (theirs / name).symlink_to(private)
    for look in (lambda: open_runs([str(theirs)]), lambda: find_run(str(theirs))):
        with pytest.raises(OutsideLink, match=re.escape(f"{theirs / name}' is a link to")):
            look()
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(runs)
    done = CliRunner().invoke(app, ["runs"])
    assert own.name in done.stdout and "theirs" not in done.stdout
    assert "theirs is left out" in done.stderr


def test_folders_of_ones_own_run_may_lie_on_another_disk(tmp_path):
    record = finished(tmp_path / "own")
    sign(record.path / "config.yaml")
    (record.path / "episodes").rename(tmp_path / "disk")
    (record.path / "episodes").symlink_to(tmp_path / "disk")
    assert open_runs([str(record.path)]) and find_run(str(record.path)).path == record.path
    (record.path / "summary.json").rename(tmp_path / "file")  # no file of it does
    (record.path / "summary.json").symlink_to(tmp_path / "file")
    with pytest.raises(OutsideLink):
        find_run(str(record.path))


@pytest.mark.slow
def test_the_page_stays_small_whatever_the_run(tmp_path):
    many = {f"eval/{n}{'&' * 390}": 0.5 for n in range(600)}
    tree = attempt()
    for n in range(500):
        tip = tree.append(Span(len(tree.spans) - 1, [Author.ENV, Author.POLICY][n % 2], [1]))
        tree.spans[tip].text = '"' * 5000
        tree.spans[tip].info["error"] = '"' * 500
    tree.leaves = [Leaf((len(tree.spans) - 1,), 1.0), Leaf((len(tree.spans) - 2,), 0.0)]
    keys = "".join(f"  {'k' * 200}{n}: '{'&' * 2000}'\n" for n in range(600))
    record = make_run(
        tmp_path / "a",
        *(step(n, **(many if n < 3 else {}), reward=n % 7, loss=n) for n in range(1, 5000)),
        summary={"before": dict.fromkeys(many, 0.0), "after": dict.fromkeys(many, 1.0)},
        episodes={1: [tree] * 4, 2: [tree] * 4},
        config=f"task:\n{keys}",
    )
    alarm = {"phase": "rl", "step": 1, "metric": "reward", "level": "warn", "text": "&" * 9999}
    (record.path / "alarms.jsonl").write_text((json.dumps(alarm) + "\n") * 1000)
    text = page(open_runs([str(record.path)]))
    assert len(text) < 5_000_000 and is_inert(text)


def test_modules_become_one_script_in_the_order_of_their_imports():
    modules = {
        "app": 'import { two } from "./b.js";\nstart(two);\n',
        "b": 'import { one } from "./a.js";\nexport const two = one + one;\n',
        "a": "export const one = 1;\n",
    }
    script = bundle(modules)
    assert script.index("$a") < script.index("$b") < script.index("$app")
    assert "const { two } = $b;" in script and "return { one };" in script
    with pytest.raises(ValueError, match="cannot be put into one page"):
        bundle({"app": 'import * as all from "./a.js";\n', "a": ""})


def test_the_command_writes_into_the_run_or_to_out(tmp_path):
    record = finished(tmp_path / "a")
    done = CliRunner().invoke(app, [str(record.path)], catch_exceptions=False)
    assert done.output == f"{record.path}/report.html\n"
    assert (record.path / "report.html").read_text().startswith("<!doctype html>")
    out = tmp_path / "b.html"
    done = CliRunner().invoke(app, [str(record.path), "--out", str(out), "--json"])
    assert json.loads(done.output) == {
        "report": str(out),
        "bytes": out.stat().st_size,
        "status": "done",
        "runs": [str(record.path)],
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.html"]


def test_a_report_does_not_count_as_activity_of_the_run(tmp_path):
    record = finished(tmp_path / "a")
    before = record.last_activity
    CliRunner().invoke(app, [str(record.path)], catch_exceptions=False)
    assert record.last_activity == before


@pytest.mark.parametrize("out", ["missing/b.html", "."])
def test_a_place_that_cannot_be_written_to_is_refused(tmp_path, out):
    record = make_run(tmp_path / "a")
    done = CliRunner().invoke(app, [str(record.path), "--out", str(tmp_path / out)])
    assert done.exit_code == 1
    assert "make it first" in str(done.exception) or "give a file" in str(done.exception)


def test_the_command_takes_several(tmp_path):
    made = seeds(tmp_path, 0.7, 0.8)
    done = CliRunner().invoke(app, [*(str(one.path) for one in made), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"] == [str(one.path) for one in made]


# in a real browser


@pytest.fixture
def opened(chromium: Any, runs: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    """The saved page of two runs, opened from the disk; it may request no other file."""
    out = tmp_path / "saved page.html"
    command = [*(str(run) for run in runs), "--out", str(out)]
    CliRunner().invoke(app, command, catch_exceptions=False)
    with watched_page(chromium, lambda url: url.startswith("file:")) as page:
        page.goto(out.as_uri())
        yield page


@pytest.mark.slow
def test_a_saved_page_shows_summary_curves_steps_and_episodes(opened):
    opened.wait_for_selector(".first table")
    assert "Saved" in opened.locator("main .note").first.inner_text()
    assert opened.locator(".summary").count() == 2
    opened.click('nav a[data-view="curves"]')
    opened.wait_for_selector(".chart canvas")
    assert opened.locator(".chart").count() > 3
    opened.click('nav a[data-view="steps"]')
    opened.wait_for_selector(".tasks.row .reward:not(:empty)")
    opened.click(".tasks.row >> nth=0")
    opened.wait_for_selector(".transcript .t")
    assert opened.locator(".transcript .t").count() > 3


@pytest.mark.slow
def test_a_saved_page_names_what_it_does_not_hold(opened):
    opened.wait_for_selector(".first table")
    opened.evaluate("location.hash = '#/episode?run=0&step=2&line=99'")
    opened.wait_for_selector(".panes .note")
    note = opened.locator(".panes .note").first.inner_text()
    assert re.search(r"not in this saved page; .graft view RUN. shows everything", note)
