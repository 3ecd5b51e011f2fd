"""One step in plain PyTorch: a forward over the batch, the head where a draw follows, the draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graft.engine.native.cpu.attention import paged
from graft.engine.native.cpu.batch import StepBatcher
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.sampling.masks import Masks, Narrow
from graft.engine.native.sampling.sampler import SamplingParams, sample
from graft.engine.native.sampling.uniforms import uniforms
from graft.engine.native.scheduler import PlannedWork, SampleRequest
from graft.models.decoder import Decoder
from graft.protocols import Grammar

GATHER_LIMIT = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Elements of keys that one bucket may gather at a time: small enough for caches and memory."""

Draw = tuple[SampleRequest, list[int], list[float], list[float]]
"""The request, its new actions, their log-probs, the entropies they were drawn under.

`NO_ACTION` stands where a step wrote the next token of a description and drew nothing.
"""


class CpuRunner:
    """Holds the decoder (the trainer's own module) and turns planned work into drawn tokens."""

    bursts = False

    def __init__(self, decoder: Decoder, tree: SequenceTree, masks: Masks, seed: int) -> None:
        self.decoder, self.tree, self.masks, self.seed = decoder, tree, masks, seed
        shape = decoder.shape
        limit = GATHER_LIMIT.get(decoder.device.type, GATHER_LIMIT["cuda"])
        self.batcher = StepBatcher(tree, shape.heads // shape.kv_heads, limit)

    @torch.no_grad()  # not inference_mode: the trainer must be able to use what we touch
    def run(
        self, works: list[PlannedWork], steps: int, segment: int, go_on: Callable[[], bool]
    ) -> Iterator[list[Draw]]:
        """Compute the works, mark their tokens as cached, draw where a request waits for it.

        One token each, whatever `steps` would allow: here the host takes part in every draw.
        """
        yield self._step(works)

    def _step(self, works: list[PlannedWork]) -> list[Draw]:
        batch = self.batcher.build(works)
        pages = self.tree.pages
        pages.flush_copies()
        attend = paged(pages, batch.write_rows, batch.buckets)
        hidden = self.decoder(batch.tokens, batch.positions, attend)
        for work in works:
            work.sequence.cached += work.count
        if not batch.requests:
            return []
        if len(batch.last) < len(hidden):
            hidden = hidden.index_select(0, batch.last)
        return self._draw(hidden, batch.requests)

    def _draw(self, hidden: Tensor, requests: list[SampleRequest]) -> list[Draw]:
        """One action for each request after its hidden state [B, D]."""
        narrow = self.masks.narrow
        if narrow is None:
            return self._draw_from(self.decoder.logits(hidden), requests, None)
        is_narrow = [self.masks.line(request) in narrow.lines for request in requests]
        draws: list[Draw] = []
        for part in (narrow, None):  # those inside tools, then those who need the whole head
            rows = [row for row, flag in enumerate(is_narrow) if flag is (part is not None)]
            if not rows:
                continue
            seen = hidden
            if len(rows) < len(requests):
                seen = hidden.index_select(0, self._tensor(np.array(rows)))
            if part is None:
                logits = self.decoder.logits(seen)
            else:
                logits = F.linear(seen, self.decoder.head_weight.index_select(0, part.columns))
            draws += self._draw_from(logits, [requests[row] for row in rows], part)
        return draws

    def _draw_from(
        self, logits: Tensor, requests: list[SampleRequest], narrow: Narrow | None
    ) -> list[Draw]:
        """From logits of the whole head, or of the columns that `narrow` names."""
        forbidden = None if narrow is not None else self.masks.forbidden_to_all(requests)
        if forbidden is not None:  # far less than a mask as large as the logits
            logits.index_fill_(1, forbidden, -torch.inf)
        action, logp, entropy = sample(
            logits,
            self._uniforms(requests),
            self._knobs(requests),
            self._allowed(requests, narrow, has_mask=forbidden is None),
        )
        if narrow is not None:
            action = narrow.columns.index_select(0, action)
        # float32 holds ids exactly up to 2**24; one transfer for all three
        actions, logprobs, entropies = torch.stack([action.float(), logp, entropy]).tolist()
        drawn = zip(requests, map(int, actions), logprobs, entropies, strict=True)
        return [(request, [action], [logp], [entropy]) for request, action, logp, entropy in drawn]

    def follows(self, grammar: Grammar) -> bool:
        """Nobody's grammar: the host takes part in every draw."""
        return False

    def rest(self) -> None:
        """Nothing runs: give back the memory that is kept between steps."""
        self.batcher.traffic.clear()

    def _uniforms(self, requests: list[SampleRequest]) -> Tensor:
        keys = np.array([request.key for request in requests], dtype=np.uint64)
        lengths = np.array([len(r.sequence.tokens) for r in requests], dtype=np.uint64)
        return self._tensor(uniforms(self.seed, keys, lengths))

    def _knobs(self, requests: list[SampleRequest]) -> SamplingParams:
        first = requests[0].sampling
        if all(request.sampling is first for request in requests):  # the usual case, and quick
            settings = [first]
        else:
            settings = [request.sampling for request in requests]
        temperature = np.array([s.temperature for s in settings], dtype=np.float32)
        is_greedy = temperature == 0
        knobs: dict[str, Tensor | None] = {}
        if (temperature != 1).any():
            knobs["temperature"] = self._rows(np.where(is_greedy, 1, temperature), requests)
        if is_greedy.any():
            knobs["greedy"] = self._rows(is_greedy, requests)
        truncating = [s.is_truncating and s.temperature > 0 for s in settings]
        if any(truncating):
            everything = self.masks.width
            cuts = [
                (s.top_k or everything, s.top_p, s.min_p) if t else (everything, 1.0, 0.0)
                for s, t in zip(settings, truncating, strict=True)
            ]
            top_k, top_p, min_p = zip(*cuts, strict=True)
            knobs["top_k"] = self._rows(np.array(top_k), requests)
            knobs["top_p"] = self._rows(np.array(top_p, dtype=np.float32), requests)
            knobs["min_p"] = self._rows(np.array(min_p, dtype=np.float32), requests)
        return SamplingParams(**knobs)

    def _allowed(
        self, requests: list[SampleRequest], narrow: Narrow | None, has_mask: bool
    ) -> Tensor | None:
        """[B, V] bool: the mode's line, less the stop tokens of those who must go on. None: all."""
        banned = [
            (row, token if narrow is None else narrow.place[token])
            for row, request in enumerate(requests)
            if len(request.logprobs) < request.sampling.min_tokens
            for token in request.stop_tokens
            if narrow is None or token in narrow.place
        ]
        allowed = None
        table = self.masks.allowed if narrow is None else narrow.allowed
        if table is not None and has_mask:
            lines = np.array([self.masks.line(request) for request in requests])
            allowed = table.index_select(0, self._tensor(lines))
        if banned:
            if allowed is None:
                shape = (len(requests), self.masks.width)
                allowed = torch.ones(shape, dtype=torch.bool, device=self.decoder.device)
            rows, columns = self._tensor(np.array(banned)).unbind(1)
            allowed[rows, columns] = False
        return allowed

    def _rows(self, values: np.ndarray, requests: list[SampleRequest]) -> Tensor:
        """[B], from one value per request or one for all."""
        return self._tensor(np.broadcast_to(values, (len(requests),)).copy())

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.decoder.device, non_blocking=True)
