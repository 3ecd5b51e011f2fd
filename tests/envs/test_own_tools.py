"""Tools that belong to an environment: every fork acts on its own state, whatever form they have."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial, wraps
from typing import Any

import pytest

import graft
from graft.envs.base import BaseEnv, Wrapper
from graft.envs.own_tools import own_tools
from graft.envs.tool_env import ToolEnv
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.types import Status, Task, Turn
from graft.user_code import UserCodeError
from tests.rollout.test_rollout_tool_faults import BYTES, Scripted


class Board:
    def __init__(self) -> None:
        self.at = 0
        self.path: list[str] = []

    def advance(self) -> str:
        """One step forward."""
        self.at += 1
        return str(self.at)


class Walk(BaseEnv):
    """Walk to 2 and answer; `walk` is the tool."""

    max_turns = 5

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.board = Board()

    def pose(self) -> str:
        self.at = self.board.at = 0
        self.answer = "2"
        return "Walk to 2."

    def respond(self, action: str) -> Turn:
        at = max(self.at, self.board.at)
        return Turn(reward=float(at == 2), terminated=True)

    def walk(self) -> str:
        """One step forward."""
        self.at += 1
        return str(self.at)


class Marked(Walk):
    @graft.tool
    def step_on(self) -> str:
        """One step forward."""
        return self.walk()


class Deep(Walk):
    """Its fork is an object of its own, without our state."""

    def fork(self) -> Deep:
        return copy.deepcopy(self)


class Replayed(Walk):
    forkable = False


def loud(function: Any) -> Any:
    @wraps(function)
    def shouted() -> str:
        return function()

    return shouted


class Holder:
    """An object with a reference to the environment."""

    name = "walk"
    description = "One step forward."

    def __init__(self, env: Walk) -> None:
        self.holds = {"env": [env]}

    def __call__(self, content: str) -> str:
        return self.holds["env"][0].walk()


class Slotted:
    __slots__ = ("env",)
    name = "walk"

    def __init__(self, env: Walk) -> None:
        self.env = env

    def call(self, arguments: Any) -> str:
        return self.env.walk()

    __call__ = call


def closure(env: Walk) -> ToolEnv:
    def walk() -> str:
        """One step forward."""
        return env.walk()

    return ToolEnv(env, [walk])


def static(env: Walk, times: int) -> str:
    """One step forward."""
    return [env.walk() for _ in range(times)][-1]


def by_partial(env: Walk) -> ToolEnv:
    return ToolEnv(env, [graft.tool(partial(static, env, 1), name="walk")])


def by_lambda(env: Walk) -> ToolEnv:
    walk = lambda: env.walk()  # noqa: E731
    walk.__doc__ = "One step forward."
    return ToolEnv(env, [graft.tool(walk, name="walk")])


def by_wrapper(env: Walk) -> ToolEnv:
    return ToolEnv(Wrapper(Wrapper(env)), [env.walk])


def by_subclass(env: Walk) -> ToolEnv:
    class Tooled(ToolEnv):
        def __init__(self) -> None:
            super().__init__(env, [self.walk])

        def walk(self) -> str:
            """One step forward."""
            return self.env.walk()

    return Tooled()


def by_counter(env: Walk) -> ToolEnv:
    """State in a cell, not in the environment; two tools share it."""
    at = 0
    path: list[int] = []

    def walk() -> str:
        """One step forward."""
        nonlocal at
        at += 1
        path.append(at)
        env.at = len(path)
        return str(at)

    return ToolEnv(env, [walk])


WAYS = {
    "a method": lambda env: ToolEnv(env, [env.walk]),
    "a method of an object inside": lambda env: ToolEnv(
        env, [graft.tool(env.board.advance, name="walk")]
    ),
    "a closure": closure,
    "a partial": by_partial,
    "a lambda": by_lambda,
    "a decorated closure": lambda env: ToolEnv(env, [loud(env.walk)]),
    "an object that refers to it": lambda env: ToolEnv(env, [Holder(env)]),
    "an object with slots": lambda env: ToolEnv(env, [Slotted(env)]),
    "wrappers between": by_wrapper,
    "a subclass of ToolEnv": by_subclass,
    "nonlocal": by_counter,
    "a tool around a tool": lambda env: ToolEnv(ToolEnv(env, [env.walk]), []),
}


@pytest.mark.parametrize("kind", [Walk, Deep])
@pytest.mark.parametrize("way", WAYS)
def test_every_fork_has_tools_of_its_own(way: str, kind: type[Walk]):
    env = WAYS[way](kind())
    env.reset(0)
    first, second = env.fork(), env.fork()
    call = "<walk></walk>"
    walked = [first.step(call).observation for _ in range(2)]
    assert walked == ["<result>1</result>", "<result>2</result>"]
    assert second.step(call).observation == "<result>1</result>"
    third = second.fork()  # in the middle of an episode
    assert third.step(call).observation == "<result>2</result>"
    assert second.step("done").reward == 0.0
    assert [one.step("done").reward for one in (first, third)] == [1.0, 1.0]
    assert env.step(call).observation == "<result>1</result>"  # and the original stood still


@pytest.mark.parametrize(
    ("way", "kind"),
    [*((way, Replayed) for way in WAYS), ("a method", Walk), ("a closure", Deep)],
)
def test_plain_grpo_gives_each_attempt_its_own_world(way: str, kind: type[Walk]):
    from graft.rollout.setup import RolloutSetup
    from graft.text.chat import Chat
    from graft.types import Sampling

    call, scripts = "<walk></walk>", [0, 1, 2, 3]
    where = RolloutSetup(
        engine=Scripted([[*["<walk></walk>"] * count, "done"] for count in scripts]),
        chat=Chat(BYTES),
        make_env=lambda task: WAYS[way](kind()),
        sampling=Sampling(max_tokens=100),
    )
    (episode,) = collect([Task("t", "walk", seed=1)], where, independent(4))
    assert call and [leaf.status for leaf in episode.leaves] == [Status.DONE] * 4
    assert [leaf.reward for leaf in episode.leaves] == [0.0, 0.0, 1.0, 0.0]


class Listing(BaseEnv):
    """Keeps its own table of tools, as many people write it."""

    max_turns = 9

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.tools = {"walk": self.walk, "twice": partial(self.walk, 2)}

    def pose(self) -> str:
        self.at = 0
        return "?"

    def walk(self, steps: int = 1) -> str:
        self.at += steps
        return str(self.at)

    def respond(self, action: str) -> Turn:
        return Turn(self.tools[action]())


def test_methods_that_an_environment_keeps_are_its_own_in_a_fork():
    env = Listing()
    env.reset(0)
    twin = env.fork()
    assert [twin.step(name).observation for name in ("walk", "twice")] == ["1", "3"]
    assert env.step("walk").observation == "1"
    assert twin.tools["walk"].__self__ is twin


def test_marked_methods_become_tools_when_the_environment_is_made():
    env = graft.make(f"{__name__}:Marked")
    assert isinstance(env, ToolEnv) and list(env.tools) == ["step_on"]
    assert not env.blocking and env.stop == ("</step_on>",)
    prompt, _ = env.reset(0)
    assert "- step_on: One step forward. Write <step_on>...</step_on>." in prompt
    twin = env.fork()
    assert twin.step("<step_on></step_on>").observation == "<result>1</result>"
    assert (twin.unwrapped.at, env.unwrapped.at) == (1, 0)
    assert [tool.name for tool in own_tools(Marked())] == ["step_on"]


def test_tools_that_wait_run_on_a_thread():
    """On the event loop a call that waits for its timeout would stop all attempts."""

    class Timed(Marked):
        @graft.tool(timeout=1.0)
        def ask(self) -> str:
            """Ask a server."""
            return "yes"

    class Async(Marked):
        @graft.tool
        async def ask(self) -> str:
            """Ask a server."""
            return "yes"

    class Told(Marked):
        @graft.tool(timeout=1.0, blocking=False)
        def ask(self) -> str:
            """Ask a server that answers at once."""
            return "yes"

    made = {kind: own_tools(kind()) for kind in (Timed, Async, Told)}
    waits = {kind.__name__: [tool.blocking for tool in tools] for kind, tools in made.items()}
    assert waits == {"Timed": [False, True], "Async": [False, True], "Told": [False, False]}


def test_options_of_its_tools_stand_in_the_class():
    class Few(Marked):
        tool_options = {"max_uses": 1, "format": "hermes"}

        @graft.tool(name="wait", blocking=True)
        def stand(self, seconds: int = 1) -> str:
            """Do nothing."""
            return "waited"

    graft.register("few-steps", Few)
    env = graft.make("few-steps")
    assert env.max_uses == 1 and list(env.tools) == ["step_on", "wait"] and env.blocking

    class Wrong(Marked):
        tool_options = {"max_use": 1}

    graft.register("wrong-steps", Wrong)
    with pytest.raises(ValueError, match=r"tool_options of Wrong has no argument 'max_use'"):
        graft.make("wrong-steps")


def test_two_closures_share_one_copy_of_what_they_close_over():
    def make() -> ToolEnv:
        notes: list[str] = []
        later: deque[str] = deque()

        def write(text: str) -> str:
            """Note something."""
            notes.append(text)
            later.append(text)
            return "noted"

        def read() -> str:
            """What was noted."""
            return ",".join([*notes, *later])

        return ToolEnv(Walk(), [write, read])

    env = make()
    env.reset(0)
    twin = env.fork()
    twin.step("<write>a</write>")
    assert twin.step("<read></read>").observation == "<result>a,a</result>"
    assert env.step("<read></read>").observation == "<result></result>"


def test_objects_that_are_no_containers_stay_common():
    class Index:
        def find(self, what: str) -> str:
            """Find it."""
            return what

    index = Index()

    def find(what: str) -> str:
        """Find it."""
        return index.find(what)

    env = ToolEnv(Walk(), [find, graft.tool(index.find, name="other")])
    env.reset(0)
    twin = env.fork()
    assert twin.tools["find"] is env.tools["find"]
    assert twin.tools["other"] is env.tools["other"]


ROOM = Walk()


def look() -> str:
    """One step forward."""
    return ROOM.walk()


def test_a_tool_that_leads_to_the_original_is_refused_at_the_first_reset():
    with pytest.raises(
        UserCodeError,
        match=r"tool look \(.*test_own_tools.py:\d+\) reaches its environment Walk through the global "
        r"ROOM.*@graft.tool def look\(self",
    ):
        ToolEnv(ROOM, [look]).reset(0)

    env = Walk()

    class Local:
        name = "walk"

        def __call__(self, content: str) -> str:
            return env.walk()

    with pytest.raises(UserCodeError, match=r"tool walk \(.*:\d+\) reaches its environment Walk"):
        ToolEnv(env, [Local()]).reset(0)


def test_large_data_of_a_closure_must_be_called_shared():
    table = {str(number): number for number in range(20_000)}

    def find(key: str) -> str:
        """Find it."""
        return str(table[key])

    with pytest.raises(UserCodeError, match="closes over 'table', a dict of 20,000 entries"):
        ToolEnv(Walk(), [find]).reset(0)
    env = ToolEnv(Walk(), [graft.tool(find, shared=True)])
    env.reset(0)
    assert env.fork().step("<find>7</find>").observation == "<result>7</result>"


class Counting:
    name = "count"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, content: str) -> str:
        self.calls += 1
        return str(self.calls)


def test_an_object_that_changes_in_a_call_must_fork_or_be_declared_shared():
    env = ToolEnv(Walk(), [Counting()])
    env.reset(0)
    with pytest.raises(
        UserCodeError, match=r"tool count \(.*\) changed its attribute 'calls' in a call"
    ):
        env.step("<count>1</count>")

    class Meant(Counting):
        is_stateful = False

    env = ToolEnv(Walk(), [Meant()])
    env.reset(0)
    assert env.step("<count>1</count>").observation == "<result>1</result>"


def test_the_mark_goes_on_functions_only():
    with pytest.raises(TypeError, match="not a property"):
        graft.tool(property(lambda self: 1))
    with pytest.raises(ValueError, match="@tool has no argument 'nam'; did you mean 'name'"):
        graft.tool(look, nam="x")
