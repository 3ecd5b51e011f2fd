"""`NativeEngine`: samples from the trainer's own decoder, in the same process and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch

from graft.actions.matcher import StructureCompiler, StructureMatcher
from graft.actions.space import ActionSpace
from graft.engine.checks import check_positions, check_prompt, check_tokens
from graft.engine.engine_group import EngineGroup
from graft.engine.errors import EngineError
from graft.engine.native.context import NativeContext
from graft.engine.native.cpu.runner import CpuRunner
from graft.engine.native.drafts.attempts import BurstDrafter
from graft.engine.native.drafts.drafter import Drafter
from graft.engine.native.kv.pages import Pages, pool_tokens
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.kv.states import States
from graft.engine.native.loop import EngineLoop
from graft.engine.native.mirror import CallMirror
from graft.engine.native.request import SampleRequest
from graft.engine.native.sampling.masks import Masks
from graft.engine.native.sampling.uniforms import derive
from graft.engine.native.scheduler import Scheduler
from graft.engine.native.scoring import Scores, score
from graft.engine.stop_strings import StopStrings, TokenPieces
from graft.models.decoder import Decoder
from graft.models.device import has_kernels
from graft.models.io.tensor_names import weights_of
from graft.models.shape import ModelShape
from graft.models.tree.path_blocks import BLOCK
from graft.protocols import Grammar, Tokenizer
from graft.structure import Structure, StructureError
from graft.text.tokenizer import FastTokenizer
from graft.types import Sampling

MAX_GROUP = 32
"""Query heads to a KV head that one tile of the decode kernel holds."""


class NativeEngine:
    """Continuous batching over paged keys and values that forks share.

    decoder        sampled with its current weights at each step; the engine holds no copy of them
    tokenizer      to find stop strings, and to match structures
    eos_ids        stop tokens of every sample
    kv_tokens      size of the KV pool; None: from the memory of the device
    page_size      tokens per page; None: 64 for the kernels, 16 without them
    prefill_chunk  tokens of prompts and tool results computed per step; None: 8192 or 2048
    max_running    requests that share a step
    seed           of every draw, together with the context's key and the position
    space          modes and their masks; None: every token is allowed, mode 0 only. Actions beyond
                   the vocabulary need head rows, and a grammar that defines what they write
    drafts         auto: verify tokens that were written before, several in a step, where a prompt has the
                   bits of decoding (`decoder.order`); off. The same tokens are drawn
    kernels        Triton kernels and bursts of steps; None: on a GPU. Those of recurrent layers have not yet
                   run on a GPU, and are taken for True alone
    group          the processes that hold the engine together, each with a slice of the decoder
                   (`graft.models.parallel.sampler`); None: this one has all of it
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        kv_tokens: int | None = None,
        page_size: int | None = None,
        prefill_chunk: int | None = None,
        max_running: int = 1024,
        seed: int = 0,
        space: ActionSpace | None = None,
        drafts: Literal["auto", "off"] = "auto",
        kernels: bool | None = None,
        group: EngineGroup | None = None,
    ) -> None:
        shape = decoder.shape
        if kernels is None:
            kernels = has_kernels(decoder.device)
            if kernels and shape.recurrence is not None:
                raise EngineError(
                    "the kernels of recurrent layers have not yet run on a GPU, so no run takes them by "
                    "itself: use engine.name=vllm, or engine.args={kernels: true} (NativeEngine(..., "
                    "kernels=True)) to try them"
                )
        page_size = (64 if kernels else 16) if page_size is None else page_size
        prefill_chunk = (8192 if kernels else 2048) if prefill_chunk is None else prefill_chunk
        space = space or ActionSpace(shape.vocab_size)
        _check_space(space, shape)
        if min(page_size, prefill_chunk, max_running) < 1:
            raise ValueError(
                f"{page_size=}, {prefill_chunk=}, {max_running=}: each must be 1 or more"
            )
        if kv_tokens is None:
            how = decoder.device, decoder.dtype, decoder.rounds_kv
            kv_tokens = pool_tokens(decoder.own_shape, *how)
        if kv_tokens < page_size:
            raise ValueError(
                f"kv_tokens={kv_tokens} holds no page of {page_size} tokens; set engine.kv_tokens to some "
                "thousands, or to 0, which chooses by the memory of the device"
            )
        self.decoder, self.space = decoder, space
        self.vocab_size = shape.vocab_size
        self.version = 0
        self.eos_ids = frozenset(eos_ids)
        self._masks = Masks(space, shape, decoder.device)
        num_pages = kv_tokens // page_size
        stored = decoder.device, decoder.dtype, decoder.rounds_kv
        pages = Pages(decoder.own_shape, num_pages, page_size, *stored)
        states = None
        if decoder.shape.recurrence is not None:
            states = States(decoder.own_shape, kv_tokens, decoder.device, decoder.dtype)
        self._tree = SequenceTree(pages, states)
        self._scheduler = Scheduler(
            self._tree,
            prefill_chunk=prefill_chunk,
            max_running=max_running,
            separate_prefill=kernels,
        )
        if drafts not in ("auto", "off"):
            raise ValueError(f"drafts={drafts!r}: must be 'auto' or 'off'")
        has_drafts = drafts == "auto" and decoder.order is not None and group is None
        has_drafts = has_drafts and states is None  # a wrong draft would be in the states
        drafter: Drafter | BurstDrafter | None = None
        if kernels:
            from graft.engine.native.cuda.runner import CudaRunner

            _check_kernels(shape, page_size, decoder.order is not None, decoder.rounds_kv)
            runner = CudaRunner(decoder, self._tree, space, self._masks, seed)
            if has_drafts:
                drafter = BurstDrafter()
                runner.attempts, runner.draft_counts = drafter.attempts, drafter.counts
        else:
            runner = CpuRunner(decoder, self._tree, self._masks, seed)
            drafter = Drafter(self._tree, space) if has_drafts else None
        self._loop = EngineLoop(self._tree, self._scheduler, runner, space, drafter)
        self._pieces = None if tokenizer is None else TokenPieces(tokenizer)
        self._structures: StructureCompiler | None = None
        if isinstance(tokenizer, FastTokenizer):
            self._structures = StructureCompiler(tokenizer, shape.vocab_size)
        self._stop_strings = lru_cache(maxsize=64)(StopStrings)
        self._opened = 0
        self._is_open = True
        self.group = group
        self._copies: dict[int, NativeContext] = {}  # of contexts of the group's first process
        if group is not None:
            self._loop.mirror = CallMirror(group, self._repeat)

    def open(self, tokens: Sequence[int], key: int | None = None) -> NativeContext:
        """A context over `tokens`; nothing is computed before it samples."""
        if not self._is_open:
            raise EngineError("the engine is closed")
        ids = check_prompt(tokens, self.vocab_size)
        self._opened += 1
        key = derive(0, self._opened) if key is None else key
        self._loop.record("open", ids, key)
        sequence, number = self._tree.open(ids), self._loop.next_number()
        task = hash(tuple(ids))
        return NativeContext(sequence, key, self._loop, self._request, number, task)

    def share_loop(self) -> None:
        """Let a server that runs on the same event loop answer while the device computes."""
        self._loop.runner.shares_loop = (
            self.group is None
        )  # a group takes the same steps everywhere

    def score(
        self,
        texts: Sequence[Sequence[int]],
        at: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        mode: int = 0,
        temperature: float = 1.0,
    ) -> list[Scores]:
        """Score each text: log-probs [i][j][k] of action k of continuations[j] right after text[: at[i]].

        They are under the mask of `mode`, at `temperature`; a forbidden action has -inf. Only the last action
        of a continuation may lie beyond the vocabulary: it is never fed to the model.
        """
        trunks = [check_tokens(text, self.vocab_size) for text in texts]
        wanted = [[int(action) for action in actions] for actions in continuations]
        check_positions(trunks, at)
        if not 0 <= mode < self.space.num_modes:
            raise ValueError(
                f"cannot score in mode {mode}: the space has modes 0 to {self.space.num_modes - 1}"
            )
        for actions in wanted:
            check_tokens(actions[:-1], self.vocab_size)
            if not actions or not 0 <= actions[-1] < self.space.num_actions:
                raise ValueError(
                    f"cannot score the continuation {actions}: it needs an action, and the last one "
                    f"must be one of the space's {self.space.num_actions}"
                )
        args = trunks, [list(positions) for positions in at], wanted, mode, temperature
        if (mirror := self._loop.mirror) is not None:
            mirror.record("score", *args)
            mirror.flush()
        return self._score(*args)

    def _score(
        self,
        texts: list[list[int]],
        at: list[list[int]],
        continuations: list[list[int]],
        mode: int,
        temperature: float,
    ) -> list[Scores]:
        allowed = self._masks.allowed
        return score(self.decoder, texts, at, continuations, mode, allowed, temperature)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Take over new weights: None if they were changed in place, else by Hugging Face name (and
        rows of actions beyond the vocabulary as `models.io.tensor_names` names them).

        Cached keys and values are dropped, except those of completions in progress, which continue.
        """
        if weights is not None:
            views = weights_of(self.decoder)
            unknown = sorted(set(weights) - set(views))
            missing = sorted(set(views) - set(weights))
            if unknown or missing:
                raise EngineError(
                    f"these weights are not the model's: missing {missing[:4]}, "
                    f"unknown {unknown[:4]} (of {len(missing)} and {len(unknown)})"
                )
            for name in weights:  # in their order: a sharded model gathers each as it is read
                views[name].copy_(weights[name])
        self.version = version
        self._loop.drop_stale_pages()

    def follow(self) -> None:
        """Repeat the calls of the group's first process until it releases this one."""
        asyncio.run(self._loop.follow())

    def release(self) -> None:
        """End `follow` in the other processes of the group."""
        assert self._loop.mirror is not None
        self._loop.mirror.release()

    def _repeat(self, name: str, *args: Any) -> None:
        """A call that the first process made, on the context of the same number."""
        if name == "open":
            context = self.open(*args)
            self._copies[context.number] = context
        elif name == "score":
            self._score(*args)
        elif name == "grammar" and self._loop.mirror is not None:
            self._loop.mirror.add_grammar(*args)
        elif name == "pause":
            self.pause()
        else:
            self._repeat_on(self._copies[args[0]], name, args[1:])

    def _repeat_on(self, context: NativeContext, name: str, args: tuple[Any, ...]) -> None:
        mirror = self._loop.mirror
        if name == "fork":
            child = context.fork(*args)
            self._copies[child.number] = child
        elif name == "begin" and mirror is not None:
            context.mode, sampling, number = args
            future = context.begin(sampling, mirror.grammar(number)).future
            # nobody waits for it here
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        else:
            getattr(context, name)(*args)  # append, end, close
        if context.is_done:
            del self._copies[context.number]

    def pause(self) -> None:
        """End every running sample as it is, finish "pause"."""
        self._loop.record("pause")
        self._loop.pause()

    def close(self) -> None:
        """End every sample with an error and free the pool."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.fail_all(EngineError("the engine was closed while this context sampled"))
        self._tree.pages.discard()

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the start; `decode_tokens` were computed one per request and step."""
        pages = self._tree.pages
        return {
            "steps": self._loop.steps,
            "prefill_tokens": self._loop.prefill_tokens,
            "decode_tokens": self._loop.decode_tokens,
            "evictions": self._scheduler.evictions,
            "preemptions": self._scheduler.preemptions,
            "running": len(self._scheduler.requests),
            "pages_free": pages.free,
            "pages_total": pages.total,
            **self.draft_counts,
        }

    @property
    def drafts(self) -> bool:
        """Whether it drafts tokens where that pays."""
        return self._loop.drafter is not None

    @property
    def draft_counts(self) -> dict[str, int]:
        """Drafted tokens since the start, and those that were right, by source; empty without drafts."""
        if self._loop.drafter is None:
            return {}
        counts = self._loop.drafter.counts
        by_kind = {"drafts_proposed": counts.proposed, "drafts_accepted": counts.accepted}
        return {f"{kind}/{source}": n for kind, by in by_kind.items() for source, n in by.items()}

    def _request(
        self, context: NativeContext, sampling: Sampling, grammar: Grammar | None
    ) -> SampleRequest:
        if not self._is_open:
            raise EngineError("the engine is closed")
        stop_strings = None
        if sampling.stop:
            if self._pieces is None:
                raise EngineError(
                    f"stop strings {sampling.stop!r} need a tokenizer; pass "
                    f"NativeEngine(..., tokenizer=...) or use stop_tokens"
                )
            stop_strings = self._stop_strings(sampling.stop, self._pieces)
        mode = 0
        if grammar is not None:
            mode = grammar.start if context.mode is None else context.mode
            if not 0 <= mode < self.space.num_modes:
                raise EngineError(
                    f"the grammar starts in mode {mode}, but the action space has modes 0 to "
                    f"{self.space.num_modes - 1}"
                )
        stop_tokens = self.eos_ids.union(sampling.stop_tokens)
        matcher = None
        if sampling.structure is not None:
            if sampling.structure.is_part:
                stop_tokens = frozenset[int]()
            matcher = self._matcher(context, sampling, stop_tokens, grammar)
        window = self.decoder.shape.max_positions - len(context.tokens)
        return SampleRequest(
            sequence=context.sequence,
            key=context.key,
            sampling=sampling,
            stop_tokens=stop_tokens,
            stop_strings=stop_strings,
            grammar=grammar,
            mode=mode,
            budget=min(sampling.max_tokens, window),
            version=self.version,
            future=asyncio.get_running_loop().create_future(),
            matcher=matcher,
            task=context.task,
        )

    def check_structure(self, structure: Structure) -> None:
        """Raise EngineError if answers cannot be held to it."""
        if self._structures is None:
            raise EngineError(
                "a structure is matched with the bytes of tokens; pass NativeEngine(..., tokenizer=...)"
            )
        try:
            self._structures.check(structure)
        except StructureError as error:
            raise EngineError(str(error)) from error

    def _matcher(
        self,
        context: NativeContext,
        sampling: Sampling,
        stop_tokens: frozenset[int],
        grammar: Grammar | None,
    ) -> StructureMatcher:
        """The structure's matcher, behind the tokens of the answer that the context has already."""
        structure = sampling.structure
        assert structure is not None
        self.check_structure(structure)
        assert self._structures is not None
        if grammar is not None:
            raise EngineError(
                "a sample has the run's actions or a structure, not both: an action beyond the vocabulary "
                "has no text that a structure could allow"
            )
        matcher = self._structures.matcher(structure, stop_tokens)
        if sampling.num_begun:
            try:
                matcher.write(context.tokens[-sampling.num_begun :])
            except StructureError as error:
                raise EngineError(str(error)) from error
        return matcher


def _check_space(space: ActionSpace, shape: ModelShape) -> None:
    if space.extra > shape.extra:
        raise EngineError(
            f"the action space has {space.extra} actions beyond the vocabulary; extra actions "
            f"need head rows, and the model has {shape.extra} (see graft.models.extra_actions.extend)"
        )
    if space.vocab_size != shape.vocab_size:
        raise EngineError(
            f"the action space has {space.vocab_size} tokens, the model has {shape.vocab_size}"
        )


def _check_kernels(shape: ModelShape, page_size: int, in_order: bool, rounds_kv: bool) -> None:
    if rounds_kv and not in_order:
        raise EngineError(
            "the decoder rounds keys and values to eight bits, which the kernels read in one order of "
            "adding only, and it has none (decoder.order); use that of `order_probe.find_order`, or "
            "kernels=False"
        )
    if in_order and page_size != BLOCK:
        raise ValueError(
            f"page_size={page_size}, but with model.exact attention adds in blocks of {BLOCK} "
            f"positions, which are pages; leave engine.page_size out, or set it to {BLOCK}"
        )
    if page_size & (page_size - 1) or page_size < 16:
        raise ValueError(f"page_size={page_size}: the kernels need a power of two of 16 or more")
    if shape.heads > MAX_GROUP * shape.kv_heads:
        raise EngineError(
            f"{shape.heads // shape.kv_heads} query heads share a KV head; the kernels take "
            f"up to {MAX_GROUP}; pass kernels=False"
        )
