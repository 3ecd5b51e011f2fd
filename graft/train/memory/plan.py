"""The memory that a recipe needs on a device, and the sizes that a recipe leaves open.

Everything is computed from the model's shape and the recipe, before anything is allocated. With N
parameters of b bytes and T tokens of a micro-batch:

    always    weights N b, fp32 masters 4N (of a bf16 model), AdamW's moments 8N, the KV pool
    learning  gradients N b (and 4N of their fp32 sum), activations of T tokens, their logits or a chunk
    sampling  the logits of one step

Learning and sampling take turns, so the total is `always` plus the larger of the two. Sizes that the recipe
leaves open are chosen here: first those of the trainer, then the KV pool from the rest.

kernels    a bf16 model has no bf16 gradients: products add to the fp32 sums, 4N that are always allocated
processes  that split the model (`DeviceMemory.ways`) hold their part of masters, moments and gradients, and
           temporarily two whole layers, embedding and head; the native engine has a copy of its own
adapters   masters, moments and sums are those of A and B alone, and weight gradients are freed at once; a
           GPU run keeps the base weights in host memory, a CPU run beside the weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from graft.algos.preset import kl_in_reward_of
from graft.config import Config, ConfigError
from graft.engine.native.kv.pages import CPU_BYTES, CPU_TOKENS, GPU_SHARE, kv_bytes
from graft.engine.native.kv.states import state_bytes, state_limit
from graft.models.lora.training import num_trained, target_sizes
from graft.models.shape import ModelShape
from graft.train.algorithm import preset_of
from graft.train.memory.device_memory import DeviceMemory
from graft.train.memory.footprint import (
    activation_bytes,
    adapter_gradient_bytes,
    decode_bytes,
    gigabytes,
    gradient_bytes,
    most_head_bytes,
    num_parameters,
    optimizer_state_bytes,
    sums_in_place,
)
from graft.train.memory.frozen_shapes import frozen_shapes, teacher_shapes
from graft.train.memory.workload import (
    largest_micro,
    page_size,
    running,
    smallest_pool,
    wanted_pool,
    workload_of,
)
from graft.train.teachers.paths import REFERENCE

RUNTIME = {"cuda": 1 << 30, "cpu": 1 << 28}
"""The CUDA context, cuBLAS's workspace and compiled kernels; on a CPU, threads and libraries."""

CPU_MICRO = 2048
"""On a CPU a micro-batch should fit into the caches; a GPU needs large matrices."""
GPU_MICROS = (32768, 16384, 8192, 4096, 2048)
WHOLE_MICRO = 16384
"""The largest for a model that one process holds: twice as many are no faster, and take twice the memory.
Processes that split a model gather all of it for each micro-batch, so that fewer are better."""

COMFORT = 0.2
"""Share of the memory that the KV pool must get with a large micro-batch."""

When = Literal["always", "learning", "sampling"]


class MemoryItem(NamedTuple):
    """One entry, and the key of the recipe that changes it."""

    name: str
    bytes: int
    when: When
    key: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All entries for one choice of sizes."""

    items: list[MemoryItem]
    available: int
    usable: int
    kv_tokens: int
    tokens_per_micro: int
    recompute: bool

    @property
    def total(self) -> int:
        return self.during("always") + max(self.during("learning"), self.during("sampling"))

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    def during(self, when: str) -> int:
        return sum(item.bytes for item in self.items if item.when == when)


class MicroBatchSize(NamedTuple):
    """Tokens of a micro-batch, and whether activations are recomputed."""

    tokens: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class RunSizes:
    """A recipe on a device, whose memory is computed for several choices of sizes."""

    config: Config
    shape: ModelShape
    dtype: torch.dtype
    memory: DeviceMemory
    frozen: Mapping[str, ModelShape]
    """The models of `rollout.frozen`, by seat."""
    taught: Mapping[str, ModelShape]
    """The models of `distill.teacher` in this process, by name."""

    @classmethod
    def of(
        cls, config: Config, shape: ModelShape, dtype: torch.dtype, memory: DeviceMemory
    ) -> RunSizes:
        others = frozen_shapes(config, shape), teacher_shapes(config, shape)
        return cls(config, shape, dtype, memory, *others)

    @property
    def kv_token(self) -> int:
        """Bytes of a token in the KV pool of one process, which may have some of the heads only."""
        engine = self.config.engine
        return kv_bytes(self.shape, self.dtype, engine.rounds_kv) // engine.tp

    def account(self, kv_tokens: int, micro: MicroBatchSize) -> MemoryPlan:
        config, shape, dtype = self.config, self.shape, self.dtype
        memory, work = self.memory, workload_of(config)
        params = num_parameters(shape)
        preset = preset_of(config)
        tokens = largest_micro(config, micro.tokens)
        when: When = "always" if sums_in_place(dtype, memory.fused) else "learning"
        items = [
            *(self._split(params) if memory.ways > 1 else self._whole(params, when)),
            *self._engine_copy(params),
            *self._frozen_players(kv_tokens),
            *self._teachers(),
            MemoryItem("KV pool", kv_tokens * self.kv_token, "always", "engine.kv_tokens"),
            MemoryItem("recurrent states", self._state_bytes(kv_tokens), "always", "model"),
            MemoryItem("runtime", RUNTIME.get(memory.device.type, RUNTIME["cuda"]), "always", ""),
        ]
        copies = 1
        has_sft_kl = bool(config.sft.is_on and config.sft.kl_coef)
        if (has_reference(config) or has_sft_kl) and not config.lora.rank:
            # a part of a split one is fp32, like the policy's
            held = params * dtype.itemsize if memory.ways == 1 else 4 * params // memory.ways
            key = "algo.kl_coef" if has_reference(config) else "sft.kl_coef"
            if REFERENCE in config.distill.teachers.values():
                key = "distill.teacher"
            items.append(MemoryItem("reference", held, "always", key))
        if preset.needs_critic and config.train.steps:
            copies = 2  # one backward pass through both graphs
            body = params - (0 if shape.tied else shape.head_rows * shape.width)
            state = body * dtype.itemsize + optimizer_state_bytes(body, dtype)
            grads = gradient_bytes(body, dtype, memory.fused)
            if memory.ways > 1:
                state, grads = 12 * body // memory.ways, 4 * body // memory.ways
            items.append(MemoryItem("critic", state, "always", "algo.name"))
            items.append(MemoryItem("critic's gradients", grads, when, "algo.name"))
        kept = activation_bytes(shape, dtype, tokens, work, memory.fused, micro.recompute)
        head = most_head_bytes(shape, dtype, tokens, memory)
        trains_head = bool(shape.extra) or "lm_head" in config.lora.targets
        if config.lora.rank and trains_head and sums_in_place(dtype, memory.fused):
            # a head without an fp32 sum gets its gradient in fp32, then in the weights' dtype
            head += shape.head_rows * shape.width * (4 + dtype.itemsize)
        step = decode_bytes(shape, dtype, running(config), kv_tokens, memory)
        items += [
            MemoryItem("activations", copies * kept, "learning", "train.tokens_per_micro"),
            MemoryItem("logits", head, "learning", "train.tokens_per_micro"),
            MemoryItem("a decoding step", step, "sampling", "rollout.samples"),
        ]
        counted = [item for item in items if item.bytes]
        return MemoryPlan(counted, memory.available, memory.usable, kv_tokens, *micro)

    def _state_bytes(self, kv_tokens: int) -> int:
        memory = self.memory
        limit = state_limit(memory.device, memory.total or memory.available)
        return state_bytes(self.shape, kv_tokens, limit, self.dtype)

    def _split(self, params: int) -> Iterator[MemoryItem]:
        """One process's part, and the layers gathered while they are computed."""
        shape, ways = self.shape, self.memory.ways
        held = 0 if self.config.parallel.offload else 1
        ends = shape.head_rows * shape.width * (1 if shape.tied else 2)
        gathered = (2 * ((params - ends) // shape.layers) + ends) * self.dtype.itemsize
        yield MemoryItem("weights, a part", held * 4 * params // ways, "always", "parallel")
        yield MemoryItem("AdamW moments", held * 8 * params // ways, "always", "parallel")
        yield MemoryItem("gradients, a part", 4 * params // ways, "learning", "parallel")
        yield MemoryItem("gathered layers", gathered, "learning", "model")

    def _engine_copy(self, params: int) -> Iterator[MemoryItem]:
        """The native engine's own copy of the weights, where it does not share the learner's."""
        is_ours = self.config.engine.name == "native" and not self.config.cluster.address
        is_split, tp = self.memory.ways > 1, self.config.engine.tp
        if is_ours and (is_split or tp > 1 or self.config.rollout.staleness):
            key = "engine.tp" if is_split or tp > 1 else "rollout.staleness"
            yield MemoryItem("engine's weights", params * self.dtype.itemsize // tp, "always", key)

    def _frozen_players(self, kv_tokens: int) -> Iterator[MemoryItem]:
        """Whole models with a pool of as many tokens as the policy's."""
        for seat, shape in self.frozen.items():
            held = num_parameters(shape) * self.dtype.itemsize
            held += kv_tokens * kv_bytes(shape, self.dtype)
            yield MemoryItem(f"frozen {seat}", held, "always", "rollout.frozen, agent.models")

    def _teachers(self) -> Iterator[MemoryItem]:
        """Weights of frozen models that score; split over processes as the policy is."""
        memory, size = self.memory, self.dtype.itemsize
        for name, shape in self.taught.items():
            params = num_parameters(shape)
            held = params * size if memory.ways == 1 else 4 * params // memory.ways
            label = "teacher" if name == "teacher" else f"teacher {name}"
            yield MemoryItem(label, held, "always", "distill.teacher")

    def _whole(self, params: int, when: When) -> Iterator[MemoryItem]:
        """Weights, optimizer state and gradients of one process that holds all."""
        shape, dtype, lora = self.shape, self.dtype, self.config.lora
        yield MemoryItem("weights", params * dtype.itemsize, "always", "model")
        if not lora.rank:
            masters = 4 * params if dtype.itemsize < 4 else 0
            yield MemoryItem("fp32 masters", masters, "always", "model")
            yield MemoryItem("AdamW moments", 8 * params, "always", "model")
            grads = gradient_bytes(params, dtype, self.memory.fused)
            yield MemoryItem("gradients", grads, when, "model")
            return
        trained = num_trained(shape, lora.rank, lora.targets)
        yield MemoryItem("adapters", 4 * trained, "always", "lora.rank")
        yield MemoryItem("AdamW moments", 8 * trained, "always", "lora.rank")
        if self.memory.device.type == "cpu":
            base = sum(out * into for out, into in target_sizes(shape, lora.targets))
            yield MemoryItem("base", base * dtype.itemsize, "always", "lora.targets")
        grads = adapter_gradient_bytes(shape, dtype, lora.rank, lora.targets)
        yield MemoryItem("gradients", grads, "learning", "lora.rank")

    def fits(self, kv_tokens: int, micro: MicroBatchSize) -> bool:
        return self.account(kv_tokens, micro).fits

    def choose_micro(self) -> MicroBatchSize:
        train, cpu = self.config.train, self.memory.device.type == "cpu"
        most = WHOLE_MICRO if self.memory.ways == 1 else GPU_MICROS[0]
        sizes = (CPU_MICRO,) if cpu else tuple(size for size in GPU_MICROS if size <= most)
        if train.tokens_per_micro:
            sizes = (train.tokens_per_micro,)
        kv_tokens, page = self.config.engine.kv_tokens, page_size(self.config, self.memory)
        least = kv_tokens or smallest_pool(self.config, page)
        recompute = train.recompute
        if recompute is None:  # recompute only where the longest row needs it
            recompute = not self.fits(least, MicroBatchSize(sizes[-1], False))
        comfort = int(self.memory.available * COMFORT) // self.kv_token
        ample = kv_tokens or max(min(wanted_pool(self.config, page), comfort), least)
        choices = [MicroBatchSize(tokens, recompute) for tokens in sizes]
        for micro in choices:
            if self.fits(ample, micro):
                return micro
        # the pool needs all memory: the smallest, or one that holds no more than the longest row
        floor = largest_micro(self.config, sizes[-1])
        return next(m for m in choices if largest_micro(self.config, m.tokens) == floor)

    def choose_pool(self, micro: MicroBatchSize) -> int:
        if self.config.engine.kv_tokens:
            return self.config.engine.kv_tokens
        page, per_token = page_size(self.config, self.memory), self.kv_token
        if self.memory.device.type == "cpu":  # pages are allocated when first written
            most = min(CPU_TOKENS, CPU_BYTES // per_token)
        else:
            share = int(self.memory.available * GPU_SHARE) // per_token
            most = min(share, wanted_pool(self.config, page))
        others = sum(kv_bytes(shape, self.dtype) for shape in self.frozen.values())
        left = (self.memory.usable - self.account(0, micro).total) // (per_token + others)
        return max(smallest_pool(self.config, page), min(most, left))


def plan_memory(
    config: Config, shape: ModelShape, dtype: torch.dtype, device_memory: DeviceMemory
) -> MemoryPlan:
    """The memory with the sizes that a run would choose."""
    sizes = RunSizes.of(config, shape, dtype, device_memory)
    micro = sizes.choose_micro()
    return sizes.account(sizes.choose_pool(micro), micro)


def choose_micro(
    config: Config, shape: ModelShape, dtype: torch.dtype, device_memory: DeviceMemory
) -> MicroBatchSize:
    """Tokens per micro-batch and whether to recompute, where the recipe does not set them.

    On a GPU the largest useful size that leaves the KV pool a fifth of the memory, else the smallest;
    recomputation only if the longest row does not fit without it.
    """
    return RunSizes.of(config, shape, dtype, device_memory).choose_micro()


def kv_tokens_for(
    config: Config, shape: ModelShape, dtype: torch.dtype, device_memory: DeviceMemory
) -> int:
    """Tokens of the KV pool: the recipe's, or the rest of the memory; at least one context.

    On a GPU at most what a step can use and 0.4 of the memory, on a CPU 65,536 tokens or 2 GiB.
    """
    sizes = RunSizes.of(config, shape, dtype, device_memory)
    return sizes.choose_pool(sizes.choose_micro())


def check_fits(
    config: Config, shape: ModelShape, dtype: torch.dtype, device_memory: DeviceMemory
) -> None:
    """Raise if a recipe does not fit, with the numbers and the key to change."""
    memory = plan_memory(config, shape, dtype, device_memory)
    if memory.fits:
        return
    largest = sorted(memory.items, key=lambda item: -item.bytes)[:3]
    named = ", ".join(f"{item.name} {gigabytes(item.bytes)}" for item in largest)
    name = device_memory.name or device_memory.device.type
    way_out = remedy(config, shape, dtype, device_memory)
    raise ConfigError(
        f"this recipe needs {gigabytes(memory.total)} and {name} has {gigabytes(memory.usable)} to use "
        f"(mostly {named}). {way_out}. `graft plan` shows all entries"
    )


def remedy(
    config: Config, shape: ModelShape, dtype: torch.dtype, device_memory: DeviceMemory
) -> str:
    """The first single change with which it fits, else a combination of changes."""

    def does_fit(changed: Config) -> bool:
        return plan_memory(changed, shape, dtype, device_memory).fits

    changes = list(_remedies(config))
    for name, keys in changes:
        if does_fit(config.changed(keys)):
            return f"Change {name}"
    together: dict[str, object] = {}
    named: dict[str, str] = {}  # a later change of the same key replaces the earlier
    for name, keys in changes:
        together |= keys
        named |= dict.fromkeys(keys, name)
        if does_fit(config.changed(together)):
            return "Change " + ", ".join(named.values())
    return "No key of the recipe makes it fit: use a smaller model or a larger device"


def _remedies(config: Config) -> Iterator[tuple[str, dict[str, object]]]:
    """Changes in the order of their cost: none, time, then training quality."""
    train, rollout = config.train, config.rollout
    if config.engine.kv_tokens:
        yield f"engine.kv_tokens={config.engine.kv_tokens} to 0", {"engine.kv_tokens": 0}
    if train.tokens_per_micro:
        name = f"train.tokens_per_micro={train.tokens_per_micro} to 0"
        yield name, {"train.tokens_per_micro": 0}
    if train.recompute is False:
        yield "train.recompute=false to true", {"train.recompute": True}
    context = rollout.max_context // 2
    while context > rollout.max_tokens:
        name = f"rollout.max_context={rollout.max_context} to {context}"
        yield name, {"rollout.max_context": context}
        context //= 2
    if (coef := _kl_coef(config)) and has_reference(config) and not config.lora.rank:
        name = f"algo.kl_coef={coef} to 0 (no reference model)"
        yield name, {"algo.kl_coef": 0.0}


def has_reference(config: Config) -> bool:
    """Whether a KL term, in the loss or in the rewards, or a teacher is the reference model."""
    preset = preset_of(config)
    has_kl = preset.kl_coef or kl_in_reward_of(preset)
    is_teacher = REFERENCE in config.distill.teachers.values()
    return bool(config.train.steps and (has_kl or is_teacher))


def _kl_coef(config: Config) -> float:
    """What algo.kl_coef=0 would switch off: a KL that a preset has in its own shaping stays."""
    preset = preset_of(config)
    is_moved = config.algo.kl_in == "reward"
    return kl_in_reward_of(preset).get("coef", 0.0) if is_moved else preset.kl_coef
