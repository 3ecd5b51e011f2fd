"""`agent.main` and `agent.models` from Python: which conversation is the agent's, which model answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from graft.api.engine import PolicyEngine
from graft.api.settings import settings
from graft.user_code import UserCodeError

ModelRuleLike = str | Mapping[str, str] | PolicyEngine
"""policy; {"endpoint": URL, "model": NAME, "api_key_env": VARIABLE}; or an Engine that is not trained."""


def speaker_options(
    main: Mapping[str, str], models: Mapping[str, ModelRuleLike], embeddings: Mapping[str, str]
) -> dict[str, Any]:
    """The arguments of a gateway for these rules; ConfigError or UserCodeError for wrong ones."""
    from graft.gateway.speakers.main_choice import MainPattern
    from graft.train.rollouts.agents import make_routes

    engines = {name: rule for name, rule in models.items() if isinstance(rule, PolicyEngine)}
    rules = {name: {"frozen": name} if name in engines else rule for name, rule in models.items()}
    agent = {"main": dict(main), "models": rules, "embeddings": dict(embeddings)}
    config = settings(agent=agent)
    if paths := {*config.agent.frozen.values()} - {*engines}:
        raise UserCodeError(
            f"models names the frozen model {min(paths)!r}; from Python give its engine: "
            "graft.Engine(graft.load(...))"
        )
    return {
        "main": MainPattern(**config.agent.main),
        "routes": make_routes(config),
        "frozen": engines,
    }


@contextmanager
def frozen_samplers(engine: PolicyEngine, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with the samplers of the frozen engines, which read the tokens of `engine`'s policy."""
    from graft.train.rollouts.frozen_players import is_same_vocabulary

    with ExitStack() as held:
        samplers: dict[str, Any] = {}
        for name, frozen in options.get("frozen", {}).items():
            if not is_same_vocabulary(frozen.policy.tokenizer, engine.policy.tokenizer):
                raise UserCodeError(
                    f"models: the engine of {name!r} has another tokenizer than the policy; give an endpoint"
                )
            samplers[name] = held.enter_context(frozen.sampling())
        yield {**options, "frozen": samplers}
