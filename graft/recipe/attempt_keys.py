"""Keys about attempts: the tasks, who attempts them, with which actions and draws, and held-out ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from graft.recipe.json_schema import check_keywords
from graft.recipe.section import Section


class EnvItem(Section):
    """One of several environments; what it leaves out comes from the section `task`."""

    env: str = Field(min_length=1)
    """An environment's id, or "your.module:Class"."""
    name: str = ""
    """Of its metrics and tasks; empty: the id."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the tasks, relative to the weights of the others."""
    args: dict[str, Any] | None = None
    eval_args: dict[str, Any] | None = None
    wrappers: list[str | dict[str, Any]] | None = None
    reward: Any = None
    prefill: str | None = None

    @property
    def label(self) -> str:
        return self.name or self.env

    @property
    def held_out_args(self) -> dict[str, Any]:
        return {**(self.args or {}), **(self.eval_args or {})}


def _env_items(value: Any) -> Any:
    """A list of environments, each item checked, so that a message names the item and its key."""
    if not isinstance(value, list | tuple):
        return value
    items: list[EnvItem] = []
    for number, given in enumerate(value, 1):
        if isinstance(given, EnvItem):
            items.append(given)
            continue
        if not isinstance(given, str | Mapping):
            raise ValueError(
                f"item {number} is {given!r}; give an environment's id, or a mapping such as "
                "{env: calculator, weight: 2}"
            )
        try:
            items.append(
                EnvItem.model_validate({"env": given} if isinstance(given, str) else given)
            )
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            known = ", ".join(EnvItem.model_fields)
            why = f"no such key; an item has {known}"
            why = why if problem["type"] == "extra_forbidden" else problem["msg"].lower()
            raise ValueError(f"item {number}, {key}: {why}") from error
    labels = [item.label for item in items]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"{label!r} is there {labels.count(label)} times; metrics and tasks go by the name, so "
                "give each its own: {env: ..., name: ...}"
            )
    return items


EnvList = Annotated[str | list[EnvItem], BeforeValidator(_env_items)]


class TaskSection(Section):
    env: EnvList = ""
    """An environment's id, or "your.module:Class"; or a list of several: ids, or mappings {env, name,
    weight, args, eval_args, wrappers, reward, prefill}. What an item leaves out comes from this section."""
    args: dict[str, Any] = {}
    """Its keyword arguments."""
    eval_args: dict[str, Any] = {}
    """Arguments that differ for held-out tasks, such as {split: test}."""
    wrappers: list[str | dict[str, Any]] = []
    """Wrappers, innermost first: names, {name: {key: value}}, or "your.module:Class"."""
    reward: Any = ""
    """A reward: a name, {name: {...}}, "your.module:fn", or a list of these with weights, such as
    [f1, {"your.module:fn": {}, weight: 0.2}]; empty: the environment's own."""
    prefill: str = ""
    """Text that every answer begins with, as if the policy had written it; never trained. Left out where the
    prompt ends with an assistant's message that ends with it."""
    agent: str | list[str] = ""
    """An agent that exists already and attempts the tasks: a command such as "python agent.py {base_url}
    {task.prompt}", "your.module:function", or external: agents elsewhere claim attempts over HTTP; empty: the
    policy acts in the environment. See agents.md."""
    salt: str = ""
    """A text that the policy cannot know, mixed into the seeds of generated training tasks: code that the
    policy writes cannot generate them again from run.seed. Empty: run.seed alone decides them."""

    @property
    def envs(self) -> list[EnvItem]:
        """Every environment with all of its settings; none: []."""
        return self.completed(self.env)

    def completed(self, env: str | list[EnvItem]) -> list[EnvItem]:
        """Environments, with what each leaves out filled in from this section."""
        items = env if isinstance(env, list) else [EnvItem(env=env)] if env else []
        shared = {
            key: getattr(self, key)
            for key in ("args", "eval_args", "wrappers", "reward", "prefill")
        }
        return [
            item.model_copy(
                update={key: v for key, v in shared.items() if getattr(item, key) is None}
            )
            for item in items
        ]

    @property
    def label(self) -> str:
        """The environments, for messages."""
        return ", ".join(item.label for item in self.envs)


class EvalSection(Section):
    env: EnvList = []
    """Other environments for held-out tasks, as in task.env; empty: those of the run."""
    samples: int = Field(default=0, ge=0, le=100_000)
    """Attempts per held-out task; 0: what the row asks for (its extra_info["pass@k"]), else 1."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """Temperature of the sampled attempts; 0: only greedy ones, null: rollout.temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1: every token, null: as in
    training."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this number of likeliest tokens; 0: every token, null: as in training."""
    min_p: float | None = Field(default=None, ge=0, lt=1)
    """Sample from tokens with at least this share of the largest probability; null: as in training."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Divides the positive logits of tokens that the context has, and multiplies the negative ones; 1 and
    null: off."""
    max_tokens: int = Field(default=0, ge=0)
    """Sampled tokens per turn; 0: rollout.max_tokens."""
    max_turns: int = Field(default=0, ge=0)
    """Turns per attempt; 0: rollout.max_turns."""
    max_context: int = Field(default=0, ge=0)
    """Tokens of a whole attempt, including the prompt; 0: rollout.max_context."""

    @property
    def draws(self) -> dict[str, Any]:
        """The settings of `Sampling` that differ from training."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class ActionsSection(Section):
    file: str = ""
    """Actions beyond the vocabulary, or calls with an enforced syntax: a bundled file such as calculator, or
    a path; empty: plain text."""
    tools: list[str] = []
    """The tools of the file to use; empty: all."""
    init_from_base: bool = True
    """New head rows start as copies of the rows of their descriptions; false: random."""
    start: str = ""
    """Tool that every attempt begins with: its entry is written after the prompt and not trained, in
    demonstrations too; empty: the policy decides."""
    bias: bool = False
    """Each action also has a bias in the head, 0 at the start."""
    freeze_base: bool = False
    """Train the head rows of the actions only, in both phases; every other weight stays as it is."""


class RolloutSection(Section):
    tasks: int = Field(default=16, ge=1, le=1_000_000)
    """Tasks per step."""
    samples: int = Field(default=8, ge=1, le=100_000)
    """Attempts per task."""
    branch: Any = ""
    """Where attempts fork: a name, {name: {...}} or "your.module:fn"; empty: the preset's."""
    temperature: float = Field(default=1.0, le=100)
    """Temperature of sampling, and of the trained log-probs."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; the trained log-probs are those
    of this truncated distribution. 1: every token."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this number of likeliest tokens, as top_p; 0: every token."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens of at least this share of the likeliest one's probability; 0: every token."""
    max_tokens: int = Field(default=256, ge=1)
    """Sampled tokens per turn."""
    cut_turns: Literal["end", "step"] = "end"
    """After a turn that max_tokens cut off: end the attempt as truncated; or step the environment with GEM's
    text for an invalid action, which the environment may punish. The turn's tokens are trained either way."""
    answer_schema: dict[str, Any] = {}
    """The JSON schema of every turn of the policy, which the engine enforces and the learner knows; empty:
    any text. An environment gives that of its next turn as info["answer_schema"]."""
    max_turns: int = Field(default=8, ge=1)
    """Turns per attempt."""
    max_context: int = Field(default=4096, ge=2)
    """Tokens of a whole attempt, including the prompt."""
    dynamic_rounds: int = Field(default=0, ge=0)
    """Draws per step to replace groups of equal rewards; 1: no redraw, 0: the preset's number."""
    concurrency: int = Field(default=256, ge=1)
    """Tasks that are attempted concurrently."""
    drafts: Literal["auto", "off"] = "auto"
    """auto: tokens that were written before after the same ones, in the attempt, in others at its task or in
    earlier ones, are verified several in a step where that is faster (model.exact holds). The same tokens
    are drawn with the same log-probs. off: one token in a step."""
    deadline: float = Field(default=600.0, gt=0)
    """Seconds that a single wait may take: for a completion, a tool, an environment."""
    staleness: int = Field(default=0, ge=0)
    """Steps that sampling may run ahead of learning: the maximum age of a trained token, in versions of the
    weights. 0: sampling and learning alternate."""
    frozen: dict[str, str] = {}
    """Seats of a game that the policy does not play, and the model that does: {O: PATH}, or {O: reference}
    for the weights that RL starts from."""
    unfinished: Literal["continue", "discard"] = "continue"
    """Running attempts when new weights arrive: continue with the new weights, or discard and start again."""

    @field_validator("answer_schema", mode="before")
    @classmethod
    def _schema(cls, schema: Any) -> Any:
        if isinstance(schema, str):
            raise ValueError("a text; write the schema itself into the recipe, as a mapping")
        check_keywords(schema)
        return schema

    @field_validator("temperature")
    @classmethod
    def _draws(cls, value: float) -> float:
        if value <= 0:
            raise ValueError(
                "must be more than 0: training needs attempts that differ, and greedy ones at a task are "
                "all the same. 1 is usual; held-out tasks are attempted greedily too"
            )
        return value
