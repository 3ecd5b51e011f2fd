"""Good attempts of a model as rows for supervised training: `graft data sample`.

    graft data sample runs/quickstart calculator --n 100 --samples 4 --keep "reward>0" --out good.jsonl

    100 tasks, 4 attempts each     good.attempts.jsonl, each as it ends
    those that pass --keep         good.jsonl, in the order of the tasks, without duplicates

With --resume attempts in the first file are not sampled again: a killed command continues, --n may grow, and
--keep may change. With --endpoint a server samples; behind a chat API the tokenizer is unknown, so rows are
messages without spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.datagen.accepted_rows import RejectionSampling, gather
from graft.datagen.attempt_log import AttemptLog
from graft.datagen.model_recipe import config_for
from graft.datagen.row_file import check_place
from graft.datagen.sample_work import SampleWork
from graft.evaluate.candidates import check_readable, fingerprint
from graft.evaluate.evaluator import chat_with, refuse_broken_in, setup_behind
from graft.evaluate.model_source import EndpointSpec, ModelSource
from graft.rollout.filters import read_condition
from graft.rollout.options import RolloutOptions
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.train.build import build_run, env_factory, is_chatty
from graft.train.model import sampling_only
from graft.train.run_dir.checkpoint import latest_model
from graft.train.tasks import TaskStream
from graft.trust.masking import masked


def sample_rows(
    model: ModelSource,
    env: str,
    out: str,
    options: RolloutOptions,
    *,
    keep: str = "reward>0",
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> RejectionSampling:
    """Attempt training tasks several times each; write what `keep` allows to `out`."""
    path, condition = Path(out), read_condition(keep)
    check_place(path)
    model = model.locate()
    server = model.read_endpoint()
    with model.use_settings(env):
        config = config_for(model, env)
        temperature = options.choose_temperature(config.rollout.temperature)
        seed = config.run.seed if options.seed is None else options.seed
        options = replace(options, temperature=temperature, seed=seed)
        weights = latest_model(model.path) if model.path else None
        if weights is not None:
            check_readable(weights)
        config, whose = _sampler_of(config, weights, server)
        attempts_path = path.with_name(f"{path.stem}.attempts.jsonl")
        for file in (attempts_path, path):
            if file.exists() and not resume:
                raise ConfigError(
                    f"{file} exists; --resume continues it, another --out leaves it alone"
                )
        chat = chat_with(config, server, weights)
        tools = {one.task.label: pose_one(one, chat, seed, server) for one in config.of_each_env()}
        log = AttemptLog(attempts_path, {**whose, **settings_of(config, options)})
        tasks = options.tasks or 1
        try:
            todo = [number for number in range(tasks) if not log.is_done(number)]
            if len(todo) < tasks:
                say(f"{tasks - len(todo):,} of {tasks:,} tasks are in {attempts_path} already")
            if todo:
                setup = _setup(config, weights, server, chat)
                try:
                    work = SampleWork(config, setup, log, tools, tasks, say, server)
                    work.sample(todo, options)
                except KeyboardInterrupt:
                    say(
                        f"interrupted; finished attempts are in {attempts_path}, --resume makes the rest"
                    )
                    raise
                finally:
                    setup.engine.close()
            return gather(log, condition, RejectionSampling(out, str(attempts_path), tasks), keep)
        finally:
            log.close()


def _sampler_of(
    config: Config, weights: Path | None, server: EndpointSpec | None
) -> tuple[Config, dict[str, Any]]:
    """The settings that sample, and what identifies the weights."""
    if server is None:
        assert weights is not None, "no model and no server was refused above"
        return sampling_only(config, weights), {"weights": fingerprint(weights)}
    if config.actions.file:
        raise ConfigError(
            f"actions.file={config.actions.file} makes calls that no server can; add actions.file="
        )
    return config, {"served": server.model, "api": server.api}  # all that is known of its weights


def _setup(
    config: Config, weights: Path | None, server: EndpointSpec | None, chat: Chat
) -> RolloutSetup:
    if server is None:
        return build_run(config, weights=weights).setup
    return setup_behind(server, config, chat, env_factory(config, chat.tokenizer))


def pose_one(config: Config, chat: Chat, seed: int, server: EndpointSpec | None = None) -> Any:
    """Pose the first task before weights are read; the schemas of the tools in its prompt."""
    first = next(TaskStream(config.task.envs, seed))
    env_of = env_factory(config, chat.tokenizer)
    label = config.task.label
    try:
        env = env_of(first)
        try:
            _, info = env.reset(first.seed)
        finally:
            env.close()
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(
            f"{label} with {config.task.args} cannot be posed: {error}. Change its arguments "
            "with task.args.key=value, all of them with task.args={...}"
        ) from error
    if env.observe_as == "raw":
        raise ConfigError(
            f"a wrapper of {label} puts the prompt through the chat template, so there are no "
            "messages to write; leave it out: task.wrappers=[]"
        )
    if server is not None and server.api == "chat":
        refuse_broken_in(label, env, config.rollout.max_turns, "rollout.max_turns=1")
    if server is not None and is_chatty(config, env_of):
        chat.history_note()  # raises where the template cannot hold a conversation
    return info.get("tools")


def settings_of(config: Config, options: RolloutOptions) -> dict[str, Any]:
    """Everything that the attempts depend on, apart from the weights."""
    limits = {"max_tokens", "max_turns", "max_context"}
    return masked(
        {
            **options.select("samples", "temperature", "seed"),
            "task": config.task.model_dump(mode="json", exclude={"eval_args"}),
            "actions": config.actions.model_dump(mode="json"),
            "rollout": config.rollout.model_dump(mode="json", include=limits),
            "model": config.model.model_dump(
                mode="json", include={"chat_template", "template_args", "history", "dtype"}
            ),
        }
    )
