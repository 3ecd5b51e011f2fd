"""Attributes that a Policy, an Engine or a Learner does not have: the error names what does it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from graft.spelling import suggestion

MEANT = {
    "train": "learner.step(episodes) learns",
    "fit": "learner.step(episodes) learns",
    "backward": "learner.step(episodes) learns",
    "optimizer": "learner.step(episodes) learns",
    "rollout": "graft.collect(engine, env) makes attempts",
    "sample": "graft.collect(engine, env) makes attempts, graft.generate(policy, prompts) completes texts",
    "chat": "graft.generate(policy, [messages]) completes chats",
    "save_pretrained": "policy.save(folder) writes such a folder",
    "save_model": "policy.save(folder) writes a folder",
    "from_pretrained": "graft.load(name) opens a model",
    "parameters": "policy.model is the torch module",
    "state_dict": "policy.model is the torch module",
    "eval": "graft.evaluate(policy, on=...) scores it",
}
"""Names that these things have in TRL, verl, transformers and vLLM."""


class ExplainedAttributes:
    """Answers a name that is not there."""

    if not TYPE_CHECKING:  # a type checker still refuses such names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(_explain(self, name))


def _explain(thing: Any, name: str) -> str:
    kind = type(thing).__name__
    kind = kind if kind == "Policy" else kind.removeprefix("Policy")
    text = f"{kind} has no attribute {name!r}"
    if name.startswith("_"):  # asked for by copy, pickle and notebooks
        return text
    if name in MEANT:
        return f"{text}; {MEANT[name]}"
    if name in sys.modules["graft"].__all__:
        return f"{text}; graft.{name}(...) is a function: see help(graft.{name})"
    hint = suggestion(name, [one for one in dir(thing) if not one.startswith("_")])
    return f"{text}{hint and ';'}{hint}"
