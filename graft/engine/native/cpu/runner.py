"""One step in plain PyTorch: a forward over the batch, then the head and a draw for each request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cpu.attention import paged
from graft.engine.native.cpu.batch import StepBatcher
from graft.engine.native.drafts.verification import Drawn, DrawPlace, accept
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
    mean_drawn = 1.0
    num_steps = 1

    def __init__(self, decoder: Decoder, tree: SequenceTree, masks: Masks, seed: int) -> None:
        self.decoder, self.tree, self.masks, self.seed = decoder, tree, masks, seed
        shape = decoder.shape
        limit = GATHER_LIMIT.get(decoder.device.type, GATHER_LIMIT["cuda"])
        self.batcher = StepBatcher(tree, shape.heads // shape.kv_heads, limit)
        self.shares_loop = False  # one step at a time: the loop runs between two steps

    @torch.no_grad()  # not inference_mode: the trainer uses these tensors too
    def run(self, works: list[PlannedWork], plan: BurstPlan) -> Iterator[list[Draw]]:
        """Compute the works, mark their tokens as cached, draw one token for each that has a request, and
        more where its draft was right.

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
        if self.tree.states is not None:
            self.tree.states.flush_copies()
        attend = paged(pages, batch.write_rows, batch.buckets, batch.paths)
        is_decoding = len(batch.last) == len(batch.tokens)  # no token but those drawn after
        rows = None if is_decoding else batch.last
        hidden = self.decoder(batch.tokens, batch.positions, attend, rows=rows)
        drawn = self._draw(hidden, batch.places) if batch.places else []
        results: dict[SampleRequest, list[Drawn]] = {}
        for place, result in zip(batch.places, drawn, strict=True):
            results.setdefault(place.request, []).append(result)
        draws: list[Draw] = []
        for work in works:
            work.sequence.cached += work.count
            if work.request is not None:
                draw = accept(work.request, work.draft, results[work.request])
                work.sequence.cached += len(draw.actions) - 1
                draws.append(draw)
        return draws

    def _draw(self, hidden: Tensor, places: list[DrawPlace]) -> list[Drawn]:
        """One action for each place after its hidden state [B, D]."""
        subset = self.masks.subset
        if subset is None:
            return self._draw_from(self.decoder.logits(hidden), places, None)
        is_small = [
            p.request.matcher is None and self.masks.place_row(p) in subset.rows for p in places
        ]
        drawn: dict[int, Drawn] = {}
        for part in (subset, None):  # places inside tools, then those that need the whole head
            rows = [row for row, flag in enumerate(is_small) if flag is (part is not None)]
            if not rows:
                continue
            seen = hidden
            if len(rows) < len(places):
                seen = hidden.index_select(0, self._tensor(np.array(rows)))
            columns, order = None if part is None else part.columns, self.decoder.order
            if order is not None and not order.any_columns:
                columns = part = None
            logits = self.decoder.logits(seen, columns)
            if order is not None and columns is not None:  # sums over all columns, as in training
                width = (len(logits), self.masks.width)
                logits = logits.new_full(width, -torch.inf).index_copy_(1, columns, logits)
                part = None
            drawn |= zip(
                rows, self._draw_from(logits, [places[row] for row in rows], part), strict=True
            )
        return [drawn[number] for number in range(len(places))]

    def _draw_from(
        self, logits: Tensor, places: list[DrawPlace], subset: HeadSubset | None
    ) -> list[Drawn]:
        """Draw from logits of the whole head, or of the columns of `subset`."""
        if any(place.request.sampling.repetition_penalty != 1 for place in places):
            logits = self._penalize(logits, places, subset)
        is_matched = any(place.request.matcher is not None for place in places)
        forbidden = None
        if subset is None and not is_matched:
            forbidden = self.masks.forbidden_to_all(places)
        if forbidden is not None:  # much cheaper than a mask as large as the logits
            logits.index_fill_(1, forbidden, -torch.inf)
        action, logp, entropy = sample(
            logits,
            self._uniforms(places),
            self._params(places),
            self._allowed(places, subset, has_mask=forbidden is None),
        )
        if subset is not None:
            action = subset.columns.index_select(0, action)
        # float32 holds ids exactly up to 2**24; one transfer for all three
        actions, logprobs, entropies = torch.stack([action.float(), logp, entropy]).tolist()
        return [*map(Drawn, map(int, actions), logprobs, entropies)]

    def can_follow(self, grammar: Grammar) -> bool:
        """False: the host takes part in every draw."""
        return False

    def on_idle(self) -> None:
        """No request is left: free the memory that is kept between steps."""
        self.batcher.clear()

    def _uniforms(self, places: list[DrawPlace]) -> Tensor:
        keys = np.array([place.request.key for place in places], dtype=np.uint64)
        lengths = np.array([place.length for place in places], dtype=np.uint64)
        return self._tensor(uniforms(self.seed, keys, lengths))

    def _params(self, places: list[DrawPlace]) -> SamplingParams:
        first = places[0].request.sampling
        if all(place.request.sampling is first for place in places):  # the usual case: kept fast
            settings = [first]
        else:
            settings = [place.request.sampling for place in places]
        temperature = np.array([s.temperature for s in settings], dtype=np.float32)
        is_greedy = temperature == 0
        params: dict[str, Tensor | None] = {}
        if (temperature != 1).any():
            params["temperature"] = self._rows(np.where(is_greedy, 1, temperature), places)
        if is_greedy.any():
            params["greedy"] = self._rows(is_greedy, places)
        truncating = [s.is_truncating and s.temperature > 0 for s in settings]
        if any(truncating):
            everything = self.masks.width
            cuts = [
                (s.top_k or everything, s.top_p, s.min_p) if t else (everything, 1.0, 0.0)
                for s, t in zip(settings, truncating, strict=True)
            ]
            top_k, top_p, min_p = zip(*cuts, strict=True)
            params["top_k"] = self._rows(np.array(top_k), places)
            params["top_p"] = self._rows(np.array(top_p, dtype=np.float32), places)
            params["min_p"] = self._rows(np.array(min_p, dtype=np.float32), places)
        return SamplingParams(**params)

    def _penalize(
        self, logits: Tensor, places: list[DrawPlace], subset: HeadSubset | None
    ) -> Tensor:
        """The logits [B, V] after the repetition penalty over all tokens of each context."""
        index = None if subset is None else subset.index
        pairs = [
            (row, token if index is None else index[token])
            for row, place in enumerate(places)
            for token in {*place.request.sequence.tokens, *place.drafted}
            if index is None or token in index
        ]
        rows, columns = self._tensor(np.array(pairs, dtype=np.int64).reshape(-1, 2)).unbind(1)
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        seen[rows, columns] = True
        penalties = [place.request.sampling.repetition_penalty for place in places]
        return penalize(logits, seen, self._tensor(np.array(penalties, dtype=np.float32)))

    def _allowed(
        self, places: list[DrawPlace], subset: HeadSubset | None, has_mask: bool
    ) -> Tensor | None:
        """[B, V] bool: the row of the mode, without stop tokens before `min_tokens`. None: all."""
        banned = [
            (row, token if subset is None else subset.index[token])
            for row, place in enumerate(places)
            if place.must_go_on
            for token in place.request.stop_tokens
            if subset is None or token in subset.index
        ]
        allowed = None
        matchers = [place.request.matcher for place in places]
        matched = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
        table = self.masks.allowed if subset is None else subset.allowed
        if table is not None and has_mask:
            table_rows = np.array([self.masks.place_row(place) for place in places])
            allowed = table.index_select(0, self._tensor(table_rows))
        if allowed is None and (banned or matched):
            shape = (len(places), self.masks.width)
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

    def _rows(self, values: np.ndarray, places: list[DrawPlace]) -> Tensor:
        """[B], from one value per place or one for all."""
        return self._tensor(np.broadcast_to(values, (len(places),)).copy())

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.decoder.device, non_blocking=True)
