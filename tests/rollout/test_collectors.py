"""Crews: who attempts tasks when, how old a token may be, and what happens to attempts under way."""

import asyncio
import random
import threading
import time
from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graft.envs.base import BaseEnv
from graft.rollout.async_collector import AsyncCollector, AttemptRunner
from graft.rollout.branches.branch import independent
from graft.rollout.collector import CollectorConfig, RolloutRequest, StalenessWindow, SyncCollector
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.types import Author, Finish, Sampling, Status, Task, Turn
from graft.user_code import UserCodeError
from tests.rollout.scripted import TextContext, TextEngine

LETTERS = FastTokenizer.characters("abcdefgh]?;")
LENGTH = 6
"""Tokens of a turn."""


class OneQuestion(BaseEnv):
    """Two turns: "abcde]" is answered with "?;" the first time, and ends the attempt the second."""

    env_id = "asking"
    observe_as = "inline"
    blocking = True
    stop = ("]",)
    max_turns = None

    def __init__(self, wait=lambda env: None, on_reset=lambda env: None) -> None:
        super().__init__()
        self.wait, self.on_reset = wait, on_reset

    def reset(self, seed=None):
        self.on_reset(seed)
        return super().reset(seed)

    def pose(self) -> str:
        self.answer = "z"
        return "a?"

    def respond(self, action: str) -> Turn:
        self.wait(self)
        if self.turns == 0:
            return Turn("?;", info={"tool": "ask"})
        return Turn(reward=1.0, terminated=True)


class Slow(TextEngine):
    """An engine that writes "abcde]", one letter per `pace()` seconds, and can be paused.

    With `holds` {version: letters} a sample of that version waits behind so many for what comes.
    """

    vocab_size = LETTERS.vocab_size

    def __init__(self, pace=lambda: 0.0, holds=None) -> None:
        self.pace, self.holds, self.kind = pace, holds or {}, Voice
        self.holding: Counter[int] = Counter()  # by version
        self.weights: list = []
        self.running: set[PendingText] = set()
        self.threads: set[str] = set()
        self.is_closed = False

    def pause(self):
        for pending_text in self.running:
            pending_text.is_paused = True
        self.running.clear()

    def load(self, weights, version):
        self.threads.add(threading.current_thread().name)
        self.weights.append(weights)
        self.version = version

    def close(self):
        self.is_closed = True


class PendingText:
    is_paused = False


class Voice(TextContext):
    async def sample(self, sampling, grammar=None):
        engine, pending_text, version = self.engine, PendingText(), self.engine.version
        engine.running.add(pending_text)
        whole = LETTERS.encode("abcde]")
        drawn: list[int] = []
        finish = Finish.STOP
        try:
            for token in whole[sampling.num_begun :]:
                await asyncio.sleep(engine.pace())
                if len(drawn) == engine.holds.get(version):
                    await self.hold(pending_text, version)
                if pending_text.is_paused:
                    finish = Finish.PAUSE
                    break
                drawn.append(token)
        finally:
            engine.running.discard(pending_text)
        return self.write(drawn, finish, version=version)

    async def hold(self, pending_text, version):
        self.engine.holding[version] += 1
        try:
            while not pending_text.is_paused:
                await asyncio.sleep(0.001)
        finally:
            self.engine.holding[version] -= 1


def until(is_so) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def collector_config(
    engine=None, make_env=OneQuestion, samples=2, concurrency=256, **changes
) -> CollectorConfig:
    given = {"sampling": Sampling(max_tokens=20), **changes}
    setup = RolloutSetup(
        engine=engine or Slow(), chat=Chat(LETTERS), make_env=lambda task: make_env(), **given
    )
    return CollectorConfig(setup, setup, independent(samples), concurrency)


def request(step: int = 1, tasks: int = 2) -> RolloutRequest:
    first = (step - 1) * tasks
    return RolloutRequest(
        [Task(f"t{n}", "asking", seed=n) for n in range(first, first + tasks)],
        f"the episodes of step {step}",
        step=step,
        salt=step,
    )


def versions(episodes) -> list[int]:
    return [s.version for e in episodes for s in e.spans if s.author is Author.POLICY and len(s)]


@pytest.fixture
def closing():
    """Collectors that are closed at the end of a test."""
    collectors: list = []
    yield lambda collector: collectors.append(collector) or collector
    for collector in collectors:
        collector.close()


# what a collector gives


def test_both_collectors_give_the_same_episodes_in_the_order_of_the_tasks(closing):
    class Quick(OneQuestion):
        blocking = False  # spans are written in the order in which threads come back

    here, apart = (
        SyncCollector(collector_config(make_env=Quick)),
        closing(AsyncCollector(collector_config(make_env=Quick))),
    )
    expected = [e.to_json() for e in here.submit(request(3)).result()]
    assert [e.to_json() for e in apart.submit(request(3)).result()] == expected
    assert [e["task"]["id"] for e in expected] == ["t4", "t5"]
    assert here.counts() == {} and apart.counts() == {"rollout/discarded": 0.0}


def test_a_background_collector_begins_before_the_episodes_are_requested(closing):
    collector = closing(AsyncCollector(collector_config()))
    pending = collector.submit(request())
    until(pending.is_done)
    assert not SyncCollector(collector_config()).submit(request()).is_done()


def test_a_part_of_a_job_keeps_the_places_of_its_tasks():
    part = request(tasks=5).subset([1, 4]).subset([1])
    assert [task.id for task in part.tasks] == ["t4"] and part.indices == [4]


def test_held_out_tasks_have_the_requested_samples_and_not_the_runs_branch(closing):
    collector = closing(AsyncCollector(collector_config(samples=3)))
    held_out = RolloutRequest(
        [Task("h", "asking")],
        "held-out",
        held_out=True,
        samples=1,
        sampling=Sampling(temperature=0.5),
    )
    assert [len(e.leaves) for e in collector.submit(held_out).result()] == [1]
    assert [len(e.leaves) for e in collector.submit(request(tasks=1)).result()] == [3]


def test_no_more_tasks_run_at_a_time_than_concurrency(closing):
    lock, now, most = threading.Lock(), 0, 0

    def wait(env):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    collector = closing(
        AsyncCollector(
            collector_config(make_env=lambda: OneQuestion(wait), samples=1, concurrency=2)
        )
    )
    several = [collector.submit(request(step, tasks=3)) for step in (1, 2)]
    assert [len(pending.result()) for pending in several] == [3, 3] and most == 2


# weights that come in the middle


def test_weights_are_changed_on_the_collectors_thread_and_are_there_when_load_returns(closing):
    engine = Slow()
    collector = closing(AsyncCollector(collector_config(engine)))
    collector.load({"w": 1}, version=4)
    assert (engine.version, engine.weights) == (4, [{"w": 1}])
    assert engine.threads == {"graft-rollouts"}


def test_attempts_under_way_go_on_with_new_weights_and_each_span_has_its_version(closing):
    engine = Slow(holds={0: 4})
    collector = closing(AsyncCollector(collector_config(engine, samples=1)))
    pending = collector.submit(request(tasks=1))
    until(lambda: engine.holding[0])
    collector.load(None, version=1)
    [episode] = pending.result()
    first, second, *rest = [s for s in episode.spans if s.author is Author.POLICY]
    assert (first.version, second.version, [s.version for s in rest]) == (0, 1, [1])
    assert (len(first), len(second)) == (4, 2)
    assert (first.text, second.text) == ("", "abcde]")  # the text of a turn is on its last span
    [row] = episode.trajectories()
    assert row.text == "abcde]?;abcde]" and row.leaf.metrics["turns"] == 2


def test_thrown_away_attempts_begin_anew_and_every_one_is_counted(closing):
    engine = Slow(holds={0: 4, 1: 2})
    collector = closing(AsyncCollector(collector_config(engine, samples=1), discards=True))
    pending = collector.submit(request(tasks=3))
    until(lambda: engine.holding[0] == 3)
    collector.load(None, version=1)
    until(lambda: engine.holding[1] == 3)
    collector.load(None, version=2)
    episodes = pending.result()
    assert [e.task.id for e in episodes] == ["t0", "t1", "t2"]
    assert set(versions(episodes)) == {2}
    assert [[len(s) for s in e.spans if s.author is Author.POLICY] for e in episodes] == [
        [6, 6]
    ] * 3
    assert collector.counts() == {"rollout/discarded": 6.0}
    assert collector.counts() == {"rollout/discarded": 0.0}


def test_a_tool_that_is_waited_for_does_not_keep_a_discarded_attempt(closing):
    let_go = threading.Event()
    engine = Slow()
    waits: list[int] = []

    def wait(env):
        waits.append(engine.version)
        if engine.version == 0:
            let_go.wait(20)

    collector = closing(
        AsyncCollector(
            collector_config(engine, lambda: OneQuestion(wait), samples=1), discards=True
        )
    )
    pending = collector.submit(request(tasks=1))
    until(lambda: waits)
    collector.load(None, version=1)
    assert set(versions(pending.result())) == {1} and waits == [0, 1, 1]
    let_go.set()


def test_finished_episodes_of_a_step_under_way_are_not_thrown_away(closing):
    slow, waits = threading.Event(), []

    def wait(env):
        if env.seed == 1:
            waits.append(env)
            slow.wait(20)

    collector = closing(
        AsyncCollector(
            collector_config(make_env=lambda: OneQuestion(wait), samples=1), discards=True
        )
    )
    pending = collector.submit(request(tasks=2))
    until(lambda: waits and len(collector._runner._running) == 1)  # task 0 is done
    collector.load(None, version=1)
    slow.set()
    first, second = pending.result()
    assert set(versions([first])) == {0} and set(versions([second])) == {1}
    assert collector.counts() == {"rollout/discarded": 1.0}


def test_held_out_attempts_are_never_thrown_away(closing):
    engine = Slow(holds={0: 4})
    collector = closing(AsyncCollector(collector_config(engine), discards=True))
    pending = collector.submit(RolloutRequest([Task("h", "asking")], "held-out", held_out=True))
    until(lambda: engine.holding[0])
    collector.load(None, version=1)
    assert set(versions(pending.result())) == {0, 1}
    assert collector.counts() == {"rollout/discarded": 0.0}


def test_an_attempt_that_is_thrown_away_and_given_up_at_once_does_not_begin_anew():
    """Both are cancellations of the same task: the second must not wait for a new attempt."""

    async def main():
        started = 0

        def count(seed):
            nonlocal started
            started += 1

        engine = Slow(holds={0: 4})
        runner = AttemptRunner(
            collector_config(engine, lambda: OneQuestion(on_reset=count), samples=1), discards=True
        )
        attempt = asyncio.create_task(runner.attempt(Task("t", "asking"), request(), 0))
        while not engine.holding[0]:
            await asyncio.sleep(0.001)
        before = started
        runner.load(None, 1)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(attempt, 5)
        return before, started, runner.num_discarded

    before, after, discarded = asyncio.run(main())
    assert before == after and discarded == 0


# how far ahead


STALENESS = st.integers(0, 3)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STALENESS, SEEDS, st.booleans())
def test_no_token_is_older_than_the_bound_and_no_collector_runs_further_ahead(
    ahead, seed, discards
):
    """Latencies of sampling, tools and learning are drawn; the bound holds whatever they are."""
    steps, tasks = 6, 2
    draw = random.Random(seed)
    lock = threading.Lock()
    learning = 1  # the step that is taken or learned
    furthest: list[int] = []

    def latency(most: float) -> float:
        with lock:
            return draw.random() ** 3 * most

    def on_reset(number):
        furthest.append(number // tasks + 1 - learning)

    engine = Slow(pace=lambda: latency(0.002))
    make_env = lambda: OneQuestion(lambda env: time.sleep(latency(0.01)), on_reset)  # noqa: E731
    collector = AsyncCollector(collector_config(engine, make_env, samples=2), discards=discards)
    try:
        collector.load(None, version=0)
        window = StalenessWindow(collector, lambda step: request(step, tasks), ahead, last=steps)
        ages: list[int] = []
        seen: list[str] = []
        for step in range(1, steps + 1):
            learning = step
            episodes = window.take(step)
            seen += [episode.task.id for episode in episodes]
            ages += [step - 1 - version for version in versions(episodes)]
            assert all(
                sum(len(s) for s in row.spans if s.author is Author.POLICY) == 2 * LENGTH
                for episode in episodes
                for row in episode.trajectories()
            )
            time.sleep(latency(0.02))
            collector.load(None, version=step)
    finally:
        collector.close()
    assert min(ages) >= 0 and max(ages) <= ahead
    assert max(furthest) <= ahead
    assert seen == [f"t{n}" for n in range(steps * tasks)]  # none lost, none twice


def test_a_collector_that_is_quick_stops_when_it_is_as_far_ahead_as_it_may_be(closing):
    collector = closing(AsyncCollector(collector_config()))
    made: list[int] = []
    window = StalenessWindow(
        collector, lambda step: made.append(step) or request(step), staleness=2, last=6
    )
    window.take(1)
    until(lambda: window.num_done == 2)  # the learner takes its time
    time.sleep(0.05)
    assert made == [1, 2, 3]
    window.take(2)
    assert made == [1, 2, 3, 4]
    for step in (3, 4, 5, 6):
        window.take(step)
    assert made == [1, 2, 3, 4, 5, 6] and window.num_done == 0  # none beyond the last


def test_a_learner_that_is_quick_waits_for_the_collector(closing):
    engine = Slow(pace=lambda: 0.01)
    collector = closing(AsyncCollector(collector_config(engine, samples=1)))
    window = StalenessWindow(collector, request, staleness=1, last=2)
    started = time.perf_counter()
    window.take(1)
    assert time.perf_counter() - started > 2 * LENGTH * 0.01


def test_with_nothing_ahead_a_step_begins_when_its_turn_has_come(closing):
    collector = closing(AsyncCollector(collector_config()))
    made: list[int] = []
    window = StalenessWindow(
        collector, lambda step: made.append(step) or request(step), staleness=0, last=3
    )
    for step in (1, 2, 3):
        window.take(step)
        assert made == list(range(1, step + 1)) and window.num_done == 0


def test_a_resumed_window_begins_at_the_step_that_is_taken(closing):
    collector = closing(AsyncCollector(collector_config()))
    made: list[int] = []
    window = StalenessWindow(
        collector, lambda step: made.append(step) or request(step), staleness=2, last=100
    )
    window.take(41)
    assert made == [41, 42, 43]


# what goes wrong


def bad_reward(task, row):
    if task.id == "t1":
        raise ZeroDivisionError("the reward of t1")
    return 1.0


def test_a_reward_that_raises_fails_its_attempts_and_no_other(closing):
    for kind in (AsyncCollector, SyncCollector):
        config = collector_config(Slow(pace=lambda: 0.001), reward=bad_reward)
        fine, broken = closing(kind(config)).submit(request()).result()
        assert {leaf.status for leaf in fine.leaves} == {Status.DONE}
        assert {leaf.status for leaf in broken.leaves} == {Status.ENV_ERROR}
        (why, *_) = [span.info["error"] for span in broken.spans if "error" in span.info]
        assert "raised ZeroDivisionError: the reward of t1 at" in why


def test_a_mistake_of_every_attempt_is_raised(closing):
    collector = closing(SyncCollector(collector_config(reward=lambda task, row: "much")))
    with pytest.raises(UserCodeError, match="the text 'much'"):
        collector.submit(request()).result()


def test_a_fault_of_the_engine_in_a_step_ahead_is_raised_when_that_step_is_taken(closing):
    class Broken(Slow):
        num_opened = 0

        def open(self, tokens, key=None):
            self.num_opened += 1
            if self.num_opened == 2:
                raise ZeroDivisionError("a bug of the engine")
            is_open.set()
            return super().open(tokens, key)

    is_open = threading.Event()

    def second_waits(seed: int | None) -> None:
        assert seed == 0 or is_open.wait(20)

    make_env = partial(OneQuestion, on_reset=second_waits)
    collector = closing(AsyncCollector(collector_config(Broken(), make_env=make_env)))
    window = StalenessWindow(collector, lambda step: request(step, tasks=1), staleness=1, last=3)
    assert len(window.take(1)) == 1
    with pytest.raises(ZeroDivisionError, match="a bug of the engine"):
        window.take(2)


def test_an_environment_that_raises_is_data_as_everywhere(closing):
    def wait(env):
        raise OSError("no such disk")

    collector = closing(
        AsyncCollector(collector_config(make_env=lambda: OneQuestion(wait), samples=1))
    )
    [episode] = collector.submit(request(tasks=1)).result()
    assert episode.leaves[0].status is Status.ENV_ERROR
    assert "no such disk" in episode.spans[1].info["error"]


def test_weights_that_the_engine_refuses_are_an_error_of_load(closing):
    class Refusing(Slow):
        def load(self, weights, version):
            raise ValueError("these weights are not the model's")

    collector = closing(AsyncCollector(collector_config(Refusing())))
    with pytest.raises(ValueError, match="not the model's"):
        collector.load({}, version=1)
    assert len(collector.submit(request()).result()) == 2


def test_a_thread_that_ended_raises_its_cause_in_every_later_call(closing):
    """What asyncio does not hold back ends the thread's event loop: later calls raise the same."""

    class Leaving(OneQuestion):
        blocking = False

        def respond(self, action):
            asyncio.get_running_loop().call_soon(leave)
            return super().respond(action)

    def leave() -> None:
        raise KeyboardInterrupt

    collector = closing(AsyncCollector(collector_config(make_env=Leaving)))
    pending = collector.submit(request())
    with pytest.raises(KeyboardInterrupt):
        pending.result()
    with pytest.raises(KeyboardInterrupt):
        collector.load(None, version=1)
    with pytest.raises(KeyboardInterrupt):
        collector.submit(request(2)).result()


def test_an_environment_that_calls_exit_fails_its_attempt_and_nothing_else(closing):
    class Leaving(OneQuestion):
        blocking = False

        def respond(self, action):
            raise SystemExit(3)

    collector = closing(AsyncCollector(collector_config(make_env=Leaving, samples=1)))
    [episode] = collector.submit(request(tasks=1)).result()
    assert episode.leaves[0].status is Status.ENV_ERROR


def test_an_engine_behind_a_blocked_event_loop_is_named_after_the_deadline(closing):
    let_go, held = threading.Event(), []

    class Holding(OneQuestion):
        blocking = False  # and yet it waits: everything on the event loop waits with it

        def respond(self, action):
            held.append(action)
            let_go.wait(20)
            return super().respond(action)

    collector = closing(AsyncCollector(collector_config(make_env=Holding, samples=1), deadline=0.2))
    pending = collector.submit(request(tasks=1))
    until(lambda: held)
    with pytest.raises(
        TimeoutError, match=r"0\.2 s for the engine to take version 1.*blocking = T"
    ):
        collector.load(None, version=1)
    let_go.set()
    assert len(pending.result()) == 1


@pytest.mark.parametrize("discards", [False, True])
def test_closing_gives_up_what_is_under_way_at_once(discards):
    forever, waits = threading.Event(), []

    def wait(env):
        waits.append(env)
        forever.wait(30)

    engine = Slow(pace=lambda: 0.001)
    collector = AsyncCollector(
        collector_config(engine, lambda: OneQuestion(wait)), discards=discards
    )
    pending = [collector.submit(request(step, tasks=8)) for step in (1, 2, 3)]
    until(lambda: len(waits) == 48)  # tools of 3 steps of 8 tasks with 2 attempts each
    collector.load(None, version=1)
    started = time.perf_counter()
    collector.close()
    assert time.perf_counter() - started < 5
    assert engine.is_closed and not collector._thread.is_alive()
    for one in pending:
        with pytest.raises(RuntimeError, match="closed"):
            one.result()
    with pytest.raises(RuntimeError, match="closed"):
        collector.submit(request()).result()
    collector.close()  # twice is once
    forever.set()
