import torch

from graft.rollout.batching import to_batch, trajectories_of
from graft.types import Author, Episode, Leaf, Span, Status, Task
from tests.trees import group


def policy(
    parent: int, tokens: list[int], reward: float = 0.0, mask=None, version: int = 0
) -> Span:
    n = len(tokens)
    return Span(
        parent, Author.POLICY, tokens, tokens, [-0.5] * n, [0.1] * n, [0] * n,
        mask or [True] * n, reward, version,
    )  # fmt: skip


def tool_use() -> Episode:
    """prompt [1 2]; leaf 0: [5]; leaf 1: [6 7] then the tool's [8] then [9 3]; span 4 is forced."""
    episode = Episode(Task("t", "env"))
    episode.append(Span(None, Author.TASK, [1, 2]))
    episode.append(policy(0, [5], reward=0.0))
    episode.append(policy(0, [6, 7], reward=0.25, version=1))
    episode.append(Span(2, Author.ENV, [8]))
    episode.append(policy(3, [9, 3], reward=0.75, mask=[True, False], version=2))
    episode.leaves = [Leaf((1,), 0.0), Leaf((4,), 1.0, Status.TRUNCATED)]
    return episode


def test_the_grid_by_hand():
    batch = to_batch(trajectories_of([tool_use()]))
    assert batch.mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 1, 0]]
    assert batch.turns.tolist() == [[0, -1, -1, -1, -1], [0, 0, -1, 1, 1]]
    assert batch.actions.tolist() == [[5, 0, 0, 0, 0], [6, 7, 0, 9, 3]]
    assert batch.rewards.tolist() == [[0, 0, 0, 0, 0], [0, 0.25, 0, 0, 0.75]]
    assert batch.versions.tolist() == [[0, 0, 0, 0, 0], [1, 1, 0, 2, 2]]
    assert batch.spans.tolist() == [[0, -1, -1, -1, -1], [1, 1, 2, 3, 3]]
    assert batch.reward.tolist() == [0.0, 1.0]
    assert batch.truncated.tolist() == [False, True]
    assert (batch.group.tolist(), batch.leaf.tolist()) == ([0, 0], [0, 1])


def test_a_span_shared_by_two_rows_has_one_number():
    episode = tool_use()
    episode.append(policy(3, [4]))
    episode.leaves.append(Leaf((5,), 0.0))
    spans = to_batch(trajectories_of([episode])).spans
    assert spans[1, :3].tolist() == spans[2, :3].tolist()
    assert spans[1, 3] != spans[2, 3]


def test_a_split_span_is_still_one_turn():
    episode = tool_use()
    episode.split(2, 1)
    batch = to_batch(trajectories_of([episode]))
    assert batch.turns[1].tolist() == [0, 0, -1, 1, 1]
    assert batch.rewards[1].tolist() == [0, 0.25, 0, 0, 0.75]


def test_failed_leaves_are_left_out():
    episode = tool_use()
    episode.leaves[1].status = Status.TOOL_ERROR
    assert to_batch(trajectories_of([episode])).num_rows == 1


def test_groups_are_episodes_and_leaves_are_numbered_across_them():
    batch = to_batch(trajectories_of([group([1], [[2], [3]], [0.0, 1.0]) for _ in range(2)]))
    assert (batch.group.tolist(), batch.leaf.tolist()) == ([0, 0, 1, 1], [0, 1, 2, 3])


def test_a_counterfactual_row_carries_what_its_twin_earned():
    first, second = group([1], [[2], [3]], [0.0, 1.0]), group([1], [[2], [3]], [0.0, 1.0])
    second.leaves[1].twin = 0
    second.leaves[0].reward = 0.25
    second.leaves[0].status = Status.REPLACED  # its row is gone, its reward is not
    twin_reward = to_batch(trajectories_of([first, second])).twin_reward
    assert twin_reward.isnan().tolist() == [True, True, False]
    assert twin_reward[2] == 0.25


def test_several_contexts_of_a_leaf_are_rows_of_one_leaf_with_turns_counted_on():
    episode = Episode(Task("t", "env"))
    episode.append(Span(None, Author.TASK, [1]))
    episode.append(policy(0, [2], reward=0.5))
    episode.append(Span(None, Author.TASK, [1, 9]))  # the history was rewritten
    episode.append(policy(2, [3, 4], reward=0.5))
    episode.leaves = [Leaf((1, 3), 1.0)]
    batch = to_batch(trajectories_of([episode]))
    assert batch.leaf.tolist() == [0, 0]
    assert batch.turns.tolist() == [[0, -1], [1, 1]]
    torch.testing.assert_close(batch.reward, torch.ones(2))
