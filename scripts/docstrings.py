"""Shows docstrings on the site as they are written: examples and aligned lines become code blocks.

mkdocs.yml names this file as an extension of griffe, which reads the docstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def as_markdown(text: str) -> str:
    """Put paragraphs whose line breaks matter into fences; others stay.

    ">>> graft.make(id)"              -> a Python block
    "recipe    a name\\nprogress  True" -> a text block, since two blanks align its columns
    """
    paragraphs = re.split(r"\n{2,}", text.strip("\n"))
    return "\n\n".join(_fenced(paragraph) for paragraph in paragraphs)


def _fenced(paragraph: str) -> str:
    if paragraph.lstrip().startswith(">>>"):
        return f"```python\n{paragraph}\n```"
    if re.search(r"^\s|\S {2,}\S", paragraph, re.M):
        return f"```text\n{paragraph}\n```"
    return paragraph


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
