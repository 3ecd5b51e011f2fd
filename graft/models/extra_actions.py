"""Actions beyond the vocabulary: rows of the head that no embedding has.

A model of 3 tokens learns two more actions, which start as likely as tokens 0 and 2:

    extend(decoder, [0, 2])         head row   0  1  2 | 3  4 | 5 .. 66
                                    copy of            | 0  2 | zero padding, never sampled

Their ids, 3 and 4, are labels only. Such an action writes text into the context, so the model never
reads an id without an embedding. On disk a model with actions is a plain Hugging Face folder with the
rows in an additional file, `actions.safetensors`, which other programs ignore.
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
from graft.models.device import without_memory
from graft.models.io.load import ModelFileError, open_tensors, read_tensor
from graft.models.io.tensors import check_finite

ACTIONS = "actions.safetensors"
"""The file of a model's extra rows: ROWS [extra, width], and BIAS [extra] if they have one."""
ROWS, BIAS = "rows", "bias"
SEED = 0
"""Seed of rows that start from no token, independent of the seed of the run."""


def extend(decoder: Decoder, init_tokens: Sequence[int | None], bias: bool = False) -> Decoder:
    """The decoder with one more head row per entry: a copy of that token's, or a random one.

    With `bias` each of these actions also has a number that is added to its logit, 0 at the start.

    All other weights are shared with `decoder`, which should not be used any further: training one
    changes the other. Actions that it had already are replaced.
    """
    vocab_size, width = decoder.shape.vocab_size, decoder.shape.width
    unknown = [token for token in init_tokens if token is not None and not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(
            f"an action cannot start from token {unknown[0]}: the model has {vocab_size} tokens; "
            f"give one of them, or None for a random row"
        )
    head = decoder.head_weight.detach()
    rows = random_rows(len(init_tokens), width).to(head)
    for row, token in zip(rows, init_tokens, strict=True):
        if token is not None:
            row.copy_(head[token])
    return _with_rows(decoder, rows, torch.zeros(len(rows)) if bias else None)


def random_rows(count: int, width: int) -> Tensor:
    """Rows of actions that start from no token, drawn as torch initialises a linear layer.

    On the CPU, so that all devices get the same numbers.
    """
    generator, bound = torch.Generator().manual_seed(SEED), 1 / math.sqrt(width)
    return torch.empty(count, width).uniform_(-bound, bound, generator=generator)


def load_rows(decoder: Decoder, folder: str | os.PathLike[str]) -> Decoder | None:
    """The decoder with the actions saved in `folder`; None: there are none."""
    rows = read_rows(Path(folder), decoder.shape.width)
    if rows is None:
        return None
    with open_tensors(Path(folder) / ACTIONS) as stored:
        bias = stored.get_tensor(BIAS) if BIAS in stored.keys() else None  # noqa: SIM118
    return _with_rows(decoder, rows, bias)


def read_rows(folder: Path, width: int) -> Tensor | None:
    """[extra, width]: the rows saved in `folder`; None: there are none."""
    file = folder / ACTIONS
    if not file.exists():
        return None
    with open_tensors(file) as stored:
        if ROWS not in stored.keys():  # noqa: SIM118  # not a mapping
            raise ModelFileError(
                f"'{file}' holds {', '.join(stored.keys()) or 'nothing'}, not the tensor {ROWS!r}; "
                f"save the model again, or remove the file to use it without its actions"
            )
        rows = read_tensor(stored, ROWS, folder)
    check_finite({ROWS: rows}, f"'{file}'")
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ModelFileError(
            f"{ROWS!r} in '{file}' is {list(rows.shape)}, and the model is {width} wide: the actions "
            f"belong to another model; remove the file to use it without them"
        )
    return rows


def _with_rows(decoder: Decoder, rows: Tensor, bias: Tensor | None) -> Decoder:
    shape = replace(decoder.shape, extra=len(rows), extra_bias=bias is not None)
    old = decoder.head_weight
    weight = torch.zeros(shape.head_rows, shape.width, dtype=old.dtype, device=old.device)
    weight[: shape.vocab_size] = old.detach()[: shape.vocab_size]
    weight[shape.vocab_size : shape.vocab_size + len(rows)] = rows.to(weight)
    with without_memory():  # all of its weights are replaced below
        extended = Decoder(shape)
    extended.blocks, extended.norm, extended.angles = decoder.blocks, decoder.norm, decoder.angles
    extended.recompute = decoder.recompute
    extended.use_order(decoder.order)
    extended.rounds_kv = decoder.rounds_kv
    if bias is not None:
        extended.action_bias = nn.Parameter(bias.to(old), requires_grad=old.requires_grad)
    head = nn.Parameter(weight, requires_grad=old.requires_grad)
    if extended.head is None:
        extended.embed.weight = head
    else:
        extended.embed, extended.head.weight = decoder.embed, head
    return extended
