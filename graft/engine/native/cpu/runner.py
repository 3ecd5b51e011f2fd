"""One step in plain PyTorch: a forward over the batch, then the head and a draw for each request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cpu.attention import paged
from graft.engine.native.cpu.batch import StepBatcher
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.request import Draw, SampleRequest
from graft.engine.native.sampling.masks import HeadSubset, Masks
from graft.engine.native.sampling.sampler import SamplingParams, penalize, sample
from graft.engine.native.sampling.uniforms import uniforms
from graft.engine.native.scheduler import BurstPlan, PlannedWork
from graft.models.decoder import Decoder
from graft.protocols import Grammar
from graft.structure import allowed_by

GATHER_LIMIT = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Elements of keys that one bucket may gather at a time: chosen for caches and memory."""


class CpuRunner:
    """Holds the decoder (the trainer's own module) and turns planned work into drawn tokens."""

    has_bursts = False

    def __init__(self, decoder: Decoder, tree: SequenceTree, masks: Masks, seed: int) -> None:
        self.decoder, self.tree, self.masks, self.seed = decoder, tree, masks, seed
        shape = decoder.shape
        limit = GATHER_LIMIT.get(decoder.device.type, GATHER_LIMIT["cuda"])
        self.batcher = StepBatcher(tree, shape.heads // shape.kv_heads, limit)
        self.shares_loop = False  # one step at a time: the loop runs between two steps

    @torch.no_grad()  # not inference_mode: the trainer uses these tensors too
    def run(self, works: list[PlannedWork], plan: BurstPlan) -> Iterator[list[Draw]]:
        """Compute the works, mark their tokens as cached, draw one token for each that has a request.

        The plan has one step: the host takes part in every draw, and nothing runs ahead.
        """
        yield self._step(works)

    def should_restart(self, num_waiting: int, num_running: int) -> bool:
        """There are no bursts here."""
        return True

    def _step(self, works: list[PlannedWork]) -> list[Draw]:
        batch = self.batcher.build(works)
        pages = self.tree.pages
        pages.flush_copies()
        attend = paged(pages, batch.write_rows, batch.buckets)
        is_decoding = len(batch.last) == len(batch.tokens)  # no token but those drawn after
        rows = None if is_decoding else batch.last
        hidden = self.decoder(batch.tokens, batch.positions, attend, rows=rows)
        for work in works:
            work.sequence.cached += work.count
        return self._draw(hidden, batch.requests) if batch.requests else []

    def _draw(self, hidden: Tensor, requests: list[SampleRequest]) -> list[Draw]:
        """One action for each request after its hidden state [B, D]."""
        subset = self.masks.subset
        if subset is None:
            return self._draw_from(self.decoder.logits(hidden), requests, None)
        is_small = [r.matcher is None and self.masks.row(r) in subset.rows for r in requests]
        draws: list[Draw] = []
        for part in (subset, None):  # requests inside tools, then those that need the whole head
            rows = [row for row, flag in enumerate(is_small) if flag is (part is not None)]
            if not rows:
                continue
            seen = hidden
            if len(rows) < len(requests):
                seen = hidden.index_select(0, self._tensor(np.array(rows)))
            columns, order = None if part is None else part.columns, self.decoder.order
            if order is not None and not order.any_columns:
                columns = part = None
            logits = self.decoder.logits(seen, columns)
            if order is not None and columns is not None:  # sums over all columns, as in training
                width = (len(logits), self.masks.width)
                logits = logits.new_full(width, -torch.inf).index_copy_(1, columns, logits)
                part = None
            draws += self._draw_from(logits, [requests[row] for row in rows], part)
        return draws

    def _draw_from(
        self, logits: Tensor, requests: list[SampleRequest], subset: HeadSubset | None
    ) -> list[Draw]:
        """Draw from logits of the whole head, or of the columns of `subset`."""
        if any(request.sampling.repetition_penalty != 1 for request in requests):
            logits = self._penalize(logits, requests, subset)
        is_matched = any(request.matcher is not None for request in requests)
        forbidden = None
        if subset is None and not is_matched:
            forbidden = self.masks.forbidden_to_all(requests)
        if forbidden is not None:  # much cheaper than a mask as large as the logits
            logits.index_fill_(1, forbidden, -torch.inf)
        action, logp, entropy = sample(
            logits,
            self._uniforms(requests),
            self._params(requests),
            self._allowed(requests, subset, has_mask=forbidden is None),
        )
        if subset is not None:
            action = subset.columns.index_select(0, action)
        # float32 holds ids exactly up to 2**24; one transfer for all three
        actions, logprobs, entropies = torch.stack([action.float(), logp, entropy]).tolist()
        drawn = zip(requests, map(int, actions), logprobs, entropies, strict=True)
        return [
            Draw(request, [action], [logp], [entropy]) for request, action, logp, entropy in drawn
        ]

    def can_follow(self, grammar: Grammar) -> bool:
        """False: the host takes part in every draw."""
        return False

    def on_idle(self) -> None:
        """No request is left: free the memory that is kept between steps."""
        self.batcher.decode_cache.clear()

    def _uniforms(self, requests: list[SampleRequest]) -> Tensor:
        keys = np.array([request.key for request in requests], dtype=np.uint64)
        lengths = np.array([len(r.sequence.tokens) for r in requests], dtype=np.uint64)
        return self._tensor(uniforms(self.seed, keys, lengths))

    def _params(self, requests: list[SampleRequest]) -> SamplingParams:
        first = requests[0].sampling
        if all(request.sampling is first for request in requests):  # the usual case: kept fast
            settings = [first]
        else:
            settings = [request.sampling for request in requests]
        temperature = np.array([s.temperature for s in settings], dtype=np.float32)
        is_greedy = temperature == 0
        params: dict[str, Tensor | None] = {}
        if (temperature != 1).any():
            params["temperature"] = self._rows(np.where(is_greedy, 1, temperature), requests)
        if is_greedy.any():
            params["greedy"] = self._rows(is_greedy, requests)
        truncating = [s.is_truncating and s.temperature > 0 for s in settings]
        if any(truncating):
            everything = self.masks.width
            cuts = [
                (s.top_k or everything, s.top_p, s.min_p) if t else (everything, 1.0, 0.0)
                for s, t in zip(settings, truncating, strict=True)
            ]
            top_k, top_p, min_p = zip(*cuts, strict=True)
            params["top_k"] = self._rows(np.array(top_k), requests)
            params["top_p"] = self._rows(np.array(top_p, dtype=np.float32), requests)
            params["min_p"] = self._rows(np.array(min_p, dtype=np.float32), requests)
        return SamplingParams(**params)

    def _penalize(
        self, logits: Tensor, requests: list[SampleRequest], subset: HeadSubset | None
    ) -> Tensor:
        """The logits [B, V] after the repetition penalty over all tokens of each context."""
        index = None if subset is None else subset.index
        pairs = [
            (row, token if index is None else index[token])
            for row, request in enumerate(requests)
            for token in set(request.sequence.tokens)
            if index is None or token in index
        ]
        rows, columns = self._tensor(np.array(pairs, dtype=np.int64).reshape(-1, 2)).unbind(1)
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        seen[rows, columns] = True
        penalties = [request.sampling.repetition_penalty for request in requests]
        return penalize(logits, seen, self._tensor(np.array(penalties, dtype=np.float32)))

    def _allowed(
        self, requests: list[SampleRequest], subset: HeadSubset | None, has_mask: bool
    ) -> Tensor | None:
        """[B, V] bool: the row of the mode, without stop tokens before `min_tokens`. None: all."""
        banned = [
            (row, token if subset is None else subset.index[token])
            for row, request in enumerate(requests)
            if request.must_go_on
            for token in request.stop_tokens
            if subset is None or token in subset.index
        ]
        allowed = None
        matched = {row: r.matcher for row, r in enumerate(requests) if r.matcher is not None}
        table = self.masks.allowed if subset is None else subset.allowed
        if table is not None and has_mask:
            table_rows = np.array([self.masks.row(request) for request in requests])
            allowed = table.index_select(0, self._tensor(table_rows))
        if allowed is None and (banned or matched):
            shape = (len(requests), self.masks.width)
            allowed = torch.ones(shape, dtype=torch.bool, device=self.decoder.device)
        if matched and allowed is not None:
            rows = [
                allowed_by(matcher.draw().bits, self.masks.width) for matcher in matched.values()
            ]
            allowed[self._tensor(np.array([*matched]))] = self._tensor(np.stack(rows))
        if banned and allowed is not None:
            rows, columns = self._tensor(np.array(banned)).unbind(1)
            allowed[rows, columns] = False
        return allowed

    def _rows(self, values: np.ndarray, requests: list[SampleRequest]) -> Tensor:
        """[B], from one value per request or one for all."""
        return self._tensor(np.broadcast_to(values, (len(requests),)).copy())

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.decoder.device, non_blocking=True)
