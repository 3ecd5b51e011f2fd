"""The teachers of a recipe, opened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graft.algos.distillation import DIVERGENCES
from graft.algos.parts import make
from graft.config import Config, ConfigError
from graft.engine.errors import EngineError
from graft.engine.remote.prompt_logprobs import PromptScorer
from graft.models.decoder import Decoder
from graft.models.divergence import TeacherComparison
from graft.models.shape import ARCHITECTURES
from graft.text.tokenizer import FastTokenizer
from graft.train.actions import allowed_table
from graft.train.components import RunComponents
from graft.train.model import load_reference
from graft.train.run_dir.checkpoint import latest_model
from graft.train.teachers.check import DEFAULT, OWN, SAMPLED, has_users_part, readers
from graft.train.teachers.paths import is_server, teacher_paths
from graft.train.teachers.teacher_prompt import TeacherPrompt, read_context
from graft.train.teachers.teachers import Teachers
from graft.types import Task
from graft.user_code import UserCodeError


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
    opened: dict[Path, Any] = {
        path: load_reference(path, policy, is_teacher=True) for path in {*paths.values()}
    }
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
        needs_logprobs=has_users_part(preset) or bool(SAMPLED & {*readers(preset)}),
        prompt=_prompt(components, [model or policy for model in models.values()]),
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


def _prompt(components: RunComponents, models: Sequence[Any]) -> TeacherPrompt | None:
    distill, setup = components.config.distill, components.setup
    if not distill.context:
        return None
    context = read_context(distill.context)
    positions = min((model.shape.max_positions for model in models), default=sys.maxsize)
    return TeacherPrompt(
        context, components.chat, lambda task: setup.for_task(task).prefill, positions
    )
