"""The benchmark of an evaluation's idle time: its clock by hand, and a small run of it."""

from benchmarks import eval_idle


def test_only_the_time_without_any_request_is_idle(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(eval_idle.time, "perf_counter", lambda: now[0])
    watch = eval_idle.Watch()
    for at, by in ((11.0, +1), (12.0, +1), (14.0, -1), (15.0, -1), (18.0, +1), (20.0, -1)):
        now[0] = at
        watch.change(by)
    assert watch.idle == 1.0 + 3.0  # 10 to 11 and 15 to 18
    assert watch.weighted == 1 * 1.0 + 2 * 2.0 + 1 * 1.0 + 1 * 2.0
    assert watch.requests == 3 and watch.under_way == 0


def test_a_small_evaluation_is_measured_with_slow_answers_too():
    found = eval_idle.measure(8, 2, 4, tool_seconds=0.01, device="cpu")
    assert found["requests"] >= 16 and found["attempts_per_second"] > 0
    assert 0 <= found["idle"] < 1 and 0 < found["computing"] <= 1
    assert 0 < found["under_way"] <= 8
