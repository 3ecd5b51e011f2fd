"""The keys of a recipe, section by section: type, default and meaning.

Each field's line of documentation is what `graft config --keys` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

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
    """Name (chatml, qwen3_game, ...), path or text of a template; empty: the tokenizer's own."""
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
    exact: bool = True
    """Engine and learner compute log-probs with the same bits, where this machine's library allows it: in
    float32 on a CPU, in bfloat16 on a GPU of the Hopper generation or later. false: each computes as is
    fastest. sampling/exact tells which."""

    @field_validator("chat_template", mode="before")
    @classmethod
    def _is_name(cls, value: Any) -> Any:
        return "no" if value is False else value  # YAML reads the template's name as a boolean


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


class AgentSection(Section):
    """Of the gateway that the agents of task.agent take for their model provider."""

    seconds: float = Field(default=1800.0, gt=0)
    """Seconds that one attempt of task.agent may take; then its processes are killed."""
    concurrency: int = Field(default=0, ge=0)
    """Attempts of task.agent that run at a time; 0: 64 processes of a command, or 512 calls of a function."""
    roles: list[Literal["main", "sub-agent", "summary"]] = Field(
        default=["main", "sub-agent", "summary"], min_length=1
    )
    """Whose answers are trained: the agent's own, those of its sub-agents, those that it continues from as
    a summary."""
    client_sampling: bool = False
    """Sample with the temperature, top_p and top_k that the agent asks for; answers drawn otherwise than
    rollout says are then not trained. false: always as rollout says."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on, with a port (127.0.0.1:8399) or a free one; one that is not a
    loopback address can be reached by other machines."""


class EvalSection(Section):
    env: EnvList = []
    """Other environments for held-out tasks, as in task.env; empty: those of the run."""
    samples: int = Field(default=0, ge=0)
    """Attempts per held-out task; 0: what the row asks for (its extra_info["pass@k"]), else 1."""
    temperature: float | None = Field(default=None, ge=0)
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
    tasks: int = Field(default=16, ge=1)
    """Tasks per step."""
    samples: int = Field(default=8, ge=1)
    """Attempts per task."""
    branch: Any = ""
    """Where attempts fork: a name, {name: {...}} or "your.module:fn"; empty: the preset's."""
    temperature: float = 1.0
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
    frozen: dict[str, str] = {}
    """Seats of a game that the policy does not play, and the model that does: {O: PATH}, or {O: reference}
    for the weights that RL starts from."""
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
    api_key_env: str = ""
    """Environment variable with the key for these servers; empty: none, or $OPENAI_API_KEY for OpenAI's."""
    sync: Literal["auto", "memory", "file"] = "auto"
    """How the engine gets new weights: through memory where the backend supports it, or by files."""
    exchange: str = ""
    """Folder of these files, which the servers must see under the same path; empty: in the run's folder."""
    args: dict[str, Any] = {}
    """Arguments of the backend itself, such as {gpu_memory_utilization: 0.5}."""
    tp: int = Field(default=1, ge=1)
    """Processes that hold one engine together, each with a part of every layer: for models of which one
    device cannot hold a copy."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens in the KV pool; 0: chosen by the free memory."""
    page_size: int = Field(default=0, ge=0)
    """Tokens per KV page; 0: 64 with kernels (on a GPU), else 16."""


class AlgoSection(Section):
    name: str = "grpo"
    """A preset: reinforce, rebn, grpo, dr_grpo, rloo, dapo, gspo, cispo, sapo, gmpo, luspo, vespo, dppo,
    clip_cov, kl_cov, top_entropy, icepop, deepseek_v32, echo, ppo, ppo_turn, cpo, earl_grpo, arpo,
    arpo_hard, aepo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg, maxrl, grpo_passk,
    pass_at_k, gdpo, gigpo, treerpo, spiral, optimal_token_baseline, opd, iw_opd, mopd, gkd, sdpo."""
    credit: list[Any] = []
    """Instead of the preset's: names, {name: {...}} or "your.module:fn", applied in order."""
    loss: Any = None
    """Instead of the preset's: a name, {name: {...}} or "your.module:fn"."""
    reduction: Any = None
    """Instead of the preset's: token, unique_tokens, sequence, written_tokens, {constant: {length: n}}."""
    kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL to the reference model; 0: no reference, null: the preset's."""
    kl_kind: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] | None = None
    """Estimator of the KL; a + takes the gradient of k2 instead of its own. null: the preset's, k3."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is added."""
    kl_corrected: bool | None = None
    """Multiply the KL in the loss by the ratio to the old policy (DeepSeek-V3.2); null: the preset's."""
    kl_control: dict[str, float] | None = None
    """{target: KL, horizon: 10000}: kl_coef follows the KL from step to step (PPO's controller)."""
    entropy_coef: float | None = None
    """Bonus on the policy's entropy; null: the preset's."""
    entropy_control: dict[str, float] | None = None
    """{target: H, delta: 0.005, least: 0, most: 1}: the bonus is paid up to that entropy, and its coefficient
    changes by delta in each step."""
    old_policy: Literal["learner", "engine"] | None = None
    """What ratios are measured to: the learner before its first update, or the engine's own log-probs, which
    need no pass; null: the preset's, learner."""
    weights: list[Any] | None = None
    """Factors on the policy's loss instead of the preset's: importance, reject, off_policy_rows, top_entropy,
    {name: {...}} or "your.module:fn"; all are multiplied."""
    importance_cap: float | None = Field(default=None, ge=0)
    """Cap of the truncated importance weight between engine and learner; 0: off, null: the preset's."""
    observation_coef: float | None = Field(default=None, ge=0)
    """Weight of the cross-entropy of the tokens that the environment writes (ECHO); null: the preset's, 0."""
    reference_sync: (
        tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0, le=1)]] | None
    ) = None
    """[steps, share]: how often the reference of the KL follows the policy, and the policy's share in the new
    one, 1 replaces it; null: the preset's, never."""
    mask_truncated: bool = False
    """Do not train on truncated attempts."""
    overlong: list[int] = []
    """[length, buffer]: soft penalty on the last `buffer` of `length` sampled tokens (DAPO)."""
    critic_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the critic (ppo); 0: train.lr."""


class DistillSection(Section):
    teacher: str | dict[str, str] = ""
    """A model that scores the policy's tokens: a path, run or hub name with the policy's tokenizer; policy
    (the present weights), reference (those that RL starts from), or the address of a server, with #NAME where
    it serves several models; or several by name, {maths: PATH, code: PATH}. Empty: none."""
    by: str = "env"
    """What of a task names its teacher, where there are several: env, data_source, or a key of its meta."""
    divergence: Any = None
    """How the policy's distribution is compared with the teacher's: reverse, forward, {js: {beta: 0.5}} or
    "your.module:fn"; null: the preset's."""
    coef: float | None = Field(default=None, ge=0)
    """Weight of the divergence that is added to algo.loss; null: the preset's, 0: none."""
    temperature: float | None = Field(default=None, gt=0)
    """Temperature of both distributions; null: rollout.temperature."""
    top_k: int = Field(default=0, ge=0)
    """Compare this number of likeliest tokens; 0: all. A server gives no others, so it needs a number."""
    support: Literal["teacher", "student", "union"] = "teacher"
    """Whose likeliest tokens are compared; those of a server are the teacher's."""
    tail: Literal["bucket", "renormalise", "ignore"] = "bucket"
    """Probability of the tokens beyond top_k: one category more, none (the compared ones sum to 1), or left
    out."""
    context: str = ""
    """The teacher's last user message, where it knows more than the policy: a template such as
    "{prompt}\\n\\nA solution: {solution}", or "your.module:fn". Fields: prompt, answer, feedback, success
    (an attempt with reward 1), keys of the task's meta. Empty: the policy's prompt."""
    data: str = ""
    """Rows that are distilled beside the policy's own attempts, in a layout of sft.data."""
    on_policy: float = Field(default=1.0, gt=0, le=1)
    """Share of rollout.tasks that the policy attempts; rows of distill.data replace the others (GKD)."""
    api_key_env: str = ""
    """Environment variable with the key for the teacher's server; empty: none, or $OPENAI_API_KEY for
    OpenAI's."""

    @property
    def teachers(self) -> dict[str, str]:
        """Every teacher by its name; a single one is called "teacher"."""
        if isinstance(self.teacher, str):
            return {"teacher": self.teacher} if self.teacher else {}
        return self.teacher


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
    """Unique tokens per micro-batch; affects memory, not results. 0: 2048 on a CPU, up to 16384 on a GPU
    (32768 of a model that processes split)."""
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
    """Peak learning rate. Betas, weight decay and clipping are those of train."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after the warm-up."""
    min_lr: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate of the schedule, as a share of lr."""
    warmup: float = Field(default=50, ge=0)
    """Steps of linear warm-up, or below 1 their share of all steps: 0.1 of 250 are 25."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL (k3) to the model that SFT starts from, at vocabulary tokens; 0: no reference."""
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

    @field_validator("warmup")
    @classmethod
    def _steps_or_a_share(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("give a whole number of steps, or a share of them below 1")
        return value

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
