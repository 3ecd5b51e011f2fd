"""Tests at loading, on a small tree, whether a model's attention honours a tree mask.

    4 prompt tokens, forked:  a a a a a ─ b b b        each path alone in one call: the reference
                                        └ c c c c c c  all paths as padded rows: must match it
                              d d d d d d d            packed as a tree: matches, or is not used

Whether a model passes depends on its code and not on its weights. One that builds its mask from a
padding mask, counts positions internally, or carries a state from token to token fails. The gap is also
compared with that of the worst mistake, all tokens read as one text, because a model of tiny weights
gives nearly the same log-probs for any context. Sliding windows are narrowed while the probe runs, so
that its few tokens reach the end of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graft.models.io.tensors import first_line
from graft.models.shape import UnsupportedModel
from graft.models.transformers.mask import TreeMask
from graft.models.transformers.model import TransformersModel
from graft.models.transformers.rows import paths_of
from graft.models.transformers.shape import fixed_length
from graft.models.tree.forest import Forest
from graft.tolerances import tolerances
from graft.types import Author, Episode, Leaf, Span, Task

SPANS: list[tuple[int, int | None]] = [(4, None), (5, 0), (3, 1), (6, 1), (7, 0)]
"""Number of tokens of each span of the tree, and the index of its parent."""
PROBE_WINDOW = 4
"""Size of sliding windows while the probe runs."""
MAX_GAP_SHARE = 1 / 8
"""Largest gap that passes, as a share of the gap of all tokens read as one text."""


@torch.no_grad()
def run_probe(model: TransformersModel) -> list[str]:
    """Set the model's `body` and `tree_mask` to what works, and return notes for the user."""
    forest = probe_forest(model)
    tolerance = tolerances(model.dtype).transformers_gap
    why_not, tree_mask = "", None
    try:
        tree_mask = TreeMask.of(model.module.config.get_text_config())
    except ValueError as error:
        why_not = str(error)
    with narrow_windows(model.module):
        reference = _reference(model, forest)
        _find_body(model, forest, reference, tolerance)
        if tree_mask is not None:
            is_sliding = tree_mask.window > 0
            model.tree_mask = replace(tree_mask, window=PROBE_WINDOW) if is_sliding else tree_mask
            worst_gap = float((_as_one_text(model, forest) - reference).abs().mean())
            gap, why = _gap(model, forest, reference)
            if gap > min(tolerance, MAX_GAP_SHARE * worst_gap):
                why_not = why or f"log-probs under it are {gap:.2g} off on average"
    model.tree_mask = None if why_not else tree_mask
    return _notes(model, why_not)


def _reference(model: TransformersModel, forest: Forest) -> Tensor:
    try:
        return separate_logprobs(model, forest)
    except Exception as error:  # transformers code may raise anything
        raise UnsupportedModel(
            f"{model.architecture} failed on a few tokens: {type(error).__name__}: {first_line(error)}"
        ) from error


def _find_body(
    model: TransformersModel, forest: Forest, reference: Tensor, tolerance: float
) -> None:
    """Set `body` to the first candidate with which padded rows match the reference."""
    names = {id(part): name for name, part in model.module.named_modules() if name}
    bodies = (model.module.base_model, model.module.get_decoder())
    why = ""
    candidates = dict.fromkeys(names[id(body)] for body in bodies if id(body) in names)
    for name in [*candidates, None]:
        model.body = name
        gap, why = _gap(model, forest, reference)
        if gap <= tolerance:
            return
        why = why or f"{gap:.2g} apart on average"
    raise UnsupportedModel(
        f"{model.architecture} cannot be trained as a causal language model: padded rows give other "
        f"log-probs than the same texts one at a time ({why}), so its log-prob of a token depends on "
        "more than the tokens before it"
    )


def _notes(model: TransformersModel, why_not: str) -> list[str]:
    notes: list[str] = []
    if why_not:
        notes.append(
            f"plain packing: {model.shape.family} cannot use the tree mask ({why_not}), so every path "
            "is a row of its own. The numbers are the same; a prompt is computed again for each of "
            "its samples, which multiplies time and memory by up to the number of samples"
        )
    if model.body is None:
        notes.append(
            f"the head of {model.shape.family} cannot be run on chunks: logits of all tokens of a "
            "micro-batch are held at once; lower train.tokens_per_micro if memory runs out"
        )
    if limit := fixed_length(model.module.config.get_text_config()):
        notes.append(
            f"the rope frequencies of {model.shape.family} change once a text exceeds {limit} tokens, "
            f"in all rows of its micro-batch, so only texts up to {limit} tokens can be trained"
        )
    return notes


def probe_forest(model: TransformersModel) -> Forest:
    """A small tree of random tokens; all but the prompt's are trained."""
    config = model.module.config.get_text_config()
    special = {  # such as placeholders of images
        value
        for part in (model.module.config, config)
        for name, value in part.to_dict().items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    plain = [token for token in range(min(model.shape.vocab_size, 4096)) if token not in special]
    generator = torch.Generator().manual_seed(0)
    episode = Episode(Task("probe", ""))
    for count, parent in SPANS:
        drawn = torch.randint(len(plain), (count,), generator=generator).tolist()
        tokens, zeros = [plain[i] for i in drawn], [0.0] * count
        if parent is None:
            episode.append(Span(None, Author.TASK, tokens))
        else:
            flags = [True] * count
            episode.append(
                Span(parent, Author.POLICY, tokens, tokens, zeros, zeros, [0] * count, flags)
            )
    inner = {parent for _, parent in SPANS}
    episode.leaves = [Leaf((tip,)) for tip in range(len(SPANS)) if tip not in inner]
    rows = list(episode.trajectories())
    lengths = torch.tensor([sum(map(len, row.spans[1:])) for row in rows])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    return Forest(rows, mask, model.device)


def separate_logprobs(model: TransformersModel, forest: Forest) -> Tensor:
    """[U] log-probs, each path in a separate call of the module."""
    log_p = torch.zeros(len(forest.tokens), model.shape.vocab_size, device=model.device)
    for path in paths_of(forest.runs):
        index = torch.from_numpy(path).to(model.device)
        log_p[index] = _log_p(model, forest.tokens[index])
    return log_p[forest.before].gather(1, forest.actions[:, None])[:, 0]


def _as_one_text(model: TransformersModel, forest: Forest) -> Tensor:
    """[U] log-probs if all tokens of the forest were one text."""
    log_p = _log_p(model, forest.tokens)
    return log_p[forest.before].gather(1, forest.actions[:, None])[:, 0]


def _log_p(model: TransformersModel, tokens: Tensor) -> Tensor:
    return model.module(input_ids=tokens[None]).logits[0].float().log_softmax(-1)


def _gap(model: TransformersModel, forest: Forest, reference: Tensor) -> tuple[float, str]:
    """Mean distance of the model's log-probs from the reference; inf and the reason if it failed."""
    try:
        gap = (model.action_logprobs(forest)[0] - reference).abs().mean()
    except Exception as error:  # an unexpected mask may fail anywhere in transformers' code
        return float("inf"), f"it fails with {type(error).__name__}: {first_line(error)}"
    return (float(gap), "") if gap.isfinite() else (float("inf"), "it gives no finite numbers")


@contextmanager
def narrow_windows(module: Any) -> Iterator[None]:
    """Set every sliding window of the module's configs to PROBE_WINDOW tokens."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    windows = [(config, getattr(config, "sliding_window", None)) for config in configs.values()]
    windows = [(config, window) for config, window in windows if isinstance(window, int)]
    try:
        for config, _ in windows:
            config.sliding_window = PROBE_WINDOW
        yield
    finally:
        for config, window in windows:
            config.sliding_window = window
