"""Any causal language model that transformers can load, as a policy: its own module is what trains.

Our decoder computes three families; Gemma, Mistral, Phi, mixtures of experts and the rest are computed
by transformers' modules, unchanged, and sampled by an engine that knows them. The learner asks both
for the same: the log-prob of each trained token of a forest (`action_logprobs`, `greedy_match`).

    forest of K tokens -> module without its head: [K, D] -> before each trained token: [U, D]
                       -> the module's own head, chunk by chunk: logits [u, V] -> log-probs [U]

The head is not a matrix to be multiplied with: families scale logits, cap them, add biases. So the
module's own `forward` runs again on a chunk, with the part below the head standing still and answering
with the states it has already found.

A prompt that samples share is computed once if the module's attention takes a tree mask; whether it
does is tried out at loading (`probe`). Where it does not, every path is computed by itself
(`rows`), which gives the same numbers, later. Attention under a tree mask looks at every pair
of tokens of a micro-batch, so unlike our kernels it costs the square of them.

Everything runs inside `forward`, in one pass over the blocks whatever the forest: hooks that gather
split weights find every rank at the same place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graft.models.logprobs import CHUNK_ELEMENTS
from graft.models.ops import gather_rows
from graft.models.shape import UnsupportedModel
from graft.models.transformers.files import (
    OpenedModel,
    config_to_write,
    folder_names,
    open_foreign,
    read_configs,
    write_folder,
)
from graft.models.transformers.mask import TreeMask
from graft.models.transformers.probe import settle
from graft.models.transformers.rows import path_rows
from graft.models.transformers.scores import find_likeliest, score_logits
from graft.models.transformers.shape import TransformersShape, fixed_length

if TYPE_CHECKING:
    from graft.models.tree.forest import Forest

Score = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]
"""(logits [u, V], actions [u], allowed [u, V] or None) -> numbers [u] each"""


class TransformersModel(nn.Module):
    """A module of transformers that answers a learner's questions about forests."""

    def __init__(self, opened: OpenedModel) -> None:
        super().__init__()
        self.module = opened.module
        self.configs = opened.configs
        self.notes = opened.notes
        self.shape = TransformersShape.of(opened.module)
        self.fixed_length = fixed_length(opened.module.config.get_text_config())
        self.architecture = type(opened.module).__name__
        self.sight: TreeMask | None = None
        """How tree masks are made; None: every path is computed by itself."""
        self.body: str | None = None
        """The part below the head, so that the head can run on a chunk of states by itself; None:
        logits of all tokens come at once."""
        self._recompute = False
        self.notes += _freeze_other_parts(opened.module)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], dtype: torch.dtype, device: torch.device | str
    ) -> TransformersModel:
        """The model in a Hugging Face folder; what the user should know of it is in `notes`."""
        model = cls(open_foreign(folder, dtype, device))
        model.notes += settle(model)
        return model

    @property
    def device(self) -> torch.device:
        return self.module.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.get_input_embeddings().weight.dtype

    def to(self, *args: Any, **kwargs: Any) -> TransformersModel:
        """Only ever to another device: a cast would round the angles of rotary positions, too."""
        given = {**dict(enumerate(args)), **kwargs}
        cast = [value for value in given.values() if isinstance(value, torch.dtype)]
        if any(dtype != self.dtype for dtype in cast):
            raise ValueError(
                f"a {self.shape.family} model in {self.dtype} cannot be cast to {cast[0]}; load it as "
                "such: Foreign.load(folder, dtype, device)"
            )
        args = tuple(value for value in args if value not in cast)
        kwargs = {name: value for name, value in kwargs.items() if value not in cast}
        return super().to(*args, **kwargs) if args or kwargs else self

    @property
    def recompute(self) -> bool:
        """Whether blocks are computed again in the backward pass instead of being remembered."""
        return self._recompute

    @recompute.setter
    def recompute(self, is_on: bool) -> None:
        if is_on and not self.module.supports_gradient_checkpointing:
            note = f"{self.architecture} cannot compute its blocks again: all activations are kept"
            self.notes += [note] if note not in self.notes else []
            return
        if is_on and not self._recompute:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        elif self._recompute and not is_on:
            self.module.gradient_checkpointing_disable()
        self._recompute = is_on
        self.train()

    def train(self, mode: bool = True) -> TransformersModel:
        """Everything stays as in evaluation, so that no dropout comes on.

        transformers computes blocks again only where a module says that it trains: those that ask are
        told so, and not what is inside them.
        """
        super().train(False)
        for module in self.module.modules():
            if self._recompute and hasattr(module, "gradient_checkpointing"):
                module.training = True
        return self

    def action_logprobs(
        self,
        forest: Forest,
        temperature: float = 1.0,
        allowed: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-prob [U] of each trained action of a forest and entropy [U] of its distribution.

        With `vocab_size` also the log-prob [U] of choosing any token, not an action (see `logprobs`).
        """
        return self(
            forest, partial(score_logits, temperature=temperature, vocab_size=vocab_size), allowed
        )

    @torch.no_grad()
    def greedy_match(self, forest: Forest, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-prob [U] of each trained action, and whether it is the likeliest one."""
        return self(forest, find_likeliest, allowed)

    def forward(
        self, forest: Forest, score: Score, allowed: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """What `score` says of each trained action, [U] each."""
        inputs, cells = self._laid_out(forest)
        states, make_logits = self._states(inputs)
        actions, modes = forest.actions, forest.modes
        if not len(actions):  # a rank without work goes through every weight like the others
            logits = make_logits(states[:1])
            nothing = logits.float().sum() * 0.0
            scores = score(logits[:0], actions, None)
            return tuple(x + nothing if x.is_floating_point() else x for x in scores)

        def score_part(states: Tensor, actions: Tensor, modes: Tensor) -> tuple[Tensor, ...]:
            rows = None if allowed is None else allowed[modes]
            return score(make_logits(states), actions, rows)

        asked = gather_rows(states, cells[forest.before])
        chunk = self._chunk()
        found: list[tuple[Tensor, ...]] = []
        for part in zip(asked.split(chunk), actions.split(chunk), modes.split(chunk), strict=True):
            if len(actions) > chunk and torch.is_grad_enabled():
                found.append(checkpoint(score_part, *part, use_reentrant=False))
            else:
                found.append(score_part(*part))
        return tuple(torch.cat(numbers) for numbers in zip(*found, strict=True))

    def _chunk(self) -> int:
        """Trained tokens whose logits are held at a time."""
        budget = CHUNK_ELEMENTS if self.device.type == "cpu" else CHUNK_ELEMENTS * 64
        return max(1, budget // self.shape.head_rows)

    def _laid_out(self, forest: Forest) -> tuple[dict[str, Any], Tensor]:
        """What the module is given, and the cell [K] of its output that holds each token's state."""
        tokens, device = forest.tokens, self.device
        if not len(tokens):
            nothing = torch.zeros(1, 1, dtype=torch.long, device=device)
            return {"input_ids": nothing}, nothing[0]
        if self.fixed_length and (longest := int(forest.positions.max()) + 1) > self.fixed_length:
            raise UnsupportedModel(
                f"a text of {longest} tokens, and the rope scaling of {self.shape.family} gives other "
                f"frequencies to all rows of a call once one of them exceeds {self.fixed_length} "
                f"tokens: set rollout.max_context={self.fixed_length} or less"
            )
        if self.sight is None:
            index, cells = path_rows(forest.runs)
            return {"input_ids": tokens[index.to(device)]}, cells.to(device)
        is_eager = self.module.config._attn_implementation == "eager"
        masks = self.sight.masks(
            forest.ends.to(device), forest.positions, self.dtype if is_eager else None
        )
        inputs = {
            "input_ids": tokens[None],
            "position_ids": forest.positions[None],
            "attention_mask": masks,
        }
        return inputs, torch.arange(len(tokens), device=device)

    def _states(self, inputs: dict[str, Any]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the module says of every cell [cells, D], and how that becomes logits [u, V]."""
        if self.body is None:
            return self.module(**inputs).logits.flatten(0, 1), lambda logits: logits
        body = self.module.get_submodule(self.body)
        found = body(**inputs)
        return found[0].flatten(0, 1), partial(self._logits, body, type(found))

    def _logits(self, body: nn.Module, output: type, states: Tensor) -> Tensor:
        """[u, V] of states [u, D], by everything that the module does above its body."""
        inputs = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with _answering(body, output(last_hidden_state=states[None])):
            # not a call of the module: this is the middle of one, whose hooks have run
            return self.module.forward(input_ids=inputs).logits[0]

    def block_classes(self) -> set[type[nn.Module]]:
        """Classes of the blocks of the text model, which are split over processes one by one."""
        names = set(self.module._no_split_modules or ())
        found: dict[str, type[nn.Module]] = {}
        for (
            name,
            part,
        ) in self.module.get_decoder().named_modules():  # a part comes before what is inside it
            is_inside = any(name.startswith(f"{outer}.") for outer in found)
            if type(part).__name__ in names and not is_inside:
                found[name] = type(part)
        return set(found.values())

    def hf_weights(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights as transformers names and saves them, a tied one once.

        `state` is a state dict of this model that was gathered elsewhere, if its weights are split.
        """
        state = self.state_dict() if state is None else state
        own = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        return folder_names(self.module, own)

    def save(
        self,
        folder: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        source: str | os.PathLike[str] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write config, generation config and weights (not the tokenizer) into `folder`.

        Configs are those of `source`; without it those of the folder the model was loaded from.
        """
        dtype = dtype or self.dtype
        configs = self.configs if source is None else read_configs(Path(source))
        config = config_to_write(configs["config.json"], self.architecture, dtype)
        # buffers are no weights: how a router is balanced, for one, is kept in fp32 on purpose
        buffers = {name.removeprefix("module.") for name, _ in self.named_buffers()}
        weights = self.hf_weights(state)
        write_folder(weights, {**configs, "config.json": config}, Path(folder), dtype, buffers)


@contextmanager
def _answering(body: nn.Module, output: Any) -> Iterator[None]:
    """Calls of `body` give `output`, whatever they are asked."""
    body.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del body.forward  # the class's own shows again


def _freeze_other_parts(module: Any) -> list[str]:
    """Take what is not text (eyes, ears) out of training: no gradient would ever reach it."""
    if module.config.get_text_config() is module.config:
        return []
    text = [module.get_decoder(), module.get_input_embeddings(), module.get_output_embeddings()]
    trained = {id(p) for part in text if part is not None for p in part.parameters()}
    others = [p for p in module.parameters() if id(p) not in trained]
    for parameter in others:
        parameter.requires_grad_(False)
    if not others:
        return []
    return [
        f"{module.config.model_type} is more than a text model: its {sum(map(Tensor.numel, others)):,} "
        "parameters for other inputs are kept as they are, and saved with the rest"
    ]
