"""What the parts of graft ask of each other. Anything with these methods will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from graft.types import Completion, Episode, Message, Sampling, Task, Trajectory, Turn

Observation = str | list[Message]
"""What `reset` shows the policy: a text (one user message) or the messages themselves."""

Reward = Callable[[Task, Trajectory], float]


@runtime_checkable
class Env(Protocol):
    """Gymnasium's manners on text. An env owns its random generator and shares nothing.

    `stop` are strings that end the policy's turn (they belong to the action). `observe_as` says how
    an observation enters the context: "inline" (appended to the policy's own turn, as tool tags do),
    as a chat message with the role "user" or "tool", or in place of it: "prompt" is the whole next
    prompt, for wrappers that rewrite the history, "raw" the same already put through the chat
    template, and "messages" (of a turn alone) the same as `info["messages"]`, with `info["tools"]`.
    """

    blocking: bool
    forkable: bool
    stop: tuple[str, ...]
    observe_as: str

    def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]: ...
    def step(self, action: str) -> Turn: ...
    def fork(self) -> Env: ...
    def close(self) -> None: ...


@runtime_checkable
class Tool(Protocol):
    """A callable the policy can reach by name. Bad arguments are answered with text, not raised."""

    name: str

    def __call__(self, content: str) -> str: ...


class Grammar(Protocol):
    """A small automaton over modes; `start` is the mode of a fresh context.

    A decision writes tokens: itself, or the description of an action beyond the vocabulary. After
    one that exits, sampling ends with `Finish.EXIT`: somebody outside has to answer.
    """

    @property
    def start(self) -> int: ...
    def step(self, mode: int, action: int) -> int: ...
    def written(self, mode: int, action: int) -> Sequence[int]: ...
    def is_exit(self, mode: int, action: int) -> bool: ...


class Context(Protocol):
    """A sequence of tokens an engine keeps ready to continue. Close it when done.

    `mode` is the grammar's, None before the first sample. A fork `at` n has the first n tokens; who
    forks in the past says which mode that was.
    """

    tokens: list[int]
    mode: int | None

    def append(self, tokens: Sequence[int]) -> None: ...
    def fork(self, key: int | None = None, at: int | None = None) -> Context: ...
    def close(self) -> None: ...
    async def sample(self, sampling: Sampling, grammar: Grammar | None = None) -> Completion: ...


class Engine(Protocol):
    """Samples from one model. `version` counts the weights it was given.

    `load` takes weights by Hugging Face name, read once and in order (None: changed in place).
    `pause` ends every sample that is running with `Finish.PAUSE` and what it has said so far.

    `score` gives, for each text, log-probs [i][j][k]: of action k of continuations[j] right after
    text[: at[i]], in the distribution of `mode` at `temperature`; `at` has a list of places for each
    text. Only the last action of a continuation may lie beyond the vocabulary, for it is never fed
    to the model.
    """

    version: int
    vocab_size: int

    def score(
        self,
        texts: Sequence[Sequence[int]],
        at: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        mode: int = 0,
        temperature: float = 1.0,
    ) -> list[list[list[list[float]]]]: ...
    def open(self, tokens: Sequence[int], key: int | None = None) -> Context: ...
    def load(self, weights: Mapping[str, Any] | None, version: int) -> None: ...
    def pause(self) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """A branch that learns from step to step. `state` is plain JSON and goes into checkpoints."""

    @property
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    def begin(self, step: int) -> None: ...
    def settle(self, episodes: Sequence[Episode]) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back. Chat rendering lives in `graft.text.chat`."""

    vocab_size: int
    eos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    chat_template: str | None

    def encode(self, text: str) -> list[int]: ...
    def encode_after(self, text: str, last: int | None = None) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Any) -> None: ...
