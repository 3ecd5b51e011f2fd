"""Sync and async, with and without a running event loop, and Ctrl-C in each."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

import graft
from tests.api.api_kit import Letters


def stats(engine: graft.Engine) -> tuple[int, bool]:
    counted = engine.stats
    return counted["running"], counted["pages_free"] == counted["pages_total"]


def test_sync_calls_work_inside_a_running_loop(engine):
    async def cell() -> list[graft.Episode]:
        episodes = graft.collect(engine, Letters, tasks=3, samples=2, max_tokens=2)
        assert graft.generate(engine, "a?", max_tokens=2)[0].tokens
        assert graft.evaluate(engine, on=Letters, tasks=2, max_tokens=2)["Letters"]
        graft.Learner(engine.policy).step(episodes)
        return episodes

    inside = asyncio.run(cell())
    assert len(inside) == 3 and engine.version == 1


def test_async_calls_share_the_engine(engine):
    async def both() -> list[list[graft.Episode]]:
        calls = [
            graft.acollect(engine, Letters, tasks=3, samples=2, max_tokens=2) for _ in range(2)
        ]
        return await asyncio.gather(*calls)

    first, second = asyncio.run(both())
    assert len({episode.task.id for episode in (*first, *second)}) == 6
    assert asyncio.run(graft.agenerate(engine, "a?", max_tokens=2))[0].tokens


def test_the_same_episodes_come_from_every_way_of_calling(policy):
    def drawn(call) -> list[list[int]]:
        with graft.Engine(policy) as engine:
            episodes = call(engine)
        return [span.tokens for episode in episodes for span in episode.spans]

    how = {"tasks": 3, "samples": 2, "max_tokens": 4}

    async def cell(engine: graft.Engine) -> list[graft.Episode]:
        return graft.collect(engine, Letters, **how)

    plain = drawn(lambda engine: graft.collect(engine, Letters, **how))
    assert plain == drawn(lambda engine: asyncio.run(cell(engine)))
    assert plain == drawn(lambda engine: asyncio.run(graft.acollect(engine, Letters, **how)))


def test_an_engine_samples_in_one_event_loop_at_a_time(engine):
    """Two loops would wait for each other: the second is refused at once."""

    async def cell() -> None:
        first = asyncio.create_task(graft.acollect(engine, Letters, tasks=2, max_tokens=8))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="sampling in another event loop"):
            graft.collect(engine, Letters, tasks=2, max_tokens=2)
        assert len(await first) == 2

    asyncio.run(cell())


class Interrupting(Letters):
    """Presses Ctrl-C in the first answer."""

    pressed: list[int] = []
    shared = ("pressed",)

    def respond(self, action: str) -> graft.Turn:
        if not self.pressed:
            self.pressed.append(1)
            signal.raise_signal(signal.SIGINT)
            time.sleep(
                0.3
            )  # until the main thread handles the signal, where this is another thread
        return super().respond(action)


@pytest.mark.parametrize("is_inside", [False, True], ids=["script", "notebook"])
def test_ctrl_c_ends_a_collection_and_leaves_everything_usable(engine, is_inside):
    assert threading.current_thread() is threading.main_thread()
    Interrupting.pressed.clear()
    learner = graft.Learner(engine.policy)
    how = {"tasks": 4, "samples": 4, "max_tokens": 4}

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            graft.collect(engine, Interrupting, **how)

    if is_inside:
        asyncio.run(cell())
    else:
        with pytest.raises(KeyboardInterrupt):
            graft.collect(engine, Interrupting, **how)
    assert stats(engine) == (0, True)
    episodes = graft.collect(engine, Interrupting, **how)
    first = [f"Interrupting:train:{number}" for number in range(4)]
    assert [episode.task.id for episode in episodes] == first  # those that were given up
    assert learner.step(episodes)["optimizer_steps"] == 1


def test_ctrl_c_in_a_step_is_raised_when_the_weights_are_whole(engine):
    def loss(logp, entropy, batch):
        signal.raise_signal(signal.SIGINT)
        return -batch.advantages * logp, {}

    learner = graft.Learner(engine.policy, loss=loss)
    episodes = graft.collect(engine, Letters, tasks=2, samples=2, max_tokens=2)
    with pytest.raises(KeyboardInterrupt):
        learner.step(episodes)
    assert learner.steps == engine.version == 1


def test_ctrl_c_in_a_run_saves_it_and_the_same_call_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Interrupting.pressed.clear()
    graft.envs.ENVS.pop("interrupting", None)
    graft.register("interrupting", Interrupting)
    recipe = {
        "run": {"eval_tasks": 0, "name": "cut"},
        "model": {
            "shape": {"width": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "ff": 16}
        },
        "task": {"env": "interrupting"},
        "rollout": {"tasks": 2, "samples": 2, "max_tokens": 2, "max_context": 16},
        "train": {"steps": 2},
    }
    recipe["model"]["alphabet"] = "abc?"
    with pytest.raises(KeyboardInterrupt):
        graft.train(recipe)
    run = graft.train(recipe)
    assert run.summary["checkpoint"].endswith("rl-000002")
