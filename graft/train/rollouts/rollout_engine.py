"""The engine of a run, and the collector that attempts tasks with it.

engine            its weights
native            the learner's own tensors, where both take turns in one process; else a copy, or
                  (engine.tp) a part of one in each of several processes
vllm, sglang      their own, sent after every step
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.actions.actions import Actions
from graft.config import Config, ConfigError
from graft.engine import ENGINES
from graft.engine.engine_group import EngineGroup
from graft.engine.errors import EngineError
from graft.engine.remote.top_entropy import TOP_K, known_tokens
from graft.models.decoder import Decoder
from graft.models.device import has_kernels, why_no_kernels
from graft.models.io.save import ids_of
from graft.models.policy import save_policy
from graft.models.shape import ModelShape
from graft.protocols import Engine, Stateful
from graft.registry import resolve
from graft.rollout.async_collector import AsyncCollector
from graft.rollout.collector import Collector, SyncCollector
from graft.text.tokenizer import FastTokenizer
from graft.train.components import RunComponents
from graft.train.distributed.collector import DistributedCollector
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.memory.device_memory import device_memory_of
from graft.train.memory.plan import kv_tokens_for
from graft.train.memory.workload import longest_context

EXTERNAL = ("vllm", "sglang")
"""Engines with weights of their own."""
KERNELS = "kernels", True
"""The argument that the native engine may have: the kernels of recurrent layers, on a GPU."""
TENSOR_PARALLEL = "tensor_parallel_size"
"""vLLM's name for engine.tp."""


def is_external(config: Config) -> bool:
    return config.engine.name in EXTERNAL


def shares_weights(config: Config, processes: ProcessGroup) -> bool:
    """Whether the engine samples from the learner's own tensors."""
    is_split = ways(config, processes) > 1 or engine_tp(config) > 1
    takes_turns = not config.rollout.staleness and not config.cluster.address
    return takes_turns and not is_split and not is_external(config)


def ways(config: Config, processes: ProcessGroup) -> int:
    """Processes that hold the trained weights together."""
    return processes.world if config.parallel.shard else config.parallel.tp


def engine_tp(config: Config) -> int:
    """Processes that hold one engine together: engine.tp, or vLLM's own name for it in engine.args."""
    named = config.engine.args.get(TENSOR_PARALLEL, config.engine.tp)
    if not isinstance(named, int) or named < 1:
        raise ConfigError(f"engine.args tensor_parallel_size={named}: a number of 1 or more")
    if config.engine.tp > 1 and named != config.engine.tp:
        raise ConfigError(
            f"engine.tp={config.engine.tp} and engine.args tensor_parallel_size={named} are the same "
            "setting with two values; leave one of them out"
        )
    return 1 if config.engine.url else named


def refuse_engine_group(config: Config, processes: ProcessGroup, with_engine: bool) -> None:
    """Refuse engines that the processes of this run cannot hold together."""
    tp, world = engine_tp(config), processes.world
    if config.engine.tp > 1 and config.engine.url:
        raise ConfigError(
            f"engine.tp={config.engine.tp} splits an engine over processes of this run, and engine.url "
            "names servers; start them with their own option, such as vllm serve --tensor-parallel-size"
        )
    if tp == 1 or not (with_engine or config.cluster.address):
        return
    if config.cluster.address:
        raise ConfigError(
            f"engine.tp={tp}: a Ray worker (cluster.address={config.cluster.address}) holds an engine "
            "alone; use torchrun without a cluster, or servers (engine.url)"
        )
    if world % tp:
        raise ConfigError(
            f"engine.tp={tp} needs a multiple of {tp} processes, and there "
            f"{'is' if world == 1 else 'are'} {world}: torchrun --nproc-per-node {tp} -m graft train "
            f"RECIPE engine.tp={tp}"
        )
    if config.rollout.staleness:
        raise ConfigError(
            f"engine.tp={tp} with rollout.staleness={config.rollout.staleness}: the processes that hold "
            "an engine together also learn together, so they cannot sample meanwhile; take "
            "rollout.staleness=0, or servers (engine.url)"
        )


def make_engine(
    config: Config,
    decoder: Decoder,
    tokenizer: FastTokenizer,
    actions: Actions | None = None,
    processes: ProcessGroup = ALONE,
    group: EngineGroup | None = None,
    planned: ModelShape | None = None,
) -> Engine:
    """The engine of this process, over a decoder.

    group    the processes that hold it together
    planned  the policy's shape, where the decoder is another model: the memory is planned for both
    """
    section = config.engine
    if section.args and not has_kernels(decoder.device):
        raise ConfigError(
            f"engine.args={section.args}: {why_no_kernels(decoder.device)}, and kernels run on a GPU; "
            "leave it out"
        )
    room = device_memory_of(decoder.device, ways(config, processes))
    kv_tokens = section.kv_tokens or kv_tokens_for(
        config, planned or decoder.shape, decoder.dtype, room
    )
    if group is not None:  # the same pages in each of them
        kv_tokens = -int(processes.max_over_ranks(-kv_tokens, "the size of the KV pools"))
    return resolve(section.name, ENGINES, "engine")(
        decoder,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        kv_tokens=kv_tokens,
        page_size=section.page_size or None,
        seed=config.run.seed,
        space=None if actions is None else actions.space,
        drafts=config.rollout.drafts,
        **section.args,
        **({} if group is None else {"group": group}),
    )


def round_kv(config: Config, policy: Decoder) -> None:
    """Round keys and values of the policy as `engine.kv` says; refused where its engine and the learner would
    compute different numbers with them."""
    if not config.engine.rounds_kv:
        return
    why = "model.exact is false" if not config.model.exact else why_not_rounded(policy)
    if why:
        raise ConfigError(
            f"engine.kv={config.engine.kv}: engine and learner have to compute the same with rounded keys "
            f"and values, bit for bit, and here they do not: {why}. Leave engine.kv out, or set it to model"
        )
    policy.round_kv()


def why_not_rounded(policy: Decoder) -> str:
    """Why engine and learner would not compute the same with rounded keys and values; empty: they do."""
    if policy.device.type != "cpu":
        return (
            "on a GPU the engine's kernels for them do not have the learner's bits (measured on an H200: a "
            "mean gap of 6e-3), so it is for CPUs only"
        )
    if policy.order is None:
        return (
            "there is no order of adding in common, which needs float32, an engine that is not split, and a "
            f"library that keeps one; the weights are {policy.dtype}"
        )
    return ""


def refuse_external(config: Config, branch: str) -> None:
    """Refuse what vLLM and SGLang cannot do, before anything is loaded or started."""
    section = config.engine
    if not is_external(config):
        args = {key: value for key, value in section.args.items() if (key, value) != KERNELS}
        given = {"engine.url": section.url, "engine.args": args}
        for key, value in given.items():
            if value:
                raise ConfigError(
                    f"{key}={value} is for vLLM and SGLang, and engine.name={section.name} samples in "
                    "this process; add engine.name=vllm, or leave it out"
                )
        return
    if section.rounds_kv:
        raise ConfigError(
            f"engine.kv={section.kv}: {section.name} rounds keys and values in its own way, which the "
            "learner cannot repeat; use engine.name=native, or leave engine.kv out"
        )
    if branch == "counterfactual":
        raise ConfigError(
            f"the branch 'counterfactual' (algo.name={config.algo.name}) forces actions, and "
            f"engine.name={section.name} has none; use engine.name=native, or another branch"
        )
    if config.actions.file:
        raise ConfigError(
            f"engine.name={section.name} samples from the vocabulary without a grammar, so it has no "
            f"actions (actions.file={config.actions.file}); use engine.name=native"
        )
    if config.rollout.frozen:
        raise ConfigError(
            f"engine.name={section.name} holds one model, and rollout.frozen={config.rollout.frozen} "
            "needs an engine for each frozen seat; use engine.name=native"
        )
    if section.name == "sglang" and not section.url:
        raise ConfigError(
            "engine.name=sglang needs a server: start one (python -m sglang.launch_server "
            "--model-path MODEL --port 30000) and give its address, engine.url=[http://host:30000]"
        )
    if section.url and section.args:
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in section.args.items()]
        raise ConfigError(
            f"engine.args={section.args} are arguments of an engine that is started here, and "
            f"engine.url names servers that run already; start those with {' '.join(flags)}"
        )
    if not section.url and section.sync == "file":
        raise ConfigError(
            "engine.sync=file is for servers (engine.url); vLLM in this process takes weights through "
            "memory, so leave it out"
        )


def make_external(
    config: Config,
    policy: Any,
    tokenizer: FastTokenizer,
    source: Path | None,
    processes: ProcessGroup = ALONE,
    group: EngineGroup | None = None,
) -> Engine:
    """vLLM in this process, or servers, whose health is checked."""
    section = config.engine
    exchange = Path(section.exchange or Path(config.run.dir) / config.run.name / "exchange")
    folder = _folder_for(policy, tokenizer, source, exchange, processes)
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "eos_ids": tokenizer.eos_ids,
        "seed": config.run.seed,
        "deadline": config.rollout.deadline,
    }
    if section.url:
        kind = resolve(f"{section.name}_server", ENGINES, "engine")
        engine = kind(
            section.url,
            folder,
            exchange=exchange,
            sync=section.sync,
            api_key_env=section.api_key_env,
            **common,
        )
        engine.health()
        return engine
    return resolve(section.name, ENGINES, "engine")(
        folder,
        max_context=longest_context(config),
        args=section.args,
        dtype=str(policy.dtype).removeprefix("torch."),
        group=group,
        **common,
    )


def _folder_for(
    policy: Any,
    tokenizer: FastTokenizer,
    source: Path | None,
    exchange: Path,
    processes: ProcessGroup,
) -> Path:
    """A Hugging Face folder of the model: its own, or one written for the engine."""
    if source is not None and source.is_dir():
        return source
    folder = exchange / "start"
    if processes.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
    special = ids_of(tokenizer)
    save_policy(policy, folder if processes.is_first else None, special=special, source=None)
    processes.barrier("the model that the engine starts from")
    return folder


def known_elsewhere(config: Config, vocab_size: int) -> int:
    """Likeliest tokens that entropies of engines on other machines are computed from; 0: all."""
    top_k = config.engine.args.get("max_logprobs", TOP_K)
    return known_tokens(vocab_size, top_k) if is_external(config) and top_k > 0 else 0


def make_collector(components: RunComponents, processes: ProcessGroup = ALONE) -> Collector:
    """The collector of this run, in this process or over all of them."""
    rollout = components.config.rollout
    collector: Collector = SyncCollector(components.collector_config)
    if rollout.staleness:
        discards = rollout.unfinished == "discard"
        collector = AsyncCollector(components.collector_config, discards=discards)
    if processes.world == 1:
        return collector
    return DistributedCollector(collector, processes, components.engine)


def refuse_async(config: Config, branch: Any, is_dynamic: bool) -> None:
    """Refuse staleness and clusters where a step must be over before the next one is sampled."""
    where = {
        f"rollout.staleness={config.rollout.staleness}": bool(config.rollout.staleness),
        f"cluster.address={config.cluster.address}": bool(config.cluster.address),
    }
    key = next((key for key, is_set in where.items() if is_set), None)
    if key is None:
        return
    if isinstance(branch, Stateful):
        raise ConfigError(
            f"{key}: this run's branch ({type(branch).__name__}) learns from each step where to fork "
            "in the next, in this process; take rollout.staleness=0 without a cluster, or another branch"
        )
    if is_dynamic and config.rollout.staleness:
        raise ConfigError(
            f"{key}: which tasks a step draws again (rollout.dynamic_rounds, or the preset's) is known "
            "only when it is over; take rollout.dynamic_rounds=1, or rollout.staleness=0"
        )


class NoEngine:
    """Stands for the engine where tasks are attempted on other machines."""

    def __init__(self, vocab_size: int, entropy_top_k: int = 0) -> None:
        """`entropy_top_k` is that of the engines there."""
        self.version, self.vocab_size, self.entropy_top_k = 0, vocab_size, entropy_top_k

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise EngineError("there is no engine in this process: the workers of the cluster sample")

    score = open = _refuse

    def load(self, weights: Any, version: int) -> None:
        self.version = version

    def pause(self) -> None:
        """Nothing is sampled here."""

    def close(self) -> None:
        """Nothing to release."""
