"""What a person sees: sparklines, plain lines, the live panel, tables and transcripts."""

from __future__ import annotations

import io
import math
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from graft.train.monitor.display import Display, Trend
from graft.train.monitor.formatting import clip, clock_face, sparkline
from graft.train.monitor.labels import in_words
from graft.train.monitor.printable import visible
from graft.types import Author, Episode, Leaf, Span, Status, Task


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def attempt() -> Episode:
    one = Episode(Task("sum/1", "calc"))
    root = one.append(Span(None, Author.TASK, [1], text="2+3="))
    call = one.append(Span(root, Author.POLICY, [2], text="[2+3]"))
    result = one.append(Span(call, Author.ENV, [3], text="5;"))
    tip = one.append(Span(result, Author.POLICY, [4], text="5"))
    guess = one.append(Span(root, Author.POLICY, [5], text="6"))
    one.leaves += [Leaf((tip,), reward=1.0), Leaf((guess,), status=Status.TRUNCATED)]
    return one


def shown(do, **options) -> str:
    stream = io.StringIO()
    do(Display(10, stream=stream, **options))
    return stream.getvalue()


# sparkline


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([5, 0, 5], 8, "█▁█"),
        ([0, 0, 3, 4, 7, 7], 3, "▁▅█"),  # means 0, 3.5, 7: half way rounds to even
        ([0.5, 0.5], 8, "▄▄"),
        ([0, math.nan, 7, math.inf], 8, "▁ █ "),
        ([math.nan], 8, " "),
        ([], 8, ""),
    ],
)
def test_a_sparkline_climbs_from_the_least_to_the_greatest_value(values, width, bars):
    assert sparkline(values, width) == bars


def test_a_sparkline_without_columns_is_refused():
    with pytest.raises(ValueError, match="width=0"):
        sparkline([1.0], 0)


@given(st.lists(st.floats(-1e300, 1e300)), st.integers(1, 50))
def test_a_sparkline_fills_its_columns_whatever_the_values(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set("▁▂▃▄▅▆▇█")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30, unique=True))
def test_the_order_of_values_is_the_order_of_bars(values):
    line = sparkline(values, 30)
    ranked = [bar for _, bar in sorted(zip(values, line, strict=True))]
    assert ranked == sorted(ranked)
    assert {ranked[0], ranked[-1]} == {"▁", "█"}


# labels


def test_a_summary_shows_the_reward_and_not_the_policy_loss():
    metrics = {"loss": 1e-9, "reward": 0.5, "tools/rate": 0.934, "unknown/name": 3.0}
    assert in_words(metrics, is_brief=True) == "reward 0.500  tools 93%"
    assert in_words({"loss": 2.0, "tokens_per_second": 5512.4}) == "loss 2.000  tokens/s 5,512"


def test_seconds_read_as_a_clock():
    faces = {0: "0:00", 9.6: "0:10", 75: "1:15", 3675: "1:01:15", math.nan: "?"}
    assert [clock_face(seconds) for seconds in faces] == list(faces.values())


@given(st.text())
def test_no_text_of_a_model_can_reach_the_terminal_as_a_command(text):
    assert all(c.isprintable() or c in "\n\t" for c in visible(text))


def test_an_escape_sequence_is_spelled_out_and_letters_are_left_alone():
    assert visible("é→\x1b[2J\n") == "é→\\x1b[2J\n"


def test_long_text_keeps_both_ends():
    assert clip("a" * 6 + "b" * 6, limit=4) == "aa\n… 8 more characters …\nbb"
    assert clip("abcd", limit=4) == "abcd"


# plain lines


def test_without_a_terminal_a_slow_step_is_one_plain_line():
    clock = Clock()
    stream = io.StringIO()
    with Display(60, stream=stream, clock=clock) as display:
        display.phase("rl", 60)
        clock.now = 6.0
        display.update(1, {"reward": 0.25, "entropy": 1.5, "tokens_per_second": 5512.0})
        clock.now = 12.0
        display.update(2, {"reward": 0.5})
    assert stream.getvalue().splitlines() == [
        "rl: 60 steps",
        "rl 1/60  reward 0.250  entropy 1.500  tokens/s 5,512  left 5:54",
        "rl 2/60  reward 0.500  left 5:48",
    ]


def test_quick_steps_share_a_plain_line_and_the_last_of_a_phase_has_its_own():
    """400 steps of 0.1 s: one line every 5 s. A phase that stops early shows where it stopped."""
    clock, stream = Clock(), io.StringIO()
    with Display(400, stream=stream, clock=clock) as display:
        display.phase("warm-up", 400)
        for step in range(1, 388):
            clock.now += 0.1
            display.update(step, {"loss": 1.0})
        display.phase("rl", 2)
        display.update(1, {"reward": 0.5})
        display.update(2, {"reward": 0.5})
    lines = stream.getvalue().splitlines()
    steps = [int(line.split()[1].partition("/")[0]) for line in lines if "warm-up " in line]
    assert steps[0] == 1 and steps[-1] == 387 and len(steps) == 9  # 38.6 s, and the last one
    assert all(50 <= late - early <= 51 for early, late in pairwise(steps[:-1]))
    assert [line.split("  ")[0] for line in lines[-3:]] == ["rl: 2 steps", "rl 1/2", "rl 2/2"]


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (
            {
                "loss": 1e-9, "reward": 0.5, "reward_std": 0.25, "entropy": 1.5,
                "completions/mean_length": 1234.4, "tools/rate": 0.934,
                "sampling/sampling_logp_difference/mean": 3.1e-07,
                "clip_ratio/region_mean": 0.0125, "tokens_per_second": 5512.4, "grad_norm": 3.0,
            },
            "reward 0.500  spread 0.250  entropy 1.500  length 1,234  tools 93%  "
            "gap 3.1e-07  clipped 1.2%  tokens/s 5,512",
        ),
        ({"reward": 1.0}, "reward 1.000"),  # the last step has no time left to show
        ({"reward": math.nan, "entropy": math.inf}, "reward nan  entropy inf"),
    ],
)  # fmt: skip
def test_a_plain_line_has_all_that_matters_and_not_the_policy_loss(metrics, line):
    assert shown(lambda d: d.update(10, metrics)) == f"train 10/10  {line}\n"


def test_an_alarm_is_a_line_with_its_level():
    def do(display):
        display.alarm("entropy fell to \x1b[2J 0.02", step=7)
        display.alarm("it may fall", level="warn")

    assert shown(do).splitlines() == [
        "alarm at step 7: entropy fell to \\x1b[2J 0.02",
        "warning at step 0: it may fall",
    ]


def test_a_resumed_phase_is_paced_by_the_steps_it_made_itself():
    clock = Clock()
    display = Display(60, stream=io.StringIO(), clock=clock)
    display.phase("rl", 60)
    clock.now = 4.0
    display.update(51, {})
    clock.now = 8.0
    display.update(52, {})
    assert display.seconds_left() == 8 * 4.0


def test_a_long_line_is_not_wrapped_and_brackets_are_not_markup():
    text = "[bold]calls look like [2+3] " + "x" * 200
    assert shown(lambda d: d.note(text)) == text + "\n"


def test_quiet_prints_nothing():
    def everything(display):
        with display:
            display.phase("rl", 3)
            display.update(1, {"reward": 1.0})
            display.note("hello")
            display.table({"accuracy": 0.1}, {"accuracy": 0.2})
            display.transcript(attempt(), 0)
            display.closing("runs/a", ["graft view runs/a"])

    assert shown(everything, quiet=True) == ""
    assert shown(everything) != ""


def test_json_leaves_stdout_alone_and_never_animates(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Display(2, json=True) as display:
        assert not display.is_live
        display.update(1, {"reward": 1.0})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("train 1/2  reward 1.000")


def test_a_stream_that_cannot_encode_a_character_gets_a_substitute():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Display(1, stream=stream).note("→ 5")
    stream.flush()
    assert raw.getvalue() == b"? 5\n"


# in a terminal


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_terminal_sees_the_panel_and_keeps_one_line_per_phase(terminal):
    clock = Clock()
    with Display(4, stream=terminal, clock=clock) as display:
        assert display.is_live
        display.phase("warm-up", 2)
        clock.now = 5.0
        display.update(2, {"loss": 0.5})
        display.phase("rl", 4)
        clock.now = 15.0
        display.update(1, {"reward": 0.0})
        display.update(2, {"reward": 0.75})
        display._live.refresh()
    text = terminal.getvalue()
    assert "warm-up 2/2 in 0:05  loss 0.500" in text
    assert "0:10 left" in text  # the panel: 2 of 4 steps in 10 seconds
    assert "rl 2/4 in 0:10  reward 0.750  ▁█" in text


def panel(terminal, height: int, *steps: dict[str, float]) -> list[list[str]]:
    """The words of the panel, line by line, after these steps."""
    display = Display(20, stream=terminal)  # not entered: no thread draws it a second time
    display.console.height = height
    for number, metrics in enumerate(steps, 1):
        display.update(number, metrics)
    display.alarm("no spread:\nnothing to learn from")
    page = Console(file=io.StringIO(), width=100)
    page.print(display._panel())
    return [line.split() for line in page.file.getvalue().splitlines()]


def test_the_live_table_shows_now_lately_and_first(terminal):
    rewards = [0.0, 1.0, *([0.5] * 9), 1.0]  # of the last ten the mean is 0.55
    rows = panel(terminal, 30, *({"reward": r, "tools/rate": 0.5} for r in rewards))
    assert ["now", "last", "10", "first"] in rows
    reward = next(row for row in rows if row[0] == "reward")
    assert reward[:4] == ["reward", "1.000", "0.550", "0.000"]
    assert reward[4][:3] == "▁█▅"
    assert ["tools", "50%", "50%", "50%", "▄" * 12] in rows
    assert any(row[:4] == ["1", "alarm,", "the", "last"] for row in rows)


def test_a_low_window_gets_one_line_instead_of_the_table(terminal):
    rows = panel(terminal, 7, {"reward": 0.25, "tools/rate": 0.5})
    assert ["reward", "0.250", "tools", "50%"] in rows
    assert len(rows) == 3  # progress, numbers, alarm


def test_a_trend_keeps_bounded_memory_and_the_mean_of_what_it_merged():
    trend = Trend(1.0, most=4)
    for value in (2.0, 3.0, 4.0):
        trend.add(value)
    assert trend.values == [1.0, 2.0, 3.0, 4.0]
    trend.add(5.0)
    assert trend.values == [1.5, 3.5, 5.0]
    trend.add(6.0)
    assert trend.values == [1.5, 3.5, 5.5]
    for value in range(7, 10_001):
        trend.add(float(value))
    assert len(trend.values) <= 5
    assert (trend.first, trend.last, trend.lately) == (1.0, 10_000.0, 9_995.5)


def test_the_terminal_is_restored_when_training_raises(terminal):
    with pytest.raises(KeyboardInterrupt), Display(4, stream=terminal) as display:
        display.update(1, {"reward": 0.5})
        raise KeyboardInterrupt
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l") >= 0


# tables, transcripts, closing


def test_the_table_shows_before_after_and_the_difference():
    text = shown(
        lambda d: d.table(
            {"accuracy": 0.31, "only before": 1.0}, {"accuracy": 0.952, "only after": 2.0}
        )
    )
    rows = [line.split() for line in text.splitlines()]
    assert ["accuracy", "0.310", "0.952", "+0.642"] in rows
    assert ["only", "before", "1.000", "-", "-"] in rows
    assert ["only", "after", "-", "2.000", "-"] in rows


@pytest.mark.parametrize(
    ("leaf", "rows"),
    [
        (0, ["task 2+3=", "policy [2+3]", "env 5;", "policy 5", "reward 1.00 (done)"]),
        (1, ["task 2+3=", "policy 6", "reward 0.00 (truncated)"]),
    ],
)
def test_a_transcript_of_a_leaf_gives_each_author_a_row(leaf, rows):
    text = shown(lambda d: d.transcript(attempt(), leaf))
    assert [" ".join(line.split()) for line in text.splitlines()] == rows


def test_a_transcript_in_a_terminal_is_coloured_by_author(terminal):
    Display(1, stream=terminal).transcript(attempt(), 0)
    assert "\x1b[32m[2+3] " in terminal.getvalue()  # green
    assert "\x1b[36m5; " in terminal.getvalue()  # cyan


def test_a_transcript_of_several_contexts_shows_each():
    one = attempt()
    root = one.append(Span(None, Author.TASK, [9], text="so far: 5"))
    tip = one.append(Span(root, Author.POLICY, [4], text="done"))
    one.leaves.append(Leaf((3, tip)))
    text = shown(lambda d: d.transcript(one, 2))
    assert text.index("2+3=") < text.index("context 2") < text.index("so far: 5")


def test_a_transcript_spells_out_what_would_steer_the_terminal():
    one = attempt()
    one.spans[1].text = "\x1b[2J"
    assert "\x1b" not in shown(lambda d: d.transcript(one, 0))


def test_a_prompt_known_only_as_messages_is_shown_too():
    one = Episode(Task("t", "calc", prompt=({"role": "user", "content": "What is 2+3?"},)))
    one.leaves.append(Leaf((one.append(Span(None, Author.TASK, [1])),)))
    assert "What is 2+3?" in shown(lambda d: d.transcript(one, 0))


def test_the_closing_names_the_folder_and_the_next_commands():
    text = shown(lambda d: d.closing("runs/quickstart", ["graft view runs/quickstart"]))
    assert text == "run folder: runs/quickstart\n  graft view runs/quickstart\n"
