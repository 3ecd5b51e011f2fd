"""Actions beyond the vocabulary: rows of the head that no embedding has.

A model of 3 tokens learns two more actions, which begin as likely as tokens 0 and 2 are:

    extend(decoder, [0, 2])         head row   0  1  2 | 3  4 | 5 .. 66
                                    copy of            | 0  2 | zeros that pad it; nobody chooses them

Their ids, 3 and 4, are labels only. What such an action writes into the context is text, so the model
never reads an id without an embedding. On disk a model with actions is a Hugging Face folder like any
other, with their rows beside the weights in `actions.safetensors`: whoever does not know of them finds
the plain model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from graft.models.decoder import Decoder
from graft.models.io.load import ModelFileError, open_tensors, read_tensor

ACTIONS = "actions.safetensors"
"""The file of a model's extra rows: one tensor, ROWS [extra, width]."""
ROWS = "rows"
ACTION_ROWS = "actions.rows"
"""What these rows are called among weights that travel; no checkpoint of others has the name."""
SEED = 0
"""Of rows that start from no token: the same in every run, whatever else a run draws."""


def extend(decoder: Decoder, init_tokens: Sequence[int | None]) -> Decoder:
    """The decoder with one more head row per entry: a copy of that token's, or a random one.

    All other weights are shared with `decoder`, which is not meant to be used any further: training
    the one changes the other. Actions it may have had already are replaced.
    """
    vocab_size, width = decoder.shape.vocab_size, decoder.shape.width
    outside = [token for token in init_tokens if token is not None and not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"an action cannot start from token {outside[0]}: the model has {vocab_size} tokens; "
            f"give one of them, or None for a random row"
        )
    # as a linear layer of torch starts, drawn on the CPU: every device gets the same numbers
    generator = torch.Generator().manual_seed(SEED)
    bound = 1 / math.sqrt(width)
    rows = torch.empty(len(init_tokens), width).uniform_(-bound, bound, generator=generator)
    head = decoder.head_weight.detach()
    rows = rows.to(head)
    for row, token in zip(rows, init_tokens, strict=True):
        if token is not None:
            row.copy_(head[token])
    return _with_rows(decoder, rows)


def load_rows(decoder: Decoder, folder: str | os.PathLike[str]) -> Decoder | None:
    """The decoder with the actions that were saved in `folder`; None: there are none."""
    file = Path(folder) / ACTIONS
    if not file.exists():
        return None
    with open_tensors(file) as stored:
        if ROWS not in stored.keys():  # noqa: SIM118  # no mapping: it has no other way to ask
            raise ModelFileError(
                f"'{file}' holds {', '.join(stored.keys()) or 'nothing'}, not the tensor {ROWS!r}; "
                f"save the model again, or remove the file to load it without its actions"
            )
        rows = read_tensor(stored, ROWS, Path(folder))
    if rows.ndim != 2 or rows.shape[1] != decoder.shape.width:
        raise ModelFileError(
            f"{ROWS!r} in '{file}' is {list(rows.shape)}, and the model is {decoder.shape.width} "
            f"wide: the actions are those of another model"
        )
    return _with_rows(decoder, rows)


def extra_rows(decoder: Decoder) -> Tensor:
    """[extra, D]: a view of the head's rows of actions beyond the vocabulary, without padding."""
    shape = decoder.shape
    return decoder.head_weight.detach()[shape.vocab_size : shape.vocab_size + shape.extra]


def _with_rows(decoder: Decoder, rows: Tensor) -> Decoder:
    shape = replace(decoder.shape, extra=len(rows))
    old = decoder.head_weight
    weight = torch.zeros(shape.head_rows, shape.width, dtype=old.dtype, device=old.device)
    weight[: shape.vocab_size] = old.detach()[: shape.vocab_size]
    weight[shape.vocab_size : shape.vocab_size + len(rows)] = rows.to(weight)
    with torch.device("meta"):  # nothing of it stays but the sizes of its ends
        extended = Decoder(shape)
    extended.blocks, extended.norm, extended.angles = decoder.blocks, decoder.norm, decoder.angles
    extended.recompute = decoder.recompute
    head = nn.Parameter(weight, requires_grad=old.requires_grad)
    if extended.head is None:
        extended.embed.weight = head
    else:
        extended.embed, extended.head.weight = decoder.embed, head
    return extended
