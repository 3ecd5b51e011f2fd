"""LoRA adapters in training: few parameters are trained, and the model computes as without them.

    W [out, in] = W0 + s B A        A [r, in], B [out, r], s = alpha / r

The model holds W, the merged matrix, and no second path beside it. So the engine samples from the
weights that are trained, and every kernel works as without adapters. The gradient of W is turned into
those of A and B as soon as it is complete, and freed:

    dA = s Bᵀ dW                    dB = s dW Aᵀ

One output, two inputs, r = 1, s = 2:

    W0 = [10 20], A = [1 3], B = [0.5]      W  = [11 23]
    dW = [1 -1]                             dA = [1 -1], dB = [-4]

After a step W is recomputed in place; W0 is kept in host memory. A and B are fp32 for any dtype of the
model. Rows of actions beyond the vocabulary have no W0 worth keeping: they are trained in full.
`files.py` writes and reads adapters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graft.models.action_rows import extra_rows
from graft.models.decoder import Decoder
from graft.models.io.tensor_names import GATED_NAMES, hf_rows, own_name
from graft.models.shape import ModelShape

PREFIX = "base_model.model."
"""PEFT's prefix of module names."""
ALL = "all-linear"
"""The target that stands for every matrix of every layer."""
HEAD = "lm_head"
LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("input_linear", "output_linear"),  # of an MLP whose gate and up are one matrix
    *("w1", "w3", "w2"),  # gate, up and down of LFM2
    # of recurrent layers, by family
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
    *("in_proj", "out_proj"),
)
TARGETS = (ALL, *LINEARS, HEAD)
"""What can be named: matrices of a layer, and a head that is not tied."""


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of one of the model's weights that an adapter changes."""

    name: str
    """Hugging Face's tensor name without ".weight"."""
    weight: nn.Parameter
    rows: slice
    base: Tensor
    """W0 of these rows, in host memory."""


class Lora(nn.Module):
    """The adapters of one decoder; its parameters are A and B of each target, and rows of actions.

    decoder   its target weights get gradient hooks; all other weights are frozen
    targets   modules by the last part of their names: q_proj, ..., lm_head; all-linear: all of the layers
    origin    the path of the model of W0, for the adapter's config
    base      a decoder that holds W0, if `decoder` is merged already; None: `decoder` itself
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        origin: str = "",
        seed: int = 0,
        base: Decoder | None = None,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(
                f"rank={rank}: adapters need 1 or more; to train without them, create no Lora"
            )
        if unknown := [name for name in targets if name not in TARGETS]:
            raise ValueError(f"unknown target {unknown[0]!r}; known: {', '.join(TARGETS)}")
        if not targets:
            raise ValueError(f"no targets: name some of {', '.join(TARGETS)}")
        if HEAD in targets and decoder.shape.tied:
            raise ValueError(
                f"target {HEAD!r}: this model's head is its embedding (tie_word_embeddings), which "
                f"adapters cannot change on one side alone; leave {HEAD!r} out"
            )
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.names, self.origin = target_names(decoder.shape, targets), origin
        self.shape = decoder.shape
        self.targets = [
            Target(name, weight, rows, _host_copy(source.detach()[rows], weight.device))
            for name, weight, source, rows in _find(decoder, base or decoder, self.names)
        ]
        kind = torch.promote_types(decoder.dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)
        self.down, self.up = nn.ParameterList(), nn.ParameterList()  # A and B
        for target in self.targets:
            size_out, size_in = target.base.shape
            bound = 1 / math.sqrt(size_in)
            # drawn on the CPU: the same numbers on every device
            drawn = torch.empty(rank, size_in).uniform_(-bound, bound, generator=generator)
            self.down.append(nn.Parameter(drawn.to(decoder.device, kind)))
            self.up.append(
                nn.Parameter(torch.zeros(size_out, rank, dtype=kind, device=decoder.device))
            )
        # in a list, so that it is not registered as a parameter of this module
        self._head = [decoder.head_weight]
        rows = extra_rows(decoder).to(kind, copy=True) if self.shape.extra else None
        self.rows = None if rows is None else nn.Parameter(rows)
        self._hook_gradients(decoder)
        self._fingerprint = ""

    @property
    def head(self) -> Tensor:
        return self._head[0]

    def _hook_gradients(self, decoder: Decoder) -> None:
        decoder.requires_grad_(False)
        hooked: dict[Tensor, list[int]] = {}
        for number, target in enumerate(self.targets):
            hooked.setdefault(target.weight, []).append(number)
        if self.rows is not None:
            hooked.setdefault(self.head, [])
        for weight, numbers in hooked.items():
            weight.requires_grad_(True)
            weight.register_post_accumulate_grad_hook(
                lambda complete, numbers=numbers: self._pass_gradient(complete, numbers)
            )

    @torch.no_grad()
    def _pass_gradient(self, weight: Tensor, numbers: list[int]) -> None:
        """Turn the gradient of a weight into those of its adapters, and free it."""
        grad, weight.grad = weight.grad, None
        if grad is None:
            return
        for number in numbers:
            down, up = self.down[number], self.up[number]
            part = grad[self.targets[number].rows].to(down.dtype)
            _sum_of(down).addmm_(up.T, part, alpha=self.scale)
            _sum_of(up).addmm_(part, down.T, alpha=self.scale)
        if self.rows is not None and weight is self.head:
            _sum_of(self.rows).add_(grad[self._extra_rows])

    @property
    def _extra_rows(self) -> slice:
        return slice(self.shape.vocab_size, self.shape.vocab_size + self.shape.extra)

    @torch.no_grad()
    def merge(self) -> None:
        """Recompute the model's weights in place: W0 + s B A, rounded once."""
        for target, down, up in zip(self.targets, self.down, self.up, strict=True):
            base = target.base.to(up.device, non_blocking=True)
            total = torch.addmm(base.to(up.dtype), up, down, alpha=self.scale)
            target.weight[target.rows].copy_(total)
        if self.rows is not None:
            self.head[self._extra_rows].copy_(self.rows)

    @contextmanager
    def using(self, adapters: Mapping[str, Tensor]) -> Iterator[None]:
        """Use other adapters (a `snapshot`) inside the context, and restore the current ones after it.

        With the snapshot of the start the model is the base: a reference policy without a copy.
        """
        own = self.snapshot()
        try:
            self.load_state_dict(adapters)
            self.merge()
            yield
        finally:
            self.load_state_dict(own)
            self.merge()

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the current adapters and rows."""
        return {name: value.clone() for name, value in self.state_dict().items()}

    @torch.no_grad()
    def random_snapshot(self, share: float = 0.2) -> dict[str, Tensor]:
        """Random adapters that change each target by about this share of its norm.

        Fresh adapters are a no-op (B is 0), so checks that an engine applies adapters use these.
        """
        generator = torch.Generator().manual_seed(0)
        numbers = self.snapshot()
        for index, target in enumerate(self.targets):
            up, size = self.up[index], float(self.down[index].norm()) * self.scale
            wanted = share * float(target.base.float().norm()) / (size * math.sqrt(len(up)))
            numbers[f"up.{index}"] = (torch.randn(up.shape, generator=generator) * wanted).to(up)
        return numbers

    @property
    def fingerprint(self) -> str:
        """A hash of W0 rounded to bf16, so that the dtype of the model does not matter."""
        if not self._fingerprint:
            sums = [int(_bits(target.base).sum(dtype=torch.int64)) for target in self.targets]
            self._fingerprint = hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()
        return self._fingerprint

    def peft_tensors(self) -> dict[str, Tensor]:
        """PEFT's names -> A and B."""
        named: dict[str, Tensor] = {}
        for target, down, up in zip(self.targets, self.down, self.up, strict=True):
            named[f"{PREFIX}{target.name}.lora_A.weight"] = down.detach()
            named[f"{PREFIX}{target.name}.lora_B.weight"] = up.detach()
        return named


def target_names(shape: ModelShape, targets: Sequence[str]) -> list[str]:
    """The modules that targets name, in order; ValueError where no layer has one that is named."""
    known = [name for name in LINEARS if name in _matrices(shape)]
    names = dict.fromkeys(
        name for target in targets for name in (known if target == ALL else [target])
    )
    if missing := [name for name in names if name not in known and name != HEAD]:
        raise ValueError(
            f"target {missing[0]!r}: no layer of this {shape.family} model has it; it has {', '.join(known)}"
        )
    return list(names)


def target_sizes(shape: ModelShape, targets: Sequence[str]) -> list[tuple[int, int]]:
    """(out, in) of every matrix that has an adapter, without creating any."""
    names, matrices = target_names(shape, targets), _matrices(shape)
    found = [size for name in names if name != HEAD for size in matrices[name]]
    return [*found, (shape.vocab_size, shape.width)] if HEAD in names else found


def _matrices(shape: ModelShape) -> dict[str, list[tuple[int, int]]]:
    """Module -> (out, in) of its matrix in every layer, and in every expert, that has it."""
    width, q, kv = shape.width, shape.q_size, shape.kv_size
    gated = (1 + shape.attention_gate) * q
    of_attention = {"q_proj": (gated, width), "k_proj": (kv, width), "v_proj": (kv, width)}
    of_attention["o_proj"] = (width, q)
    of_recurrence = {} if shape.recurrence is None else shape.recurrence.products(width)
    found: dict[str, list[tuple[int, int]]] = {}

    def add(sizes: dict[str, tuple[int, int]], count: int) -> None:
        for name, size in sizes.items():
            found.setdefault(own_name(shape.family, name), []).extend([size] * count)

    add(of_attention, shape.attention_layers)
    add(of_recurrence, len(shape.recurrent_layers))
    for layer in filter(shape.has_mlp, range(shape.layers)):
        experts = shape.experts_of(layer)
        plain = shape.ff if experts is None else experts.shared_ff
        if shape.family in GATED_NAMES:
            names = (name.rpartition(".")[2] for name in GATED_NAMES[shape.family])
            sizes = (2 * plain, width), (width, plain)
            add(dict(zip(names, sizes, strict=True)), int(plain > 0))
            plain = 0
        blocks = [(plain, int(plain > 0))]
        if experts is not None:
            blocks.insert(0, (experts.ff, experts.count))
        for ff, count in blocks:
            add({"gate_proj": (ff, width)}, count * shape.is_gated)
            add({"up_proj": (ff, width), "down_proj": (width, ff)}, count)
    return {name: sizes for name, sizes in found.items() if sizes}


def num_trained(shape: ModelShape, rank: int, targets: Sequence[str]) -> int:
    """Number of trained parameters: rank 2 on a matrix [6, 4] has 2 * (6 + 4)."""
    adapters = sum(rank * (out + into) for out, into in target_sizes(shape, targets))
    return adapters + shape.extra * shape.width


def _find(
    decoder: Decoder, base: Decoder, targets: Sequence[str]
) -> Iterator[tuple[str, nn.Parameter, Tensor, slice]]:
    """Name, weight, the tensor that holds W0, and rows of every target, in order of computation."""
    weights, sources = dict(decoder.named_parameters()), dict(base.named_parameters())
    for name, where in hf_rows(decoder.shape, split_experts=True).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in targets:
            yield module, weights[where.parameter], sources[where.parameter], where.rows


def _host_copy(rows: Tensor, device: torch.device) -> Tensor:
    """A copy in host memory, pinned for a GPU, so that transfers are asynchronous."""
    if device.type != "cuda":
        return rows.to("cpu", copy=True)
    try:
        return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
    except RuntimeError:  # out of pinnable memory: slower, same result
        return rows.to("cpu", copy=True)


def _sum_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _bits(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).contiguous().view(torch.int16)
