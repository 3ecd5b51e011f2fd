"""The tensors of a checkpoint under the names that a text model alone has.

model.language_model.norm.weight                       model.norm.weight
model.layers.0.mlp.experts.gate_up_proj [2, 48, D]     model.layers.0.mlp.experts.0.gate_proj.weight [24, D]
                                                       model.layers.0.mlp.experts.0.up_proj.weight   [24, D]
                                                       ... of expert 1
model.visual.*, mtp.*                                  left out
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from graft.models.families.table import FAMILIES
from graft.models.io.stream import StoredTensor
from graft.models.io.tensor_names import EXPERT_NAMES, ExpertNames, own_name
from graft.models.io.tensors import ModelFileError
from graft.models.shape import ModelShape

TEXT = "model.language_model."
"""Prefix of the text part in models that also read pictures."""
OTHERS = re.compile(r"(model\.visual|mtp)\.")
LAYER = re.compile(r"model\.layers\.(\d+)\.")


EXPERT_MATRICES = {"gate_up": ("gate_proj", "up_proj"), "up": ("up_proj",), "down": ("down_proj",)}
"""What a tensor of all experts is made of, by the beginning of its name."""


class StoredPart(NamedTuple):
    """A tensor of a checkpoint, or some rows of one expert's matrix in a tensor of all experts."""

    name: str
    size: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    """The first of these rows."""

    @property
    def inside(self) -> tuple[int, slice] | None:
        """The expert and the rows; None: the whole tensor."""
        if self.expert is None:
            return None
        return self.expert, slice(self.start, self.start + self.size[0])

    def place(self, whole: StoredTensor) -> StoredTensor:
        """The bytes of this part, of those of the tensor."""
        if self.expert is None:
            return whole
        rows = whole.sizes[0] * whole.sizes[1]
        of_row = (whole.stop - whole.start) // rows
        first = whole.start + (self.expert * whole.sizes[1] + self.start) * of_row
        return whole._replace(start=first, stop=first + self.size[0] * of_row, sizes=self.size)


def find_parts(
    shape: ModelShape, stored: Mapping[str, tuple[int, ...]], origin: str
) -> tuple[dict[str, StoredPart], list[str]]:
    """The tensors of a checkpoint by our names, and the names of those that are left out."""
    may_have_others = FAMILIES[shape.family].has_later_layers
    names = EXPERT_NAMES.get(shape.family, ExpertNames())
    block = own_name(shape.family, names.block)
    of_all = re.compile(rf"(.+\.{block}\.experts)\.(gate_up|up|down)_proj")
    parts: dict[str, StoredPart] = {}
    others: list[str] = []
    for name, size in stored.items():
        ours = name
        if may_have_others:
            if name.startswith(TEXT):
                ours = f"model.{name.removeprefix(TEXT)}"
            layer = LAYER.match(ours)
            if OTHERS.match(ours) or (layer and int(layer[1]) >= shape.layers):
                others.append(name)
                continue
        together = None if names.gate_up or len(size) != 3 else of_all.fullmatch(ours)
        new = {ours: StoredPart(name, size)}
        if together and shape.experts is not None:
            matrices = EXPERT_MATRICES[together[2]]
            count, rows, _ = size
            if count != shape.experts.count or not rows or rows % len(matrices):
                raise ModelFileError(
                    f"{origin}: {name} has the sizes {list(size)}; it must hold {len(matrices)} matrices of "
                    f"each of {shape.experts.count} experts, as config.json says"
                )
            own = [own_name(shape.family, matrix) for matrix in matrices]
            new = _split(name, size, together[1], own)
        if twice := sorted(new.keys() & parts.keys()):
            raise ModelFileError(
                f"{origin} holds {twice[0]} twice, in {parts[twice[0]].name} and in {name}; delete one"
            )
        parts |= new
    return parts, others


def _split(
    name: str, size: tuple[int, ...], prefix: str, matrices: list[str]
) -> dict[str, StoredPart]:
    """The matrices of each expert in a tensor [experts, rows, columns]; they share the rows equally."""
    count, rows, columns = size
    each = rows // len(matrices)
    return {
        f"{prefix}.{expert}.{matrix}.weight": StoredPart(
            name, (each, columns), expert, number * each
        )
        for expert in range(count)
        for number, matrix in enumerate(matrices)
    }


def describe_others(names: list[str], origin: str) -> str:
    """One line about the tensors that are left out."""
    stems = sorted({stem_of(name) for name in names})
    return (
        f"{origin}: {len(names)} tensors are no part of the text model and are left out "
        f"({', '.join(stems)}); what is saved of it has none of them"
    )


def stem_of(name: str) -> str:
    """
    >>> stem_of("model.visual.blocks.0.norm1.weight"), stem_of("model.layers.46.enorm.weight")
    ('model.visual', 'model.layers.46')
    """
    layer = LAYER.match(name)
    return layer[0].rstrip(".") if layer else name[: OTHERS.match(name).end() - 1]  # type: ignore[union-attr]
