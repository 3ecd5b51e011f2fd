"""Pages and the tree: no page leaks, no page is shared by mistake."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_kit import (
    assert_equals_the_model,
    prompt,
    sample_all,
    sample_one,
    tiny_decoder,
    tiny_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.engine.errors import EngineError
from graft.engine.native.context import NativeContext
from graft.engine.native.kv.pages import Pages
from graft.engine.native.kv.sequences import Sequence, SequenceTree
from graft.engine.native.kv.siblings import find_sibling_groups, split_by_size, split_by_total
from graft.models.shape import ModelShape
from graft.types import Finish, Sampling


def tiny_tree(num_pages: int = 8, page_size: int = 4) -> SequenceTree:
    shape = ModelShape(layers=1, kv_heads=1, heads=1, head_dim=2, width=2, ff=2)
    return SequenceTree(Pages(shape, num_pages, page_size, torch.device("cpu"), torch.float32))


def compute(tree: SequenceTree, sequence: Sequence) -> None:
    """Pretend that all tokens of the sequence were computed."""
    assert tree.reserve(sequence, len(sequence.tokens))
    sequence.cached = len(sequence.tokens)


def test_a_fork_shares_full_pages_and_copies_the_half_full_one_on_writing() -> None:
    tree = tiny_tree()
    root = tree.open([0, 1, 2, 3, 4, 5])
    left, right = tree.fork(root), tree.fork(root)
    stem = left.stem
    assert stem is not None and stem is root.stem is right.stem
    assert stem.tokens == [0, 1, 2, 3, 4]
    assert tree.next_to_compute(left) is stem
    compute(tree, stem)
    tree.pages.pool[:, :, 2] = 7.0  # what the stem wrote
    for fork, own in ((left, 3), (right, 4)):
        assert tree.next_to_compute(fork) is fork and fork.cached == 5 and fork.pages == [1, 2]
        assert tree.missing_pages(fork, 6) == 1
        assert tree.reserve(fork, 6) and fork.pages == [1, own]
        assert tree.table[fork.row, :3].tolist() == [1, own, 0]
    assert [tree.pages.ref_count(page) for page in (1, 2, 3, 4)] == [3, 1, 1, 1]
    tree.pages.flush_copies()
    assert (tree.pages.pool[:, :, 3:5] == 7.0).all()
    for sequence in (root, left, right):
        tree.close(sequence)
    assert tree.pages.free == 8 and not tree.sequences


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    tree = tiny_tree()
    root = tree.open([0, 1, 2, 3, 4])  # a stem of one whole page
    fork = tree.fork(root)
    assert fork.stem is not None
    compute(tree, fork.stem)
    assert tree.next_to_compute(fork) is fork and tree.missing_pages(fork, 5) == 1
    assert tree.reserve(fork, 5) and fork.pages == [1, 2]


def test_the_forked_sequence_continues_in_the_half_full_page() -> None:
    tree = tiny_tree()
    root = tree.open([0, 1, 2, 3, 4, 5, 6])
    compute(tree, root)
    root.tokens.append(7)  # drawn, not computed
    fork = tree.fork(root)
    assert tree.next_to_compute(root) is root and root.writable == 8 and root.pages == [1, 2]
    assert tree.next_to_compute(fork) is fork and tree.reserve(fork, 8) and fork.pages == [1, 3]


def test_reserving_more_than_is_free_changes_nothing() -> None:
    tree = tiny_tree(num_pages=2)
    sequence = tree.open([0] * 9)
    assert not tree.reserve(sequence, 9)
    assert tree.pages.free == 2 and sequence.pages == []
    assert tree.reserve(sequence, 8) and tree.pages.free == 0


def test_truncating_gives_back_whole_pages_only() -> None:
    tree = tiny_tree()
    sequence = tree.open(list(range(14)))
    compute(tree, sequence)
    assert len(sequence.pages) == 4
    tree.truncate(sequence, 7)
    assert sequence.tokens == list(range(7)) and sequence.cached == 6
    assert len(sequence.pages) == 2 and tree.pages.free == 6
    assert tree.table[sequence.row].sum() == sum(sequence.pages)


def test_the_table_grows_with_rows_and_columns() -> None:
    tree = tiny_tree(num_pages=400, page_size=1)
    sequences = [tree.open([0] * 3) for _ in range(70)]
    for sequence in sequences:
        compute(tree, sequence)
    long = tree.open([0] * 40)
    compute(tree, long)
    assert tree.table.shape[0] >= 71 and tree.table.shape[1] >= 40
    for sequence in (*sequences, long):
        row = tree.table[sequence.row]
        assert row[: len(sequence.pages)].tolist() == sequence.pages
        assert not row[len(sequence.pages) :].any()


def test_sibling_groups_form_where_they_save_most_page_reads() -> None:
    tree = tiny_tree(num_pages=100, page_size=1)
    root = tree.open(list(range(21)))
    early = [tree.fork(root) for _ in range(3)]
    early[0].tokens.extend(range(9))
    late = [tree.fork(early[0]) for _ in range(2)]  # stems of 29 tokens, and of 20 of the root
    single = tree.open(list(range(30)))
    sequences = [root, *early, *late, single]
    for sequence in sequences:
        while (ready := tree.next_to_compute(sequence)) is not sequence:
            compute(tree, ready)
        compute(tree, sequence)
    groups, alone = find_sibling_groups(sequences, page_size=1)
    assert alone == [single]
    # 6 on the root's 20 pages save 100 reads; 3 on the branch's 29 would save 58
    assert [(f.pages, f.members) for f in groups] == [(20, [root, *early, *late])]
    groups, alone = find_sibling_groups(late, page_size=1)
    assert [(f.pages, f.members) for f in groups] == [(29, late)] and not alone


def test_stems_that_end_in_one_page_are_one_group() -> None:
    tree = tiny_tree(num_pages=20, page_size=4)
    root = tree.open(list(range(18)))
    alone = tree.fork(root)
    alone.tokens.append(0)
    twig = tree.fork(alone)  # stems of 18 tokens, and of 17 of the root: 4 full pages both
    for sequence in (alone, twig):
        while (ready := tree.next_to_compute(sequence)) is not sequence:
            compute(tree, ready)
        compute(tree, sequence)
    assert find_sibling_groups([twig], page_size=4) == ([], [twig])
    groups, _ = find_sibling_groups([alone, twig], page_size=4)
    assert [(f.pages, len(f.members)) for f in groups] == [(4, 2)]


def test_the_least_recently_used_context_loses_its_pages_first() -> None:
    engine = tiny_engine(kv_tokens=64)
    new, old = (engine.open(prompt(20, salt)) for salt in range(2))
    sample_one(new, Sampling(max_tokens=2))
    sample_one(old, Sampling(max_tokens=2))
    sample_one(new, Sampling(max_tokens=2))
    sample_one(engine.open(prompt(28)), Sampling(max_tokens=2))
    assert (old.sequence.cached, new.sequence.cached) == (0, 23)
    assert engine.stats["evictions"] == 1


def test_a_request_waits_instead_of_being_preempted_at_once() -> None:
    engine = tiny_engine(kv_tokens=76)
    contexts = [engine.open(prompt(24, salt)) for salt in range(3)]
    sample_all(contexts, Sampling(max_tokens=6))  # first 6 pages each, then 8, of 19 in all
    assert engine.stats["preemptions"] == 0
    assert engine.stats["prefill_tokens"] + engine.stats["decode_tokens"] == 3 * 29


def test_runs_are_cut_by_size_and_limited_in_total() -> None:
    assert split_by_size([15, 100, 40, 46, 60], key=int) == [[100, 60, 46], [40], [15]]
    assert split_by_total([2, 2, 2, 7], 5, key=int) == [[2, 2], [2], [7]]
    assert split_by_size([], key=int) == [] and split_by_total([], 5, key=int) == []


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "fork", "append", "sample", "close", "load", "wait"]),
        st.integers(0, 50),
    ),
    min_size=15,
    max_size=80,
)


@settings(max_examples=60)
@given(ACTIONS, st.sampled_from([48, 96, 800]))
def test_random_operations_leak_no_page(actions: list[tuple[str, int]], kv_tokens: int) -> None:
    """Fork, append, sample, abort and close in any order, with and without pages for all."""
    decoder = tiny_decoder(layers=1, width=8, heads=2, kv_heads=1, head_dim=4, ff=8)
    engine = tiny_engine(decoder, kv_tokens=kv_tokens, prefill_chunk=9)
    pages, tree = engine._tree.pages, engine._tree

    async def sample(context: NativeContext, before: list[int], number: int) -> None:
        sampling = Sampling(max_tokens=1 + number % 7)
        try:
            completion = await context.sample(sampling)
        except EngineError as error:
            if "KV pages" in str(error):  # too large for the small pool
                return
            raise
        if completion.tokens:
            assert_equals_the_model(decoder, before, completion)
        assert len(completion.tokens) == sampling.max_tokens or completion.finish is Finish.ABORT

    async def main() -> None:
        contexts: list[NativeContext] = [engine.open(prompt(5))]
        tasks: list[asyncio.Task[None]] = []
        busy: dict[NativeContext, asyncio.Task[None]] = {}
        for action, number in actions:
            context = contexts[number % len(contexts)] if contexts else None
            is_busy = context in busy and not busy[context].done()
            if action == "open" or context is None:
                contexts.append(engine.open(prompt(1 + number, number)))
            elif action == "load":
                engine.load(None, engine.version)
            elif action == "wait":
                await asyncio.sleep(0)
            elif action == "close":
                context.close()
                contexts.remove(context)
            elif is_busy:
                continue
            elif action == "fork":
                contexts.append(context.fork())
            elif action == "append":
                context.append(prompt(number % 9, number))
            else:
                before = list(context.tokens)
                busy[context] = asyncio.ensure_future(sample(context, before, number))
                tasks.append(busy[context])
                await asyncio.sleep(0)
            check_ref_counts()
        await asyncio.gather(*tasks)
        for context in contexts:
            context.close()

    def check_ref_counts() -> None:
        held = np.zeros(pages.total + 1, dtype=int)
        for sequence in tree.sequences:
            assert len(set(sequence.pages)) == len(sequence.pages)
            np.add.at(held, sequence.pages, 1)
        assert held.tolist() == [pages.ref_count(page) for page in range(pages.total + 1)]
        assert pages.free == (held[1:] == 0).sum()

    asyncio.run(main())
    assert pages.free == pages.total
    assert not tree.sequences
    assert all(pages.ref_count(page) == 0 for page in range(pages.total + 1))
    assert (tree.table == 0).all()
    assert not pages.pool[:, :, 0].any()  # the padding page was never written


def test_a_fork_at_an_earlier_token_gets_the_right_stem() -> None:
    """Stems of 3 and 6 tokens below a sequence of 9, forked everywhere."""
    tree = tiny_tree(num_pages=20, page_size=4)
    root = tree.open(list(range(4)))
    first = tree.fork(root)  # a stem of 3
    first.tokens += range(4, 7)
    compute(tree, first)
    leaf = tree.fork(first)  # a stem of 6
    leaf.tokens += (7, 8)
    lengths = {None: 0, **{s: len(s.tokens) for s in tree.sequences}}
    forks = {at: tree.fork(leaf, at) for at in (5, 2, 9, 4, 1, 7)}
    for at, fork in forks.items():
        assert fork.tokens == list(range(at))
        assert lengths.get(fork.stem, at - 1) == at - 1
        node, way = leaf, [leaf]
        while node.stem is not None:
            node = node.stem
            way.append(node)
        assert at == 1 or fork.stem in way
        assert [len(s.tokens) for s in way] == sorted({len(s.tokens) for s in way}, reverse=True)
    # the first 6 tokens were computed: forks share them, and copy the page they write into
    assert tree.next_to_compute(forks[5]) is forks[5]
    assert forks[5].cached == 4 and forks[5].pages == first.pages[:1]
    assert tree.next_to_compute(forks[7]) is forks[7] and tree.missing_pages(forks[7], 7) == 1
    for sequence in (root, first, leaf, *forks.values()):
        tree.close(sequence)
    assert tree.pages.free == 20 and not tree.sequences


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.booleans()), max_size=6),
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from([96, 1024]),
)
def test_a_fork_anywhere_equals_a_fresh_context_over_the_same_tokens(
    moves: list[tuple[int, int, bool]], page_size: int, kv_tokens: int
) -> None:
    """Forks of forks at earlier tokens, some after their pages were dropped."""
    decoder = tiny_decoder(layers=1)
    engine = tiny_engine(decoder, page_size=page_size, kv_tokens=kv_tokens)
    contexts = [engine.open(prompt(13), key=0)]
    sample_one(contexts[0], Sampling(max_tokens=11))
    for number, (of, at, is_lost) in enumerate(moves, 1):
        parent = contexts[of % len(contexts)]
        at = 1 + at % len(parent.tokens)
        if is_lost:
            for sequence in list(engine._tree.sequences)[number % 2 :: 2]:
                engine._tree.drop(sequence)
        fork = parent.fork(key=number, at=at)
        assert fork.tokens == parent.tokens[:at] and fork.mode is None
        before = list(fork.tokens)
        completion = sample_one(fork, Sampling(max_tokens=6))
        fresh = tiny_engine(decoder).open(before, key=number)
        assert sample_one(fresh, Sampling(max_tokens=6)).tokens == completion.tokens
        assert_equals_the_model(decoder, before, completion)
        contexts.append(fork)
    before = [list(context.tokens) for context in contexts]
    for tokens, more in zip(before, sample_all(contexts, Sampling(max_tokens=3)), strict=True):
        # no sequence wrote into another's pages
        assert_equals_the_model(decoder, tokens, more)
    for context in contexts:
        context.close()
    assert engine.stats["pages_free"] == engine.stats["pages_total"]


def test_a_fork_outside_the_context_is_refused() -> None:
    context = tiny_engine().open(prompt(5))
    for at in (0, 6):
        with pytest.raises(ValueError, match=f"at token {at} of a context of 5"):
            context.fork(at=at)


def test_a_page_that_is_copied_and_then_taken_for_a_copy_is_read_first() -> None:
    """A kernel makes all copies of a call at once: page 1 must not get its new content before page 2."""
    pages = tiny_tree().pages
    pages.pool[:, :, 1], pages.pool[:, :, 3] = 1.0, 3.0
    pages.copy_later(1, 2)
    pages.copy_later(3, 1)  # its owners were evicted in the same step
    assert (pages.pool[:, :, 2] == 1.0).all()
    pages.flush_copies()
    assert (pages.pool[:, :, 1] == 3.0).all()


def windowed_tree(num_pages: int, windows: tuple[int, ...]) -> SequenceTree:
    """Pages of two tokens, so segments of eight."""
    sizes = {"kv_heads": 1, "heads": 1, "head_dim": 2, "width": 2, "ff": 2}
    shape = ModelShape(layers=len(windows), windows=windows, **sizes)
    return SequenceTree(Pages(shape, num_pages, 2, torch.device("cpu"), torch.float32))


def test_pages_that_no_window_sees_are_released() -> None:
    tree = windowed_tree(12, (3, 5))
    root = tree.open(list(range(20)))
    compute(tree, root)  # the next token sees positions 16 to 20
    root.tokens.append(0)
    assert tree.pages.free == 2 and tree.reserve(root, 21)
    assert tree.pages.free == 9 and root.pages[:8] == [0] * 8 and all(root.pages[8:])
    assert tree.table[root.row, :12].tolist() == [*root.pages, 0]
    near, far = tree.fork(root), tree.fork(root, at=12)
    assert tree.next_to_compute(near) is near and near.cached == 20 and near.freed == 8
    stem = far.stem  # of 11 tokens, whose keys are gone
    assert stem is not None and tree.next_to_compute(far) is stem and stem.cached == 0
    for sequence in (root, near, far):
        tree.close(sequence)
    assert tree.pages.free == 12 and not tree.sequences


def test_a_layer_without_a_window_keeps_all_pages() -> None:
    tree = windowed_tree(12, (3, 0))
    root = tree.open(list(range(20)))
    compute(tree, root)
    assert tree.reserve(root, 21) and all(root.pages) and root.freed == 0


def test_what_is_cut_off_behind_released_pages_is_computed_again() -> None:
    tree = windowed_tree(12, (5,))
    root = tree.open(list(range(21)))
    root.tokens.append(0)
    compute(tree, root)
    assert tree.reserve(root, 23) and root.freed == 8
    tree.truncate(root, 22)
    assert root.freed == 8 and root.cached == 21
    tree.truncate(root, 15)
    assert (root.freed, root.cached, tree.pages.free) == (0, 0, 12)


def test_a_context_longer_than_the_pool_is_sampled_through_a_window() -> None:
    decoder = tiny_decoder(family="mistral", qk_norm=False, windows=(6, 6))
    sizes = {"page_size": 4, "prefill_chunk": 16}
    small, large = (tiny_engine(decoder, kv_tokens=n, **sizes) for n in (48, 1024))
    text, sampling = prompt(100), Sampling(max_tokens=40)
    done, want = (sample_one(engine.open(text), sampling) for engine in (small, large))
    assert (done.tokens, done.logprobs) == (want.tokens, want.logprobs) and len(done.tokens) == 40
