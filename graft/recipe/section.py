"""What the sections of a recipe share.

Each field's line of documentation is what `graft config --keys` prints.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

MAX_WHOLE = 2**32 - 1
"""Of whole numbers, such as seeds of 32 bits; larger ones are slips that overflow or fill memory later."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _counts(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for a number, which would be read as 1, and numbers that count nothing real."""
        types = {*re.findall(r"\w+", str(cls.model_fields[info.field_name or ""].annotation))}
        if isinstance(value, bool) and types & {"int", "float"} and "bool" not in types:
            raise ValueError("give a number, not true or false")
        if isinstance(value, int) and "int" in types and value > MAX_WHOLE:
            raise ValueError(f"must be at most {MAX_WHOLE:,}")
        return value
