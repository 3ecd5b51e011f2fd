"""`graft generate`: completions of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import AsJson


def generate(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, run, checkpoint or .gguf file.")
    ],
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="May be given several times.")
    ],
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token.")] = False,
    n: Annotated[int, typer.Option(min=1, help="Completions per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps every token.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps every token.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps every token.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of the text so far are less likely.")
    ] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End where this text appears.")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="A file with the JSON schema of every answer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Without the chat template: the text as it is.")
    ] = False,
    template: Annotated[str, typer.Option(help="Chat template: a name, path or text.")] = "",
    template_args: Annotated[
        list[str] | None,
        typer.Option("--template-arg", help="A variable it reads: enable_thinking=false."),
    ] = None,
    device: Annotated[str, typer.Option()] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Sample from a model. With --json: tokens, text, log-probs and entropies of every token."""
    from graft.evaluate.generate import Generator, read_schema, read_variables
    from graft.rollout.event_loop import run
    from graft.rollout.options import RolloutOptions
    from graft.train.monitor.printable import visible
    from graft.train.run_dir.checkpoint import latest_model

    options = RolloutOptions(
        samples=n,
        seed=seed,
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        structure=None if schema is None else read_schema(schema),
    )
    generator = Generator.open(
        latest_model(model),
        device=device,
        dtype=dtype,
        template=template or None,
        template_args=read_variables(template_args or []),
    )
    if generator.note:
        typer.echo(generator.note, err=True)
    drawn = run(lambda: generator.complete(prompt, options, raw=raw))
    if as_json:
        answers = [
            {"prompt": text, "completions": completions}
            for text, completions in zip(prompt, drawn, strict=True)
        ]
        typer.echo(json.dumps({"model": model, "answers": answers}))
        return
    for text, completions in zip(prompt, drawn, strict=True):
        for completion in completions:
            if len(prompt) * n > 1:
                typer.echo(f"--- {text}")
            answer = completion["text"]
            typer.echo(visible(answer) if sys.stdout.isatty() else answer)
