"""Metrics that explain themselves: every one that a run writes has a text, and the texts are true."""

from __future__ import annotations

import ast
import io
import json
import re
import tomllib
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import graft
from graft.commands.explain import explain as explain_command
from graft.config import keys
from graft.evaluate.answer_measures import MEASURES
from graft.evaluate.comparison import COLUMNS as AGAINST
from graft.evaluate.table import (
    CALLS,
    GRADED,
    HEAD,
    PRODUCTIVITY,
    SOURCE,
    TASKS,
    TOOL_USE,
    ScoreTable,
)
from graft.registry import UnknownName
from graft.runs import RunStatus as RunStatus
from graft.train.monitor.alarm_rules import GAP, RULES, WATCHED
from graft.train.monitor.display import Display
from graft.train.monitor.labels import PHASE_WORDS, RUN_COLUMNS
from graft.train.monitor.labels import WATCHED as SHOWN
from graft.train.monitor.metric_docs import (
    CHECKOUT,
    INSTALLED,
    METRICS,
    PAGE,
    explain,
    parse,
)
from graft.train.run_dir.metrics_log import RESERVED, read_metrics
from graft.types import Author, Episode, Leaf, Span, Status, Task

ROOT = Path(__file__).parents[2]
TINY = (
    "model.shape={family: qwen3, width: 16, layers: 1, heads: 2, kv_heads: 2, head_dim: 8, ff: 16, "
    "tied: false, rope_theta: 100.0, max_positions: 128}",
    "rollout.tasks=3",
    "rollout.samples=4",
    "rollout.max_context=96",
    "sft.steps=2",
    "sft.batch=4",
    "train.steps=2",
    "run.eval_tasks=2",
    "run.eval_every=1",
    "run.log_episodes=0",
    "run.trackers=[]",
)
SCORES = {"sampled": "eval/sampled", "greedy": "eval/greedy", "tool_rate": "eval/tool_rate"}
"""Rows of the table of scores -> the metric of the same evaluation."""
PPO = ("algo.name=ppo", "algo.kl_coef=0.01", "algo.importance_cap=2", "train.epochs=2")

_app = typer.Typer()
_app.command()(explain_command)


def called(*arguments: str):
    return CliRunner().invoke(_app, list(arguments))


@pytest.mark.parametrize(
    ("recipe", "changes", "among_them"),
    [
        (
            "quickstart",
            ("sft.steps=25",),  # evaluated every 25
            {"frac_reward_zero_std", "accuracy"},
        ),
        ("quickstart", PPO, {"loss/value", "critic/grad_norm", "kl"}),
        ("quickstart", ("rollout.staleness=1",), {"staleness/max"}),
        (
            "arpo/toy",
            ("rollout.branch={arpo: {initial_rollouts: 2}}", "sft.eval_every=1"),
            {"tools/search/calls"},
        ),
        ("expa/toy-prompt-cpo", (), {"training/rewrites/gain"}),
    ],
)
def test_every_metric_of_a_real_run_has_a_text(tmp_path: Path, recipe, changes, among_them):
    graft.train(recipe, *TINY, *changes, f"run.dir={tmp_path}", "run.name=a")
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    names = {name for row in rows for name in row} - set(RESERVED)
    assert {"reward", "loss", "entropy", "eval/sampled"} | among_them <= names
    assert [name for name in sorted(names) if not _has_text(name)] == []


def test_every_metric_of_the_held_out_rows_of_a_warm_up_has_a_text(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows.write_text((json.dumps({"messages": chat}) + "\n") * 8)
    graft.train(
        "quickstart",
        *TINY,
        "train.steps=0",
        f"sft.data={rows}",
        "sft.eval_share=0.25",
        "sft.stop_at=0",
        "task.env=",
        "model.alphabet=bytes",
        f"run.dir={tmp_path}",
        "run.name=a",
        "run.eval_every=0",
    )
    written = {name for row in read_metrics(tmp_path / "a" / "metrics.jsonl") for name in row}
    assert {"epoch", "eval/loss", "eval/accuracy", "eval/num_tokens"} <= written
    assert [name for name in sorted(written - set(RESERVED)) if not _has_text(name)] == []


@pytest.mark.parametrize(
    ("file", "at_least"),
    [
        ("train/step_metrics.py", 20),
        ("algos/losses", 7),
        ("algos/weights.py", 1),
        ("train/sft.py", 7),
    ],
)
def test_metrics_that_need_a_rare_step_have_a_text_too(file, at_least):
    """Keys of the dicts that functions of these files make: they are metrics, and nothing else is."""
    path = ROOT / "graft" / file
    trees = [ast.parse(one.read_text()) for one in (path.glob("*.py") if path.is_dir() else [path])]
    names = {
        key.value
        for tree in trees
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    names -= {"sampling/importance_sampling_ratio/mean_square"}  # the learner makes `ess` of it
    assert len(names) >= at_least
    assert [name for name in sorted(names) if not _has_text(name)] == []


def test_every_alarm_watches_a_metric_and_prints_a_case_of_the_page():
    assert set(WATCHED) <= set(METRICS)
    for name, rule in RULES.items():
        assert METRICS[rule.metric].case(rule.case), name
    for metric, case in (
        ("frac_reward_zero_std", "Reward near 0"),
        ("frac_reward_zero_std", "Reward in between"),
        (GAP, "Above 1e-3"),
        (GAP, "Above 0.2 with several updates"),
    ):
        assert METRICS[metric].case(case)


def test_the_page_is_shipped_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert ROOT / included["docs/metrics.md"] == INSTALLED and CHECKOUT == ROOT / "docs/metrics.md"


def test_short_names_of_the_display_and_of_alarms_are_on_the_page():
    shown = {row.word: row.metric for row in SHOWN if row.word != row.metric}
    alarms = {name: rule.metric for name, rule in RULES.items()}
    assert {**shown, **SCORES, **alarms} == PAGE.aliases


METRIC = "## Area\n### `a`\n\nWhat.\n\n**Healthy:** 0.\n"


def test_the_page_becomes_metrics_short_names_and_words():
    page = parse(
        f"# Metrics\n\nSome text.\n\n{METRIC}\n**If not:**\n\n- Low: raise it.\n- Lower it.\n"
        "\n**Range:** from 1\n"
        "## Short\n\nText.\n\n| name | metric |\n|---|---|\n| b | `a` |\n"
        "## Words\n\n| word | meaning |\n|---|---|\n| c d | Another. |\n"
    )
    (doc,) = page.areas["Area"]
    assert doc.to_json() == {
        "name": "a",
        "what": "What.",
        "healthy": "0.",
        "remedy": "Low: raise it. Lower it.",
        "range": (1.0, None),
    }
    assert doc.case("Low:") == "Low: raise it."
    assert page.aliases == {"b": "a"} and page.words["c d"].what == "Another."


def test_the_page_has_the_form_that_is_read():
    text = CHECKOUT.read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings == [f"### `{name}`" for name in METRICS]  # each once
    ranges = [doc for doc in METRICS.values() if doc.range is not None]
    assert len(ranges) == text.count("\n**Range:**")
    assert len(METRICS) == text.count("\n**Healthy:**")
    advised = [doc for doc in METRICS.values() if doc.cases]
    assert len(advised) == text.count("\n**If not:**")
    assert set(PAGE.aliases.values()) <= set(METRICS)
    assert not set(METRICS) & {*PAGE.aliases, *PAGE.words}


def test_keys_of_the_recipe_that_texts_name_exist():
    known = {key.rpartition(".")[0] for key in keys()} | set(keys())
    sections = {key.split(".")[0] for key in keys()}
    pattern = re.compile(rf"\b(?:{'|'.join(sections)})\.[a-z_]+")
    named = [
        (entry.name, key)
        for entry in METRICS.values()
        for text in (entry.what, entry.healthy, entry.remedy)
        for key in pattern.findall(text)
    ]
    assert len(named) > 80
    assert [pair for pair in named if pair[1] not in known] == []


def test_metrics_that_texts_point_to_exist():
    pattern = re.compile(r"\b(?:[a-z_]+/)+[a-z0-9_]+\b|\b[a-z]+_[a-z_]+_[a-z_]+\b")
    areas = {name.split("/")[0] for name in METRICS if "/" in name}
    for entry in METRICS.values():
        for text in (entry.what, entry.healthy, entry.remedy):
            for name in pattern.findall(text.replace("{tool}", "search")):
                if name.split("/")[0] in areas:
                    assert _has_text(name), f"{entry.name} points to {name}"


def test_texts_are_sentences_and_ranges_are_ranges():
    for entry in METRICS.values():
        assert entry.what and entry.healthy, entry.name
        for text in (entry.what, entry.healthy, entry.remedy):
            assert not text or text.endswith((".", "?")), text
            assert "  " not in text and "\n" not in text
        low, high = entry.range or (None, None)
        assert low is None or high is None or low <= high, entry.name


def test_a_pattern_is_filled_in():
    found = explain("tools/search/failures")
    assert found.name == "tools/search/failures"
    assert found.what == "Calls of search per attempt that were answered with an error."
    assert found.healthy == "Well below tools/search/calls."
    assert explain("tools/{tool}/failures") is METRICS["tools/{tool}/failures"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rewrad", "reward"),
        ("ess", "sampling/importance_sampling_ratio/ess"),
        ("frac_zero_std", "frac_reward_zero_std"),
        ("clipped_ratio", "completions/clipped_ratio"),
        ("actor/grad_norm", "grad_norm"),
        ("logp_diff", "sampling/sampling_logp_difference/mean"),
        ("tools/search/call", "tools/{tool}/calls"),
        ("spred", "spread"),
        ("heldout", "held out"),
        ("stoped", "stopped"),
    ],
)
def test_a_name_that_is_not_quite_right_is_led_home(typed, meant):
    with pytest.raises(UnknownName, match=rf"{typed}.*{meant}"):
        explain(typed)
    # graft.cli turns an UnknownName into one line and exit code 2
    assert isinstance(called(*typed.split(" ")).exception, UnknownName)


@pytest.mark.parametrize(
    "typed",
    [
        "",
        " ",
        "(",
        "a" * 10_000,
        "tools//calls",
        "\x1b[2J",
        "{tool}",
        "tools/a/calls/again",
        "loss/own",
    ],
)
def test_nonsense_has_no_neighbours_and_breaks_nothing(typed):
    with pytest.raises(UnknownName):
        explain(typed)


def test_the_command_prints_the_text_and_json_the_same():
    plain = called("frac_reward_zero_std")
    assert plain.exit_code == 0
    assert plain.stdout.startswith("frac_reward_zero_std\n  Share of the groups")
    assert "healthy: Below about 0.6." in plain.stdout
    assert max(map(len, plain.stdout.splitlines())) <= 96
    loaded = json.loads(called("frac_reward_zero_std", "--json").stdout)
    assert set(loaded) == {"name", "what", "healthy", "remedy", "range"}
    assert loaded["range"] == [0.0, 0.6]


def test_the_command_without_a_name_lists_them_all():
    lines = called().stdout.splitlines()
    names = [line[2:].split("  ")[0] for line in lines if re.match(r"  [^ ]", line)]
    assert names[:-1] == [*METRICS, *PAGE.words]  # behind them the short words, in one block
    listed = json.loads(called("--json").stdout)
    assert [entry["name"] for entry in listed["metrics"]] == list(METRICS)
    assert [entry["name"] for entry in listed["words"]] == list(PAGE.words)
    assert listed["aliases"] == PAGE.aliases


# words of the display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(out: io.StringIO) -> str:
    """All that a display can print: both phases, alarms, scores, a transcript, the closing lines."""
    task = Episode(Task("", "", prompt=({"role": "user", "content": "1"},)))
    root = task.append(Span(None, Author.TASK, [1], text="1"))
    answer = task.append(Span(root, Author.POLICY, [1], text="2"))
    observation = task.append(Span(answer, Author.ENV, [1], text="3"))
    task.leaves += [Leaf((answer, observation), status=status) for status in Status]
    metrics = {row.metric: 0.5 for row in SHOWN}
    panels: list[str] = []
    with Display(2, stream=out) as display:

        def save_panel() -> None:
            panel = Console(file=io.StringIO(), width=200, height=40, record=True)
            panel.print(display._panel())
            panels.append(panel.export_text())

        save_panel()  # before the first phase
        for phase in PHASE_WORDS.values():
            display.phase(phase, 2)
            save_panel()
            display.update(1, {"loss": 1.0})
            display.update(2, metrics)
            for level in ("warn", "alarm"):
                display.alarm("", level)
            save_panel()
        display.table(dict.fromkeys(SCORES, 0.25), dict.fromkeys(SCORES, 0.5))
        for leaf in range(len(task.leaves)):
            display.transcript(task, leaf)
        display.closing("", [])
    return "\n".join([out.getvalue(), *panels])


@pytest.mark.parametrize("out", [io.StringIO, Terminal])
def test_every_word_that_the_display_prints_can_be_explained(out, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", printed(out()))
    assert all(row.word in text for row in SHOWN)
    known = [
        re.sub(r"\\{\w+\\}", r"\\d+", re.escape(word))
        for word in {*METRICS, *PAGE.words, *PAGE.aliases}
    ]
    for word in sorted(known, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/]){word}(?![\w/])", "", text)
    left = set(re.findall(r"(?<!\d)[A-Za-z]+", text))
    assert left <= {"in", "at", "the", "last"}, left  # between the words: "2/2 in 0:03"


@pytest.mark.parametrize(
    "word",
    [
        *(row.word for row in SHOWN),
        *PHASE_WORDS.values(),
        *RUN_COLUMNS,
        *RunStatus,
        *Status,
        *Author,
        *SCORES,
        *AGAINST,
        *(*HEAD, SOURCE, TASKS, CALLS),
        *(*MEASURES, *GRADED, TOOL_USE, PRODUCTIVITY),
        *ScoreTable([], {}, "", samples=8, k=(1, 8)).measures,
        *RULES,
    ],
)
def test_every_word_of_the_tables_can_be_explained(word):
    assert explain(word).what


def test_a_short_word_leads_to_its_metric():
    assert explain("gap").name == "sampling/sampling_logp_difference/mean"
    assert explain("Entropy collapse").name == "entropy"
    assert explain("pass@16").what.startswith("Probability that at least one of 16 attempts")
    assert explain("last 10").what.startswith("Mean over the latest 10 steps")
    assert called("spread").stdout.startswith("spread: reward_std\n")
    assert called("held", "out").stdout.startswith("held out\n") and not explain("held out").healthy


def _has_text(name: str) -> bool:
    try:
        explain(name)
    except UnknownName:
        return False
    return True
