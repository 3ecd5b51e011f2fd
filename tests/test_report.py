"""`graft report`: the numbers are on the page, hostile text is inert, and the page stays small."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from graft.commands.report import report
from graft.config import ConfigError
from graft.report.curves import curve, number, smoothed, ticks
from graft.report.markup import shown
from graft.report.page import page, write_report
from graft.report.tables import tokens_per_second
from graft.report.transcripts import pick
from graft.runs import Curves, RunRecord
from graft.types import Author, Episode, Leaf, Span, Status, Task
from tests.test_record import attempt, held, make_run, save, step

app = typer.Typer()
app.command("report")(report)

HOSTILE = (
    "<script>alert(1)</script><img src=http://evil/x onerror=alert(2)>\x1b[2J\u202egnp.exe"
    "</pre></style></title><!-- & \"' \ud800"
)

VOID = {"meta", "br", "hr", "img", "input", "link", "line", "circle", "polyline", "polygon"}


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def is_inert(seen: Page) -> bool:
    outward = {"href", "src", "srcset", "action", "data", "xlink:href", "style", "srcdoc"}
    names = {name for _, name, _ in seen.attributes}
    return not (
        set(seen.tags) & {"script", "iframe", "object", "embed", "img", "link", "base", "form", "a"}
        or names & outward
        or any(name.startswith("on") for name in names)
    )


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


def test_the_numbers_of_a_run_are_on_its_page(tmp_path):
    seen = Page(page(finished(tmp_path / "calc")))
    for text in (
        "calc done sampled 0.310 → 0.952 (+0.642); greedy 0.350 → 0.350 (+0.000)",
        "GRPO on calculator, 3 steps of 16 x 8 attempts, after a warm-up of 2 steps",
        "sampled 0.310 0.952 +0.642",
        "warn reinforce 2 entropy it fell",
        "reward 0.25 0.75 0.25 0.75",  # first, last, least, greatest
        "best reward 1.000 (done, 1 tool call) sum/1",
        "worst reward 0.000 (done, 1 tool call) sum/2",
        "warm-up 2 0:02 1 s 700",
        "reinforce 3 0:12 4 s 200",  # 100, 200 and 300 tokens/s for four seconds each
        "reinforce 1:01:15",
        "train.lr 0.003 1e-06",  # this run's, and the default
        "torch 2.13.0+cpu",
        "parameters 1,115,520",
    ):
        assert text in seen.text, text
    # of RL reward, entropy and speed; of the warm-up loss and speed
    assert seen.tags.count("svg") == 3 + 2
    assert is_inert(seen)


def test_scores_that_fall_are_red_and_more_calls_have_no_colour(tmp_path):
    summary = {
        "before": {"sampled": 0.5, "greedy": 0.5, "tool_rate": 0.25},
        "after": {"sampled": 0.0, "greedy": 0.75, "tool_rate": 1.0},
        "checkpoint": "x/rl-000001",
    }
    text = page(make_run(tmp_path / "a", step(1), train=1, summary=summary))
    for change in ('down">-0.500', 'up">+0.250', '">+0.750'):
        assert f'<span class="{change}</span>' in text


def test_settings_that_differ_come_before_all_of_them(tmp_path):
    seen = Page(page(finished(tmp_path / "a"))).text
    changed, _, everything = seen.partition("all settings")
    changed = changed.partition("differs from the default")[2]
    assert "train.lr" in changed
    assert "rollout.tasks" not in changed  # 16 is the default
    assert "rollout.tasks 16" in everything


def test_secrets_stay_at_home(tmp_path):
    config = "engine: {args: {api_key: abc123, max_tokens: 7}}\n"
    text = page(make_run(tmp_path / "a", config=config))
    assert "abc123" not in text
    assert "(left out)" in text
    assert "max_tokens" in text


def test_the_turns_of_an_attempt_are_named_and_tools_marked(tmp_path):
    text = page(finished(tmp_path / "a"))
    who = re.findall(r'<span class="who">(\w+)</span><pre dir="auto">([^<]*)</pre>', text)
    turns = [("task", "2+3="), ("policy", "[2+3]"), ("tool", "5;"), ("policy", "right")]
    assert any(who[i : i + 4] == turns for i in range(len(who)))
    assert "calls 1 tool<" in text


# hostile text


def test_hostile_text_is_shown_and_does_nothing(tmp_path):
    tree = attempt(HOSTILE.removesuffix("\ud800"), 1.0, task=f"<b>{HOSTILE[:80]}")
    tree.spans[2].text = "x" * 1_000_000
    tree.spans[1].info["error"] = HOSTILE[:60]
    name = 'a"><script>alert(3)<'
    record = make_run(
        tmp_path / name.replace("/", ""),
        step(1, reward=1.0, **{f"eval/{HOSTILE[:60]}": 0.5}),
        summary={"before": {HOSTILE: 0.0}, "after": {HOSTILE: 1.0}, "machine": {HOSTILE: HOSTILE}},
        episodes={1: [tree]},
        config=f"task: {{env: {json.dumps(HOSTILE[:90])}}}\n",
    )
    alarm = {"phase": HOSTILE, "step": 1, "metric": HOSTILE, "level": HOSTILE, "text": HOSTILE}
    (record.path / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    text = write_report(record).read_text(encoding="utf-8")
    seen = Page(text)
    assert is_inert(seen)
    assert "<script>alert(1)</script><img src=http://evil/x onerror=alert(2)>" in seen.text
    assert "996,000 more characters" in seen.text
    assert "\\x1b[2J\\u202egnp.exe" in seen.text
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert len(text) < 200_000


def test_a_long_line_is_clipped_even_if_every_letter_has_to_be_spelled():
    assert len(shown("\u202e" * 10**6, 400)) < 600
    assert shown("<&>") == "&lt;&amp;&gt;"


def test_the_page_stays_small_whatever_the_run(tmp_path):
    many = {f"eval/{n}{'&' * 390}": 0.5 for n in range(600)}
    tree = attempt()
    for n in range(500):
        tip = tree.append(Span(len(tree.spans) - 1, [Author.ENV, Author.POLICY][n % 2], [1]))
        tree.spans[tip].text = '"' * 5000
        tree.spans[tip].info["error"] = '"' * 5000
    tree.leaves = [Leaf((len(tree.spans) - 1,), 1.0), Leaf((len(tree.spans) - 2,), 0.0)]
    keys = "".join(f"  {'k' * 200}{n}: '{'&' * 2000}'\n" for n in range(600))
    record = make_run(
        tmp_path / "a",
        *(step(n, **(many if n < 3 else {}), reward=n % 7, loss=n) for n in range(1, 20_000)),
        summary={"before": dict.fromkeys(many, 0.0), "after": dict.fromkeys(many, 1.0)},
        episodes={1: [tree] * 4, 2: [tree] * 4},
        config=f"task:\n{keys}",
    )
    alarm = {"phase": "rl", "step": 1, "metric": "reward", "level": "warn", "text": "&" * 9999}
    (record.path / "alarms.jsonl").write_text((json.dumps(alarm) + "\n") * 1000)
    path = write_report(record)
    assert path.stat().st_size < 5_000_000
    assert is_inert(Page(path.read_text(encoding="utf-8")))


# runs that are not whole


def test_a_run_that_goes_on_says_so(tmp_path):
    record = make_run(tmp_path / "a", step(2, reward=0.5), train=8)
    save(record, "rl-000000", before={"sampled": 0.25}, seconds={"rl": 61.0})
    with held(record.path / ".lock"):
        seen = Page(page(record)).text
    assert "still going on, at reinforce step 2 of 8" in seen
    assert "sampled 0.250 before training" in seen
    assert "reward 0.500 at the last step" in seen
    assert "reinforce 1:01" in seen


def test_a_run_that_died_says_where_and_what_is_left(tmp_path):
    record = make_run(tmp_path / "a", step(2, reward=0.5), '{"phase": "rl", "st', train=8)
    assert "stopped at reinforce step 2 of 8, before its end. Nothing was saved." in page(record)
    save(record, "rl-000002")
    assert "Its last checkpoint is rl-000002." in page(record)
    (record.path / "failed").mkdir()
    (record.path / "failed" / "step_000003.jsonl").touch()
    assert "failed after reinforce step 2 of 8: numbers that were not finite" in page(record)


def test_a_run_that_never_began_still_has_a_page(tmp_path):
    seen = Page(page(make_run(tmp_path / "a"))).text
    assert "nothing is measured yet" in seen
    assert "stopped before its first step" in seen


def test_a_supervised_run_shows_its_loss_and_its_rows(tmp_path):
    record = make_run(
        tmp_path / "a",
        step(1, "sft", loss=3.5),
        step(2, "sft", loss=2.25),
        train=0,
        sft=2,
        summary={"before": {}, "after": {}, "sft": {"rows": 640, "eval/loss": 2.5}},
    )
    seen = Page(page(record)).text
    assert "warm-up loss 3.500 → 2.250" in seen
    assert "rows 640" in seen
    assert "eval/loss 2.5" in seen
    assert "No episodes were written down" in seen


# attempts


def test_best_and_worst_are_of_attempts_that_ended(tmp_path):
    broken = attempt("broken", 9.0, "sum/9")
    broken.leaves[0].status = Status.TOOL_ERROR
    lost = attempt("lost", 8.0, "sum/8")
    lost.leaves[0].tips = (77,)
    trees = [attempt(str(n), n / 4, f"sum/{n}") for n in range(4)]
    record = make_run(tmp_path / "a", episodes={5: [broken, *trees, lost]})
    picked = pick(record, 5)
    assert [one.leaf.reward for one in picked.best] == [0.75, 0.5]
    assert [one.leaf.reward for one in picked.worst] == [0.0, 0.25]
    assert (picked.seen, picked.is_cut) == (4, False)


def test_equal_rewards_show_two_attempts_and_not_one_twice(tmp_path):
    tree = Episode(Task("t", "calc"))
    root = tree.append(Span(None, Author.TASK, [1], text="?"))
    tips = [tree.append(Span(root, Author.POLICY, [2], text=word)) for word in ("one", "two")]
    tree.leaves += [Leaf((tip,), 0.5) for tip in tips]
    picked = pick(make_run(tmp_path / "a", episodes={1: [tree]}), 1)
    assert picked.best[0].leaf.tips == (1,)
    assert picked.worst[0].leaf.tips == (2,)


def test_every_context_of_an_attempt_is_shown(tmp_path):
    tree = attempt()
    root = tree.append(Span(None, Author.TASK, [9], text="so far: 5"))
    tip = tree.append(Span(root, Author.POLICY, [4], text="done"))
    tree.leaves = [Leaf((3, tip))]
    text = page(make_run(tmp_path / "a", episodes={1: [tree]}))
    assert text.index("2+3=") < text.index("context 2") < text.index("so far: 5")


# curves


def test_a_curve_goes_through_its_points():
    figure = curve("reward", [1, 2, 3], [0.0, 0.5, 1.0])
    raw = re.search(r'class="raw" points="([^"]*)"', figure)
    assert raw is not None and raw[1] == "56.0,176.0 232.0,94.0 408.0,12.0"
    labels = re.findall(r'<text class="([xy])"[^>]*>([^<]*)<', figure)
    assert labels == [*(("y", t) for t in ("0.0", "0.5", "1.0")), *(("x", t) for t in "123")]


def test_a_running_mean_is_over_the_last_few():
    assert smoothed([1.0, 2.0, 3.0, 6.0], 2) == [1.0, 1.5, 2.5, 4.5]
    assert smoothed([4.0, 8.0], 1) == [4.0, 8.0]
    drifting = smoothed([0.1] * 1000, 7)
    assert max(abs(value - 0.1) for value in drifting) < 1e-12


def test_a_spike_of_one_step_in_many_is_still_drawn():
    values = [0.0] * 100_000
    values[77_777] = 1.0
    figure = curve("gap", range(100_000), values)
    assert ",12.0" in figure  # the top of the picture
    assert len(figure) < 20_000


def test_a_curve_of_nothing_is_nothing_and_of_one_step_a_dot():
    assert curve("a", [1, 2], [math.nan, math.inf]) == ""
    assert "<circle" in curve("a", [1, 2], [math.nan, 0.5])


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [-1e308, 1e308], [1e-320, 2e-320], [1e16, 1e16 + 2], [5.0, 5.0 + 1e-13]]
)
def test_extreme_values_are_drawn_inside_the_picture(values):
    figure = curve("a", [1, 2], values)
    for x, y in re.findall(r"([-\d.]+),([-\d.]+)", " ".join(re.findall(r'points="(.*?)"', figure))):
        assert 0 <= float(x) <= 420
        assert 0 <= float(y) <= 200


def test_ticks_are_round_and_few():
    assert ticks(0, 1, 4) == [0.0, 0.5, 1.0]
    assert ticks(3, 58, 6) == [10.0, 20.0, 30.0, 40.0, 50.0]
    for low, high in ((0.1, 0.137), (-3, 1e6), (1e-9, 2e-9)):
        assert 2 <= len(ticks(low, high, 4)) <= 4


def test_numbers_are_short():
    assert [number(v) for v in (0.0, 0.5, 5512.4, 3.1e-07)] == ["0", "0.5", "5,512", "3.1e-07"]


def test_tokens_per_second_counts_each_step_by_its_time():
    curves = Curves()
    curves.add({"step": 1, "tokens_per_second": 100.0, "step_time": 3.0})
    curves.add({"step": 2, "tokens_per_second": 500.0, "step_time": 1.0})
    assert tokens_per_second(curves) == 200.0


# the command


def test_the_command_writes_into_the_run_or_where_it_is_told(tmp_path):
    record = finished(tmp_path / "a")
    done = CliRunner().invoke(app, [str(record.path)], catch_exceptions=False)
    assert done.output == f"{record.path}/report.html\n"
    assert (record.path / "report.html").read_text().startswith("<!doctype html>")
    out = tmp_path / "b.html"
    told = CliRunner().invoke(app, [str(record.path), "--out", str(out), "--json"])
    assert json.loads(told.output) == {
        "report": str(out),
        "bytes": out.stat().st_size,
        "status": "done",
        "runs": [str(record.path)],
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.html"]


def test_a_report_does_not_count_as_activity_of_the_run(tmp_path):
    record = finished(tmp_path / "a")
    before = record.last_activity
    write_report(record)
    assert record.last_activity == before


@pytest.mark.parametrize("out", ["missing/b.html", "."])
def test_a_place_that_cannot_be_written_to_is_refused_in_words(tmp_path, out):
    record = make_run(tmp_path / "a")
    done = CliRunner().invoke(app, [str(record.path), "--out", str(tmp_path / out)])
    assert done.exit_code == 1
    assert "make it first" in str(done.exception) or "give a file" in str(done.exception)


# several seeds of one recipe


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


def test_several_seeds_have_their_means_and_spread_on_the_page(tmp_path):
    first, *others = seeds(tmp_path, 0.7, 0.8, 0.9)
    text = page(first, *others)
    seen = Page(text).text
    assert "sampled 0.200 ± 0.100 → 0.800 ± 0.100 over 3 seeds" in seen
    assert "sampled 0.200 ± 0.100 0.800 ± 0.100 +0.600" in " ".join(seen.split())
    assert "With s1, s2: scores and curves are of all 3 seeds" in seen
    # steps 1, 2, 3: means of 0 1 2, of 0.1 1.1, of 0.2; the axis reaches from 0 to 2
    assert "reward, 1 at first, 0.2 at last" in seen
    points = re.search(r'<polygon class="band" points="([^"]*)"', text)[1].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert (heights[0], heights[-1]) == (12.0, 176.0)  # step 1: from 2, the top, to 0, the bottom
    assert len(points) == 6 and heights[2] == heights[3]  # one seed alone at step 3
    assert text.count('class="band"') == text.count("<figure>")
    assert 'class="band"' not in page(first)


def test_a_seed_without_a_score_is_left_out_of_the_mean_and_said(tmp_path):
    first, *others = seeds(tmp_path, 0.7, 0.8, None)
    seen = " ".join(Page(page(first, *others)).text.split())
    assert "0.750 ± 0.071" in seen
    assert "Some runs have no score yet" in seen and "s2 2 stopped - -" in seen


def test_runs_of_other_recipes_are_refused_by_the_setting(tmp_path):
    first = seeds(tmp_path / "a", 0.7)[0]
    other = seeds(tmp_path / "b", 0.7, lr="0.2")[0]
    with pytest.raises(
        ConfigError, match=r"they differ in train.lr; give runs that differ in run.seed"
    ):
        page(first, other)


def test_the_command_takes_several(tmp_path):
    made = seeds(tmp_path, 0.7, 0.8)
    done = CliRunner().invoke(app, [*(str(one.path) for one in made), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["runs"] == [str(one.path) for one in made]
    assert "over 2 seeds" in Path(told["report"]).read_text(encoding="utf-8")
