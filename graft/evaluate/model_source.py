"""Which model is sampled and with which recipe: the words of `graft eval`, `data sample` and `rollout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError, load_config
from graft.evaluate.candidates import recipe_of, run_behind
from graft.models.io.hub import HubError, find_model
from graft.recipe.admission import NOT_OF_ATTEMPTS
from graft.train.run_dir.checkpoint import located
from graft.train.run_dir.names import named
from graft.trust.ownership import settings_from


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """The servers that hold the model."""

    urls: tuple[str, ...]
    model: str
    api: str
    """completions or chat; see `graft.engine.remote.openai`."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and its recipe, as a command names them.

    >>> ModelSource("runs/sort", overrides=["rollout.max_turns=4"]).recipe_file
    'runs/sort/config.yaml'
    """

    path: str = ""
    """A run, one checkpoint of it, or a model; with an endpoint "", or the model's name there."""
    recipe: str = ""
    """Empty: that of the run."""
    overrides: Sequence[str] = ()
    endpoint: Sequence[str] = ()
    """Servers with OpenAI's API that share the attempts; empty: the model is loaded."""
    served: str = ""
    """The name that the endpoint serves; empty: its only model."""
    api: str = ""
    """Of the endpoint: completions or chat."""
    trust: bool = False
    """Run code that the recipe of a stranger names."""

    @property
    def run(self) -> Path | None:
        """The run that the model is of."""
        return run_behind(Path(self.path)) if self.path else None

    @property
    def recipe_file(self) -> str:
        """The file with the settings; "": there is none."""
        return self.recipe or recipe_of(self.run)

    def locate(self) -> ModelSource:
        """The same with the path of a run that is given by its name."""
        return replace(self, path=str(located(self.path))) if self.path else self

    def use_settings(self, *typed: str) -> AbstractContextManager[None]:
        """The recipe's settings are in use inside the block; `typed` are other words of the command."""
        words = [self.path, *typed, *self.overrides, *self.urls]
        return settings_from(self.recipe_file, self.trust, words)

    def load_config(self, plain: Mapping[str, Any]) -> Config:
        """The recipe; of a model without one the `plain` settings."""
        if file := self.recipe_file:
            return load_config(file, self.overrides, unused=NOT_OF_ATTEMPTS)
        values = {"model": {"path": self.path or "none"}, **plain}
        return load_config(values, self.overrides, "settings")

    @property
    def urls(self) -> tuple[str, ...]:
        listed = (url.strip() for text in self.endpoint for url in text.split(","))
        return tuple(filter(None, listed))

    def read_endpoint(self) -> EndpointSpec | None:
        """The servers; None: the model is loaded here."""
        if not self.urls:
            if self.served or self.api:
                raise ConfigError("--model and --api belong to --endpoint URL; give that too")
            if not self.path:
                raise ConfigError("nothing to sample from: give a run, a model, or --endpoint URL")
            return None
        api = self.api or ("completions" if self.path else "chat")
        if api not in ("completions", "chat"):
            raise ConfigError(f"--api {api!r}: must be completions or chat")
        if api == "completions" and not self.path:
            raise ConfigError(
                "--api completions writes whole prompts, which takes the model's tokenizer and chat "
                "template; give a folder that has them as first argument, or use --api chat"
            )
        return EndpointSpec(self.urls, self.served, api)

    def locate_served(self, say: Callable[[str], None]) -> ModelSource:
        """The same with the folder that has the tokenizer of a served model, and its name on the server.

        Weights are neither needed nor downloaded. Of a name without a tokenizer here or on the hub the
        folder is "": then messages are sent (--api chat), and the server writes them with its own template.
        """
        where = named(self.path)
        if where.exists():
            return replace(self, path=str(where))
        by_name = replace(self, path="", served=self.served or self.path.partition("@")[0])
        if self.api == "chat":
            return by_name
        why = "it is no folder here and no name of the hub (OWNER/NAME)"
        try:
            folder = find_model(self.path, weights=False)
            if folder.exists():
                return replace(by_name, path=str(folder))
        except HubError as error:
            why = str(error)
        if self.api:
            raise ConfigError(
                f"--api {self.api} writes whole prompts with the tokenizer of {self.path!r}, which cannot be "
                f"had: {why}. Use --api chat, or give a folder that has it"
            )
        say(f"{self.path} is evaluated as a model of the server, by messages (--api chat): {why}")
        return by_name
