"""The model of a run and its tokenizer: their source, and whether they fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch

from graft.actions.actions import Actions
from graft.config import ClusterSection, Config, ConfigError, EngineSection, ParallelSection
from graft.engine.engine_group import EngineGroup
from graft.envs.table import build_env
from graft.files import remove, write_json
from graft.models.decoder import Decoder
from graft.models.device_choice import choose_device, choose_dtype, prefer_blas
from graft.models.families.table import make_shape, why_not_native
from graft.models.finite import find_unusable
from graft.models.io.gguf_read import gguf_shape, open_gguf, open_tokenizer
from graft.models.io.hub import find_model, origin_of
from graft.models.io.load import hub_hint, load_model, open_model, read_config, read_json, shape_of
from graft.models.io.tensor_names import weights_of
from graft.models.io.tensors import ModelFileError
from graft.models.order_probe import find_order
from graft.models.policy import host_copy
from graft.models.shape import ARCHITECTURES, ModelShape, UnsupportedModel
from graft.models.tree.path_blocks import BLOCK
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import actions_of, with_actions
from graft.train.distributed.process_group import ProcessGroup
from graft.train.memory.device_memory import device_memory_of
from graft.train.memory.plan import check_fits, choose_micro
from graft.train.rollouts.rollout_engine import TENSOR_PARALLEL, is_external, round_kv, ways
from graft.train.run_dir.checkpoint import latest_model
from graft.trust import check_program

MODEL_FILE = "model.json"
"""In a run's folder, where its model is the hub's: {"path": as in the recipe, "name": ..., "commit": ...}."""


def source_of(config: Config, weights: Path | None = None, *, is_read: bool = True) -> Path | None:
    """The place that the model is read from: a checkpoint, the recipe's model, or None for a new one.

    is_read   False: only configs and tokenizer are needed, so weights of the hub are not downloaded
    """
    if weights or not config.model.path:
        return weights
    source = latest_model(config.model.path, is_read)
    if not source.exists():
        raise ModelFileError(
            f"model.path={config.model.path}: there is no such folder, file or run; "
            f"{hub_hint(config.model.path)}"
        )
    return source


def pin_model(config: Config, folder: Path) -> tuple[Config, str]:
    """The recipe with the commit of a hub model that the run in `folder` began with, and a note of it.

    Qwen/Qwen3-0.6B -> Qwen/Qwen3-0.6B@c1899de289a0..., so that a resumed run, and processes that join
    it, do not take newer weights. The first call records the commit.
    """
    path, file = config.model.path, folder / MODEL_FILE
    known = read_json(file) if file.exists() else {}
    if known.get("path") != path:
        named = origin_of(latest_model(path)) if path else None
        if named is None or Path(path).exists():
            remove(file)
            return config, ""
        known = {"path": path, "name": named[0], "commit": named[1]}
        write_json(file, known)
    note = f"the model is {known['name']} of the hub, commit {known['commit']}"
    return config.changed({"model.path": f"{known['name']}@{known['commit']}"}), note


def open_policy(
    config: Config,
    source: Path | None,
    tokenizer: FastTokenizer,
    device: torch.device,
    dtype: torch.dtype,
    processes: ProcessGroup,
    is_shared: bool,
    with_engine: bool,
    group: EngineGroup | None = None,
) -> tuple[Any, Decoder, Actions | None]:
    """The trained policy, the decoder that the native engine samples from, and actions.

    `group` are the processes that hold the engine together, each with a slice of that decoder.

    The two are one where they share their weights. A family without a native decoder trains as
    transformers computes it, with an external engine.
    """
    if config.parallel.tp > processes.world:
        raise ConfigError(
            f"parallel.tp={config.parallel.tp} splits layers over as many processes, and there "
            f"{'is' if processes.world == 1 else 'are'} {processes.world}: torchrun --nproc-per-node "
            f"{config.parallel.tp} -m graft train RECIPE parallel.tp={config.parallel.tp}"
        )
    if is_transformers_only(config, source):
        assert source is not None
        return open_transformers(config, source, device, dtype, processes), None, None  # type: ignore[return-value]
    prefer_blas(device, dtype)
    is_split = processes.world > 1 and (config.parallel.shard or config.parallel.tp > 1)
    has_sampler = with_engine and not is_external(config)
    is_read_by_parts = is_split and not (has_sampler and group is None)
    # what is split is read from host memory, by parts; else the weights are loaded where they stay
    how = {"dtype": dtype, "device": torch.device("cpu") if is_split else device}
    opened = _stored(config, source, tokenizer, is_read_by_parts, **how)
    with opened as (shape, read, plain, actions):
        room = device_memory_of(device, ways(config, processes))
        recompute = choose_micro(config, shape, dtype, room).recompute
        recompute = processes.any(recompute, "whether blocks are computed twice")  # all, or none
        if is_split:
            from graft.models.parallel.decoder import shard

            mesh, offload = processes.mesh(config.parallel.tp), config.parallel.offload
            kept = {"dtype": dtype, "offload": offload, "recompute": recompute}
            policy: Decoder = shard(shape, mesh, read, **kept)
            refuse_unusable(policy, source, processes)
        else:
            assert plain is not None
            policy = plain
            policy.recompute = recompute
        # a matrix of which each process computes a part is added up in another order
        is_whole = config.parallel.tp == 1 and group is None and not is_external(config)
        may_hold = config.model.exact and is_whole and (device.type == "cpu" or not is_split)
        if device.type == "cuda" and config.engine.page_size not in (0, BLOCK):
            may_hold = False  # attention adds in blocks of this size
        refuse_without_experts(config, shape)
        for block in policy.blocks if config.train.freeze_router else ():
            cast(Any, block).freeze_router()
        if may_hold and plain is not None:
            policy.use_order(find_order(plain.to(device=device, dtype=dtype)))
        round_kv(config, policy)
        if not has_sampler or is_shared:
            return policy, policy, actions
        if group is not None:
            return policy, _sliced(shape, read, group, dtype, device), actions
    assert plain is not None
    copy = plain if is_split else host_copy(policy, keep=True)
    copy.use_order(policy.order)
    if policy.rounds_kv:
        copy.round_kv()
    return policy, copy.to(device=device, dtype=dtype), actions


def _router_keys(config: Config) -> dict[str, Any]:
    """Settings of routers that are on, by key."""
    names = ("freeze_router", "router_balance", "router_z")
    keys = {f"train.{name}": getattr(config.train, name) for name in names}
    return {key: value for key, value in keys.items() if value}


def refuse_without_experts(config: Config, shape: ModelShape) -> None:
    """Refuse settings of routers for a model that has none."""
    for key, value in _router_keys(config).items():
        if shape.experts is None:
            raise ConfigError(
                f"{key}={value}: this {shape.family} model has no experts, so no router; leave it out"
            )


@contextmanager
def _stored(
    config: Config,
    source: Path | None,
    tokenizer: FastTokenizer,
    by_parts: bool,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[ModelShape, Callable[[str], Any], Decoder | None, Actions | None]]:
    """The shape of the recipe's model, its tensors by name, the whole model, and actions.

    `by_parts`: no process needs the whole model, so it is not loaded where a folder holds it and each
    tensor can be read when it is used.
    """
    if by_parts and source is not None and source.is_dir() and not config.actions.file:
        refuse_family(source, config)
        with open_model(source) as stored:
            stored.check()
            yield stored.shape, stored.read, None, None
        return
    plain = load_policy(config, source, tokenizer, dtype=dtype, device=device)
    actions = actions_of(config, tokenizer, plain.shape.vocab_size)
    if actions is not None:
        plain = with_actions(plain, actions, source, config.actions)
    yield plain.shape, weights_of(plain).get, plain, actions


def _sliced(
    shape: ModelShape,
    read: Callable[[str], Any],
    group: EngineGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """This process's slice of the decoder that its engine samples from."""
    from graft.models.parallel.sampler import SlicedDecoder

    where = group.group, group.size, group.index
    sampler = SlicedDecoder(shape, *where, dtype=dtype, device=device)
    for name, target in sampler.hf_weights().items():
        target.copy_(read(name))
    return sampler


def load_reference(path: Path, policy: Any, is_teacher: bool = False) -> Any:
    """A frozen model of the policy's kind, with the weights at `path`.

    Its keys and values are rounded as the policy's, but not those of a teacher: another model.
    """
    if not isinstance(policy, Decoder):
        from graft.models.transformers.load import load_transformers_model

        reference = load_transformers_model(path, dtype=policy.dtype, device=policy.device)
    elif policy.is_whole:
        reference = load_model(path, dtype=policy.dtype, device=policy.device)
    else:
        from graft.models.parallel.decoder import ShardedDecoder, shard

        assert isinstance(policy, ShardedDecoder)
        with open_model(path) as stored:
            kept = {"dtype": policy.dtype, "offload": policy.offload}
            reference = shard(stored.shape, policy.mesh, stored.read, **kept)
    if not is_teacher and getattr(policy, "rounds_kv", False):
        reference.round_kv()  # type: ignore[operator]
    return reference.requires_grad_(False)


def is_transformers_only(config: Config, source: Path | None) -> bool:
    """Whether only transformers computes the model's family."""
    if source is None or not source.is_dir():
        return False
    device = choose_device(config.model.device)
    return is_external(config) and bool(why_not_native(read_config(source), device))


def sampling_only(config: Config, source: Path) -> Config:
    """The recipe for sampling from a model without training.

    The engine is in this process, with the only copy of the weights: servers belong to the run that
    trains with them, and hold its weights.
    """
    section = config.engine
    engine = EngineSection(kv_tokens=section.kv_tokens, page_size=section.page_size, kv=section.kv)
    if section.name == engine.name:
        engine = engine.model_copy(update={"args": section.args})
    if is_transformers_only(config, source):
        args = {key: value for key, value in section.args.items() if key != TENSOR_PARALLEL}
        if args:  # such as trust_remote_code
            check_program(f"vLLM with engine.args={args}")
        engine = EngineSection(name="vllm", args={} if section.url else args)
    rollout = config.rollout.model_copy(update={"staleness": 0})
    alone = {"parallel": ParallelSection(), "cluster": ClusterSection()}
    return config.model_copy(update={"engine": engine, "rollout": rollout, **alone})


def open_transformers(
    config: Config, source: Path, device: torch.device, dtype: torch.dtype, processes: ProcessGroup
) -> Any:
    """A policy that transformers computes."""
    from graft.models.transformers.load import load_transformers_model

    refused = {
        "actions.file": config.actions.file,
        "lora.rank": config.lora.rank,
        "parallel.tp": config.parallel.tp if config.parallel.tp > 1 else 0,
        **_router_keys(config),
    }
    for key, value in refused.items():
        if value:
            raise ConfigError(
                f"{key}={value} needs a native decoder ({', '.join(ARCHITECTURES)}), and "
                f"'{source}' is another family, which trains as transformers computes it; leave it out"
            )
    policy = load_transformers_model(source, dtype=dtype, device=device)
    policy.recompute = bool(config.train.recompute)
    if processes.world > 1 and config.parallel.shard:
        from graft.models.parallel.module import shard_module

        shard_module(policy, policy.block_classes(), processes.mesh(1), config.parallel.offload)
    refuse_unusable(policy, source, processes)
    return policy


def refuse_unusable(policy: Any, source: Path | None, processes: ProcessGroup) -> None:
    """Refuse weights that hold NaN or inf in any process; `load_model` does so for a whole decoder."""
    why = find_unusable(dict(policy.named_parameters()))
    if processes.any(bool(why), "whether the weights of all ranks are finite"):
        raise ModelFileError(
            f"{why or 'the part of another process is not finite'} in '{source}', so nothing can be computed "
            "with it; take the checkpoint before it, or download it again"
        )


def load_tokenizer(config: Config, source: Path | None) -> FastTokenizer:
    if source is not None:
        return open_tokenizer(source)
    alphabet = config.model.alphabet
    if alphabet == "bytes":
        return FastTokenizer.bytes()
    if not alphabet:
        alphabet = _alphabet_of(config)
    return FastTokenizer.characters(alphabet)


def _alphabet_of(config: Config) -> str:
    """The characters of all environments."""
    items = [*config.task.envs, *config.held_out_envs]
    made = {item.label: build_env(item.env, **(item.args or {})) for item in items}
    alphabets = {name: str(getattr(env, "alphabet", "")) for name, env in made.items()}
    if not alphabets or not all(alphabets.values()):
        lacking = [name for name, characters in alphabets.items() if not characters]
        raise ConfigError(
            f"model.alphabet is empty and environment {', '.join(lacking)!r} names no alphabet; "
            "give the characters, or model.alphabet=bytes"
        )
    return "".join(alphabets.values())


def make_chat(config: Config, tokenizer: FastTokenizer) -> Chat:
    """The chat template of the recipe."""
    model = config.model
    template, args = model.chat_template or None, model.template_args
    try:
        return Chat(tokenizer, template, history=model.history, **args)
    except TypeError as error:  # a name that is a parameter of ours
        raise ConfigError(f"model.template_args={args}: {error}") from error


def load_policy(
    config: Config,
    source: Path | None,
    tokenizer: FastTokenizer,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """The model at `source`, or a new one, in the memory of the device."""
    if source is not None:
        refuse_family(source, config)
        return load_model(source, dtype=dtype, device=device)
    shape = new_shape(config, tokenizer)
    return Decoder.empty(shape, dtype, device).initialise(config.run.seed)


def new_shape(config: Config, tokenizer: FastTokenizer) -> ModelShape:
    """The shape of a model from scratch; its vocabulary is the tokenizer's."""
    given = dict(config.model.shape)
    known = {
        name
        for name in ModelShape.__dataclass_fields__
        if name not in ("vocab_size", "extra", "extra_bias")
    }
    if unknown := sorted(set(given) - known):
        near = get_close_matches(unknown[0], known, n=1, cutoff=0.75)  # depth is not width
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"model.shape has no {', '.join(unknown)};{hint} known: {', '.join(sorted(known))}"
        )
    try:
        return make_shape(given, vocab_size=tokenizer.vocab_size)
    except UnsupportedModel as error:
        raise ConfigError(f"model.shape: {error}") from error


def recipe_shape(config: Config, weights: Path | None = None) -> ModelShape:
    """The shape of the model that `build_run` would build, without reading a weight."""
    source = source_of(config, weights, is_read=False)
    if source is None:
        shape = new_shape(config, load_tokenizer(config, None))
    elif source.suffix == ".gguf" and source.exists():
        shape = gguf_shape(open_gguf(source), source)
    else:
        if not source.exists():
            load_tokenizer(config, source)  # raises with what is missing and how to get it
        refuse_family(source, config)
        shape = shape_of(read_config(source), source / "config.json")
    if not config.actions.file:
        return shape
    actions = actions_of(config, load_tokenizer(config, source), shape.vocab_size)
    extra = 0 if actions is None else actions.space.extra
    return replace(shape, extra=extra, extra_bias=bool(extra) and config.actions.bias)


def refuse_family(source: Path, config: Config) -> None:
    """Refuse models that our decoder does not compute where the engine is native."""
    described = read_config(source) if source.is_dir() else {}
    device = choose_device(config.model.device)
    if described.get("model_type") and (why := why_not_native(described, device)):
        raise ConfigError(
            f"'{source}' is {why}; engine.name=vllm (or sglang) can train it, as transformers computes it"
        )


def refuse_what_cannot_fit(config: Config, weights: Path | None = None) -> None:
    """Refuse what cannot fit, before anything large is allocated."""
    if is_transformers_only(config, source_of(config, weights, is_read=False)):
        return  # its memory is not counted: its layers are not known
    device = choose_device(config.model.device)
    dtype, _ = choose_dtype(config.model.dtype, device)
    check_fits(config, recipe_shape(config, weights), dtype, device_memory_of(device))


def load_base(folder: Path, origin: str, policy: Decoder) -> Decoder:
    """The base model that the adapters of a checkpoint were merged into."""
    path = find_model(origin)
    if not path.exists():
        raise ConfigError(
            f"the adapters in '{folder}' belong to '{origin}', which does not exist; restore that "
            "model to train them further (the checkpoint itself is a whole model: a new run may start "
            "from it)"
        )
    base = load_model(path, dtype=policy.dtype)
    if [p.shape for p in base.blocks.parameters()] != [p.shape for p in policy.blocks.parameters()]:
        raise ConfigError(
            f"the adapters in '{folder}' belong to '{origin}', and the model there has other "
            "sizes now; restore the model that they were trained on"
        )
    return base
