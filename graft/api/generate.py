"""Completions of prompts: text, tokens, log-probs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from graft.api.engine import PolicyEngine, engine_for, load_if_path
from graft.api.environments import Prompt
from graft.api.policy import Policy
from graft.recipe.json_schema import check_keywords
from graft.rollout.options import RolloutOptions
from graft.signatures import explain_arguments
from graft.structure import Structure
from graft.user_code import UserCodeError, describe_value


@explain_arguments
@dataclass(frozen=True, slots=True)
class Generation:
    """One completion; the lists have an entry per sampled token."""

    prompt: int
    """Which of the prompts it completes."""
    text: str
    """Without the token that ended it."""
    tokens: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    entropies: list[float] = field(repr=False)
    prompt_tokens: list[int] = field(repr=False)
    finish: str
    """stop: a stop token or stop text; length: max_tokens or the model's window."""


@explain_arguments
def generate(
    policy: Policy | PolicyEngine | str | PathLike[str],
    prompts: str | Sequence[Prompt],
    *,
    samples: int = 1,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    schema: Any = None,
    seed: int = 0,
    raw: bool = False,
) -> list[Generation]:
    """Sample completions: those of the first prompt, then those of the second, and so on.

    >>> answers = graft.generate(policy, ["What is 2+3?", "And 4+4?"], samples=2)
    >>> [(answer.prompt, answer.text) for answer in answers]
    [(0, '5'), (0, 'It is 5.'), (1, '8'), (1, '8')]

    policy       a Policy, an Engine, or what `graft.load` takes
    prompts      a text, or a list of texts and lists of messages; the chat template renders them
    samples      completions per prompt
    max_tokens   tokens per completion
    temperature  0 is greedy
    top_p        below 1: only the likeliest tokens that together have this probability
    top_k        only this number of the likeliest tokens; 0: all
    repetition_penalty   above 1: tokens that the text has already are less likely
    stop         texts that end a completion
    schema       what every completion must be: a JSON schema, a pydantic model or a graft.Structure
    seed         the same prompt and seed give the same draws
    raw          True: prompts are texts to continue, without the chat template
    """
    from graft.rollout.event_loop import run

    arguments = {name: value for name, value in locals().items() if name != "run"}
    return run(lambda: agenerate(**arguments))


def _listed(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UserCodeError(
            f"prompts is {describe_value(prompts)}; give a text, or a list of texts"
        )
    for number, one in enumerate(prompts):
        if isinstance(one, Mapping):
            raise UserCodeError("prompts is one list of messages; write prompts=[messages]")
        if not isinstance(one, str | Sequence):
            raise UserCodeError(
                f"prompts[{number}] is {describe_value(one)}; give a text or messages"
            )
    return list(prompts)


@explain_arguments
async def agenerate(
    policy: Policy | PolicyEngine | str | PathLike[str],
    prompts: str | Sequence[Prompt],
    *,
    samples: int = 1,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    schema: Any = None,
    seed: int = 0,
    raw: bool = False,
) -> list[Generation]:
    """`generate` on the running event loop."""
    from graft.evaluate.generate import Generator

    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise UserCodeError(f"samples is {describe_value(samples)}; give a whole number from 1")
    given = _listed(prompts)
    structure = None if schema is None else Structure.of(schema)
    if structure is not None and structure.kind == "json":
        check_keywords(json.loads(structure.source))
    options = RolloutOptions(
        samples=samples,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        structure=structure,
    )
    policy = load_if_path(policy, "generate")
    with engine_for(policy, 0) as engine, engine.sampling() as sampler:
        generator = Generator(sampler, engine.policy.tokenizer, engine.policy.chat)
        drawn = await generator.complete(given, options, raw=raw)
    return [
        Generation(prompt=number, **completion)
        for number, completions in enumerate(drawn)
        for completion in completions
    ]
