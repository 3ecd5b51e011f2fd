"""Small random episodes for tests."""

import random

from graft.types import Author, Episode, Leaf, Span, Task


def sampled_span(parent: int, tokens: list[int], rng: random.Random) -> Span:
    n = len(tokens)
    logprobs = [-rng.random() for _ in tokens]
    return Span(parent, Author.POLICY, tokens, tokens, logprobs, [0.5] * n, [0] * n, [True] * n)


def random_tree(seed: int, vocab: int = 30, spans: int = 9) -> Episode:
    """A prompt, then policy and env spans under random parents; every childless one is a leaf."""
    rng = random.Random(seed)
    episode = Episode(Task(str(seed), "test"))

    def tokens(most: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(1, most))]

    episode.append(Span(None, Author.TASK, tokens(8)))
    for _ in range(rng.randint(1, spans)):
        parent = rng.randrange(len(episode.spans))
        is_env = episode.spans[parent].author is Author.POLICY and rng.random() < 0.3
        span = (
            Span(parent, Author.ENV, tokens(4)) if is_env else sampled_span(parent, tokens(6), rng)
        )
        episode.append(span)
    parents = {span.parent for span in episode.spans}
    episode.leaves = [
        Leaf((i,), reward=float(rng.random() < 0.5))
        for i in range(1, len(episode.spans))
        if i not in parents
    ]
    return episode


def group(prompt: list[int], answers: list[list[int]], rewards: list[float]) -> Episode:
    """Independent samples of one prompt."""
    rng = random.Random(0)
    episode = Episode(Task(str(prompt), "test"))
    episode.append(Span(None, Author.TASK, prompt))
    for answer, reward in zip(answers, rewards, strict=True):
        tip = episode.append(sampled_span(0, answer, rng))
        episode.spans[tip].reward = reward
        episode.leaves.append(Leaf((tip,), reward=reward))
    return episode
