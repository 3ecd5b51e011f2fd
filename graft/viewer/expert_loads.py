"""The loads of a run's experts as its folder has them, checked: a picture of layers x experts."""

from __future__ import annotations

import math
from typing import Any

from graft.files import read_object
from graft.runs import RunRecord
from graft.train.run_dir.expert_loads import FILE

MAX_CELLS = 1 << 17


def expert_loads(record: RunRecord) -> dict[str, Any] | None:
    """Steps, layers and loads; None: the model has no experts, or the file is not one of ours."""
    written = read_object(record.path / FILE)
    layers, loads = written.get("layers"), written.get("loads")
    if not isinstance(layers, list) or not isinstance(loads, list) or len(layers) != len(loads):
        return None
    widths = {len(row) if isinstance(row, list) else 0 for row in loads}
    if len(widths) != 1 or not 0 < len(loads) * max(widths) <= MAX_CELLS:
        return None
    numbers = [
        *layers,
        written.get("first"),
        written.get("last"),
        *(load for row in loads for load in row),
    ]
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
        return None
    phase = "warm-up" if written.get("phase") == "sft" else "RL"
    steps = f"{phase} steps {written['first']:g} to {written['last']:g}"
    return {"steps": steps, "layers": layers, "loads": loads}
