"""What the sections of a recipe share.

Each field's line of documentation is what `graft config --keys` prints.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
