"""The engine's kernels against plain PyTorch, on ragged batches; on a GPU or in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graft.engine.native.kv.sharing import find_sharing
from graft.engine.native.sampling.sampler import SamplingParams, lowest_kept, sample
from graft.engine.native.sampling.uniforms import row_keys, uniforms

PAGE = 16


def ragged_table(
    groups: list[tuple[int, list[int]]], generator: torch.Generator
) -> tuple[np.ndarray, list[int]]:
    """A page table of sibling groups: (shared pages, lengths of the members); and the lengths, flat."""
    rows: list[list[int]] = []
    lengths: list[int] = []
    page = 1
    for shared, members in groups:
        stem = list(range(page, page + shared))
        page += shared
        for length in members:
            own = -(-length // PAGE) - shared
            rows.append(stem + list(range(page, page + own)))
            page += own
            lengths.append(length)
    names = torch.randperm(page - 1, generator=generator) + 1  # pages lie anywhere in the pool
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = [int(names[p - 1]) for p in row]
    return table, lengths


def dense(
    q: Tensor, keys: Tensor, values: Tensor, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attention of q [n,H,d] over keys, values [L,K,d] or the last of them, in float64."""
    keys, values = keys[-window:], values[-window:]
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    score = torch.einsum("nhd,lhd->nhl", q.double(), keys) * q.shape[-1] ** -0.5
    if sinks is not None:  # one more score, without a value
        sink = sinks.cpu().double()[None, :, None].expand(len(q), -1, -1)
        values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        score = torch.cat([score, sink], -1)
    return torch.einsum("nhl,lhd->nhd", score.softmax(-1), values)


def read_sequence(pool: Tensor, pages: list[int], length: int) -> Tensor:
    """Keys or values of a sequence, [L, K, d]."""
    return pool[pages].transpose(1, 2).flatten(0, 1)[:length]


def poisoned_pool(table: np.ndarray, lengths: list[int], heads: int, size: int, dtype, device):
    """Keys and values where a sequence has them, NaN everywhere else."""
    generator = torch.Generator().manual_seed(1)
    pool = torch.full((2, int(table.max()) + 2, heads, PAGE, size), torch.nan)
    for row, length in zip(table, lengths, strict=True):
        for position in range(length):
            page, slot = row[position // PAGE], position % PAGE
            if pool[0, page, 0, slot, 0].isnan():
                pool[:, page, :, slot] = torch.randn(2, heads, size, generator=generator)
    return pool.to(device, dtype)


@pytest.mark.parametrize(
    ("group", "kv_heads", "size", "splits", "dtype", "window"),
    [
        (2, 2, 64, 1, torch.float32, 0),
        (1, 2, 128, 2, torch.float32, 0),
        (3, 1, 64, 4, torch.float32, 0),
        pytest.param(4, 1, 32, 1, torch.float32, 0, marks=pytest.mark.slow),
        pytest.param(8, 1, 128, 1, torch.float32, 0, marks=pytest.mark.slow),
        (2, 1, 80, 2, torch.float32, 0),
        (2, 2, 128, 1, torch.bfloat16, 0),
        (2, 1, 16, 1, torch.float32, 7),
        (2, 1, 32, 2, torch.float32, 40),
        (1, 1, 16, 1, torch.bfloat16, 64),
    ],
)
def test_decoding_with_shared_pages_equals_dense_attention_of_each_row(
    group, kv_heads, size, splits, dtype, window, kernel_device
):
    from graft.engine.native.cuda.kernels.decode import decode, scratch

    generator = torch.Generator().manual_seed(0)
    several = [33] * (1 + -(-17 // group))  # more than a tile holds
    groups = [(3, [49, 64, 80]), (0, [1]), (2, several), (0, [17])]
    table, lengths = ragged_table(groups, generator)
    sharing = find_sharing(table, group, kv_heads, splits)
    assert len(sharing.items) > 0
    table, lengths = table[sharing.order], [lengths[i] for i in sharing.order]
    pool = poisoned_pool(table, lengths, kv_heads, size, dtype, kernel_device)
    q = torch.randn(len(table), kv_heads * group, size, generator=generator)
    q = q.to(kernel_device, dtype)
    sinks = torch.randn(q.shape[1]).to(kernel_device, dtype) if window else None
    dead = 2  # a row that is over: none of its pages may be read
    seen = torch.tensor(lengths, device=kernel_device)
    seen[dead] = 0
    slots = splits + int(sharing.slots.max())
    space = scratch(len(table), slots, q.shape[1], size, kernel_device)
    for buffer in space:
        buffer.fill_(torch.nan)
    out = decode(
        q,
        pool[0],
        pool[1],
        torch.tensor(table, dtype=torch.int32, device=kernel_device),
        seen,
        torch.tensor(sharing.tails, device=kernel_device),
        torch.tensor(sharing.items, dtype=torch.int32, device=kernel_device),
        torch.tensor(sharing.slots, device=kernel_device),
        splits=splits,
        slots=slots,
        tile_rows=sharing.tile_rows,
        space=space,
        window=window,
        sinks=sinks,
    ).cpu()
    pool, q = pool.cpu().float(), q.cpu().float()
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for row, length in enumerate(lengths):
        if row != dead:
            keys, values = (read_sequence(pool[i], table[row].tolist(), length) for i in (0, 1))
            want = dense(q[row : row + 1], keys, values, window, sinks)[0]
            torch.testing.assert_close(out[row].double(), want, atol=tolerance, rtol=tolerance)


def test_one_slot_is_written_without_a_merge(kernel_device):
    from graft.engine.native.cuda.kernels.decode import decode, scratch

    generator = torch.Generator().manual_seed(3)
    table, lengths = ragged_table([(0, [5]), (0, [31]), (0, [32])], generator)
    pool = poisoned_pool(table, lengths, 2, 32, torch.float32, kernel_device)
    q = torch.randn(3, 4, 32, generator=generator).to(kernel_device)
    sinks = torch.randn(4, generator=generator).to(kernel_device)
    zeros = torch.zeros(3, dtype=torch.int64, device=kernel_device)
    out = decode(
        q,
        pool[0],
        pool[1],
        torch.tensor(table, dtype=torch.int32, device=kernel_device),
        torch.tensor(lengths, device=kernel_device),
        zeros,
        zeros[:0].view(0, 5).int(),
        zeros,
        splits=1,
        slots=1,
        tile_rows=16,
        space=scratch(0, 1, 4, 32, kernel_device),
        sinks=sinks,
    ).cpu()
    for row, length in enumerate(lengths):
        keys, values = (read_sequence(pool[i].cpu(), table[row].tolist(), length) for i in (0, 1))
        want = dense(q[row : row + 1].cpu(), keys, values, sinks=sinks)[0]
        torch.testing.assert_close(out[row].double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("group", "size", "dtype", "window"),
    [
        (3, 32, torch.float32, 0),
        (1, 64, torch.bfloat16, 0),
        (1, 32, torch.float32, 5),
        (2, 16, torch.float32, 50),
    ],
)
def test_extending_sees_the_past_and_itself(group, size, dtype, window, kernel_device):
    from graft.engine.native.cuda.kernels.extend import BLOCK, extend

    generator = torch.Generator().manual_seed(0)
    table, lengths = ragged_table([(1, [40, 95]), (0, [1]), (0, [64])], generator)
    counts = [24, 70, 1, 64]  # of the last tokens of each sequence
    pool = poisoned_pool(table, lengths, 2, size, dtype, kernel_device)
    q = torch.randn(sum(counts), 2 * group, size, generator=generator).to(kernel_device, dtype)
    sinks = torch.randn(2 * group).to(kernel_device, dtype) if window else None
    blocks: list[list[int]] = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for begin in range(0, count, BLOCK):
            left = min(BLOCK, count - begin)
            blocks.append([first + begin, left, length - count + begin, row])
        first += count
    out = extend(
        q,
        pool[0],
        pool[1],
        torch.tensor(table, dtype=torch.int32, device=kernel_device),
        torch.tensor(blocks, dtype=torch.int32, device=kernel_device),
        window,
        sinks,
    ).cpu()
    pool, q = pool.cpu().float(), q.cpu().float()
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for number in range(0, count, 13):
            seen = length - count + number + 1
            keys, values = (read_sequence(pool[i], table[row].tolist(), seen) for i in (0, 1))
            want = dense(q[first + number : first + number + 1], keys, values, window, sinks)
            got = out[first + number : first + number + 1].double()
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        first += count


def burst_state(rows: int, device: torch.device, **fields: list[int]) -> Tensor:
    from graft.engine.native.cuda.kernels.draw import FIELDS, DrawField

    state = torch.zeros(FIELDS, rows, dtype=torch.int64)
    state[DrawField.BUDGET] = 9
    for name, values in fields.items():
        state[DrawField[name.upper()]] = torch.tensor(values)
    return state.to(device)


@pytest.mark.parametrize("vocabulary", [7, 4099])
def test_a_draw_is_the_plain_samplers_draw(vocabulary, kernel_device):
    from graft.engine.native.cuda.kernels.draw import DrawField, draw

    rows, modes = 12, 3
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    allowed = torch.rand(modes, vocabulary, generator=generator) < 0.6
    allowed[:, :3] = True
    mode = torch.randint(modes, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    greedy = torch.zeros(rows, dtype=torch.bool)
    greedy[3] = True
    temperature[3] = 1.0
    keys = np.arange(rows, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)
    positions = np.arange(rows) * 7
    state = burst_state(
        rows,
        kernel_device,
        position=positions.tolist(),
        length=[p + 1 for p in positions],
        key=row_keys(5, keys).view(np.int64).tolist(),
        mode=mode.tolist(),
        greedy=greedy.long().tolist(),
    )
    results = torch.full((3, 4, rows), torch.nan, device=kernel_device)
    stops = torch.full((rows, 2), -1, dtype=torch.int32)
    stops[:, 0] = 1
    draw(
        logits.to(kernel_device),
        state,
        (1 / temperature).to(kernel_device),
        stops.to(kernel_device),
        results,
        allowed=allowed.to(kernel_device),
    )
    drawn = torch.from_numpy(uniforms(5, keys, (positions + 1).astype(np.uint64)))
    want = sample(logits, drawn, SamplingParams(temperature, greedy), allowed[mode])
    token, logp, entropy = results[:, 0].cpu()
    torch.testing.assert_close(token.long(), want[0])
    torch.testing.assert_close(logp, want[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want[2], atol=1e-4, rtol=1e-5)
    state = state.cpu()
    assert state[DrawField.TOKEN].tolist() == want[0].tolist()
    assert state[DrawField.POSITION].tolist() == (positions + 1).tolist()
    is_over = want[0] == 1  # the stop token
    assert ((state[DrawField.LENGTH] == 0) == is_over).all()
    assert results[:, 1:].isnan().all()


def test_a_row_stops_at_its_budget_and_stop_tokens_wait_for_min_tokens(kernel_device):
    from graft.engine.native.cuda.kernels.draw import DrawField, draw

    logits = torch.full((3, 10), -20.0)
    logits[:, 4] = 5.0  # the stop token is by far the likeliest
    logits[:, 6] = 1.0
    state = burst_state(
        3, kernel_device, position=[0, 0, 0], length=[1, 1, 0], forced=[2, 0, 0], budget=[3, 3, 3]
    )
    results = torch.full((3, 3, 3), torch.nan, device=kernel_device)
    stops = torch.full((3, 1), 4, dtype=torch.int32, device=kernel_device)
    inv_temperature = torch.ones(3, device=kernel_device)
    for _ in range(3):
        draw(logits.to(kernel_device), state, inv_temperature, stops, results)
    assert results[0, :, 0].tolist() == [6, 6, 4]
    assert results[0, 0, 1] == 4 and results[0, 1:, 1].isnan().all()
    assert results[:, :, 2].isnan().all()  # an unused row
    assert state[DrawField.DRAWN].tolist() == [3, 1, 0]
    assert state[DrawField.LENGTH].tolist() == [0, 0, 0]
    # before min_tokens the stop token is not part of the distribution
    assert results[1, 0, 0].item() == pytest.approx(0.0, abs=1e-6)


def test_what_is_not_a_number_has_no_log_prob(kernel_device):
    from graft.engine.native.cuda.kernels.draw import DrawField, draw

    logits = torch.zeros(2, 8)
    logits[0, 3] = torch.nan
    allowed = torch.ones(2, 8, dtype=torch.bool)
    allowed[1] = False
    state = burst_state(2, kernel_device, length=[1, 1], mode=[0, 1])
    results = torch.zeros(3, 2, 2, device=kernel_device)
    none = torch.zeros(2, 0, dtype=torch.int32, device=kernel_device)
    inv_temperature = torch.ones(2, device=kernel_device)
    draw(
        logits.to(kernel_device),
        state,
        inv_temperature,
        none,
        results,
        allowed=allowed.to(kernel_device),
    )
    assert results[1, 0].isnan().all()
    assert state[DrawField.LENGTH].tolist() == [0, 0]


def test_truncation_keeps_what_a_sorted_list_keeps(kernel_device):
    from graft.engine.native.cuda.kernels.truncation import truncation_floors

    generator = torch.Generator().manual_seed(0)
    vocabulary = 300
    settings = [(5, 1.0, 0.0), (300, 0.7, 0.0), (300, 1.0, 0.2), (20, 0.5, 0.0), (300, 1.0, 0.0)]
    settings += [(1, 1.0, 0.0), (300, 0.01, 0.0), (40, 0.9, 0.1)]
    rows = len(settings)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    top_k, top_p, min_p = torch.tensor(settings).T.contiguous()
    floors = truncation_floors(
        logits.to(kernel_device),
        burst_state(rows, kernel_device, length=[1] * rows),
        torch.full((rows,), 0.5, device=kernel_device),
        torch.zeros(rows, 0, dtype=torch.int32, device=kernel_device),
        top_k.to(kernel_device),
        top_p.to(kernel_device),
        min_p.to(kernel_device),
    ).cpu()
    scores = logits * 0.5
    want = lowest_kept(scores, top_k.long(), top_p, min_p)
    assert torch.equal(scores >= floors[:, None], scores >= want[:, None])


def test_spans_are_shared_from_the_root_outwards():
    """Pages 1-3 by four rows, 4-5 by two of them; a lone row shares nothing."""
    table = np.array(
        [
            [9, 8, 0, 0, 0, 0],
            [1, 2, 3, 4, 5, 6],
            [1, 2, 3, 7, 0, 0],
            [1, 2, 3, 4, 5, 0],
            [1, 2, 3, 0, 0, 0],
        ]
    )
    sharing = find_sharing(table, group=2, kv_heads=8, splits=1)
    covered = {(first, rows, start, stop) for first, rows, start, stop, _ in sharing.items.tolist()}
    assert covered == {(0, 4, 0, 2), (0, 4, 2, 3), (1, 2, 3, 5)}
    assert sharing.order.tolist() == [4, 3, 1, 2, 0]
    assert sharing.tails.tolist() == [3, 5, 5, 3, 0]
    assert sharing.slots.tolist() == [2, 3, 3, 2, 0]
