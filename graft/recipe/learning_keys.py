"""Keys about learning: the algorithm, teachers, both phases of training, adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from graft.recipe.section import MAX_WHOLE, Section

Share = Annotated[float, Field(ge=0, lt=1)]


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
    kl_control: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """{target: KL, horizon: 10000}: kl_coef follows the KL from step to step (PPO's controller)."""
    entropy_coef: float | None = None
    """Bonus on the policy's entropy; null: the preset's."""
    entropy_control: dict[str, Annotated[float, Field(ge=0)]] | None = None
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
    overlong: list[Annotated[int, Field(ge=1, le=MAX_WHOLE)]] = []
    """[length, buffer]: soft penalty on the last `buffer` of `length` sampled tokens (DAPO)."""
    critic_lr: float = Field(default=0.0, ge=0, le=1)
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
    temperature: float | None = Field(default=None, gt=0, le=100)
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
    lr: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate."""
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    min_lr: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the schedule, as a share of lr."""
    weight_decay: float = Field(default=0.0, ge=0, le=100)
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
    freeze_router: bool = False
    """Leave the routers of a model with experts as they are: tokens keep their experts as far as the weights
    before them do. Adapters (lora.rank) never change routers."""
    router_balance: float = Field(default=0.0, ge=0)
    """Weight of the auxiliary loss that evens out the use of experts (Switch, as in transformers): 0.001 is
    usual, 0: none. A step of several micro-batches or processes then has one more pass without gradients."""
    router_z: float = Field(default=0.0, ge=0)
    """Weight of the z-loss of routers, the mean of logsumexp(logits)^2: 0.001 is usual, 0: none."""


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
    batch: int = Field(default=64, ge=1, le=1_000_000)
    """Examples per step."""
    lr: float = Field(default=1e-4, gt=0, le=1)
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

    def check(self, env: object) -> None:
        """Refuse values that exclude each other, or that need data which is missing; `env` is task.env."""
        if self.steps and self.epochs:
            raise ValueError(
                f"sft.steps={self.steps} and sft.epochs={self.epochs} exclude each other: set one to 0"
            )
        if self.is_on and not (env or self.data):
            raise ValueError("nothing to imitate: give sft.data, or task.env for demonstrations")
        if self.epochs and not self.data:
            raise ValueError(
                "sft.epochs counts passes over sft.data, which is empty; an environment's "
                "demonstrations never end: give sft.steps"
            )
        if self.eval_data and self.eval_share:
            raise ValueError("sft.eval_data and sft.eval_share exclude each other: choose one")
        if self.eval_share and not self.data:
            raise ValueError("sft.eval_share is a share of sft.data, which is empty")
        for name, value in {"stop_at": self.stop_at, "eval_every": self.eval_every}.items():
            if self.is_on and value and not (env or self.has_held_out):
                raise ValueError(
                    f"sft.{name}={value:g} needs held-out data: set sft.eval_share, sft.eval_data or "
                    "task.env"
                )


DecoderMatrix = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w3", "w2",
    "input_linear", "output_linear",
]  # fmt: skip
RecurrentMatrix = Literal[
    "in_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_ba",
    "out_proj",
]  # fmt: skip


class LoraSection(Section):
    rank: int = Field(default=0, ge=0, le=65_536)
    """Train adapters of this rank instead of the weights, in both phases; 0: no adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """The output of adapters is scaled by alpha / rank, so that one learning rate suits every rank."""
    targets: list[Literal["all-linear", DecoderMatrix, RecurrentMatrix, "lm_head"]] = Field(
        default=["all-linear"], min_length=1
    )
    """Matrices with an adapter, in every layer that has them: all-linear, or names such as q_proj, and
    in_proj_qkv or in_proj of recurrent layers. Also lm_head, if it is not tied to the embedding."""
