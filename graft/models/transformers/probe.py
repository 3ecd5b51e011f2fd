"""Does a model's attention honour a tree mask? Tried out on a small tree at loading.

    4 prompt tokens, forked:  a a a a a ─ b b b        each path alone, one row through the module: truth
                                        └ c c c c c c  all paths side by side, filled up: must be the same
                              d d d d d d d            packed as a tree: the same, or it is not used

Whether a model passes depends on its code and not on its weights: one that builds its mask from a
padding mask, counts positions by itself, or carries a state from token to token does not. A gap counts
against that of the crudest mistake, all tokens read as one text: a model of tiny weights says nearly
the same whatever it reads. While the probe runs sliding windows are narrow, else a few tokens would
never reach the end of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graft.models.shape import UnsupportedModel
from graft.models.transformers.mask import TreeMask
from graft.models.transformers.rows import paths_of
from graft.models.transformers.shape import fixed_length
from graft.models.tree.forest import Forest
from graft.tolerances import tolerances
from graft.types import Author, Episode, Leaf, Span, Task

if TYPE_CHECKING:
    from graft.models.transformers.model import TransformersModel

SPANS: list[tuple[int, int | None]] = [(4, None), (5, 0), (3, 1), (6, 1), (7, 0)]
"""Tokens of each span of the tree, and the number of the span it follows."""
NARROW = 4
"""Tokens that a sliding window holds while the probe runs."""
SHARE = 1 / 8
"""How large a gap may be beside that of all tokens read as one text."""


@torch.no_grad()
def settle(model: TransformersModel) -> list[str]:
    """Find out how the model can be asked, set it, and say what the user should know of it."""
    forest = probe_forest(model)
    agreeing = tolerances(model.dtype).transformers_gap
    why_not, sight = "", None
    try:
        sight = TreeMask.of(model.module.config.get_text_config())
    except ValueError as error:
        why_not = str(error)
    with narrow_windows(model.module):
        truth = _truth(model, forest)
        _settle_body(model, forest, truth, agreeing)
        if sight is not None:
            model.sight = replace(sight, window=NARROW) if sight.window else sight
            crude = float((_as_one_text(model, forest) - truth).abs().mean())
            gap, why = _gap(model, forest, truth)
            if gap > min(agreeing, SHARE * crude):
                why_not = why or f"log-probs under it are {gap:.2g} off on average"
    model.sight = None if why_not else sight
    return _notes(model, why_not)


def _truth(model: TransformersModel, forest: Forest) -> Tensor:
    try:
        return alone(model, forest)
    except Exception as error:  # whatever its code stops with
        raise UnsupportedModel(
            f"{model.architecture} cannot be run on a few tokens: {_told(error)}"
        ) from error


def _settle_body(model: TransformersModel, forest: Forest, truth: Tensor, agreeing: float) -> None:
    """Find the part below the head: the first candidate with which paths give what each gives alone."""
    names = {id(part): name for name, part in model.module.named_modules() if name}
    bodies = (model.module.base_model, model.module.get_decoder())
    why = ""
    candidates = dict.fromkeys(names[id(body)] for body in bodies if id(body) in names)
    for name in [*candidates, None]:
        model.body = name
        gap, why = _gap(model, forest, truth)
        if gap <= agreeing:
            return
        why = why or f"{gap:.2g} apart on average"
    raise UnsupportedModel(
        f"{model.architecture} cannot be trained as a causal language model: paths of a tree side by "
        f"side give other log-probs than each by itself ({why}), so what it says of a token depends on "
        "more than the tokens before it"
    )


def _notes(model: TransformersModel, why_not: str) -> list[str]:
    notes: list[str] = []
    if why_not:
        notes.append(
            f"plain packing: {model.shape.family} cannot use the tree mask ({why_not}), so every path "
            "is computed by itself. The numbers are the same; a prompt is computed again for each of "
            "its samples, which takes up to that many times the time and the memory"
        )
    if model.body is None:
        notes.append(
            f"the head of {model.shape.family} cannot be run by itself: logits of all tokens of a "
            "micro-batch are held at once; lower train.tokens_per_micro if memory runs out"
        )
    if limit := fixed_length(model.module.config.get_text_config()):
        notes.append(
            f"the positions of {model.shape.family} are turned otherwise once a text exceeds {limit} "
            f"tokens, in all rows of its micro-batch, so texts up to {limit} tokens can be trained"
        )
    return notes


def probe_forest(model: TransformersModel) -> Forest:
    """A small tree of random tokens, every one of them trained but the prompt's."""
    config = model.module.config.get_text_config()
    special = {  # the place of an image is no text
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


def alone(model: TransformersModel, forest: Forest) -> Tensor:
    """[U] log-probs from each path by itself, one call of the module for each."""
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


def _gap(model: TransformersModel, forest: Forest, truth: Tensor) -> tuple[float, str]:
    """How far the model's answers are from the truth on average; what stopped it if it gave none."""
    try:
        gap = (model.action_logprobs(forest)[0] - truth).abs().mean()
    except Exception as error:  # not our code: a mask it does not expect may break it anywhere
        return float("inf"), f"it stops with {_told(error)}"
    return (float(gap), "") if gap.isfinite() else (float("inf"), "it gives no finite numbers")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@contextmanager
def narrow_windows(module: Any) -> Iterator[None]:
    """Sliding windows of NARROW tokens wherever a config has one."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    with ExitStack() as stack:
        for config in configs.values():
            window = getattr(config, "sliding_window", None)
            if isinstance(window, int):
                config.sliding_window = NARROW
                stack.callback(_restore(config, window))
        yield


def _restore(config: Any, window: int) -> Callable[[], None]:
    return lambda: setattr(config, "sliding_window", window)
