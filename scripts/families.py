"""The table of docs/models.md: every family with a native decoder, and what can be done with it.

python -P scripts/families.py      # writes it into the page
"""

from __future__ import annotations

import re
from pathlib import Path

from graft.models.families.table import FAMILIES
from graft.models.io.tensor_names import EXPERT_NAMES
from graft.models.parallel.layout import COMPUTED
from graft.models.shape import ARCHITECTURES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BLOCK = re.compile(r"(<!-- families -->\n).*?(<!-- /families -->)", re.DOTALL)
HEAD = (
    "family",
    "class in transformers",
    "layers",
    "CPU, fp32",
    "GPU, bf16",
    "adapters",
    "split",
    "GGUF",
)
RECURRENT = {
    "delta": "gated delta net and attention with an output gate",
    "mamba": "Mamba-2 and attention",
    "conv": "gated short convolution and attention",
}
"""What the page calls the mixers of a family, by the kind of its recurrent layers."""


def render() -> str:
    """The table as Markdown."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for name, family in FAMILIES.items():
        layers, adapters, gguf = "attention, MLP", "every matrix", "yes"
        is_split = COMPUTED.issuperset(family.switches) and name not in EXPERT_NAMES
        split = "FSDP2, tensor parallel" if is_split else "FSDP2"
        if family.has_experts:
            layers, adapters, gguf = "attention, experts", "attention, each expert", "no"
        if name == "gpt_oss":
            layers = "attention with and without window, sinks, experts"
        if name in ("gemma3_text", "ministral"):
            layers = "attention with and without window, MLP"
        if name == "ministral":
            gguf = "no"
        if name == "mistral":  # llama.cpp's files say llama
            layers, gguf = "attention, window in older models, MLP", "as `llama`"
        gpu = "exact on Hopper"
        if family.recurrence:
            rest = layers.split(", ")[-1]
            if family.has_experts and not family.needs_experts:
                rest += " or MLP"
            layers = f"{RECURRENT[family.recurrence['kind']]}, {rest}"
            if family.has_single_layers:
                layers = layers.replace(" and ", ", ") + ", alone in a layer"
            gguf, gpu = "no", "through transformers"
            adapters = adapters.replace("attention", "mixers")
            split = "FSDP2"
        names = f"`{name}`", f"`{ARCHITECTURES[name]}`"
        rows.append((*names, layers, "exact", gpu, adapters, split, gguf))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill(page: str) -> str:
    """The page with the table of today's code in it."""
    return BLOCK.sub(lambda found: f"{found[1]}{render()}{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
