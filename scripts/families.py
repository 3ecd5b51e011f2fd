"""The table of docs/models.md: every family with a native decoder, and what can be done with it.

python -P scripts/families.py      # writes it into the page
"""

from __future__ import annotations

import re
from pathlib import Path

from graft.models.families.table import FAMILIES
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
    for name, family in FAMILIES.items():
        plain = (
            "attention, MLP", "exact", "exact on Hopper", "every matrix", "FSDP2, tensor parallel", "yes",
        )  # fmt: skip
        experts = (
            "attention, experts", "exact", "by transformers, with vLLM or SGLang",
            "attention, each expert", "no: each process holds all", "no",
        )  # fmt: skip
        cells = experts if family.has_experts else plain
        if name == "mistral":  # llama.cpp's files say so
            cells = (*plain[:-1], "as `llama`")
        rows.append((f"`{name}`", f"`{ARCHITECTURES[name]}`", *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill(page: str) -> str:
    """The page with the table of today's code in it."""
    return BLOCK.sub(lambda found: f"{found[1]}{render()}{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
