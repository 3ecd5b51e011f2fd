"""Any causal language model that transformers can load, as a policy that trains transformers' module.

    forest of K tokens -> module without its head: [K, D] -> before each trained token: [U, D]
                       -> the module's own head, chunk by chunk: logits [u, V] -> log-probs [U]

A head may scale logits, cap them or add biases. So the module's own `forward` runs again on each chunk,
with the body (the part below the head) replaced by a stub that returns the states already computed.

A prompt that samples share is computed once if the module's attention accepts a tree mask, which
`probe` tests at loading. Otherwise each path is a row of its own (`rows`): the same numbers, more
computation. `forward` makes one pass over the blocks for any forest, so FSDP gathers sharded weights in
the same order on every rank.
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

from graft.models.logprobs import chunk_of
from graft.models.ops import gather_rows
from graft.models.shape import UnsupportedModel
from graft.models.transformers.files import (
    PretrainedModule,
    config_to_write,
    folder_names,
    read_configs,
    write_folder,
)
from graft.models.transformers.mask import TreeMask
from graft.models.transformers.rows import path_rows
from graft.models.transformers.scores import likeliest_of_logits, score_logits
from graft.models.transformers.shape import TransformersShape, fixed_length
from graft.models.truncation import Truncation

if TYPE_CHECKING:
    from graft.models.tree.forest import Forest

Score = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]
"""(logits [u, V], actions [u], allowed [u, V] or None) -> tensors [u]"""


class TransformersModel(nn.Module):
    """A transformers module with the interface of a policy: log-probs of the actions of a forest."""

    def __init__(self, pretrained: PretrainedModule) -> None:
        super().__init__()
        self.module = pretrained.module
        self.configs = pretrained.configs
        self.notes = pretrained.notes
        self.shape = TransformersShape.of(pretrained.module)
        self.fixed_length = fixed_length(pretrained.module.config.get_text_config())
        self.architecture = type(pretrained.module).__name__
        self.tree_mask: TreeMask | None = None
        """How tree masks are made; None: each path is computed as a row of its own."""
        self.body: str | None = None
        """Name of the submodule below the head, so that the head can run on chunks of states; None:
        the logits of all tokens are computed at once."""
        self._recompute = False
        self.notes += _freeze_other_parts(pretrained.module)

    @property
    def device(self) -> torch.device:
        return self.module.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.get_input_embeddings().weight.dtype

    def to(self, *args: Any, **kwargs: Any) -> TransformersModel:
        """Move to another device. Casts are refused: they would also round the rotary angles."""
        given = {**dict(enumerate(args)), **kwargs}
        cast = [value for value in given.values() if isinstance(value, torch.dtype)]
        if any(dtype != self.dtype for dtype in cast):
            raise ValueError(
                f"a {self.shape.family} model in {self.dtype} cannot be cast to {cast[0]}; load it in "
                "that dtype: load_transformers_model(folder, dtype, device)"
            )
        args = tuple(value for value in args if value not in cast)
        kwargs = {name: value for name, value in kwargs.items() if value not in cast}
        return super().to(*args, **kwargs) if args or kwargs else self

    @property
    def recompute(self) -> bool:
        """Activation checkpointing: whether the backward pass computes blocks again."""
        return self._recompute

    @recompute.setter
    def recompute(self, is_on: bool) -> None:
        if is_on and not self.module.supports_gradient_checkpointing:
            note = f"{self.architecture} has no gradient checkpointing: all activations are kept"
            self.notes += [note] if note not in self.notes else []
            return
        if is_on and not self._recompute:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        elif self._recompute and not is_on:
            self.module.gradient_checkpointing_disable()
        self._recompute = is_on
        self.train()

    def train(self, mode: bool = True) -> TransformersModel:
        """All modules stay in evaluation mode, so that dropout stays off.

        transformers checkpoints a block only if its `training` is set: it is set on the modules that
        check it, and not on their children.
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
        truncation: Truncation | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-prob [U] of each trained action of a forest and entropy [U] of its distribution.

        With `vocab_size` also the log-prob [U] of choosing any token, not an action (see `logprobs`).
        """
        score = partial(
            score_logits, temperature=temperature, vocab_size=vocab_size, truncation=truncation
        )
        return self(forest, score, allowed)

    @torch.no_grad()
    def greedy_match(self, forest: Forest, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-prob [U] of each trained action, and whether it is the likeliest one."""
        return self(forest, likeliest_of_logits, allowed)

    def forward(
        self, forest: Forest, score: Score, allowed: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The tensors of `score`, [U] each, for the trained actions."""
        inputs, cells = self._inputs(forest)
        states, make_logits = self._states(inputs)
        actions, modes = forest.actions, forest.modes
        if not len(actions):
            # a rank without actions still uses every weight, as the other ranks do
            logits = make_logits(states[:1])
            nothing = logits.float().sum() * 0.0
            empty = score(logits[:0], actions, None)
            return tuple(x + nothing if x.is_floating_point() else x for x in empty)

        def score_part(states: Tensor, actions: Tensor, modes: Tensor) -> tuple[Tensor, ...]:
            rows = None if allowed is None else allowed[modes]
            return score(make_logits(states), actions, rows)

        states_before = gather_rows(states, cells[forest.before])
        chunk = chunk_of(self.device, self.shape.head_rows)
        scores: list[tuple[Tensor, ...]] = []
        columns = (states_before, actions, modes)
        for part in zip(*(column.split(chunk) for column in columns), strict=True):
            if len(actions) > chunk and torch.is_grad_enabled():
                scores.append(checkpoint(score_part, *part, use_reentrant=False))
            else:
                scores.append(score_part(*part))
        return tuple(torch.cat(chunks) for chunks in zip(*scores, strict=True))

    def _inputs(self, forest: Forest) -> tuple[dict[str, Any], Tensor]:
        """The module's inputs, and the cell [K] of its output that holds each token's state."""
        tokens, device = forest.tokens, self.device
        if not len(tokens):
            nothing = torch.zeros(1, 1, dtype=torch.long, device=device)
            return {"input_ids": nothing}, nothing[0]
        if self.fixed_length and (longest := int(forest.positions.max()) + 1) > self.fixed_length:
            raise UnsupportedModel(
                f"a text has {longest} tokens, and the rope scaling of {self.shape.family} changes the "
                f"frequencies of all rows of a call once one of them exceeds {self.fixed_length} "
                f"tokens: set rollout.max_context={self.fixed_length} or less"
            )
        if self.tree_mask is None:
            index, cells = path_rows(forest.runs)
            return {"input_ids": tokens[index.to(device)]}, cells.to(device)
        is_eager = self.module.config._attn_implementation == "eager"
        masks = self.tree_mask.masks(
            forest.ends.to(device), forest.positions, self.dtype if is_eager else None
        )
        inputs = {
            "input_ids": tokens[None],
            "position_ids": forest.positions[None],
            "attention_mask": masks,
        }
        return inputs, torch.arange(len(tokens), device=device)

    def _states(self, inputs: dict[str, Any]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The state of every cell [cells, D], and the function from states to logits [u, V]."""
        if self.body is None:
            return self.module(**inputs).logits.flatten(0, 1), lambda logits: logits
        body = self.module.get_submodule(self.body)
        output = body(**inputs)
        return output[0].flatten(0, 1), partial(self._logits, body, type(output))

    def _logits(self, body: nn.Module, output: type, states: Tensor) -> Tensor:
        """[u, V] of states [u, D]: what the module computes above its body."""
        inputs = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with _stubbed(body, output(last_hidden_state=states[None])):
            # forward, not a call: this runs inside a call of the module, whose hooks have run
            return self.module.forward(input_ids=inputs).logits[0]

    def block_classes(self) -> set[type[nn.Module]]:
        """Classes of the blocks of the text model, each of which is one FSDP unit."""
        names = set(self.module._no_split_modules or ())
        found: dict[str, type[nn.Module]] = {}
        # named_modules lists a module before its children
        for name, part in self.module.get_decoder().named_modules():
            is_inside = any(name.startswith(f"{outer}.") for outer in found)
            if type(part).__name__ in names and not is_inside:
                found[name] = type(part)
        return set(found.values())

    def hf_weights(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights as transformers names and saves them, a tied one once.

        `state` is a gathered state dict of this model, if its weights are sharded.
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
        # buffers keep their dtype: a router's balancing bias, for one, is fp32 on purpose
        buffers = {name.removeprefix("module.") for name, _ in self.named_buffers()}
        weights = self.hf_weights(state)
        write_folder(weights, {**configs, "config.json": config}, Path(folder), dtype, buffers)


@contextmanager
def _stubbed(body: nn.Module, output: Any) -> Iterator[None]:
    """Make calls of `body` return `output` while this is open."""
    body.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del body.forward  # uncovers the class's own method


def _freeze_other_parts(module: Any) -> list[str]:
    """Freeze the modules for images and audio: no gradient would ever reach them."""
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
        "parameters for other inputs are frozen and saved with the rest"
    ]
