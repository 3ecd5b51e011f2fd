"""The data types of graft: a Task is attempted, an Episode records it as a tree of Spans.

All are plain Python with an exact JSON round trip: a rollout log can be read without torch, and a
run can be replayed from it.

    Task "2+3=" with two samples, one of which calls a tool, becomes

        0 task   "2+3="
        ├── 1 policy "6"                      leaf 0, reward 0
        └── 2 policy "[2+3]"
            └── 3 env    "5;"
                └── 4 policy "5"              leaf 1, reward 1
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

from graft.signatures import explain_arguments
from graft.structure import Structure

Message = dict[str, Any]
"""A chat message in OpenAI's form: role, content, and where they apply tool_calls, tool_call_id, name."""

NO_ACTION = -1
"""The action of a token that was not chosen: the rest of a multi-token description, an observation."""


def _new_list() -> list[Any]:
    """An empty list for a field: `list[int]` as its factory would take ten times as long."""
    return []


def _new_dict() -> dict[Any, Any]:
    return {}


class Author(StrEnum):
    TASK = "task"
    """The prompt."""
    POLICY = "policy"
    """Sampled from the model; the only tokens that are ever trained."""
    ENV = "env"
    """Written by the environment or a tool, or by the chat template between turns."""


class Status(StrEnum):
    DONE = "done"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """A limit of the rollout was reached (tokens, turns, context); a critic may bootstrap from here."""
    CRASHED = "crashed"
    """The agent's program crashed on an answer: trained with reward 0 (agent.on_crash=zero)."""
    TOOL_ERROR = "tool_error"
    """A tool failed for a reason other than the policy's call; the leaf is not trained."""
    ENV_ERROR = "env_error"
    """The environment, agent or reward raised, or returned what cannot be used; the leaf is not trained."""
    ENGINE_ERROR = "engine_error"
    """The engine could not sample (a context larger than its KV pool, a server that is down)."""
    TIMEOUT = "timeout"
    """A named wait passed its deadline."""
    REPLACED = "replaced"
    """Its counterfactual twin is trained in its place; it still counts as what the policy did."""
    BASELINE = "baseline"
    """The greedy attempt that others are compared with (ReMax): not trained, and in no group."""
    ABORTED = "aborted"
    """Discarded: the budget was met or the run is stopping."""

    @property
    def is_trainable(self) -> bool:
        return self in (Status.DONE, Status.TRUNCATED, Status.CRASHED)


class Finish(StrEnum):
    STOP = "stop"
    """A stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's window."""
    EXIT = "exit"
    """The grammar ended a call; the environment has to answer it."""
    ABORT = "abort"
    """The context was closed while it was sampling."""
    PAUSE = "pause"
    """New weights arrive: the engine returned the tokens so far; the next `sample` continues them."""


class _Turn(NamedTuple):
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Turn(_Turn):
    """The result of an environment's step: unpacks as Gymnasium's five values, or is read by name.

    >>> observation, reward, terminated, truncated, info = Turn("higher")
    >>> Turn("Correct.", reward=1.0, terminated=True).reward
    1.0
    """

    __slots__ = ()

    @explain_arguments
    def __new__(
        cls,
        observation: str = "",
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
        info: dict[str, Any] | None = None,
    ) -> Turn:
        # a new dict each time: wrappers write into info, and must not write into each other's.
        # tuple.__new__ directly, because every step of every environment comes here
        values = (observation, reward, terminated, truncated, {} if info is None else info)
        return tuple.__new__(cls, values)  # pyright: ignore[reportUnknownMemberType]

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated


class CallText(str):
    """The text of a turn that ended with a call made by actions, with its tool and arguments.

    An environment that takes its calls from actions reads `tool` and `arguments`; the text is
    what the context contains, and is not parsed.

    >>> call = CallText(" compare A and B", "compare", ("A", "B"))
    >>> call.tool, call.arguments, call == " compare A and B"
    ('compare', ('A', 'B'), True)
    """

    tool: str
    arguments: tuple[str, ...]

    def __new__(cls, text: str, tool: str, arguments: Sequence[str]) -> CallText:
        self = super().__new__(cls, text)
        self.tool, self.arguments = tool, tuple(arguments)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # copies and pickles keep both
        return str(self), self.tool, self.arguments


class MessageText(str):
    """The text of a demonstration's observation that enters as a message of its own `role`.

    Only where an environment has observations of two kinds, such as a tool's results and a customer.
    """

    role: str

    def __new__(cls, text: str, role: str) -> MessageText:
        self = super().__new__(cls, text)
        self.role = role
        return self


@explain_arguments
@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Temperature 0 is greedy; the defaults are the model's own distribution."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the context has, and multiplies the negative ones; 1: off.
    For evaluation: a learner does not know this distribution."""
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    num_begun: int = 0
    """Tokens at the context's end that this sample continues: a stop string may start in them."""
    structure: Structure | None = None
    """What the answer must look like; the tokens that it allows are a mask, in training too."""

    def __post_init__(self) -> None:
        structure: Any = self.structure
        if structure is not None and not isinstance(structure, Structure):
            raise TypeError(
                f"structure={structure!r:.80}: must be a graft.Structure, such as "
                "graft.Structure.json(schema)"
            )
        try:
            self._check()
        except TypeError:
            for name in (one.name for one in fields(self) if one.type in ("int", "float")):
                if not isinstance(value := getattr(self, name), int | float):
                    raise TypeError(f"{name}={value!r}: must be a number") from None
            raise

    def _check(self) -> None:
        bad = None
        if self.temperature < 0:
            bad = f"temperature={self.temperature}: must be 0 (greedy) or more"
        elif not 0 < self.top_p <= 1:
            bad = f"top_p={self.top_p}: must lie in (0, 1]; 1 keeps every token"
        elif not 0 <= self.min_p < 1:
            bad = f"min_p={self.min_p}: must lie in [0, 1); 0 keeps every token"
        elif self.top_k < 0:
            bad = f"top_k={self.top_k}: must be 0 (off) or more"
        elif self.repetition_penalty <= 0:
            bad = f"repetition_penalty={self.repetition_penalty}: must be more than 0; 1 is off"
        elif self.max_tokens < 1:
            bad = f"max_tokens={self.max_tokens}: must be 1 or more"
        elif self.min_tokens > self.max_tokens:
            bad = f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
        if bad:
            raise ValueError(bad)

    @property
    def is_truncating(self) -> bool:
        """True if some tokens of the model's distribution can never be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one `sample` of an engine: parallel lists, one entry per token written.

    `tokens` are the model's next inputs; `actions` are what was chosen (the same numbers in a plain
    language model, `NO_ACTION` where a token continues the description of an action).
    """

    tokens: list[int]
    actions: list[int]
    logprobs: list[float]
    entropies: list[float]
    modes: list[int]
    finish: Finish
    version: int
    masks: dict[int, str] = field(default_factory=_new_dict)
    """The rows that its modes beyond the action space stand for; see `structure`."""


@explain_arguments
@dataclass(frozen=True, slots=True)
class Task:
    """What to attempt. An env that is reset with `seed` poses exactly this task."""

    id: str
    env: str
    prompt: tuple[Message, ...] = ()
    answer: Any = None
    seed: int = 0
    data_source: str = ""
    meta: Mapping[str, Any] = field(default_factory=_new_dict)

    def __post_init__(self) -> None:
        prompt: Any = self.prompt
        if isinstance(prompt, str | Mapping) or not all(isinstance(m, Mapping) for m in prompt):
            raise TypeError(
                f"prompt={self.prompt!r}: must be a list of messages, as in "
                "[{'role': 'user', 'content': '...'}]"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in data.items() if name in known}
        values["prompt"] = tuple(values.get("prompt", ()))
        return cls(**values)


@dataclass(slots=True)
class Span:
    """A run of tokens by one author; only the tokens it adds. The lists are parallel, or empty.

    Task and env spans leave the per-token lists empty, since nothing was chosen there. A policy span
    has all of them, and `mask` marks the tokens that are decisions and may be trained.
    """

    parent: int | None
    author: Author
    tokens: list[int]
    actions: list[int] = field(default_factory=_new_list)
    logprobs: list[float] = field(default_factory=_new_list)
    entropies: list[float] = field(default_factory=_new_list)
    modes: list[int] = field(default_factory=_new_list)
    mask: list[bool] = field(default_factory=_new_list)
    reward: float = 0.0
    version: int = 0
    text: str = ""
    info: dict[str, Any] = field(default_factory=_new_dict)
    masks: dict[int, str] = field(default_factory=_new_dict)
    """The rows that its modes beyond the action space stand for; see `structure`."""

    PER_TOKEN = ("tokens", "actions", "logprobs", "entropies", "modes", "mask")

    def __post_init__(self) -> None:
        lists = self.actions, self.logprobs, self.entropies, self.modes, self.mask
        if not {0, len(self.tokens)}.issuperset(map(len, lists)):
            lengths = {name: len(getattr(self, name)) for name in self.PER_TOKEN}
            raise ValueError(
                f"a {self.author} span has per-token lists of unequal length: {lengths}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def to_json(self) -> dict[str, Any]:
        # asdict copies a list element by element, so the long ones are kept from it
        lists = {name: list(getattr(self, name)) for name in self.PER_TOKEN}
        values = asdict(replace(self, **{name: [] for name in lists}, masks={})) | lists
        del values["masks"]  # an episode writes each row once
        return values

    @classmethod
    def sampled(cls, parent: int, completion: Completion, text: str = "", **info: Any) -> Span:
        """The policy span of a completion; every chosen token is trained."""
        return cls(
            parent,
            Author.POLICY,
            completion.tokens,
            completion.actions,
            completion.logprobs,
            completion.entropies,
            completion.modes,
            mask=[action != NO_ACTION for action in completion.actions],
            version=completion.version,
            text=text,
            info={"finish": str(completion.finish), **info},
            masks=completion.masks,
        )

    def cut(self, at: int, texts: tuple[str, str] | None = None) -> tuple[Span, Span]:
        """The tokens before `at` and the rest, as two spans; reward and info stay with the rest, and both
        begin in the same state."""
        if not 0 < at < len(self):
            raise ValueError(f"cannot split a span of {len(self)} tokens before token {at}")
        head_text, tail_text = texts or ("", self.text)

        def part(which: slice, **changes: Any) -> Span:
            lists = {name: getattr(self, name)[which] for name in Span.PER_TOKEN}
            return replace(self, **lists, **changes)

        began = {"state": self.info["state"]} if "state" in self.info else {}
        head = part(slice(None, at), reward=0.0, text=head_text, info=began)
        return head, part(slice(at, None), text=tail_text)

    def extend(self, completion: Completion, text: str) -> None:
        """Add tokens sampled later in the same turn with the same weights; `text` is the whole span's."""
        more = Span.sampled(-1, completion)
        for name in self.PER_TOKEN:
            setattr(self, name, getattr(self, name) + getattr(more, name))
        self.text = text
        self.info.update(more.info)
        self.masks = self.masks | more.masks


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _numbers(values: Sequence[float]) -> str:
    """JSON of numbers that read back equal, five times as fast as json: a rollout log is mostly these."""
    from pydantic_core import PydanticSerializationError, to_json

    try:
        text = to_json(values, inf_nan_mode="constants").decode()
    except PydanticSerializationError:
        return _encode(values)  # raises the error that names them
    if "N" in text or "I" in text:  # NaN, Infinity
        return _encode(values)
    return text.replace(",", ", ")


@dataclass(slots=True)
class Leaf:
    """One finished attempt: the last span of each of its contexts, in order, and the outcome."""

    tips: tuple[int, ...]
    reward: float = 0.0
    status: Status = Status.DONE
    twin: int | None = None
    metrics: dict[str, float] = field(default_factory=_new_dict)
    info: dict[str, Any] = field(default_factory=_new_dict)
    """The environment's last info, as plain JSON of bounded size."""
    weights: dict[str, float] = field(default_factory=_new_dict)
    """Where its reward is a weighted sum: the weight of each part; the values are metrics `reward/NAME`."""
    seat: str = ""
    """The agent whose side this is, where several agents play; "" elsewhere."""
    match: int | None = None
    """The number of the attempt that the seats of one game share."""

    @property
    def is_attempt(self) -> bool:
        """Whether it is of the policy as it is trained: neither a counterfactual nor the greedy baseline."""
        return self.twin is None and self.status is not Status.BASELINE

    @property
    def has_acted(self) -> bool:
        """False for a seat whose game was over before its first turn: there is nothing to learn."""
        return not self.seat or self.metrics.get("turns", 0.0) > 0


@explain_arguments
@dataclass(slots=True)
class Episode:
    """All attempts at one task: a forest of spans (one root per context) and its leaves.

    A root is a span whose parent is None. Children always come after their parent in `spans`, so a
    walk from the root is ascending.
    """

    task: Task
    spans: list[Span] = field(default_factory=_new_list)
    leaves: list[Leaf] = field(default_factory=_new_list)

    def __repr__(self) -> str:  # all of its tokens would fill the screen of a notebook
        rewards = ", ".join(f"{leaf.reward:.3g}" for leaf in self.leaves)
        return (
            f"Episode({self.task.id!r}, {len(self.spans)} spans, leaves with rewards [{rewards}])"
        )

    def append(self, span: Span) -> int:
        """Add a span under its parent (a second child of one parent is a fork); its index."""
        if span.parent is not None and not 0 <= span.parent < len(self.spans):
            raise ValueError(f"parent {span.parent} of a new span is not among {len(self.spans)}")
        self.spans.append(span)
        return len(self.spans) - 1

    def walk(self, tip: int) -> list[int]:
        """Indices of the spans from the root to `tip`."""
        path = [tip]
        while (parent := self.spans[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def split(self, index: int, at: int, texts: tuple[str, str] | None = None) -> int:
        """Cut span `index` before its token `at`; return the index of the first part.

        The first part is inserted in front, so that children stay after parents; every later index
        moves up by one. [0 "ab" <- 1 "cdef"] split(1, 2) -> [0 "ab" <- 1 "cd" <- 2 "ef"]
        """
        head, tail = self.spans[index].cut(at, texts)
        moved = {i: i + (i >= index) for i in range(len(self.spans))}  # old index -> new index
        for other in self.spans:
            if other.parent is not None:
                other.parent = moved[other.parent]
        tail.parent = index
        self.spans[index : index + 1] = [head, tail]
        for leaf in self.leaves:
            leaf.tips = tuple(moved[tip] for tip in leaf.tips)
        return index

    def trajectories(self) -> Iterator[Trajectory]:
        """One per leaf and context, in order."""
        for number, leaf in enumerate(self.leaves):
            for context, tip in enumerate(leaf.tips):
                yield Trajectory(self, number, context, [self.spans[i] for i in self.walk(tip)])

    def to_json(self) -> dict[str, Any]:
        masks = {str(mode): row for span in self.spans for mode, row in span.masks.items()}
        return {
            "task": self.task.to_json(),
            "spans": [span.to_json() for span in self.spans],
            "leaves": [asdict(leaf) for leaf in self.leaves],
            **({"masks": masks} if masks else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Episode:
        def span(values: dict[str, Any]) -> Span:
            values = dict(values)
            values["author"] = Author(values["author"])
            if masks:
                used = {mode: masks[mode] for mode in values["modes"] if mode in masks}
                values["masks"] = used
            return Span(**values)

        def leaf(values: dict[str, Any]) -> Leaf:
            values = dict(values)
            values["tips"], values["status"] = tuple(values["tips"]), Status(values["status"])
            return Leaf(**values)

        # names are texts in JSON
        masks = {int(mode): row for mode, row in data.get("masks", {}).items()}
        spans = [span(values) for values in data["spans"]]
        leaves = [leaf(values) for values in data["leaves"]]
        return cls(Task.from_json(data["task"]), spans, leaves)

    def dumps(self) -> str:
        """One line of JSON; `Episode.loads` gives back an equal episode."""
        parts = self.to_json()
        spans = [
            ", ".join(
                f'"{name}": {_numbers(value) if name in Span.PER_TOKEN else _encode(value)}'
                for name, value in span.items()
            )
            for span in parts["spans"]
        ]
        listed = ", ".join(f"{{{span}}}" for span in spans)
        task, leaves = _encode(parts["task"]), _encode(parts["leaves"])
        more = f', "masks": {_encode(parts["masks"])}' if "masks" in parts else ""
        line = f'{{"task": {task}, "spans": [{listed}], "leaves": {leaves}{more}}}'
        # half of a surrogate pair, which no file can hold, becomes its escape in JSON
        return line.encode(errors="backslashreplace").decode()

    @classmethod
    def loads(cls, line: str) -> Episode:
        return cls.from_json(json.loads(line))


@explain_arguments
@dataclass(frozen=True, slots=True)
class Trajectory:
    """The walk from a root to one tip of a leaf: one row of a batch."""

    episode: Episode
    leaf_index: int
    context: int
    spans: list[Span]

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.task.id!r}, leaf {self.leaf_index}, reward {self.leaf.reward:.3g}, "
            f"{self.leaf.status}, {len(self.tokens)} tokens, text {self.text!r})"
        )

    @property
    def task(self) -> Task:
        return self.episode.task

    @property
    def leaf(self) -> Leaf:
        return self.episode.leaves[self.leaf_index]

    @property
    def info(self) -> dict[str, Any]:
        """The environment's last info: of its last step, or of its reset if there was no step."""
        return self.leaf.info

    @property
    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    @property
    def text(self) -> str:
        """Everything after the prompt, as the environment saw it."""
        return "".join(span.text for span in self.spans if span.author is not Author.TASK)

    @property
    def answer_text(self) -> str:
        """The text of the policy's last span."""
        texts = [span.text for span in self.spans if span.author is Author.POLICY]
        return texts[-1] if texts else ""
