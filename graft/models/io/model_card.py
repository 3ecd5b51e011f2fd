"""The model card: where weights come from, what they score, how to load them.

Everything is read from the files of the run, so a card states only what was measured:

    runs/quick/config.yaml                    the recipe
    runs/quick/summary.json                   scores before and after, versions, machine
    runs/quick/evaluations/*.json             tables of `graft eval`: the rows of this checkpoint
    runs/quick/checkpoints/rl-000040/         the weights; state.json has a held-out score, if any

The summary's scores "after" belong to the checkpoint that it names.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from graft.files import read_object
from graft.models.io.lineage import Lineage, lineage_of, section_of, without_paths
from graft.models.shape import ModelShape
from graft.trust.bounds import MAX_YAML, OutOfBounds, check_yaml, read_bytes
from graft.trust.links import check_links
from graft.trust.masking import mask, mask_shapes, masked
from graft.version import __version__

LABELS = {"before": "before RL", "after": "this checkpoint"}


@dataclass(frozen=True, slots=True)
class Origin:
    """What is known about the training behind a folder of weights."""

    checkpoint: str = ""
    """Its name, such as rl-000040; empty for a model that no run of graft has written."""
    run: str = ""
    recipe: str = ""
    """The text of config.yaml."""
    base: Lineage = field(default_factory=Lineage)
    """The model that the run started from."""
    chat_template: str = ""
    """The recipe's own, if it names one: a name, path or text."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """{"before": {"greedy": 0.2}, "after": {"greedy": 0.9}}, held-out scores of the run itself."""
    leakage: str = ""
    """How many of these tasks the run trained on; "" if none."""
    evaluations: Sequence[tuple[str, str, Mapping[str, str]]] = ()
    """(evaluation, set of tasks, its numbers) of this checkpoint."""
    captions: Mapping[str, str] = field(default_factory=dict)
    """How each of those evaluations was done, in its own words."""
    versions: Mapping[str, str] = field(default_factory=dict)
    rounds_kv: bool = False
    """Whether the run rounded keys and values."""


def read_origin(model: Path) -> Origin:
    """Read the files of the run around a checkpoint; of any other model only its base."""
    run = model.parent.parent
    if model.parent.name != "checkpoints" or not (run / "config.yaml").exists():
        return Origin(base=lineage_of(str(model)))
    check_links(run)
    recipe = read_bytes(run / "config.yaml", MAX_YAML).decode(errors="replace")
    recipe = _without_secrets(recipe)
    section = section_of(recipe, "model")
    summary, state = read_object(run / "summary.json"), read_object(model / "state.json")
    evaluations, captions = _evaluations(run / "evaluations", model.name)
    scores = {"before": _numbers(summary.get("before") or state.get("before"))}
    if Path(str(summary.get("checkpoint", ""))).name == model.name:
        scores["after"] = _numbers(summary.get("after"))
    if not scores.get("after"):
        scores["after"] = _numbers({"sampled": state.get("score")})
    return Origin(
        checkpoint=model.name,
        run=run.name,
        recipe=recipe,
        base=lineage_of(str(section.get("path") or ""), run),
        chat_template=str(section.get("chat_template") or ""),
        scores={when: found for when, found in scores.items() if found},
        leakage=str((summary.get("leakage") or state.get("leakage") or {}).get("note", "")),
        evaluations=evaluations,
        captions=captions,
        versions=summary.get("versions") or {},
        rounds_kv=section_of(recipe, "engine").get("kv") == "fp8",
    )


def _without_secrets(recipe: str) -> str:
    """The text of config.yaml; one of an older version may hold secrets in clear."""
    import yaml

    try:
        check_yaml(recipe, "config.yaml")
        values = yaml.safe_load(recipe)
    except (yaml.YAMLError, OutOfBounds):
        return mask(recipe)
    hidden = masked(values)
    return mask_shapes(recipe) if hidden == values else yaml.safe_dump(hidden, sort_keys=False)


def _numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: v for name, v in (values or {}).items() if isinstance(v, int | float)}


def _evaluations(
    folder: Path, checkpoint: str
) -> tuple[list[tuple[str, str, dict[str, str]]], dict[str, str]]:
    """This checkpoint's rows in the tables of `graft eval`, and the tables' captions."""
    found: list[tuple[str, str, dict[str, str]]] = []
    captions: dict[str, str] = {}
    # a link in a stranger's run leads to files that are not of the run
    files = [] if folder.is_symlink() else sorted(folder.glob("*.json"))
    for file in (one for one in files if not one.is_symlink()):
        table = read_object(file)
        for row in table.get("rows", []):
            if row.get("checkpoint") == checkpoint:
                found += [
                    (file.stem, label, _format_scores(n)) for label, n in row["scores"].items()
                ]
                captions[file.stem] = table.get("caption", "")
    return found, captions


def _format_scores(numbers: Mapping[str, Any]) -> dict[str, str]:
    """
    >>> _format_scores({"tasks": 200, "measures": {"pass@4": {"value": 0.5, "interval": [0.43, 0.57]}}})
    {'tasks': '200', 'pass@4': '0.500 [0.430, 0.570]'}
    """
    texts = {name: str(numbers[name]) for name in ("tasks", "samples") if name in numbers}
    for name, measured in numbers["measures"].items():
        bounds = ", ".join(f"{end:.3f}" for end in measured["interval"] or ())
        texts[name] = f"{measured['value']:.3f}" + (f" [{bounds}]" if bounds else "")
    return texts


def model_card(
    name: str,
    shape: ModelShape,
    origin: Origin,
    *,
    num_params: int,
    dtype: torch.dtype | None,
    notes: Sequence[str] = (),
    converted: str = "",
    is_chat: bool = True,
) -> str:
    """The text of README.md. dtype None: adapters alone; converted: what it was, if not graft's."""
    first = f"{shape.family} decoder with {num_params:,} parameters"
    if dtype is None:
        first = f"Adapters (LoRA) of a {first}"
    else:
        first = f"A {first}, {str(dtype).removeprefix('torch.')}"
    if origin.run:
        first += f": checkpoint `{origin.checkpoint}` of the run `{origin.run}`"
        base = origin.base.label
        first += f", which started from `{base}`" if base else ", from random weights"
    first += f". {converted}" if converted else ". Exported by graft."
    if origin.rounds_kv:
        first += (
            " Keys and values were rounded to eight bits in sampling and in training (`engine.kv: fp8`): "
            "log-probs that are computed without it differ slightly."
        )
    sections = [
        _front(shape, dtype, origin.base),
        f"# {name}",
        first,
        *(f"> {note}" for note in notes),
        "## How to load it",
        _how(name, dtype, is_chat),
    ]
    if origin.scores or origin.evaluations:
        sections += ["## Scores", *_scores(origin)]
    if origin.recipe:
        fence = _fence(origin.recipe)
        sections += ["## Recipe", f"{fence}yaml\n{origin.recipe.strip()}\n{fence}"]
    sections += ["## License", _license(origin.base), "## Versions", _versions(origin)]
    return without_paths("\n\n".join(sections) + "\n")


def _front(shape: ModelShape, dtype: torch.dtype | None, base: Lineage) -> str:
    library = "peft" if dtype is None else "transformers"
    known = ({"base_model": base.name} if base.name else {}) | dict(base.license)
    entries = "".join(f"{key}: {json.dumps(value)}\n" for key, value in known.items())
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n{entries}"
        f"tags:\n- graft\n- reinforcement-learning\n- {shape.family}\n---"
    )


def _license(base: Lineage) -> str:
    if base.license:
        named = base.license.get("license_name") or base.license["license"]
        return f"`{named}`, the license of the base model `{base.label}`."
    if base.label:
        return (
            f"Not known: no license was found in the card of the base model `{base.label}`. Look it up "
            "before you publish these weights, and add `license` to the header."
        )
    return "None has been chosen. Add `license` to the header before you publish these weights."


def _how(name: str, dtype: torch.dtype | None, is_chat: bool) -> str:
    if dtype is None:
        load = f"""from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

# the base that adapter_config.json names has to be there
model = AutoPeftModelForCausalLM.from_pretrained("{name}")"""
    else:
        load = f"""import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", dtype={dtype})"""
    if is_chat:
        inputs = """messages = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)"""
    else:
        inputs = 'inputs = tokenizer("...", add_special_tokens=False, return_tensors="pt")'
    shell = f"\n\nor `graft generate {name} --prompt '...' --greedy`" if dtype is not None else ""
    return f"""```python
{load}
tokenizer = AutoTokenizer.from_pretrained("{name}")
{inputs}
tokens = model.generate(**inputs, do_sample=False, max_new_tokens=256)[0]
print(tokenizer.decode(tokens[inputs["input_ids"].shape[1]:]))
```{shell}"""


def _scores(origin: Origin) -> list[str]:
    found: list[str] = []
    if origin.scores:
        names = list(dict.fromkeys(name for row in origin.scores.values() for name in row))
        rows = [["held-out tasks", *names]]
        for when, values in origin.scores.items():
            shown = [f"{values[name]:.4g}" if name in values else "" for name in names]
            rows.append([LABELS[when], *shown])
        found.append(_table(rows))
        found += [f"Not held out: {origin.leakage}."] if origin.leakage else []
    if origin.evaluations:
        names = list(dict.fromkeys(n for *_, numbers in origin.evaluations for n in numbers))
        rows = [["evaluation", "set", *names]]
        for evaluation, label, numbers in origin.evaluations:
            rows.append([evaluation, label, *(numbers.get(name, "") for name in names)])
        found.append(_table(rows))
        found += [f"{name}: {caption}" for name, caption in origin.captions.items() if caption]
    return found


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rest])


def _versions(origin: Origin) -> str:
    here = {"graft": __version__, "torch": torch.__version__, "python": platform.python_version()}
    here["transformers"] = metadata.version("transformers")
    rows = [["", *here], ["exported with", *here.values()]]
    if origin.versions:
        rows.append(["trained with", *(origin.versions.get(name, "") for name in here)])
    return _table(rows)


def _fence(text: str) -> str:
    """Longer than any run of backticks inside."""
    fence = "```"
    while fence in text:
        fence += "`"
    return fence
