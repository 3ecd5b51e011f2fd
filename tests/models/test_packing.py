import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.models.critic import Critic
from graft.models.decoder import Decoder, causal
from graft.models.shape import ModelShape
from graft.models.tree.attention import TreeAttention
from graft.models.tree.forest import Forest
from graft.models.tree.packing import interval_mask, is_read, pack, response, split_rows
from graft.types import Episode, Span, Trajectory
from tests.trees import group, random_tree

SHAPE = ModelShape(vocab_size=30, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff=48)


def rows(episodes: list[Episode]) -> list[Trajectory]:
    return [row for episode in episodes for row in episode.trajectories()]


def attention(packed) -> TreeAttention:
    return TreeAttention(packed.runs, 4, 2, torch.device("cpu"))


def test_what_no_trained_token_reads_is_not_computed():
    samples = rows([group([1, 2], [[11, 12, 13], [14, 15]], [1.0, 0.0])])
    forest = Forest(samples, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), torch.device("cpu"))
    assert forest.tokens.tolist() == [1, 2, 11, 12, 14]  # 13 and 15 are labels only
    assert forest.before.tolist() == [1, 2, 3, 1, 4]
    first = Forest(samples, torch.tensor([[1, 0, 0], [0, 0, 0]]).bool(), torch.device("cpu"))
    assert (first.tokens.tolist(), first.before.tolist()) == ([1, 2], [1])
    nothing = Forest(samples, torch.zeros(2, 3).bool(), torch.device("cpu"))
    assert len(nothing.tokens) == 0


def test_the_worked_case_of_the_docstring():
    packed = pack(rows([group([1, 2], [[11, 12, 13], [14, 15]], [1.0, 0.0])]))
    assert packed.tokens.tolist() == [1, 2, 11, 12, 13, 14, 15]
    assert packed.ends.tolist() == [7, 7, 5, 5, 5, 7, 7]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert packed.parents.tolist() == [-1, 0, 1, 2, 3, 1, 5]
    assert packed.source.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert [(run.start, run.stop, run.path) for run in packed.runs] == [
        (0, 2, []),
        (2, 5, [(0, 2)]),
        (5, 7, [(0, 2)]),
    ]


def token_by_token(samples: list[Trajectory]) -> list[list[int]]:
    """Rows of (token, position, parent, end, action, mode) by walking the trees recursively."""
    below: dict[int | None, list[Span]] = {None: []}
    for sample in samples:
        for above, span in zip([None, *sample.spans], sample.spans, strict=False):
            siblings = below.setdefault(None if above is None else id(above), [])
            if all(span is not other for other in siblings):
                siblings.append(span)
    lines: list[list[int]] = []

    def write(span: Span, parent: int, depth: int) -> None:
        mine = []
        for i, token in enumerate(span.tokens):
            action = span.actions[i] if span.actions else token
            mode = span.modes[i] if span.modes else 0
            mine.append([token, depth + i, parent, 0, action, mode])
            lines.append(mine[-1])
            parent = len(lines) - 1
        for child in below.get(id(span), []):
            write(child, parent, depth + len(span))
        for line in mine:
            line[3] = len(lines)

    for root in below[None]:
        write(root, -1, 0)
    return lines


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=5), st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_forest_is_what_a_token_by_token_walk_writes(seeds: list[int], rng):
    episodes = [random_tree(seed) for seed in seeds]
    for episode in episodes:
        for number, span in enumerate(episode.spans):
            if rng.random() < 0.2:  # an environment without an observation
                episode.spans[number] = Span(span.parent, span.author, [])
            elif span.actions:
                span.actions = [rng.randrange(30) for _ in span.tokens]
                span.modes = [rng.randrange(3) for _ in span.tokens]
    samples = rows(episodes)
    packed = pack(samples)
    names = ("tokens", "positions", "parents", "ends", "actions", "modes")
    found = torch.stack([getattr(packed, name) for name in names], dim=1)
    assert found.tolist() == token_by_token(samples)
    for number, row in enumerate(samples):
        tokens = [token for span in response(row) for token in span.tokens]
        source = packed.source[number]
        assert packed.tokens[source[: len(tokens)]].tolist() == tokens
        assert (source[len(tokens) :] == len(packed)).all()
    for run in packed.runs:
        assert packed.parents[run.start + 1 : run.stop].tolist() == list(
            range(run.start, run.stop - 1)
        )
        path = [row for start, stop in run.path for row in range(start, stop)]
        assert path == (interval_mask(packed.ends)[run.start].nonzero()[:-1, 0]).tolist()


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=5), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_kept_tokens_see_each_other_as_before(seeds: list[int], seed: int):
    samples = rows([random_tree(seed) for seed in seeds])
    packed = pack(samples)
    generator = torch.Generator().manual_seed(seed)
    mask = (packed.source < len(packed)) & (
        torch.rand(packed.source.shape, generator=generator) < 0.3
    )
    forest = Forest(samples, mask, torch.device("cpu"))
    wanted = torch.zeros(len(packed) + 1, dtype=torch.bool)
    wanted[packed.source[mask]] = True
    keep = is_read(packed.ends, wanted[:-1])
    assert torch.equal(interval_mask(forest.ends), interval_mask(packed.ends)[keep][:, keep])
    assert torch.equal(forest.tokens, packed.tokens[keep])


def test_attention_is_prepared_once_for_a_forest(monkeypatch):
    samples = rows([random_tree(seed) for seed in range(3)])
    made = []

    def counted(runs, ends, heads, kv_heads, device, *more):
        made.append((heads, kv_heads))
        return TreeAttention(runs, heads, kv_heads, device)

    monkeypatch.setattr("graft.models.tree.forest.attention_over", counted)
    forest = Forest(samples, pack(samples).source < len(pack(samples)), torch.device("cpu"))
    model = Decoder(SHAPE).initialise(1)
    with torch.no_grad():
        forest.logprobs(model)
        forest.logprobs(model, temperature=0.5)
        forest.values(Critic(model))
    assert made == [(4, 2)]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_the_interval_rule_is_the_ancestor_relation(seeds: list[int]):
    packed = pack(rows([random_tree(seed) for seed in seeds]))
    sees = interval_mask(packed.ends)
    for query in range(len(packed)):
        ancestors, at = set(), query
        while at >= 0:
            ancestors.add(at)
            at = int(packed.parents[at])
        assert set(sees[query].nonzero()[:, 0].tolist()) == ancestors


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_a_packed_tree_equals_its_separate_sequences(seeds: list[int]):
    model = Decoder(SHAPE).initialise(1)
    samples = rows([random_tree(seed) for seed in seeds])
    packed = pack(samples)
    with torch.no_grad():
        hidden = model(packed.tokens, packed.positions, attention(packed))
        for number, row in enumerate(samples):
            tokens = torch.tensor(row.tokens)
            alone = model(tokens, torch.arange(len(tokens)), causal)
            n = sum(map(len, response(row)))
            torch.testing.assert_close(
                hidden[packed.source[number, :n]], alone[len(tokens) - n :], atol=2e-5, rtol=0
            )


def test_attention_by_runs_equals_the_dense_mask_in_values_and_gradients():
    packed = pack(rows([random_tree(seed) for seed in range(6)]))
    torch.manual_seed(0)
    q = torch.randn(len(packed), 4, 16, requires_grad=True)
    k, v = (torch.randn(len(packed), 2, 16, requires_grad=True) for _ in range(2))

    def dense() -> torch.Tensor:
        Q, K, V = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = interval_mask(packed.ends)
        out = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    by_runs, by_mask = attention(packed)(0, q, k, v), dense()
    torch.testing.assert_close(by_runs, by_mask, atol=1e-5, rtol=0)
    weight = torch.randn_like(by_runs)
    got = torch.autograd.grad((by_runs * weight).sum(), (q, k, v))
    want = torch.autograd.grad((by_mask * weight).sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def gradients(samples: list[Trajectory], share: bool) -> list[torch.Tensor]:
    """Of a random loss; without sharing every row is a forest of its own."""
    model = Decoder(SHAPE).initialise(2)
    packed = pack(samples)
    mask = packed.source < len(packed)
    torch.manual_seed(3)
    weight, weight_entropy = torch.randn(mask.shape), torch.randn(mask.shape)
    parts = [list(range(len(samples)))] if share else [[n] for n in range(len(samples))]
    for part in parts:
        forest = Forest([samples[n] for n in part], mask[part], torch.device("cpu"))
        logp, entropy = forest.logprobs(model, temperature=0.8)
        (logp * weight[part] + entropy * weight_entropy[part]).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_gradients_of_a_shared_prefix_equal_those_of_repeated_ones():
    samples = rows([random_tree(seed) for seed in range(4)])
    shared, repeated = gradients(samples, share=True), gradients(samples, share=False)
    assert len(pack(samples)) < sum(len(row.tokens) for row in samples)
    for a, b in zip(shared, repeated, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=6), st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_micro_batches_hold_every_row_once_and_keep_to_the_budget(seeds: list[int], budget: int):
    samples = rows([random_tree(seed) for seed in seeds])
    parts = split_rows(samples, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    for part in parts:
        assert len(part) == 1 or len(pack([samples[i] for i in part])) <= budget


def test_a_tree_that_fits_is_never_cut():
    samples = rows([group([1] * 10, [[2] * 5] * 4, [0.0] * 4) for _ in range(3)])  # 30 tokens each
    assert split_rows(samples, 40) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert split_rows(samples, 60) == [list(range(8)), list(range(8, 12))]


def test_an_empty_answer_has_no_columns():
    packed = pack(rows([group([1, 2], [[], [3]], [0.0, 0.0])]))
    assert packed.source.tolist() == [[3], [2]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_grid_logprobs_are_those_of_a_plain_forward(temperature: float):
    model = Decoder(SHAPE).initialise(1)
    samples = rows([random_tree(seed) for seed in range(3)])
    packed = pack(samples)
    mask = torch.zeros(packed.source.shape, dtype=torch.bool)
    for n, row in enumerate(samples):
        flags = [flag for span in response(row) for flag in (span.mask or [False] * len(span))]
        mask[n, : len(flags)] = torch.tensor(flags)
    with torch.no_grad():
        logp, entropy = Forest(samples, mask, torch.device("cpu")).logprobs(model, temperature)
        for n, row in enumerate(samples):
            tokens = torch.tensor(row.tokens)
            hidden = model(tokens, torch.arange(len(tokens)), causal)
            log_p = (F.linear(hidden, model.head_weight) / temperature).log_softmax(-1)
            start = len(tokens) - sum(map(len, response(row)))
            for t in mask[n].nonzero()[:, 0].tolist():
                before = log_p[start + t - 1]
                assert float(logp[n, t]) == pytest.approx(
                    float(before[tokens[start + t]]), abs=1e-5
                )
                assert float(entropy[n, t]) == pytest.approx(
                    float(-(before.exp() * before).sum()), abs=1e-5
                )
