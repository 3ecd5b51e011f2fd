"""The teachers of a recipe: checked before anything large is loaded, then opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from graft.algos.distillation import DIVERGENCES
from graft.algos.parts import make
from graft.algos.presets import Preset
from graft.config import Config, ConfigError
from graft.engine.errors import EngineError
from graft.engine.remote.prompt_logprobs import PromptScorer
from graft.models.decoder import Decoder
from graft.models.divergence import TeacherComparison
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import read_config
from graft.models.shape import ARCHITECTURES
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import allowed_table
from graft.train.components import RunComponents
from graft.train.distributed.process_group import ProcessGroup
from graft.train.memory.frozen_shapes import is_server, teacher_paths
from graft.train.model import load_reference
from graft.train.rollouts.frozen_players import is_same_vocabulary
from graft.train.run_dir.checkpoint import latest_model
from graft.train.teachers.teacher_prompt import TeacherPrompt, read_context
from graft.train.teachers.teachers import POLICY, REFERENCE, Teachers
from graft.types import Task
from graft.user_code import UserCodeError

OWN = (POLICY, REFERENCE)
DEFAULT = "default"
"""Of several teachers the one of tasks that name no other."""
SAMPLED = {"teacher_kl", "sampled_kl"}
"""Credits and losses that read the teacher's log-probs of sampled tokens."""


def refuse_teachers(config: Config, preset: Preset, processes: ProcessGroup) -> None:
    """Refuse teachers that nothing reads, and what reads a teacher without one."""
    distill, teachers = config.distill, config.distill.teachers
    readers = _readers(preset)
    if not config.train.steps:
        return
    if readers and not teachers:
        raise ConfigError(
            f"algo.name={config.algo.name} learns from a teacher ({', '.join(readers)}), and distill.teacher "
            "is empty; give a path, a run, a hub name, policy, reference or the address of a server"
        )
    if not teachers:
        return
    if taken := [name for name in OWN if teachers.get(name, name) != name]:
        raise ConfigError(
            f"distill.teacher calls {teachers[taken[0]]!r} {taken[0]!r}, which means the policy itself; give "
            "it another name"
        )
    if not readers and not _is_users(preset):
        raise ConfigError(
            f"distill.teacher={distill.teacher} is scored and not learned from: take algo.name=opd or gkd, "
            "or add it to this one: algo.credit=[grpo, teacher_kl], or distill.divergence=reverse and "
            "distill.coef=0.1"
        )
    reads_all = preset.divergence is not None
    if not reads_all and (preset.distill_coef or preset.loss == "distillation"):
        raise ConfigError(
            "the loss compares whole distributions, and distill.divergence is empty; set it to reverse, "
            "forward or {js: {beta: 0.5}}"
        )
    if config.actions.file and "teacher_kl" in readers:
        raise ConfigError(
            "teacher_kl prices every decision, and a teacher knows none of the actions beyond the "
            "vocabulary; take distill.divergence=reverse with distill.coef, which compares tokens only"
        )
    if distill.on_policy < 1 and not distill.data:
        raise ConfigError(
            f"distill.on_policy={distill.on_policy} leaves tasks to rows of distill.data, which is empty"
        )
    if distill.data and ("teacher_kl" in readers or distill.on_policy == 1):
        why = "distill.on_policy=1 leaves them no place"
        if "teacher_kl" in readers:
            why = "teacher_kl learns from tokens that the policy sampled"
        raise ConfigError(
            f"distill.data={distill.data} would not be learned from: {why}; take algo.name=gkd and "
            "distill.on_policy=0.5"
        )
    if distill.data and (config.rollout.staleness or config.rollout.dynamic_rounds > 1):
        raise ConfigError(
            "distill.data mixes rows into the attempts of each step, which rollout.staleness and "
            "rollout.dynamic_rounds collect otherwise; leave them at 0"
        )
    if reads_all and processes.world > 1 and (config.parallel.shard or config.parallel.tp > 1):
        raise ConfigError(
            "distill.divergence compares whole distributions, which needs both heads in each process; set "
            "parallel.shard=false and parallel.tp=1, or learn from sampled tokens (algo.name=opd)"
        )
    _refuse_server(config, reads_all)


def _refuse_server(config: Config, reads_all: bool) -> None:
    distill = config.distill
    if not any(map(is_server, distill.teachers.values())):
        return
    temperatures = {config.rollout.temperature, distill.temperature or config.rollout.temperature}
    if temperatures != {1.0}:
        raise ConfigError(
            "a server's log-probs are those of temperature 1; set rollout.temperature=1 and leave "
            "distill.temperature out, or open the teacher in this process (its path)"
        )
    if reads_all and not distill.top_k:
        raise ConfigError(
            "a server gives its likeliest tokens, not the whole distribution; set distill.top_k (vLLM "
            "returns up to 20, more with --max-logprobs)"
        )
    if reads_all and distill.support != "teacher":
        raise ConfigError(
            f"distill.support={distill.support} needs the teacher's log-prob of any token, and a server "
            "gives those of its likeliest ones; take distill.support=teacher"
        )
    if reads_all and config.actions.file:
        raise ConfigError(
            "a server does not know the calls that actions.file enforces, so its distribution is another "
            "one; open the teacher in this process (its path)"
        )


def _readers(preset: Preset) -> list[str]:
    """The parts of an algorithm that read a teacher."""
    named = [part if isinstance(part, str) else part[0] for part in (*preset.credit, preset.loss)]
    found = [name for name in named if name in SAMPLED | {"distillation"}]
    return found + (["distill.coef"] if preset.distill_coef else [])


def _is_users(preset: Preset) -> bool:
    """Whether a part is the user's own, which may read anything."""
    parts = (*preset.credit, preset.loss)
    named = [part if isinstance(part, str) or callable(part) else part[0] for part in parts]
    return any(callable(name) or ":" in name for name in named)


def check_tokenizers(config: Config, tokenizer: FastTokenizer) -> None:
    """Refuse teachers with another tokenizer, or of a family that no decoder here computes."""
    for name, given in teacher_paths(config).items():
        path = latest_model(given)
        family = read_config(path).get("model_type", "") if path.is_dir() else ""
        if family and family not in ARCHITECTURES:
            raise ConfigError(
                f"distill.teacher {name!r} ('{given}') is a {family} model, and the native decoder computes "
                f"{', '.join(ARCHITECTURES)}; serve it with vLLM and give its address"
            )
        if not is_same_vocabulary(open_tokenizer(path), tokenizer):
            raise ConfigError(
                f"distill.teacher {name!r} ('{given}') has another tokenizer than the policy, so its "
                "log-probs are of other tokens; take a teacher of the same family, or learn from its texts: "
                "graft data sample, then sft.data"
            )


def make_teachers(components: RunComponents) -> Teachers | None:
    """The teachers of the RL phase, with their weights."""
    config, policy, preset = components.config, components.policy, components.algo.preset
    distill, given = config.distill, config.distill.teachers
    if not given:
        return None
    comparison = None
    top_k = 0
    models: dict[str, Any] = {name: None for name, value in given.items() if value in OWN}
    if preset.divergence is not None:
        _refuse_transformers(policy)
        top_k = distill.top_k
    paths = {name: latest_model(value) for name, value in teacher_paths(config).items()}
    opened: dict[Path, Any] = {path: load_reference(path, policy) for path in {*paths.values()}}
    models |= {name: opened[path] for name, path in paths.items()}
    if preset.divergence is not None:
        sizes = [model.shape.vocab_size for model in opened.values()]
        comparison = TeacherComparison(
            make(preset.divergence, DIVERGENCES, "divergence"),
            temperature=distill.temperature or config.rollout.temperature,
            top_k=top_k,
            support=distill.support,
            tail=distill.tail,
            vocab_size=min([policy.shape.vocab_size, *sizes]),
            allowed=allowed_table(components.actions, policy),
        )
    servers = {
        name: open_server(config, url, components.tokenizer, top_k)
        for name, url in given.items()
        if is_server(url)
    }
    names = {name: value if value in OWN else name for name, value in given.items()}
    models = {names[name]: model for name, model in models.items()}
    return Teachers(
        models=models,
        servers=servers,
        choose=_chooser(config, names),
        comparison=comparison,
        needs_logprobs=_is_users(preset) or bool(SAMPLED & {*_readers(preset)}),
        prompt=_prompt(components),
    )


def open_server(config: Config, url: str, tokenizer: FastTokenizer, top_k: int) -> PromptScorer:
    """A teacher's server, checked: it answers, and its tokenizer is ours."""
    try:
        address, _, model = url.partition("#")
        how = {"deadline": config.rollout.deadline, "api_key_env": config.distill.api_key_env}
        server = PromptScorer(address, tokenizer, model=model, **how)
        server.check(top_k)
    except EngineError as error:
        raise ConfigError(f"distill.teacher={url}: {error}") from error
    return server


def _refuse_transformers(policy: Any) -> None:
    if not isinstance(policy, Decoder):
        raise ConfigError(
            f"distill.divergence compares whole distributions, which needs a native decoder "
            f"({', '.join(ARCHITECTURES)}); this model ({policy.shape.family}) trains as transformers "
            "computes it: learn from sampled tokens (algo.name=opd)"
        )


def _chooser(config: Config, names: dict[str, str]) -> Callable[[Task], str]:
    by = config.distill.by
    if isinstance(config.distill.teacher, str):
        (only,) = names.values()
        return lambda task: only

    def choose(task: Task) -> str:
        known = {"env": task.env, "data_source": task.data_source}
        value = str(known[by] if by in known else task.meta.get(by, ""))
        if value not in names and DEFAULT not in names:
            raise UserCodeError(
                f"task {task.id!r} has {by} {value!r}, and distill.teacher has {', '.join(names)}; name a "
                f"teacher for it, or one called {DEFAULT}"
            )
        return names[value if value in names else DEFAULT]

    return choose


def _prompt(components: RunComponents) -> TeacherPrompt | None:
    distill, setup = components.config.distill, components.setup
    if not distill.context:
        return None
    context = read_context(distill.context)
    return TeacherPrompt(context, components.chat, lambda task: setup.for_task(task).prefill)
