"""Evaluations and sampled rows by keyword arguments, which the objects of these functions share out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from graft.datagen.accepted_rows import RejectionSampling
from graft.datagen.rejection_sampling import sample_rows
from graft.evaluate.comparison import Comparison
from graft.evaluate.model_source import ModelSource
from graft.evaluate.options import EvalOptions
from graft.evaluate.run import evaluate_checkpoints
from graft.evaluate.table import ScoreTable
from graft.rollout.options import RolloutOptions


def evaluate_model(source: str, **given: Any) -> tuple[ScoreTable, Any, Comparison | None]:
    model, options, rest = share_out(source, EvalOptions, given)
    return evaluate_checkpoints(model, options, **rest)


def sample_model(source: str, env: str, out: str, **given: Any) -> RejectionSampling:
    model, options, rest = share_out(source, RolloutOptions, given)
    return sample_rows(model, env, out, options, **rest)


def share_out(source: str, kind: Any, given: dict[str, Any]) -> tuple[ModelSource, Any, dict]:
    rest = {"path": source, **given}
    if isinstance(rest.get("endpoint"), str):
        rest["endpoint"] = [rest["endpoint"]]

    def make(one: Any) -> Any:
        names = [field.name for field in fields(one) if field.name in rest]
        return one(**{name: rest.pop(name) for name in names})

    return make(ModelSource), make(kind), rest
