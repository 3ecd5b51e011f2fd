"""The interfaces between graft's parts. Any object with these members fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from graft.types import Completion, Episode, Message, Sampling, Task, Trajectory, Turn

Observation = str | list[Message]
"""The first observation of `reset`: a text (one user message) or a list of messages."""

Reward = Callable[[Task, Trajectory], float]


@runtime_checkable
class Env(Protocol):
    """Gymnasium's interface on text. An env owns its random generator and shares no state.

    `stop` are strings that end the policy's turn (they are part of the action). `observe_as` is how
    an observation enters the context: "inline" (appended to the policy's own turn, as tool tags do),
    as a chat message with the role "user" or "tool", or instead of the context: "prompt" is the whole
    next prompt, for wrappers that rewrite the history; "raw" the same after the chat template;
    "messages" (in a turn's info only) the messages `info["messages"]` with the tools `info["tools"]`.
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
class AgentHost(Protocol):
    """An environment with a machine, on which an agent's command attempts the task; its next step grades
    what the command did there.

    `prompt` is the task alone, without the tools that a policy has in the environment.
    """

    prompt: Observation

    def step(self, action: str) -> Turn: ...
    def run_agent(
        self, words: Sequence[str], variables: Mapping[str, str], url: str
    ) -> tuple[int, str]:
        """Run a command that calls the policy at `url`: its exit code, and the end of its output."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A callable that the policy calls by name. It answers bad arguments with text and does not raise."""

    name: str

    def __call__(self, content: str) -> str: ...


class Grammar(Protocol):
    """A small automaton over modes; `start` is the mode of a fresh context.

    A decision writes tokens: itself, or the description of an action beyond the vocabulary. After
    a decision that exits, sampling ends with `Finish.EXIT` and the environment answers.
    """

    @property
    def start(self) -> int: ...
    def step(self, mode: int, action: int) -> int: ...
    def written(self, mode: int, action: int) -> Sequence[int]: ...
    def is_exit(self, mode: int, action: int) -> bool: ...


class Context(Protocol):
    """A sequence of tokens that an engine can continue. Close it when done.

    `mode` is the grammar's, None before the first sample. A fork `at` n has the first n tokens; the
    caller then sets the mode that held there.
    """

    tokens: list[int]
    mode: int | None

    def append(self, tokens: Sequence[int]) -> None: ...
    def fork(self, key: int | None = None, at: int | None = None) -> Context: ...
    def close(self) -> None: ...
    async def sample(self, sampling: Sampling, grammar: Grammar | None = None) -> Completion: ...


class Engine(Protocol):
    """Samples from one model. `version` is the version of its weights.

    `load` takes weights by Hugging Face name, read once and in order (None: changed in place).
    `pause` ends every running sample with `Finish.PAUSE` and the tokens so far.

    `score` returns, for each text, log-probs [i][j][k]: of action k of continuations[j] directly
    after text[: at[i]], in the distribution of `mode` at `temperature`; `at` has a list of positions
    for each text. Only the last action of a continuation may be beyond the vocabulary, because it is
    not an input of the model.
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
    """A branch with state from step to step. `state` is plain JSON and is saved in checkpoints."""

    @property
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    def begin(self, step: int) -> None: ...
    def settle(self, episodes: Sequence[Episode]) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back. Chats are rendered by `graft.text.chat`."""

    vocab_size: int
    eos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    chat_template: str | None

    def encode(self, text: str) -> list[int]: ...
    def encode_after(self, text: str, last: int | None = None) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Any) -> None: ...
