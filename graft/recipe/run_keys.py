"""Keys about the run itself: its folder, model and engine, and the processes that share the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from graft.recipe.section import Section
from graft.spelling import suggestion


class RunSection(Section):
    name: str = ""
    """Folder of the run under `run.dir`; empty: the recipe's name."""
    dir: str = "runs"
    """Folder that contains the runs."""
    seed: int = Field(default=0, ge=0)
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
    eval_tasks: int = Field(default=200, ge=0, le=1_000_000)
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

    @field_validator("dir")
    @classmethod
    def _is_no_file(cls, value: str) -> str:
        if Path(value).is_file():
            raise ValueError("this is a file, and runs are folders inside run.dir; name a folder")
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
    float32 on a CPU, in bfloat16 on a GPU of the Hopper generation. false: each computes as is
    fastest. sampling/exact tells which."""

    @field_validator("chat_template", mode="before")
    @classmethod
    def _is_name(cls, value: Any) -> Any:
        return "no" if value is False else value  # YAML reads the template's name as a boolean


class EngineSection(Section):
    name: str = "native"
    """native; vllm, in this process or (engine.url) a server; sglang, a server. `graft eval --endpoint`
    uses any OpenAI-compatible server."""
    url: list[str] = []
    """Servers that sample, such as [http://host:8000]; empty: in this process."""
    api_key_env: str = ""
    """Environment variable with the key for these servers; empty: none, or $OPENAI_API_KEY for OpenAI's."""
    sync: Literal["auto", "memory", "file"] = "auto"
    """How the engine gets new weights: memory or file. auto: in this process through memory; servers by
    file. SGLang's servers also take them through memory."""
    exchange: str = ""
    """Folder of these files, which the servers must see under the same path; empty: in the run's folder."""
    args: dict[str, Any] = {}
    """Arguments of the backend itself, such as {gpu_memory_utilization: 0.5}; of native {kernels: true}, for
    recurrent layers on a GPU, whose kernels have not yet run on one."""
    tp: int = Field(default=1, ge=1)
    """Processes that hold one engine together, each with a part of every layer: for models of which one
    device cannot hold a copy."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens in the KV pool; 0: chosen by the free memory."""
    kv: Literal["model", "fp8"] = "model"
    """Keys and values: model, in the dtype of the weights; fp8, in eight bits, so the pool holds more tokens.
    The learner then rounds them in the same way. Only on a CPU, where model.exact holds."""
    page_size: int = Field(default=0, ge=0)
    """Tokens per KV page; 0: 64 with kernels (on a GPU), else 16."""

    @property
    def rounds_kv(self) -> bool:
        return self.kv == "fp8"

    @field_validator("name")
    @classmethod
    def _is_engine(cls, value: str) -> str:
        known = ["native", "vllm", "sglang"]
        if value in (*known, "openai") or ":" in value:  # that of OpenAI has its own refusal
            return value
        raise ValueError(
            f"there is no such engine;{suggestion(value, known)} known: {', '.join(known)}"
        )


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
