"""Recipes: typed, small, checked before anything is loaded.

A recipe is a YAML file (or the name of a bundled one), `key=value` overrides come after it:

    graft train quickstart train.lr=1e-4 rollout.samples=16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError, model_validator

from graft.recipe.admission import admit
from graft.recipe.agent_keys import AgentSection
from graft.recipe.attempt_keys import (
    ActionsSection,
    EnvItem,
    EvalSection,
    RolloutSection,
    TaskSection,
)
from graft.recipe.learning_keys import (
    AlgoSection,
    DistillSection,
    LoraSection,
    SftSection,
    TrainSection,
)
from graft.recipe.peer_keys import as_override
from graft.recipe.problems import explain_problems, keys_of
from graft.recipe.references import (
    Reference,
    check_references,
    escaped,
    masked_secret,
    references_in,
    remember_secrets,
)
from graft.recipe.run_keys import (
    ClusterSection,
    EngineSection,
    ModelSection,
    ParallelSection,
    RunSection,
)
from graft.recipe.section import Section
from graft.recipe.yaml_errors import explain_override, explain_yaml
from graft.signatures import explain_arguments
from graft.spelling import nearest
from graft.trust.bounds import read_yaml
from graft.trust.masking import mask, masked


class ConfigError(ValueError):
    """A recipe that cannot work; the message names the key and the remedy."""

    def __init__(self, text: str = "") -> None:
        super().__init__(mask(text))


class Config(Section):
    """Everything a run depends on.

    References to environment variables are resolved here, in memory; files get `written`.
    """

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    agent: AgentSection = AgentSection()
    actions: ActionsSection = ActionsSection()
    rollout: RolloutSection = RolloutSection()
    eval: EvalSection = EvalSection()
    engine: EngineSection = EngineSection()
    algo: AlgoSection = AlgoSection()
    distill: DistillSection = DistillSection()
    train: TrainSection = TrainSection()
    sft: SftSection = SftSection()
    lora: LoraSection = LoraSection()
    parallel: ParallelSection = ParallelSection()
    cluster: ClusterSection = ClusterSection()
    _references: list[Reference] = PrivateAttr(default_factory=list)

    def unresolved(self) -> dict[str, Any]:
        """All values, with references in place of the texts that they stand for."""
        values = self.model_dump(mode="json")
        for path, text, value in self._references:
            place: Any = values
            try:
                for key in path[:-1]:
                    place = place[key]
                if place[path[-1]] == value:  # else it was changed since; a number is no secret
                    place[path[-1]] = text
            except (LookupError, TypeError):
                continue
        return values

    def written(self) -> dict[str, Any]:
        """All values as they may be stored and shown: references stay, secrets in clear are masked."""
        return masked(self.unresolved())

    def packed(self) -> dict[str, Any]:
        """Pack it for another process of this run, which may lack environment variables: see `unpacked`."""
        return {
            "values": self.model_dump(mode="json"),
            "references": [tuple(one) for one in self._references],
        }

    def changed(self, keys: Mapping[str, object]) -> Config:
        """A copy with other values, which are not checked: {"train.lr": 1e-4}."""
        sections: dict[str, dict[str, object]] = {}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        copies = {
            section: getattr(self, section).model_copy(update=values)
            for section, values in sections.items()
        }
        return self.model_copy(update=copies)

    @property
    def held_out_envs(self) -> list[EnvItem]:
        """The environments of held-out tasks, with all of their settings."""
        return self.task.completed(self.eval.env) or self.task.envs

    def as_evaluated(self) -> Config:
        """The configuration with the lengths of evaluation as those of rollouts."""
        names = ("max_tokens", "max_turns", "max_context")
        own = {name: value for name in names if (value := getattr(self.eval, name))}
        return self.changed(
            {
                **{f"rollout.{name}": value for name, value in own.items()},
                **{f"eval.{name}": 0 for name in own},
            }
        )

    def of_each_env(self) -> list[Config]:
        """One recipe per environment of the run; without one the recipe itself."""
        envs = self.task.envs
        if len(envs) < 2:
            return [self]
        return [
            self.changed(
                {
                    "task.env": [item],
                    "task.args": item.args,
                    "task.eval_args": item.eval_args,
                    "task.wrappers": item.wrappers,
                    "task.reward": item.reward,
                    "task.prefill": item.prefill,
                }
            )
            for item in envs
        ]

    @model_validator(mode="after")
    def _can_work(self) -> Config:
        if self.model.path and self.model.shape:
            raise ValueError(
                "model.path and model.shape exclude each other: load a model, or start from scratch. To "
                "load one where the recipe starts from scratch, add 'model.shape={}'"
            )
        if not self.model.path and not self.model.shape:
            raise ValueError("no model: give model.path, or model.shape to start from scratch")
        if self.lora.rank and not self.model.path:
            raise ValueError(
                f"lora.rank={self.lora.rank} adapts a trained model, and model.shape starts from "
                "random weights; give model.path (a run's folder will do) and model.shape={}"
            )
        if not self.train.steps and not self.sft.is_on:
            raise ValueError(
                "nothing to do: no supervised steps (sft.steps, sft.epochs) and no RL steps (train.steps)"
            )
        if self.run.eval_every and not self.run.eval_tasks:
            raise ValueError("run.eval_every needs run.eval_tasks to be more than 0")
        if self.train.steps and not self.task.env:
            raise ValueError("no environment: RL needs task.env (train.steps=0 runs SFT alone)")
        self.sft.check(self.task.env)
        if self.algo.overlong and len(self.algo.overlong) != 2:
            raise ValueError(f"algo.overlong={self.algo.overlong}: give [length, buffer]")
        samples = self.train.steps or (self.task.env and self.run.eval_tasks)
        if samples and self.rollout.max_tokens >= self.rollout.max_context:
            raise ValueError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"rollout.max_context={self.rollout.max_context}; raise the second, or lower the first"
            )
        _check_eval(self)
        if self.train.minibatches > self.rollout.tasks:
            raise ValueError(
                f"train.minibatches={self.train.minibatches} is more than rollout.tasks="
                f"{self.rollout.tasks}: a mini-batch holds whole groups; lower the first, or raise the second"
            )
        return self


def _check_eval(config: Config) -> None:
    section, lengths = config.eval, config.as_evaluated().rollout
    is_longer = section.max_tokens or section.max_context
    if is_longer and lengths.max_tokens >= lengths.max_context:
        raise ValueError(
            f"held-out attempts may have {lengths.max_tokens} tokens a turn in a context of "
            f"{lengths.max_context}, which leaves no room for a prompt; change eval.max_tokens or "
            "eval.max_context (0: as in rollout)"
        )
    if section.temperature == 0 and section.samples > 1:
        raise ValueError(
            f"eval.temperature=0 makes eval.samples={section.samples} greedy attempts at a task, all of "
            "them the same; give a temperature, or eval.samples=1"
        )
    if section.env and not config.task.env:
        raise ValueError(
            "eval.env replaces task.env for held-out tasks, and task.env is empty; give that, or no eval.env"
        )


RECIPES = Path(__file__).parent / "recipes"


def find_recipe(name: str) -> Path:
    """A path, or a bundled recipe such as `quickstart` or `expa/toy-earl`."""
    given = Path(name)
    if given.suffix == ".py":
        raise ConfigError(
            f"{name!r} is Python, and a recipe is a YAML file that names it, as in task.env: "
            f"{given.stem}:CLASS; `graft init NAME` writes both, `graft translate` reads scripts of TRL"
        )
    if given.suffix in (".jsonl", ".csv", ".parquet", ".arrow"):
        raise ConfigError(
            f"{name!r} is a file of rows, and a recipe is a YAML file that names it, as in task: {{env: "
            f"prompts, args: {{data: {name}}}}} or sft: {{data: {name}}}; `graft data show {name}` shows how "
            "it is read"
        )
    if given.is_file():
        return given
    known = bundled_recipes()
    if name in known:
        return known[name]
    if given.is_dir():
        inside = sorted(given.glob("*.yaml"))
        known_here = f"it has {', '.join(map(str, inside[:6]))}" if inside else "it has none"
        raise ConfigError(f"{name!r} is a folder; a recipe is a .yaml file, and {known_here}")
    here = [str(path) for path in sorted(given.parent.glob("*.y*ml"))[:100]]
    hint = nearest(name, [*here, *known])
    meant = f"did you mean {hint!r}? " if hint else ""
    raise ConfigError(
        f"no recipe {name!r}: neither a file nor a bundled one; {meant}`graft recipes` lists those"
    )


def recipes_folder() -> Path:
    """Find the bundled recipes: installed, or beside the package in a checkout."""
    return RECIPES if RECIPES.is_dir() else Path(__file__).parent.parent / "recipes"


def bundled_recipes() -> dict[str, Path]:
    """The recipes that come with graft, by name."""
    folder = recipes_folder()
    names = {p.relative_to(folder).with_suffix("").as_posix(): p for p in folder.rglob("*.yaml")}
    return dict(sorted(names.items()))


@explain_arguments
def load_config(
    recipe: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    where: str = "the dict",
    *,
    is_resolved: bool = True,
    unused: Sequence[str] = (),
) -> Config:
    """Read, override, check. Every error names the key; for a typo also the nearest valid key.

    A dict of sections is a recipe too, called "run" unless it has a run.name; errors call it `where`.

    is_resolved   False: references to environment variables stay texts, for a look at a run of others
    unused        sections and keys that the caller never reads: left out of a stranger's recipe

    NotTrusted: the recipe is a stranger's and would do something (`graft.trust.settings`); not for a look.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if isinstance(recipe, Config):
        recipe = recipe.unresolved()
    if not isinstance(recipe, str | Path | Mapping):
        raise ConfigError(
            f"a recipe is a file, a bundled name or a dict of sections, not {type(recipe).__name__}"
        )
    if isinstance(overrides, str | Mapping):
        raise ConfigError(
            f"overrides are {overrides!r}; give a list of texts, one for each key: ['train.lr=1e-4']"
        )
    if isinstance(recipe, Mapping):
        path, name = where, "run"
    else:
        path = find_recipe(str(recipe))
        name = path.stem
    try:
        if isinstance(recipe, Mapping):
            base = OmegaConf.create(dict(recipe))
        else:
            base = OmegaConf.load(StringIO(read_yaml(Path(path))))
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        hint = "" if isinstance(path, Path) else "; write functions and classes as 'module:name'"
        raise ConfigError(f"{path} is not a recipe: {explain_yaml(error)}{hint}") from error
    if not OmegaConf.is_dict(base):
        raise ConfigError(
            f"{path} is not a recipe: it holds a list, not sections such as model: and task:"
        )
    for place, override in enumerate(overrides):
        if not isinstance(override, str):
            raise ConfigError(f"override {override!r} is not a text; write 'train.lr=1e-4'")
        if "=" not in override or override.startswith(("-", "=")):
            hint = as_override(override, overrides[place + 1 : place + 2], keys())
            raise ConfigError(f"override {override!r} is not of the form key=value: {hint}")
    parsed = [_parsed(one) for one in overrides]
    try:
        for override, tree in zip(
            overrides, parsed, strict=True
        ):  # set, not merge: model.shape={} really is empty then
            key = override.partition("=")[0]
            given = OmegaConf.to_container(tree)
            value = OmegaConf.select(OmegaConf.create(escaped(given)), key)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            _check_colons(override, value)
            value = "" if override == f"{key}=" else value  # None is written as null
            OmegaConf.update(base, key, value, merge=False, force_add=True)
        check_references(OmegaConf.to_container(base), str(path), is_resolved)
        plain = OmegaConf.create(escaped(OmegaConf.to_container(base)))
        unresolved: Any = OmegaConf.to_container(plain, resolve=True)
        values = OmegaConf.to_container(base, resolve=True) if is_resolved else unresolved
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} with {masked(list(overrides))}: {explain_yaml(error)}"
        ) from error
    references = list(references_in(unresolved, values))
    if is_resolved:
        remember_secrets(values, references)
        if problem := masked_secret(values):
            raise ConfigError(problem)
    config = check(values, where=str(path))
    config._references = references
    if is_resolved:
        config = admit(config, overrides, unused)
    return config if config.run.name else config.changed({"run.name": name})


def unpacked(packed: Mapping[str, Any]) -> Config:
    """The recipe of another process, from its `Config.packed`."""
    references = [Reference(tuple(path), *rest) for path, *rest in packed["references"]]
    remember_secrets(packed["values"], references)
    config = check(packed["values"])
    config._references = references
    return config


def read_arguments(given: Sequence[str]) -> dict[str, Any]:
    """["digits=[2,2]", "tool=true"] -> {"digits": [2, 2], "tool": True}: key=value with YAML values."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    parsed = [_parsed(one) for one in given]
    try:
        values: Any = OmegaConf.to_container(OmegaConf.merge({}, *parsed))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"cannot read {' '.join(given)}: {explain_yaml(error)}") from error
    return values


def _parsed(override: str) -> Any:
    """key=value as nested keys; the value is YAML."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.from_dotlist([override])
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(mask(explain_override(override, error))) from error


def _check_colons(override: str, value: Any) -> None:
    """Refuse {data:rows.jsonl}, which YAML reads as one key without a value."""
    if ": " in override or not isinstance(value, Mapping):
        return
    for name, one in value.items():
        if one is None and ":" in str(name):
            first, _, rest = str(name).partition(":")
            raise ValueError(
                f"{override}: YAML needs a blank after the colon, as in "
                f"'{override.partition('=')[0]}={{{first}: {rest}}}'"
            )


def check(values: Any, where: str = "config") -> Config:
    """A Config from plain values."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds {type(values).__name__}, not sections of keys")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain_problems(error, Config)}") from error


def keys() -> dict[str, str]:
    """Every key and its line of documentation."""
    return keys_of(Config)


def dump_config(config: Config) -> str:
    """The recipe with every default filled in, as YAML that loads back to the same.

    References to environment variables stay; a secret in clear is masked, and has to be given again.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.written()))
