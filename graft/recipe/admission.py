"""What of a stranger's recipe is used: what a command does not read is left out, the rest is judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from graft.trust import stranger
from graft.trust.belongings import SETTINGS
from graft.trust.settings import check_settings

SERVERS = ("cluster", "engine.url", "engine.exchange", "run.trackers")
NOT_OF_ATTEMPTS = (
    *("algo", "distill", "train", "sft", "lora", "parallel", *SERVERS),
    *("rollout.branch", "model.path"),  # attempts are independent, by a model that the user names
)
"""What attempts at tasks never read."""
NOT_OF_A_STEP = ("task", "agent", "eval", "sft", "rollout.frozen", "engine.args", *SERVERS)
"""What a step that is computed again from its episodes never reads."""
NOT_OF_A_PLAN = ("run.dir", "run.trackers", "engine.exchange")
"""What a forecast, which writes nothing, never reads."""

AnyConfig = TypeVar("AnyConfig", bound=Any)


def admit(
    config: AnyConfig, overrides: Sequence[str] = (), unused: Sequence[str] = ()
) -> AnyConfig:
    """The recipe as it may be used; NotTrusted if it is a stranger's and would do something.

    overrides   key=value of the user's command: these are the user's own
    unused      sections and keys that are left out of a stranger's recipe, so that they need no judgement
    """
    source = stranger()
    if source is None:
        return config
    fields = type(config).model_fields
    keys: dict[str, object] = {}
    for name in unused:
        section, _, key = name.partition(".")
        default = fields[section].default
        for one in [key] if key else type(default).model_fields:
            keys[f"{section}.{one}"] = getattr(default, one)
    if "model.path" in keys and config.model.path:
        keys["model.path"] = "none"
    file = Path(source.file)
    if file.name == SETTINGS:  # whatever it says, a run is where it lies
        keys |= {"run.dir": fields["run"].default.dir, "run.name": file.resolve().parent.name}
    config = config.changed(keys)
    defaults = {name: info.default.model_dump() for name, info in fields.items()}
    own = [override.partition("=")[0] for override in overrides]
    check_settings(config.model_dump(), defaults, own)
    return config
