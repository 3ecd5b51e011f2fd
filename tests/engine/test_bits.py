"""Log-probs of the engine and of the learner have the same bits, on random trees, in any company."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_kit import VOCAB, prompt, tiny_decoder

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.context import NativeContext
from graft.engine.native.cpu import decode_batch
from graft.engine.native.engine import NativeEngine
from graft.models import order_probe, tile_attention
from graft.models.decoder import Decoder
from graft.models.order_probe import find_order
from graft.models.recurrence import Recurrence
from graft.models.row_order import RowOrder
from graft.models.shape import Experts
from graft.models.tree.forest import Forest
from graft.models.truncation import Truncation
from graft.rollout.batching import to_batch
from graft.structure import Structure
from graft.text.tokenizer import FastTokenizer
from graft.types import Author, Episode, Leaf, Sampling, Span, Task, Trajectory


@dataclass
class Trees:
    """Random agents: each samples, forks, reads a tool's answer, samples again."""

    engine: NativeEngine
    sampling: dict[str, Any]
    rng: random.Random
    longest: int
    grammar: Any = None
    structures: Sequence[Structure | None] = (None,)
    episodes: list[Episode] = field(default_factory=list[Episode])

    def grow(self, num_trees: int) -> list[Trajectory]:
        async def main() -> None:
            await asyncio.gather(*(self._tree(number) for number in range(num_trees)))

        asyncio.run(main())
        return [row for episode in self.episodes for row in episode.trajectories()]

    async def _tree(self, number: int) -> None:
        episode = Episode(Task(str(number), "test"))
        self.episodes.append(episode)
        tokens = prompt(self.rng.randint(1, self.longest), number)
        episode.append(Span(None, Author.TASK, tokens))
        context = self.engine.open(tokens)
        forks = [context.fork() for _ in range(self.rng.randint(1, 4))]
        await asyncio.gather(*(self._attempt(episode, 0, fork, 2) for fork in forks))

    async def _attempt(
        self, episode: Episode, parent: int, context: NativeContext, turns: int
    ) -> None:
        most = self.rng.randint(1, self.longest)
        how = {**self.sampling, "structure": self.rng.choice(self.structures)}
        done = await context.sample(Sampling(max_tokens=most, **how), self.grammar)
        parts = done.tokens, done.actions, done.logprobs, done.entropies, done.modes
        mask = [action >= 0 for action in done.actions]
        tip = episode.append(Span(parent, Author.POLICY, *parts, mask=mask, masks=done.masks))
        if turns == 0 or self.rng.random() < 0.3:
            episode.leaves.append(Leaf((tip,)))
            return
        answer = prompt(self.rng.randint(1, self.longest), tip)
        tip = episode.append(Span(tip, Author.ENV, answer))
        context.append(answer)
        branches = [context, *(context.fork() for _ in range(self.rng.randint(0, 2)))]
        await asyncio.gather(*(self._attempt(episode, tip, b, turns - 1) for b in branches))


def num_unequal(
    decoder: Decoder,
    rows: list[Trajectory],
    rng: random.Random,
    temperature: float = 1.0,
    allowed: torch.Tensor | None = None,
    truncation: Truncation | None = None,
) -> tuple[int, int]:
    """Trained tokens whose log-probs differ, and all, in micro-batches of random rows; with gradients."""
    rng.shuffle(rows)
    unequal = total = 0
    while rows:
        size = rng.choice([1, 2, 5, 40])
        micro, rows = rows[:size], rows[size:]
        batch = to_batch(micro)
        forest = Forest(micro, batch.mask, decoder.device)
        logp, _ = forest.logprobs(decoder, temperature, allowed, truncation)
        unequal += int((logp.detach().cpu() != batch.logprobs)[batch.mask].sum())
        total += batch.num_tokens
    return unequal, total


def ordered(**changes: Any) -> Decoder:
    decoder = tiny_decoder(**changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # biases and sinks begin as 0
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    order = find_order(decoder)
    if order is None:
        pytest.skip(
            "no order holds with this machine's library; runs measure the gap that is there"
        )
    decoder.use_order(order)
    return decoder


SHAPES: list[dict[str, Any]] = [
    {"width": 64, "head_dim": 16, "ff": 96},
    {"kv_heads": 4, "family": "llama", "qk_norm": False, "tied": False},
    {"heads": 3, "kv_heads": 1, "head_dim": 12, "ff": 50, "width": 40, "qkv_bias": True},
    {"family": "qwen3_moe", "experts": Experts(5, 2, 24, renormalise=True)},
    {
        "family": "qwen3_moe",
        "experts": Experts(8, 3, 20),
        "layers": 3,
        "dense_layers": (1,),
        "tied": False,
    },
    {
        "family": "glm4_moe",
        "experts": Experts(8, 3, 20, router="sigmoid", scaling=2.5, groups=2, shared_ff=20),
        "layers": 3,
        "dense_layers": (0,),
        "rotary_share": 0.5,
        "qk_norm": False,
        "qkv_bias": True,
    },
    {"family": "olmoe", "joint_norm": True, "experts": Experts(6, 2, 20), "out_bias": True},
    {
        "family": "granitemoe",
        "experts": Experts(6, 2, 20, renormalise=True),
        "qk_norm": False,
        "query_scale": 0.3,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logits_divisor": 6.0,
    },
    {
        "family": "gpt_oss",
        "experts": Experts(6, 2, 20, renormalise=True, biased=True, swiglu_limit=0.5),
        "sinks": True,
        "windows": (9, 0),
        "qk_norm": False,
        "qkv_bias": True,
        "out_bias": True,
    },
    {"family": "mistral", "qk_norm": False, "windows": (7, 7)},
    {
        "family": "gemma3_text",
        "layers": 3,
        "windows": (9, 0, 9),
        "local_theta": 100.0,
        "query_scale": 0.7,
        "activation": "gelu_tanh",
        "norm_offset": True,
        "sandwich": True,
        "scales_embedding": True,
    },
    {
        "family": "qwen3_next",
        "recurrence": Recurrence("delta", 4, 2, 8, 4, 12, by_key_head=True),
        "recurrent_layers": (0,),
        "experts": Experts(6, 2, 20, renormalise=True, shared_ff=20, shared_gate=True),
        "attention_gate": True,
        "norm_offset": True,
        "rotary_share": 0.25,
    },
    {
        "family": "qwen3_5_text",
        "layers": 3,
        "recurrence": Recurrence("delta", 3, 3, 6, 3, 10),
        "recurrent_layers": (0, 1),
        "attention_gate": True,
        "norm_offset": True,
        "rotary_share": 0.5,
        "tied": False,
    },
    {
        "family": "granitemoehybrid",
        "layers": 3,
        "recurrence": Recurrence("mamba", 4, 2, 6, 4, 16, conv_bias=True, least_step=0.1),
        "recurrent_layers": (0, 2),
        "experts": Experts(6, 2, 20, renormalise=True, shared_ff=20),
        "qk_norm": False,
        "rotary_share": 0.0,
        "query_scale": 0.3,
        "residual_scale": 0.22,
    },
    {
        "family": "lfm2",
        "layers": 3,
        "recurrence": Recurrence("conv", 4, value_dim=32, conv_bias=True, bias=True),
        "recurrent_layers": (0, 2),
    },
    {
        "family": "lfm2_moe",
        "recurrence": Recurrence("conv", 3, value_dim=32),
        "recurrent_layers": (0,),
        "experts": Experts(6, 2, 20, renormalise=True, router="sigmoid", sum_eps=1e-6),
        "dense_layers": (0,),
    },
    {
        "family": "nemotron_h",
        "layers": 4,
        "recurrence": Recurrence("mamba", 4, 2, 6, 4, 8, least_step=0.1, by_group=True),
        "recurrent_layers": (0,),
        "mlp_layers": (1, 3),
        "activation": "relu2",
        "tied": False,
        "qk_norm": False,
        "rotary_share": 0.0,
    },
    {
        "family": "nemotron_h",
        "layers": 4,
        "recurrence": Recurrence("mamba", 4, 2, 6, 4, 8, by_group=True),
        "recurrent_layers": (0,),
        "mlp_layers": (1, 3),
        "dense_layers": (3,),
        "experts": Experts(6, 2, 20, renormalise=True, router="sigmoid", shared_ff=28),
        "activation": "relu2",
        "tied": False,
        "qk_norm": False,
        "rotary_share": 0.0,
    },
]


@pytest.mark.parametrize("changes", SHAPES)
def test_the_log_probs_of_random_trees_have_the_learners_bits(changes: dict[str, Any]) -> None:
    decoder, rng = ordered(**changes), random.Random(1)
    engine = NativeEngine(decoder, kv_tokens=480, page_size=16, prefill_chunk=50, max_running=9)
    rows = Trees(engine, {"temperature": 0.7}, rng, longest=40).grow(4)
    assert engine.stats["preemptions"] + engine.stats["evictions"] > 0
    unequal, total = num_unequal(decoder, rows, rng, temperature=0.7)
    assert total > 200 and unequal == 0


@pytest.mark.parametrize("changes", [SHAPES[0], SHAPES[5], SHAPES[10], SHAPES[12]])
def test_threads_that_share_a_pass_leave_the_bits_of_every_row(changes: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        decoder, rng = ordered(**changes), random.Random(1)
        rows = Trees(NativeEngine(decoder, kv_tokens=4096), {}, rng, longest=40).grow(4)
        assert sum(num_unequal(decoder, list(rows), random.Random(n))[0] for n in range(6)) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("changes", SHAPES)
def test_with_keys_and_values_in_eight_bits_they_have_them_too(changes: dict[str, Any]) -> None:
    decoder, rng = ordered(**changes), random.Random(1)
    engine = NativeEngine(decoder, kv_tokens=480, page_size=16)
    (plain,) = Trees(engine, {}, random.Random(2), longest=12).grow(1)[:1]
    decoder.round_kv()
    engine = NativeEngine(decoder, kv_tokens=480, page_size=16, prefill_chunk=50, max_running=9)
    rows = Trees(engine, {"temperature": 0.7}, rng, longest=40).grow(4)
    assert engine.stats["preemptions"] + engine.stats["evictions"] > 0
    assert engine._tree.pages.pool.dtype == torch.uint8
    unequal, total = num_unequal(decoder, rows, rng, temperature=0.7)
    assert total > 200 and unequal == 0
    # and rounding is no small thing: what was sampled without it has other log-probs
    assert num_unequal(decoder, [plain], rng)[0] > 0


@pytest.mark.parametrize(
    ("window", "sinks", "rounds"),
    [
        (0, False, False),
        (40, False, False),
        (200, False, False),
        (0, True, False),
        (200, True, False),
        (200, True, True),
    ],
)
def test_paths_of_several_tiles_and_shared_tiles_have_the_learners_bits(
    window: int, sinks: bool, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tile_attention, decode_batch):  # short paths, so that the test is quick
        monkeypatch.setattr(module, "TILE", 128)
    decoder, rng = ordered(layers=1, windows=(window,), sinks=sinks), random.Random(2)
    if rounds:
        decoder.round_kv()
    engine = NativeEngine(decoder, kv_tokens=16_384, page_size=16)
    rows = Trees(engine, {}, rng, longest=150).grow(2)
    assert max(len(row.tokens) for row in rows) > 300
    assert num_unequal(decoder, rows, rng)[0] == 0


def test_pages_that_do_not_fit_tiles_have_the_learners_bits() -> None:
    decoder, rng = ordered(), random.Random(3)
    rows = Trees(NativeEngine(decoder, kv_tokens=2048, page_size=5), {}, rng, 30).grow(3)
    assert num_unequal(decoder, rows, rng)[0] == 0


def test_structured_answers_have_the_learners_bits() -> None:
    """Beside plain ones, on trees, with preemption and answers that are cut."""
    letters = FastTokenizer.characters('0123456789{}":, nam')  # 3 + 20 tokens, as the model has
    structures = (
        None,
        Structure.json({"type": "integer"}),
        Structure.json(
            {
                "type": "object",
                "properties": {"nam": {"type": "integer"}, "man": {"enum": ["a", 12]}},
                "required": ["nam"],
                "additionalProperties": False,
            }
        ),
        Structure.regex("[0-9]{3,9}(, [nam]+)*"),
        Structure.choice(["nam", "man", "0123456789"]),
    )
    decoder, rng = ordered(), random.Random(5)
    engine = NativeEngine(
        decoder, tokenizer=letters, eos_ids=(1,), kv_tokens=480, page_size=16, prefill_chunk=50
    )
    trees = Trees(engine, {"temperature": 0.7}, rng, 40, structures=structures)
    drawn = trees.grow(5)
    assert engine.stats["preemptions"] + engine.stats["evictions"] > 0
    assert len({mode for row in drawn for span in row.spans for mode in span.masks}) >= 8
    logged = [Episode.loads(episode.dumps()) for episode in trees.episodes]
    rows = [row for episode in logged for row in episode.trajectories()]
    unequal, total = num_unequal(decoder, rows, rng, temperature=0.7)
    assert total > 300 and unequal == 0


def test_masked_actions_have_the_learners_bits() -> None:
    """Mode 1 allows few actions: the engine computes only their rows of the head."""
    decoder, rng = ordered(extra=3, vocab_size=VOCAB), random.Random(4)
    table = torch.zeros(2, VOCAB + 3, dtype=torch.bool)
    table[0] = table[1, [2, 3, 5]] = True
    space = ActionSpace(VOCAB, 3, table.numpy())
    writes = {(0, VOCAB): (3, 4), (0, VOCAB + 1): (5,), (0, VOCAB + 2): (6, 7, 8)}
    grammar = Automaton(1, {(0, 7): 1, (1, 2): 0}, writes=writes)
    engine = NativeEngine(decoder, kv_tokens=4096, page_size=16, space=space)
    rows = Trees(engine, {}, rng, 30, grammar).grow(4)
    allowed = torch.zeros(2, decoder.shape.head_rows, dtype=torch.bool)
    allowed[:, : VOCAB + 3] = table
    unequal, total = num_unequal(decoder, rows, rng, allowed=allowed)
    modes = {mode for row in rows for span in row.spans for mode in span.modes}
    assert (unequal, modes) == (0, {0, 1}) and total > 100


def test_truncated_distributions_have_the_learners_bits() -> None:
    decoder, rng = ordered(), random.Random(5)
    cut = {"top_k": 7, "top_p": 0.8, "min_p": 0.05}
    rows = Trees(NativeEngine(decoder, kv_tokens=4096), cut, rng, 30).grow(4)
    assert num_unequal(decoder, rows, rng, truncation=Truncation(**cut))[0] == 0


def test_products_in_blocks_compute_the_same_function() -> None:
    decoder, rng = ordered(), random.Random(6)
    decoder.use_order(RowOrder(least=64, block=64))
    rows = Trees(NativeEngine(decoder, kv_tokens=2048), {}, rng, 20).grow(3)
    assert num_unequal(decoder, list(rows), rng)[0] == 0
    decoder.use_order(None)
    batch = to_batch(rows)
    logp, _ = Forest(rows, batch.mask, torch.device("cpu")).logprobs(decoder)
    assert (logp - batch.logprobs)[batch.mask].abs().max() < 1e-5


def test_a_library_whose_rows_depend_on_their_number_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = ordered(ff=56)
    linear = torch.nn.functional.linear

    def by_rows(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return linear(x, *args) + (1e-6 if len(x) % 64 else 0.0)

    monkeypatch.setattr(torch.nn.functional, "linear", by_rows)
    monkeypatch.setattr(order_probe, "_found", {})
    found = find_order(decoder)  # the machine's own library may need larger blocks
    assert found is not None and found.block in (64, 256)
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *a: linear(x, *a) + x.mean() * 1e-3
    )
    monkeypatch.setattr(order_probe, "_found", {})
    assert find_order(decoder) is None


def test_bits_of_a_block_that_adds_little_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of 1 would round them away, and masks of few tokens show them."""
    decoder = ordered(ff=56)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(2.0**-8 if parameter.ndim == 2 else 1.0)
    linear = torch.nn.functional.linear

    def by_rows(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
        is_wrong = len(x) < 16 and len(weight) != decoder.shape.vocab_size
        return linear(x, weight, *args) * (1 + 2.0**-22 if is_wrong else 1.0)

    monkeypatch.setattr(torch.nn.functional, "linear", by_rows)
    monkeypatch.setattr(order_probe, "_found", {})
    found = find_order(decoder)
    assert found is not None and found.least >= 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_tokens_have_the_learners_bits(seed: int) -> None:
    decoder, rng = ordered(**SHAPES[seed]), random.Random(seed)
    pool, page = rng.choice([2048, 8192]), rng.choice([8, 16, 32])
    chunk, running = rng.choice([40, 2048]), rng.choice([3, 1024])
    engine = NativeEngine(
        decoder, kv_tokens=pool, page_size=page, prefill_chunk=chunk, max_running=running
    )
    rows = Trees(engine, {}, rng, longest=rng.choice([40, 200])).grow(12)
    unequal, total = num_unequal(decoder, rows, rng)
    assert unequal == 0 and total > 3000
