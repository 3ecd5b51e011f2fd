"""An engine that two processes hold together draws what one process draws.

Each process computes half of the heads; only the first has callers.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graft.actions.space import ActionSpace
from graft.engine.engine_group import HEADER, EngineGroup, lead
from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.engine.native.mirror import CallMirror
from graft.models.decoder import Decoder
from graft.models.extra_actions import extend
from graft.models.io.tensor_names import weights_of
from graft.models.parallel.sampler import SlicedDecoder
from graft.models.shape import Experts
from graft.types import Completion, Sampling
from tests.conftest import _repair_interpreter
from tests.engine.engine_kit import EXTRA, TOOLS, prompt, tiny_decoder, tools_space
from tests.processes import Processes


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    with Processes(2) as group:
        yield group


GROUPS: list[EngineGroup] = []


def the_group() -> EngineGroup:
    """In a child: both processes."""
    if not GROUPS:
        group = dist.group.WORLD
        assert group is not None
        GROUPS.append(EngineGroup(group, [0, 1], lambda work: work.wait()))
    return GROUPS[0]


def decoder_for(kind: str, seed: int = 0) -> Decoder:
    """qwen3 tied, with biases and untied, or with actions beyond the vocabulary; other families."""
    if kind == "biases":
        return tiny_decoder(seed, tied=False, qkv_bias=True, out_bias=True, mlp_bias=True)
    if kind == "experts":
        experts = Experts(4, 2, 12, router="sigmoid", scaling=2.0, shared_ff=12)
        family = {"family": "glm4_moe", "rotary_share": 0.5, "dense_layers": (0,)}
        return tiny_decoder(seed, experts=experts, **family)
    if kind == "windows":
        norms = {"norm_offset": True, "sandwich": True, "scales_embedding": True}
        family = {"family": "gemma3_text", "windows": (5, 0), "local_theta": 100.0, **norms}
        return tiny_decoder(seed, activation="gelu_tanh", **family)
    decoder = tiny_decoder(seed)
    if kind == "actions":
        decoder = extend(decoder, [None] * EXTRA, bias=True)
        assert decoder.action_bias is not None
        with torch.no_grad():
            decoder.action_bias.copy_(torch.linspace(-1.0, 1.0, EXTRA))
    return decoder


def sliced(decoder: Decoder) -> SlicedDecoder:
    group = the_group()
    where = group.group, group.size, group.index
    made = SlicedDecoder(decoder.shape, *where, dtype=torch.float32, device=torch.device("cpu"))
    whole = weights_of(decoder)
    for name, target in made.hf_weights().items():
        target.copy_(whole[name])
    return made


def engine_for(kind: str, is_split: bool, **options: Any) -> NativeEngine:
    decoder = decoder_for(kind)
    space: ActionSpace | None = tools_space() if kind == "actions" else None
    options = {"kv_tokens": 128, "page_size": 4, "seed": 3, "space": space, **options}
    if not is_split:
        return NativeEngine(decoder, **options)
    return NativeEngine(sliced(decoder), group=the_group(), **options)


# scenarios: what callers do, and what they see


def forks(engine: NativeEngine) -> list[Completion]:
    """Forks, tool results, a window of few pages, and samples that begin while others run."""

    async def attempt(context: Any, turns: int) -> list[Completion]:
        found = []
        for turn in range(turns):
            found.append(await context.sample(Sampling(temperature=0.9, max_tokens=7 + turn)))
            context.append(prompt(3, salt=turn))
            await asyncio.sleep(0)
        context.close()
        return found

    async def main() -> list[Completion]:
        roots = [engine.open(prompt(11, salt)) for salt in range(3)]
        contexts = [root.fork() for root in roots for _ in range(3)]
        contexts += [roots[0].fork(at=5), roots[1]]
        found = await asyncio.gather(
            *(attempt(c, 1 + number % 3) for number, c in enumerate(contexts))
        )
        for root in roots:
            root.close()
        return [completion for several in found for completion in several]

    return asyncio.run(main())


def stops(engine: NativeEngine) -> list[Completion]:
    """A sample that its caller gives up, one whose context is closed, and stop tokens."""

    async def main() -> list[Completion]:
        long, gone, short = (engine.open(prompt(6, salt), key=salt) for salt in (1, 2, 3))
        tasks = [asyncio.ensure_future(c.sample(Sampling(max_tokens=40))) for c in (long, gone)]
        found = [await short.sample(Sampling(max_tokens=9, stop_tokens=(3, 4, 5, 6)))]
        tasks[0].cancel()
        gone.close()
        found.append(await tasks[1])
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert long.tokens == prompt(6, 1)
        return [*found, await long.sample(Sampling(max_tokens=3))]

    return asyncio.run(main())


def calls(engine: NativeEngine) -> list[Completion]:
    """A grammar, whose mode goes on from sample to sample."""

    async def main() -> list[Completion]:
        contexts = [engine.open(prompt(5, salt)) for salt in range(4)]
        sampling = Sampling(max_tokens=9)
        first = await asyncio.gather(*(c.sample(sampling, TOOLS) for c in contexts))
        return first + await asyncio.gather(*(c.sample(sampling, TOOLS) for c in contexts))

    return asyncio.run(main())


def scores(engine: NativeEngine) -> list[Any]:
    found = engine.score([prompt(9), prompt(4, 1)], [[2, 9], [4]], [[1, 2, 3], [5]], 0, 0.8)
    return [*found, *forks(engine)[:2]]


SCENARIOS: dict[str, tuple[str, Callable[[NativeEngine], list[Any]]]] = {
    "forks and tool results": ("tied", forks),
    "biases, an untied head": ("biases", forks),
    "cancelled, closed, stopped": ("tied", stops),
    "actions beyond the vocabulary": ("actions", calls),
    "scores": ("actions", scores),
    "experts": ("experts", forks),
    "windows": ("windows", forks),
}


def in_a_pair(name: str) -> Any:
    """In a child."""
    kind, scenario = SCENARIOS[name]
    engine = engine_for(kind, is_split=True)
    found = lead(engine, lambda: scenario(engine))
    return found, engine.stats, len(engine._copies)


def assert_alike(found: Any, want: Any) -> None:
    if isinstance(want, Completion):
        for field in ("tokens", "actions", "modes", "finish", "version"):
            assert getattr(found, field) == getattr(want, field)
        assert found.logprobs == pytest.approx(want.logprobs, abs=1e-5)
        assert found.entropies == pytest.approx(want.entropies, abs=1e-5)
    else:
        for of_position, wanted in zip(found, want, strict=True):
            for logprobs, expected in zip(of_position, wanted, strict=True):
                assert logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_draw_the_tokens_of_one(pair, name):
    kind, scenario = SCENARIOS[name]
    alone = engine_for(kind, is_split=False)
    want = scenario(alone)
    (found, stats, _), (nothing, other_stats, copies) = pair.run(in_a_pair, name)
    assert nothing is None
    for one, other in zip(found, want, strict=True):
        assert_alike(one, other)
    # the same steps, pages and evictions in both
    assert stats == other_stats == alone.stats
    if scenario is forks:
        assert copies == 0  # closed contexts are forgotten
        assert stats["evictions"] + stats["preemptions"] > 0


def loaded(seeds: list[int]) -> list[Completion] | None:
    """In a child: draws with the weights of each seed."""
    engine = engine_for("tied", is_split=True)
    found: list[Completion] = []
    for version, seed in enumerate(seeds, 1):
        engine.load(weights_of(decoder_for("tied", seed)), version)
        found += lead(engine, lambda: forks(engine)[:3]) or []
    return found


def test_new_weights_are_sliced_in_memory(pair):
    alone = engine_for("tied", is_split=False)
    want: list[Completion] = []
    for version, seed in enumerate([4, 5], 1):
        alone.load(weights_of(decoder_for("tied", seed)), version)
        want += forks(alone)[:3]
    found, _ = pair.run(loaded, [4, 5])
    assert [c.version for c in found] == [1, 1, 1, 2, 2, 2]
    for one, other in zip(found, want, strict=True):
        assert_alike(one, other)


def sent(sizes: list[int]) -> list[int]:
    """In a child: the sums of messages that the first process sends."""
    group = the_group()
    messages = [bytes([7]) * size for size in sizes]
    if group.is_first:
        for message in messages:
            group.send(message)
        return [sum(message) for message in messages]
    return [sum(group.receive()) for _ in sizes]


def test_messages_of_any_length_arrive(pair):
    sizes = [0, 10, HEADER - 30, HEADER - 8, HEADER, 3 * HEADER + 1]
    first, other = pair.run(sent, sizes)
    assert first == other == [7 * size for size in sizes]


class OtherDraws:
    """A group whose first process has drawn something else."""

    is_first, index = False, 1

    def receive(self) -> Any:
        return "step", 12345, []


def test_a_process_that_draws_other_tokens_ends_the_run():
    with pytest.raises(EngineError, match="drawn other tokens than the first one"):
        CallMirror(OtherDraws(), lambda *_: None).sync()  # type: ignore[arg-type]


def small_kernels() -> None:
    """In a child, as in `conftest`: the interpreter takes its time."""
    _repair_interpreter(pytest.MonkeyPatch())
    warnings.simplefilter("ignore", RuntimeWarning)
    from graft.engine.native.cuda import runner
    from graft.engine.native.cuda.kernels import draw, truncation

    runner.MAX_SPLITS, draw.CHUNK, truncation.CHUNK = 1, 16, 32


def bursts(engine: NativeEngine) -> list[Completion]:
    """Draws of many steps at a time, while a caller cancels and others begin."""

    async def main() -> list[Completion]:
        root = engine.open(prompt(20))
        contexts = [root.fork() for _ in range(2)]
        lone = engine.open(prompt(6, 1))
        given_up = asyncio.ensure_future(lone.sample(Sampling(max_tokens=30)))
        found = await asyncio.gather(*(c.sample(Sampling(max_tokens=9)) for c in contexts))
        given_up.cancel()
        contexts[0].append(prompt(4, 2))
        sampling = Sampling(max_tokens=6, temperature=0.8, top_p=0.9)
        return [*found, await contexts[0].sample(sampling)]

    return asyncio.run(main())


def burst_in_a_pair() -> list[Completion] | None:
    """In a child."""
    small_kernels()
    decoder = tiny_decoder(layers=1, head_dim=16, heads=2, kv_heads=2)
    engine = NativeEngine(
        sliced(decoder), group=the_group(), kv_tokens=512, page_size=16, kernels=True
    )
    engine._loop.mean_length = 32.0  # segments of four steps
    return lead(engine, lambda: bursts(engine))


@pytest.mark.slow
def test_two_processes_draw_in_bursts_what_one_draws_step_by_step(pair, kernel_device):
    if kernel_device.type != "cpu":
        pytest.skip("two processes on one GPU: NCCL refuses them")
    decoder = tiny_decoder(layers=1, head_dim=16, heads=2, kv_heads=2)
    want = bursts(NativeEngine(decoder, kv_tokens=512, page_size=16, kernels=False))
    found, nothing = pair.run(burst_in_a_pair, deadline=300.0)
    assert nothing is None and len(found) == 3
    for one, other in zip(found, want, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
