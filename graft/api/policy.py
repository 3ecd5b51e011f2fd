"""A model ready to be sampled from and trained: weights, tokenizer, chat template."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from graft.api.attributes import ExplainedAttributes
from graft.api.settings import settings
from graft.config import Config, ConfigError, load_config
from graft.signatures import explain_arguments
from graft.user_code import describe_value

if TYPE_CHECKING:
    import torch

    from graft.actions.actions import Actions
    from graft.text.chat import Chat
    from graft.text.tokenizer import FastTokenizer


class Policy(ExplainedAttributes):
    """What `graft.load` returns: an Engine samples from it, a Learner trains it, both in place.

    model      the decoder, a `torch.nn.Module`; its tensors are the only copy of the weights
    tokenizer  text to token ids and back
    chat       renders messages with the chat template
    version    updates that Learners have made: 0 as loaded, 1 after the first `learner.step`; after
               `learner.restore` those of the checkpoint too
    path       where it was loaded from; None: it started from random weights
    """

    @explain_arguments
    def __init__(
        self,
        config: Config,
        model: Any,
        tokenizer: FastTokenizer,
        chat: Chat,
        actions: Actions | None,
        path: Path | None,
        recipe: Config | None,
        settings_file: str | None = None,
        trust: bool = False,
    ) -> None:
        self.config, self.model, self.actions, self.path = config, model, actions, path
        self.tokenizer, self.chat = tokenizer, chat
        self.recipe = recipe
        """Of the run it comes from, if there is one."""
        self.settings_file, self.trust = settings_file, trust
        """Where its recipe comes from, and whether code that it names may run."""
        self.version = self.loaded_version = 0
        self.engines: WeakSet[Any] = WeakSet()
        """Engines that sample from it: each learns of a new version."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @explain_arguments
    def save(self, folder: str | PathLike[str]) -> Path:
        """Write a Hugging Face folder, which `graft.load` and transformers open.

        Files of an earlier save there are replaced. Returns the folder.
        """
        from graft.models.io.save import ids_of, write_json
        from graft.models.policy import save_policy
        from graft.train.run_dir.checkpoint import ACTION_NAMES

        target = Path(folder)
        if target.is_file():
            raise ValueError(f"'{target}' is a file; save() writes a folder: give another name")
        special = ids_of(self.tokenizer, self.chat.end_ids)
        with explain_writing(target):
            target.mkdir(parents=True, exist_ok=True)
            save_policy(self.model, target, special=special, source=self.path)
            self.tokenizer.save(target)
            if self.actions is not None:
                write_json(target / ACTION_NAMES, {"actions": list(self.actions.names)})
        return target

    @property
    def updates(self) -> int:
        """The number of updates since it was loaded from `path`."""
        return self.version - self.loaded_version

    def restore_version(self, version: int) -> None:
        """Count on from the checkpoint that it was loaded from."""
        self.version = self.loaded_version = version
        for engine in self.engines:
            engine.renew(version)

    def use_kv(self, kv: str | None) -> None:
        """Compute with keys and values as `engine.kv` names them; None: as before."""
        from graft.train.rollouts.rollout_engine import round_kv

        before = self.config.engine.kv
        config = settings(self.config, engine={"kv": kv or before})
        if config.engine.kv == before:
            return
        if before != "model" or self.engines:
            raise ConfigError(
                f"Engine(kv={kv!r}): this policy computes with kv={before!r}, and its engines too; close "
                "them, load the policy anew, and give kv to its first engine"
            )
        round_kv(config, self.model)
        self.config = config

    def advance(self) -> None:
        """The weights have changed: engines drop what they computed with the old ones."""
        self.version += 1
        for engine in self.engines:
            engine.renew(self.version)

    def __repr__(self) -> str:
        shape, origin = self.model.shape, self.path or "random weights"
        return (
            f"Policy({shape.family}, {self.num_parameters:,} parameters, {self.model.dtype} on "
            f"{self.device}, from {origin}, version {self.version})"
        )


@contextmanager
def explain_writing(folder: Path) -> Iterator[None]:
    """Say of a folder that the system refuses which it is, and what to do."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            f"cannot write to '{folder}' ({error}); save to a folder that this user may write to, on a disk "
            "with room"
        ) from error


@explain_arguments
def load(
    source: str | PathLike[str] | None = None,
    *,
    shape: Mapping[str, Any] | None = None,
    alphabet: str = "",
    chat_template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    actions: str = "",
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    trust: bool = False,
) -> Policy:
    """A model from the hub, a folder, a run or a .gguf file; or a new one with random weights.

    >>> policy = graft.load("Qwen/Qwen3-0.6B")        # a name on the hub
    >>> policy = graft.load("runs/quickstart")        # the newest checkpoint of a run
    >>> policy = graft.load(shape={"width": 64, "layers": 2}, alphabet="0123456789+=")

    source         hub name (OWNER/NAME), model folder, run (its name or folder), checkpoint or .gguf
    shape          instead of `source`: sizes of a new model, as `model.shape` in a recipe
    alphabet       characters that the new model reads and writes; "bytes", and empty: any text
    chat_template  name (chatml), path or text of a template; None: the tokenizer's own
    template_args  variables that the template reads, such as {"enable_thinking": False}
    actions        a file of actions beyond the vocabulary; a run brings its own
    device         "cpu", "cuda", ...; auto: the GPU if there is one
    dtype          float32, bfloat16; auto: bfloat16 on a GPU, float32 on a CPU
    seed           of a new model's weights
    trust          run code that the settings of a stranger's run name
    """
    from graft.models.device_choice import choose_device, choose_dtype
    from graft.models.extra_actions import ACTIONS
    from graft.recipe.admission import admit
    from graft.train.distributed.process_group import ALONE
    from graft.train.model import load_tokenizer, make_chat, open_policy
    from graft.train.rollouts.rollout_engine import why_not_rounded
    from graft.trust.ownership import settings_from

    if source is not None and not isinstance(source, str | PathLike):
        new = "; for a new model write graft.load(shape={...}, alphabet=...)"
        raise ConfigError(
            f"load() takes a name or a path, not {describe_value(source)}"
            f"{new if isinstance(source, Mapping) else ''}"
        )
    if (source is None) == (shape is None):
        raise ConfigError(
            "load() needs one of the two: a source (hub name, folder, run, .gguf), or shape={...} for "
            'a new model, as in graft.load(shape={"width": 64, "layers": 2}, alphabet="abc")'
        )
    if source is not None and alphabet:
        raise ConfigError(
            f"alphabet={alphabet!r} is that of a new model, and '{source}' brings its own tokenizer; leave "
            "it out, or give shape={...} in place of the source"
        )
    file = None if source is None else _settings_file(str(source))
    with settings_from(file, trust, [actions, chat_template or ""]):
        config, path, recipe = _described(None if source is None else str(source), file)
        given: dict[str, Any] = {"device": device, "dtype": dtype}
        given |= (
            {"shape": dict(shape), "alphabet": alphabet or "bytes"} if shape is not None else {}
        )
        given |= {} if chat_template is None else {"chat_template": chat_template}
        given |= {} if template_args is None else {"template_args": dict(template_args)}
        config = settings(config, model=given, run={"seed": seed})
        if actions:
            config = settings(config, actions={"file": actions})
        typed = {"actions.file": actions, "model.chat_template": chat_template}
        admit(config, ["model.path=", *(f"{key}=" for key, value in typed.items() if value)])
        where = choose_device(config.model.device)
        kind, _ = choose_dtype(config.model.dtype, where)
        tokenizer = load_tokenizer(config, path)
        chat = make_chat(config, tokenizer)
        if chat_template is not None:
            tokenizer.chat_template = chat.template  # save() keeps it
        if path is not None and (path / ACTIONS).is_file() and not config.actions.file:
            warnings.warn(
                f"'{path}' has actions beyond the vocabulary, and nothing says what they stand for: it is "
                "loaded without them. Give actions=FILE, the file it was trained with, or load its run",
                stacklevel=2,
            )
        model, _, listed = open_policy(config, path, tokenizer, where, kind, ALONE, True, True)
        if recipe is not None and recipe.engine.rounds_kv:
            if why := why_not_rounded(model):
                warnings.warn(
                    f"'{source}' was trained with keys and values in eight bits (engine.kv=fp8), and is "
                    f"loaded without rounding, so that log-probs differ slightly: {why}",
                    stacklevel=2,
                )
            else:
                config = settings(config, engine={"kv": recipe.engine.kv})
                model.round_kv()
        return Policy(config, model, tokenizer, chat, listed, path, recipe, file, trust)


def _settings_file(source: str) -> str:
    """The config.yaml of the run at `source`; "" where there is none."""
    from graft.evaluate.candidates import recipe_of, run_behind
    from graft.train.run_dir.checkpoint import located

    return recipe_of(run_behind(located(source)))


def _described(source: str | None, file: str | None) -> tuple[Config, Path | None, Config | None]:
    """Settings of the model at `source` and its folder: a run says which template and actions it has."""
    from graft.evaluate.candidates import check_readable
    from graft.train.run_dir.checkpoint import latest_model

    if source is None:
        return settings(), None, None
    path = latest_model(source)
    check_readable(path)
    if not file:
        return settings(model={"path": source}), path, None
    recipe = load_config(file, is_resolved=False)  # a model alone needs no keys of its run
    model = recipe.model.model_copy(update={"path": source, "shape": {}})
    own = settings().model_copy(update={"model": model, "actions": recipe.actions})
    return own, path, recipe
