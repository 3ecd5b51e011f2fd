"""The table of docs/models.md: every family with a native decoder, and what can be done with it.

python -P scripts/families.py      # writes it into the page
"""

from __future__ import annotations

import re
from pathlib import Path

from graft.models.families.table import FAMILIES
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


def render() -> str:
    """The table as Markdown."""
    rows = [HEAD, ("---",) * len(HEAD)]
    on_gpu, elsewhere = "exact on Hopper", "by transformers, with vLLM or SGLang"
    for name, family in FAMILIES.items():
        layers, gpu, adapters = "attention, MLP", on_gpu, "every matrix"
        is_split = COMPUTED.issuperset(family.switches)
        split, gguf = "FSDP2, tensor parallel" if is_split else "no: each process holds all", "yes"
        if family.has_experts:
            layers, gpu, adapters = "attention, experts", elsewhere, "attention, each expert"
            gguf = "no"
        if name == "gpt_oss":
            layers = "attention with and without window, sinks, experts"
        if name == "gemma3_text":
            layers, gpu = "attention with and without window, MLP", elsewhere
        if name == "mistral":  # llama.cpp's files say llama
            layers, gpu, gguf = (
                "attention, window in older models, MLP",
                f"{on_gpu}, without window",
                "as `llama`",
            )
        rows.append(
            (f"`{name}`", f"`{ARCHITECTURES[name]}`", layers, "exact", gpu, adapters, split, gguf)
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill(page: str) -> str:
    """The page with the table of today's code in it."""
    return BLOCK.sub(lambda found: f"{found[1]}{render()}{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
