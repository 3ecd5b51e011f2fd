"""What a process waits for is listed, and reported in growing intervals with the line that waits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from graft import deadlines as waits
from graft.deadlines import Watchdog, clock, current, overdue, waiting, where


def whats() -> list[str]:
    return [wait.what for wait in current()]


@pytest.fixture
def now(monkeypatch):
    """A clock that tests turn: now[0] seconds."""
    time_now = [100.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: time_now[0])
    return time_now


def test_a_wait_is_known_while_it_lasts():
    assert whats() == []
    with waiting("the gradients of step 12", deadline=600) as wait:
        assert whats() == ["the gradients of step 12"]
        assert wait.deadline == 600
        assert wait.thread == threading.get_ident()
        assert 0 <= wait.age < 1
    assert whats() == []


def test_an_error_ends_the_wait():
    with pytest.raises(KeyError), waiting("a thing"):
        raise KeyError
    assert whats() == []


def test_of_nested_waits_the_innermost_is_shown():
    with waiting("the episodes"):
        with waiting("a tool"):
            assert whats() == ["a tool"]
        assert whats() == ["the episodes"]


def test_threads_have_waits_of_their_own():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with waiting("a file"):
            inside.set()
            leave.wait(5)

    thread = threading.Thread(target=other)
    with waiting("the thread"):
        thread.start()
        inside.wait(5)
        assert whats() == ["the thread", "a file"]  # the longest first
        assert current()[1].thread == thread.ident
        leave.set()
        thread.join(5)
        assert whats() == ["the thread"]


def test_overdue_is_by_age_or_by_the_waits_own_deadline(now):
    with waiting("the episodes", deadline=50):
        now[0] += 20
        with waiting("a tool", deadline=5):
            now[0] += 4
            assert [w.what for w in overdue(3)] == ["a tool"]
            assert [w.what for w in overdue(10)] == ["the episodes"]  # not hidden by a short one
            assert overdue(30) == []
            now[0] += 2.1
            assert [w.what for w in overdue(30)] == ["a tool"]


def test_clock_reads_like_a_stopwatch():
    assert [clock(s) for s in (0.9, 31, 725, 3723)] == ["0:00", "0:31", "12:05", "1:02:03"]


def test_the_watchdog_reports_at_30_seconds_and_then_after_1_2_and_4_minutes(now):
    notes: list[tuple[float, str]] = []
    dog = Watchdog(lambda text: notes.append((now[0] - 100, text)), name="rank 1")
    with waiting("the gradients of step 12", deadline=200):
        for _ in range(500):
            now[0] += 1
            dog.check()
    assert [when for when, _ in notes] == [31, 61, 121, 202, 241, 481]
    assert notes[0][1].startswith("rank 1 waits for the gradients of step 12 since 0:31, in ")
    late = [", past its deadline of 3:20" in text for _, text in notes]
    assert late == [False, False, False, True, True, True]


def notes_at(
    now: list[float], *turns: float, deadline: float | None = None, **options
) -> list[str]:
    """What a watchdog says of one wait; it looks after so many more seconds each time."""
    notes: list[str] = []
    dog = Watchdog(notes.append, **options)
    with waiting("a", deadline) if deadline else waiting("a"):
        for seconds in turns:
            now[0] += seconds
            dog.check()
    return notes


def test_a_late_watchdog_does_not_catch_up(now):
    assert [len(notes_at(now, *turns)) for turns in ((130,), (130, 100), (130, 100, 11))] == [
        1,
        1,
        2,
    ]


def test_a_deadline_shorter_than_the_patience_is_reported_when_it_passes(now):
    assert notes_at(now, 5.9, deadline=5) == []  # the waiting code has a second to enforce it
    (note,) = notes_at(now, 5.9, 0.2, deadline=5, after=30)
    assert note.startswith("waiting for a since 0:06, past its deadline of 0:05, in ")


def test_the_next_wait_of_the_same_name_is_a_new_one(now):
    notes: list[str] = []
    dog = Watchdog(notes.append)
    for _ in range(2):
        with waiting("the same"):
            now[0] += 31
            dog.check()
    assert len(notes) == 2


def test_the_state_of_the_peers_is_reported_too(now):
    (note,) = notes_at(now, 31, peers=lambda: {"rank 1": "is sampling, step 12, since 0:42"})
    assert note.splitlines()[1] == "rank 1 is sampling, step 12, since 0:42"


def test_a_wait_is_not_reported_while_another_process_reports_it(now):
    is_elsewhere = iter([True, False])
    notes = notes_at(now, 31, 1, is_reported_elsewhere=lambda wait: next(is_elsewhere))
    assert len(notes) == 1 and "0:32" in notes[0]


def sleep_deep(seconds: float) -> None:
    time.sleep(seconds)  # the line that is reported


def test_the_deepest_line_of_our_own_code_is_shown():
    notes: list[str] = []
    with Watchdog(notes.append, after=0.2), waiting("a nap"):
        sleep_deep(0.35)
    line = Path(__file__).read_text("utf-8").split("# the line that is reported")[0].count("\n") + 1
    assert len(notes) == 1
    assert notes[0].endswith(f"in tests/test_deadlines.py:{line}")


def test_files_that_wait_for_others_show_their_callers(tmp_path, monkeypatch):
    helper = tmp_path / "helper.py"
    helper.write_text(
        "def inside(block, where):\n    with block as wait:\n        return where(wait.thread)\n"
    )
    monkeypatch.setattr(waits, "_skipped_files", {*waits._skipped_files})
    space: dict = {}
    exec(compile(helper.read_text(), str(helper), "exec"), space)
    assert space["inside"](waiting("a"), where) == f"{tmp_path.name}/helper.py:3"
    waits.skip_frames_in(str(helper))
    assert space["inside"](waiting("a"), where).startswith("tests/test_deadlines.py:")


def test_a_closed_terminal_does_not_end_the_watch(now):
    def note(text: str) -> None:
        raise ValueError("I/O operation on closed file")

    with waiting("a"):
        now[0] += 31
        Watchdog(note).check()


def test_a_wait_costs_microseconds():
    best = min(_cost() for _ in range(5))
    assert best < 50e-6  # about 2 on a quiet machine


def _cost() -> float:
    begin = time.perf_counter()
    for _ in range(1000):
        with waiting("a", 1.0):
            pass
    return (time.perf_counter() - begin) / 1000
