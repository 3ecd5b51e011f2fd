"""The base classes of environments and wrappers: seeds, turns, forks, snapshots.

A subclass writes `pose` (draw an instance, return what the policy sees) and `respond` (answer one
action). (env, seed, actions) fixes everything that happens, later episodes included: each env draws
only from its own generator.

    env.reset(seed=7)   the same task on every machine, whatever happened before
    env.reset()         the next one; its seed is drawn from the stream that seed 7 started
"""

from __future__ import annotations

import copy
import hmac
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

from graft.envs.checked import as_observation, as_turn, check_action
from graft.envs.random_state import RandomState, checked_seed
from graft.protocols import Env, Observation
from graft.signatures import explain_arguments
from graft.tools.rebind import Memo, counterparts
from graft.types import Author, Message, Task, Turn
from graft.user_code import UserCodeError, UserObject, describe_value, named

Trace = list[tuple[Author, str]]
"""The texts after the prompt, in order, with their authors. The last one ends the episode."""

ARGUMENTS = (
    "write your own __init__ for others; max_turns, stop and the like are attributes of the class"
)

_memo: ContextVar[Memo | None] = ContextVar("_memo", default=None)


@contextmanager
def forking() -> Iterator[Memo]:
    """The memo of one fork, shared by an environment and the wrappers around it: id(original) -> copy.

    Because they share it, a wrapper or tool that refers to a part of the environment refers to the
    same part of the copy.
    """
    memo = _memo.get()
    if memo is not None:
        yield memo
        return
    memo = {}
    token = _memo.set(memo)
    try:
        yield memo
    finally:
        _memo.reset(token)


def salted(seed: int, salt: str) -> int:
    """`seed` itself without a salt; else 53 bits that only those who know the salt can compute.

    >>> salted(7, ""), salted(7, "a") == salted(7, "b")
    (7, False)
    """
    if not salt:
        return seed
    return int(hmac.new(salt.encode(), str(seed).encode(), "sha256").hexdigest(), 16) >> 203


class EnvSource:
    """Keeps how `make` built it, to build another one like it."""

    made_by: Callable[..., Any] | None = None

    def fork(self) -> Self:
        raise NotImplementedError

    def spawn(self, same_state: bool = False, **changes: Any) -> Any:
        """Another one with the same settings except `changes`: fresh, or (`same_state`) a fork."""
        if same_state:
            return self.fork()
        if self.made_by is None:
            raise TypeError(
                f"this {type(self).__name__} was not built by graft.make(), so its settings are "
                "not known; build the other one yourself, or fork()"
            )
        return self.made_by(**changes)


class CopyableEnv(EnvSource):
    """The state of an environment: its own generator, copies, snapshots."""

    env_id = ""
    entry_point = ""
    blocking = False
    forkable = True
    stop: tuple[str, ...] = ()
    observe_as = "user"
    shared: tuple[str, ...] = ()
    """Attributes that forks share instead of copying: a dataset, a pool of workers."""
    saved: tuple[str, ...] = ()
    """Attributes that hold the current episode, in plain data; a subclass adds its own."""
    task_salt = ""
    """Mixed into every seed; `task.salt` of a recipe."""

    def __init__(self) -> None:
        self.rng = RandomState()
        self.seed = 0

    def begin_stream(self, seed: int | None) -> None:
        """Begin the stream of `seed`; None draws the next one from the present stream."""
        # 53 bits: a JSON reader that has only doubles reads every seed exactly
        self.seed = self.rng.getrandbits(53) if seed is None else checked_seed(seed)
        self.rng.seed(salted(self.seed, self.task_salt))

    def fork(self) -> Self:
        """An independent copy in the same state, generator included."""
        if not self.forkable:
            raise TypeError(
                f"env {self.env_id!r} cannot be copied (forkable = False); rebuild it by replaying "
                "its actions, or write fork()"
            )
        with forking() as memo:
            twin = memo[id(self)] = copy.copy(self)
            for name in self.shared:
                common = getattr(self, name, None)
                memo[id(common)] = common
            own = without((*self.shared, "made_by"), vars(self))
            try:
                vars(twin).update(copy.deepcopy(own, memo))
            except TypeError as error:
                raise _uncopied(self, own, error) from error
            return twin

    def get_state(self) -> dict[str, Any]:
        """The current episode as plain data: generator and `saved` attributes, not the settings."""
        saved = {name: getattr(self, name) for name in self.saved}
        return copy.deepcopy({**saved, "rng": self.rng.getstate()})

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot of an env with the same settings, even one read from JSON."""
        self.rng.setstate(state["rng"])
        vars(self).update(copy.deepcopy({name: state[name] for name in self.saved}))

    def state_key(self) -> str:
        """The state in which the next action is chosen, as text: the same text, the same state of this
        task. "": it is not known. `info["state"]` of a turn goes before it."""
        return ""

    def saved_beyond(self, base: tuple[str, ...]) -> str:
        """The `saved` attributes without those of a base class, as a key."""
        return repr([getattr(self, name) for name in self.saved if name not in base])

    def close(self) -> None:
        """Release what the env holds; nothing here."""

    @property
    def unwrapped(self) -> Self:
        return self


class BaseEnv(CopyableEnv):
    """Implements the Env protocol around `pose` and `respond`."""

    data_source = ""
    split = "train"
    max_turns: int | None = 1
    """Actions per episode; when they are used up the episode is truncated. None: no limit."""
    saved: tuple[str, ...] = ("seed", "turns", "is_over", "prompt", "answer", "num_random_actions")

    @partial(explain_arguments, hint=ARGUMENTS)
    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.is_over = True  # nothing to act on before the first reset
        self.prompt: Observation = ""
        self.answer: Any = None
        self.num_random_actions = 0  # in this episode

    def pose(self) -> Observation:
        """Draw an instance from `self.rng`, keep it, set `self.answer`; return what the policy sees."""
        raise NotImplementedError(f"{type(self).__name__} must write pose()")

    def respond(self, action: str) -> Turn:
        """Answer one action. It must not raise, whatever the policy wrote."""
        raise NotImplementedError(f"{type(self).__name__} must write respond()")

    def demonstrate(self, rng: random.Random) -> Trace:
        """How a teacher solves the current instance, for warm-up data."""
        raise NotImplementedError(f"{type(self).__name__} has no teacher: write demonstrate()")

    def describe(self) -> dict[str, Any]:
        """More about the instance, JSON only; becomes `Task.meta`."""
        return {}

    def sample_random_action(self) -> str:
        """An action in the right form, drawn with `action_rng()`."""
        raise NotImplementedError(f"{type(self).__name__} must write sample_random_action()")

    def action_rng(self) -> RandomState:
        """A generator for `sample_random_action`, fixed by the episode's seed and their number so far.

        It is not `self.rng`: a random action that is never played must not change what happens next.
        """
        self.num_random_actions += 1
        return RandomState((self.seed << 16) + self.num_random_actions)

    def margins(self) -> dict[str, Any]:
        """Parts of the observation that only hold now, in a new dict: {"suffix": the board}, or "prefix"."""
        return {}

    def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        self.begin_stream(seed)
        self.turns = self.num_random_actions = 0
        self.is_over = False
        prompt: Any = as_observation(self.pose(), UserObject(self, "env", "pose"))
        self.prompt = prompt
        info = self.margins()
        info["seed"], info["answer"] = self.seed, self.answer
        return prompt, info

    def step(self, action: str) -> Turn:
        if self.is_over:
            raise RuntimeError(f"env {self.env_id!r}: no episode is running; call reset() first")
        check_action(action)
        turn = as_turn(self.respond(action), UserObject(self, "env", "respond"))
        self.turns += 1
        turn = limit_turns(turn, self.turns, self.max_turns)
        self.is_over = turn.is_over
        return turn

    def task(self) -> Task:
        """The current instance as data: `reset(task.seed)` gives it again."""
        return Task(
            id=f"{self.env_id}:{self.split}:{self.seed}",
            env=self.env_id,
            prompt=as_messages(self.prompt),
            answer=self.answer,
            seed=self.seed,
            data_source=self.data_source or self.env_id,
            meta=self.describe(),
        )


def _uncopied(env: Any, attributes: Mapping[str, Any], error: TypeError) -> Exception:
    """The error that names the attribute that a fork could not copy, and what to do."""
    for name, value in attributes.items():
        try:
            copy.deepcopy(value)
        except TypeError as found:
            return UserCodeError(
                f"{named(env, 'class')} has the attribute {name!r}, {describe_value(value)}, "
                "which cannot be copied "
                f"({found}), and attempts are copies of an environment. Name it in `shared` if all of them "
                "may use it, write fork(), or set forkable = False: it is then rebuilt and its actions "
                "replayed"
            )
    return error


class Wrapper(EnvSource):
    """An env around an env. Attributes that it does not define are read from the inner env.

    A subclass keeps its own state in attributes, which a fork copies; `saved` and `shared` are as in
    BaseEnv.
    """

    shared: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def __init__(self, env: Env) -> None:
        if isinstance(env, type) or not hasattr(env, "step"):
            raise UserCodeError(
                f"{type(self).__name__} goes around an environment, not around "
                f"{describe_value(env)}; build one first: "
                "graft.make(...), or MyEnv()"
            )
        self.env: Any = env  # Any: may have more than the protocol (task, get_state, ...)
        self.blocking = env.blocking
        self.forkable = env.forkable
        self.stop = env.stop
        self.observe_as = env.observe_as

    def __getattr__(self, name: str) -> Any:
        # only called for names not found here; copy and pickle call it before `env` exists
        if name == "env" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        return self.env.reset(seed, **options)

    def step(self, action: str) -> Turn:
        return self.env.step(action)

    def fork(self) -> Self:
        with forking() as memo:
            inner = self.env.fork()
            if id(self.env) not in memo:  # it has its own fork()
                counterparts(self.env, inner, memo)
            twin = memo[id(self)] = copy.copy(self)
            own = without((*self.shared, "made_by", "env"), vars(self))
            vars(twin).update(copy.deepcopy(own, memo), env=inner)
            return twin

    def get_state(self) -> dict[str, Any]:
        saved = {name: getattr(self, name) for name in self.saved}
        return {**copy.deepcopy(saved), "env": self.env.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.env.set_state(state["env"])
        vars(self).update(copy.deepcopy({name: state[name] for name in self.saved}))

    def close(self) -> None:
        self.env.close()

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)


class FirstSeed(Wrapper):
    """An env whose first reset without a seed starts the episode of `seed`, and later ones its stream."""

    saved = ("first_seed",)

    def __init__(self, env: Env, seed: int) -> None:
        super().__init__(env)
        self.first_seed: int | None = checked_seed(seed)

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        if seed is None and not options:
            seed = self.first_seed
        if seed is not None:
            self.first_seed = None
        return self.env.reset(seed, **options)


def without(names: Sequence[str], attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in names}


def inner_envs(env: Any) -> list[Any]:
    """The environments that a wrapper goes around, outermost first; none of a plain one."""
    found: list[Any] = []
    while isinstance(env, Wrapper):
        env = env.env
        found.append(env)
    return found


def with_request(question: str, request: str) -> str:
    """The prompt of a question: a request that names {question} encloses it, any other follows it.

    >>> with_request("3 + 4?", "Be brief."), with_request("3 + 4?", "Q: {question}")
    ('3 + 4?\\n\\nBe brief.', 'Q: 3 + 4?')
    """
    if "{question}" in request:
        return request.replace("{question}", question)
    return f"{question}\n\n{request}" if request else question


def limit_turns(turn: Turn, turns: int, max_turns: int | None) -> Turn:
    """`turn`, truncated if it was the last one allowed and did not end the episode."""
    if turn.is_over or max_turns is None or turns < max_turns:
        return turn
    return turn._replace(truncated=True)


def as_messages(observation: Observation) -> tuple[Message, ...]:
    """A text is one user message: "2+3=" -> ({"role": "user", "content": "2+3="},)"""
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    return tuple(copy.deepcopy(observation))
