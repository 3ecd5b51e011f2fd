"""A transformers model from a folder, ready to train: loaded, probed and configured."""

from __future__ import annotations

import os

import torch

from graft.models.transformers.files import load_pretrained
from graft.models.transformers.model import TransformersModel
from graft.models.transformers.probe import run_probe


def load_transformers_model(
    folder: str | os.PathLike[str], dtype: torch.dtype, device: torch.device | str
) -> TransformersModel:
    """The model in a Hugging Face folder; `notes` holds messages for the user."""
    model = TransformersModel(load_pretrained(folder, dtype, device))
    model.notes += run_probe(model)
    return model
