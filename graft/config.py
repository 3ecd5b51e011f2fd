"""Recipes: typed, small, checked before anything is loaded.

A recipe is a YAML file (or the name of a bundled one), `key=value` overrides come after it:

    graft train quickstart train.lr=1e-4 rollout.samples=16

Each field's line of documentation is what `graft config --keys` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from graft.peer_keys import FIRST_KEYS, as_override, leaves_of, meant
from graft.registry import nearest


class ConfigError(ValueError):
    """A recipe that cannot work; the message names the key and the remedy."""


Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunSection(Section):
    name: str = ""
    """Folder of the run under `run.dir`; empty: the recipe's name."""
    dir: str = "runs"
    """Folder that contains the runs."""
    seed: int = 0
    """Seed of weights, tasks and draws."""
    resume: bool = True
    """Resume from the newest checkpoint of the folder; false refuses a folder that has one."""
    save_every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    save_later: bool = False
    """Write checkpoints in the background: copy the state first, then continue training."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, besides the best one."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between held-out evaluations; 0 evaluates only before and after."""
    eval_tasks: int = Field(default=200, ge=0)
    """Held-out tasks per evaluation; 0 disables evaluation."""
    log_episodes: int = Field(default=1, ge=0)
    """Write the episode trees of every n-th step; 0: of no step."""
    trackers: list[str] = ["tensorboard"]
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, "your.module:Class"."""

    @field_validator("name")
    @classmethod
    def _stays_below_dir(cls, value: str) -> str:
        if Path(value).is_absolute() or ".." in Path(value).parts:
            raise ValueError("a run is a folder below run.dir; set run.dir for another place")
        return value


class ModelSection(Section):
    path: str = ""
    """A Hugging Face folder, a checkpoint, a run, a .gguf file, or a name on the hub (OWNER/NAME)."""
    shape: dict[str, Any] = {}
    """From scratch instead: fields of graft.models.shape.ModelShape, such as {width: 256, layers: 2}."""
    alphabet: str = ""
    """Tokenizer from scratch: its characters; "bytes" for raw bytes; empty: the environment's alphabet."""
    chat_template: str = ""
    """Name (chatml), path or text of a template; empty: the tokenizer's own."""
    template_args: dict[str, Any] = {}
    """Variables that the chat template reads, such as {enable_thinking: false}."""
    history: Literal["append", "template"] = "append"
    """For templates that rewrite earlier turns (Qwen3's drops old thoughts). append: sampled tokens stay,
    only new messages are rendered. template: each turn follows the template's rendering of the whole
    conversation; where that rewrites earlier turns, a new context begins."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto: the GPU if there is one."""


class TaskSection(Section):
    env: str = ""
    """An environment's id, or "your.module:Class"."""
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
    """Text that every answer begins with, as if the policy had written it; never trained."""


class ActionsSection(Section):
    file: str = ""
    """Actions beyond the vocabulary, or calls with an enforced syntax: a bundled file such as calculator, or
    a path; empty: plain text."""
    tools: list[str] = []
    """The tools of the file to use; empty: all."""
    init_from_base: bool = True
    """New head rows start as copies of the rows of their descriptions; false: random."""


class RolloutSection(Section):
    tasks: int = Field(default=16, ge=1)
    """Tasks per step."""
    samples: int = Field(default=8, ge=1)
    """Attempts per task."""
    branch: Any = ""
    """Where attempts fork: a name, {name: {...}} or "your.module:fn"; empty: the preset's."""
    temperature: float = 1.0
    """Temperature of sampling, and of the trained log-probs."""
    max_tokens: int = Field(default=256, ge=1)
    """Sampled tokens per turn."""
    max_turns: int = Field(default=8, ge=1)
    """Turns per attempt."""
    max_context: int = Field(default=4096, ge=2)
    """Tokens of a whole attempt, including the prompt."""
    dynamic_rounds: int = Field(default=0, ge=0)
    """Draws per step to replace groups of equal rewards; 1: no redraw, 0: the preset's number."""
    concurrency: int = Field(default=256, ge=1)
    """Tasks that are attempted concurrently."""
    deadline: float = Field(default=600.0, gt=0)
    """Seconds that a single wait may take: for a completion, a tool, an environment."""
    staleness: int = Field(default=0, ge=0)
    """Steps that sampling may run ahead of learning: the maximum age of a trained token, in versions of the
    weights. 0: sampling and learning alternate."""
    unfinished: Literal["continue", "discard"] = "continue"
    """Running attempts when new weights arrive: continue with the new weights, or discard and start again."""

    @field_validator("temperature")
    @classmethod
    def _draws(cls, value: float) -> float:
        if value <= 0:
            raise ValueError(
                "must be more than 0: training needs attempts that differ, and greedy ones at a task are "
                "all the same. 1 is usual; held-out tasks are attempted greedily too"
            )
        return value


class EngineSection(Section):
    name: str = "native"
    """native; vllm, in this process or (engine.url) a server; sglang, a server. `graft eval --endpoint`
    uses any OpenAI-compatible server."""
    url: list[str] = []
    """Servers that sample, such as [http://host:8000]; empty: in this process."""
    sync: Literal["auto", "memory", "file"] = "auto"
    """How the engine gets new weights: through memory where the backend supports it, or by files."""
    exchange: str = ""
    """Folder of these files, which the servers must see under the same path; empty: in the run's folder."""
    args: dict[str, Any] = {}
    """Arguments of the backend itself, such as {gpu_memory_utilization: 0.5}."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens in the KV pool; 0: chosen by the free memory."""
    page_size: int = Field(default=0, ge=0)
    """Tokens per KV page; 0: 64 with kernels (on a GPU), else 16."""


class AlgoSection(Section):
    name: str = "grpo"
    """A preset: reinforce, rebn, grpo, dr_grpo, rloo, dapo, gspo, cispo, ppo, cpo, earl_grpo, arpo,
    arpo_hard, aepo."""
    credit: list[Any] = []
    """Instead of the preset's: names, {name: {...}} or "your.module:fn", applied in order."""
    loss: Any = None
    """Instead of the preset's: a name, {name: {...}} or "your.module:fn"."""
    reduction: Any = None
    """Instead of the preset's: token, unique_tokens, sequence, written_tokens, {constant: {length: n}}."""
    kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL to the reference model; 0: no reference, null: the preset's."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is added."""
    entropy_coef: float | None = None
    """Bonus on the policy's entropy; null: the preset's."""
    importance_cap: float | None = Field(default=None, ge=0)
    """Cap of the truncated importance weight between engine and learner; 0: off, null: the preset's."""
    mask_truncated: bool = False
    """Do not train on truncated attempts."""
    overlong: list[int] = []
    """[length, buffer]: soft penalty on the last `buffer` of `length` sampled tokens (DAPO)."""
    critic_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the critic (ppo); 0: train.lr."""


class TrainSection(Section):
    steps: int = Field(default=100, ge=0)
    """RL steps: one batch of rollouts each."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    min_lr: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the schedule, as a share of lr."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW, on matrices only."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Betas of AdamW."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Clip gradients to this global norm; 0: no clipping."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch of rollouts."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    tokens_per_micro: int = Field(default=0, ge=0)
    """Unique tokens per micro-batch; affects memory, not results. 0: 2048 on a CPU, up to 32768 on a GPU."""
    recompute: bool | None = None
    """Activation checkpointing; null: only if the longest row does not fit without it."""


class SftSection(Section):
    steps: int = Field(default=0, ge=0)
    """Steps of the supervised warm-up; 0: none, or as many as sft.epochs needs."""
    epochs: int = Field(default=0, ge=0)
    """Passes over sft.data instead of a number of steps."""
    data: str = ""
    """Rows to imitate: a file or folder of chats, or of prompts with spans; empty: the
    environment's demonstrations."""
    layout: str = "auto"
    """Layout of the columns of sft.data, if more than one fits."""
    demo_args: dict[str, Any] = {}
    """Arguments of the environment's demonstrate()."""
    batch: int = Field(default=64, ge=1)
    """Examples per step."""
    lr: float = Field(default=1e-4, gt=0)
    """Peak learning rate; linear decay to a tenth."""
    warmup: int = Field(default=50, ge=0)
    """Steps of linear warm-up."""
    skip_bad: bool | Annotated[float, Field(ge=0, le=1)] = 0.01
    """Maximum share of bad rows to leave out; more stop the run. true: any number, false: none."""
    overlong: Literal["refuse", "cut", "skip"] = "refuse"
    """Rows of more than rollout.max_context tokens: stop, learn their beginning, or leave them out."""
    mask_results: tuple[str, str] | None = None
    """Marks around a tool's result inside an assistant's text, such as [<result>, </result>]; the result is
    not learned. null: it is learned like other text."""
    eval_data: str = ""
    """A file of held-out rows, which are never trained."""
    eval_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of sft.data to hold out, instead of a file."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations of the held-out rows, and of held-out tasks if there is an environment;
    0: only at the end."""
    stop_at: float = Field(default=0.0, ge=0, le=1)
    """Stop early at this score on held-out tasks (without an environment: accuracy on held-out tokens);
    0: never."""

    @property
    def is_on(self) -> bool:
        return bool(self.steps or self.epochs)

    @property
    def has_held_out(self) -> bool:
        return bool(self.eval_data or self.eval_share)

    @field_validator("mask_results", mode="before")
    @classmethod
    def _opens_and_closes(cls, value: Any) -> Any:
        is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(value)
        if value is not None and not is_pair:
            raise ValueError("give the text that opens a result and the text that closes it")
        return value


class LoraSection(Section):
    rank: int = Field(default=0, ge=0)
    """Train adapters of this rank instead of the weights, in both phases; 0: no adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """The output of adapters is scaled by alpha / rank, so that one learning rate suits every rank."""
    targets: list[
        Literal[
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"
        ]
    ] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
    )
    """Matrices with an adapter, in every layer; also lm_head, if it is not tied to the embedding."""


class ParallelSection(Section):
    tp: int = Field(default=1, ge=1)
    """Processes of torchrun that split every layer (tensor parallel); groups of this size divide the
    batch."""
    shard: bool = True
    """The groups also split weights, gradients and optimizer state (FSDP2); false: each holds everything."""
    offload: bool = False
    """Keep the split state in host memory, and move one layer at a time to the device."""
    deadline: float = Field(default=600.0, gt=0)
    """Seconds that a process waits for the others before the run stops with the names of the waits."""


class ClusterSection(Section):
    address: str = ""
    """A Ray cluster: auto, local, or host:port; empty: this machine, without Ray."""
    learners: int = Field(default=1, ge=1)
    """Processes that learn."""
    workers: int = Field(default=1, ge=1)
    """Processes that sample, each with an engine and its environments. `graft scale RUN N` changes it."""
    sync: Literal["store", "broadcast"] = "store"
    """How workers get new weights: through Ray's object store, or by a broadcast from the first learner."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that each process requests from the cluster."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs that each process requests from the cluster."""
    restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of the learners from the last checkpoint."""


class Config(Section):
    """Everything a run depends on."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    actions: ActionsSection = ActionsSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    algo: AlgoSection = AlgoSection()
    train: TrainSection = TrainSection()
    sft: SftSection = SftSection()
    lora: LoraSection = LoraSection()
    parallel: ParallelSection = ParallelSection()
    cluster: ClusterSection = ClusterSection()

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
            raise ValueError("nothing to do: train.steps and sft.steps are both 0")
        if self.run.eval_every and not self.run.eval_tasks:
            raise ValueError("run.eval_every needs run.eval_tasks to be more than 0")
        if self.train.steps and not self.task.env:
            raise ValueError("no environment: RL needs task.env (train.steps=0 runs SFT alone)")
        _check_sft(self.sft, self.task.env)
        if self.algo.overlong and len(self.algo.overlong) != 2:
            raise ValueError(f"algo.overlong={self.algo.overlong}: give [length, buffer]")
        samples = self.train.steps or (self.task.env and self.run.eval_tasks)
        if samples and self.rollout.max_tokens >= self.rollout.max_context:
            raise ValueError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"rollout.max_context={self.rollout.max_context}"
            )
        if self.train.minibatches > self.rollout.tasks:
            raise ValueError(
                f"train.minibatches={self.train.minibatches} is more than rollout.tasks="
                f"{self.rollout.tasks}: a mini-batch holds whole groups"
            )
        return self


def _check_sft(sft: SftSection, env: str) -> None:
    if sft.steps and sft.epochs:
        raise ValueError(
            f"sft.steps={sft.steps} and sft.epochs={sft.epochs} exclude each other: set one to 0"
        )
    if sft.is_on and not (env or sft.data):
        raise ValueError("nothing to imitate: give sft.data, or task.env for demonstrations")
    if sft.epochs and not sft.data:
        raise ValueError(
            "sft.epochs counts passes over sft.data, which is empty; an environment's "
            "demonstrations never end: give sft.steps"
        )
    if sft.eval_data and sft.eval_share:
        raise ValueError("sft.eval_data and sft.eval_share exclude each other: choose one")
    if sft.eval_share and not sft.data:
        raise ValueError("sft.eval_share is a share of sft.data, which is empty")
    for name, value in {"stop_at": sft.stop_at, "eval_every": sft.eval_every}.items():
        if sft.is_on and value and not (env or sft.has_held_out):
            raise ValueError(
                f"sft.{name}={value:g} needs held-out data: set sft.eval_share, sft.eval_data or task.env"
            )


RECIPES = Path(__file__).parent / "recipes"


def find_recipe(name: str) -> Path:
    """A path, or a bundled recipe such as `quickstart` or `expa/toy-earl`."""
    given = Path(name)
    if given.is_file():
        return given
    folders = [RECIPES, Path(__file__).parent.parent / "recipes"]  # installed; a source checkout
    for folder in folders:
        if (found := folder / f"{name}.yaml").is_file():
            return found
    known = sorted(
        str(path.relative_to(folder).with_suffix(""))
        for folder in folders
        if folder.is_dir()
        for path in folder.rglob("*.yaml")
    )
    hint = nearest(name, known)
    meant = f" Did you mean {hint!r}?" if hint else ""
    raise ConfigError(
        f"no recipe {name!r}: neither a file nor bundled ({', '.join(known)}).{meant}"
    )


def load_config(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read, override, check. Every error names the key; for a typo also the nearest valid key.

    A dict of sections is a recipe too, called "run" unless it has a run.name.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not isinstance(recipe, str | Path | Mapping):
        raise ConfigError(
            f"a recipe is a file, a bundled name or a dict of sections, not {type(recipe).__name__}"
        )
    if isinstance(recipe, Mapping):
        path, name = "the dict", "run"
    else:
        path = find_recipe(str(recipe))
        name = path.stem
    try:
        base = (
            OmegaConf.create(dict(recipe)) if isinstance(recipe, Mapping) else OmegaConf.load(path)
        )
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        hint = "" if isinstance(path, Path) else "; write functions and classes as 'module:name'"
        raise ConfigError(f"{path} is not a recipe: {error}{hint}") from error
    if not OmegaConf.is_dict(base):
        raise ConfigError(f"{path} is not a recipe: it holds {type(base).__name__}, not sections")
    for place, override in enumerate(overrides):
        if not isinstance(override, str):
            raise ConfigError(f"override {override!r} is not a text; write 'train.lr=1e-4'")
        if "=" not in override or override.startswith("-"):
            hint = as_override(override, overrides[place + 1 : place + 2], keys())
            raise ConfigError(f"override {override!r} is not of the form key=value: {hint}")
    try:
        for override in overrides:  # set, not merge: model.shape={} really is empty then
            key = override.partition("=")[0]
            value = OmegaConf.select(OmegaConf.from_dotlist([override]), key)
            _check_colons(override, value)
            value = "" if override == f"{key}=" else value  # None is written as null
            OmegaConf.update(base, key, value, merge=False, force_add=True)
        values: Any = OmegaConf.to_container(base, resolve=True)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} with {list(overrides)}: {error}") from error
    config = check(values, where=str(path))
    return config if config.run.name else config.changed({"run.name": name})


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
        lines = [explain_problem(problem) for problem in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from error


MOST_EXPLAINED = 12
"""Unknown keys of one section that are explained; a whole recipe of verl has hundreds."""


def explain_problem(problem: Any) -> str:
    """What is wrong with one value, in one line; `problem` is an entry of pydantic's errors."""
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        names = list(leaves_of(key, problem["input"]))
        lines = [f"unknown key {name!r}; {meant(name, keys())}" for name in names[:MOST_EXPLAINED]]
        left = len(names) - len(lines)
        return "; ".join([*lines, f"and {left} more below {key!r}"] if left else lines)
    if problem["type"] == "model_type" and key in FIRST_KEYS:
        return f"{key}={problem['input']!r}: {key} is a section; did you mean {FIRST_KEYS[key]!r}?"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return message
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
        message += f"; YAML reads this as a number: quote it, as in {key}='\"01\"'"
    return f"{key}={problem['input']!r}: {message[0].lower()}{message[1:]}"


def keys() -> dict[str, str]:
    """Every key and its line of documentation."""
    documented: dict[str, str] = {}
    for section, info in Config.model_fields.items():
        for name, field in type(info.default).model_fields.items():
            documented[f"{section}.{name}"] = " ".join((field.description or "").split())
    return documented


def dump_config(config: Config) -> str:
    """The recipe with every default filled in, as YAML that loads back to the same."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))
