"""The forest of calls: any sequence of prompts and answers reads back, and equal prefixes are one path."""

from __future__ import annotations

import random

from tiny import TASK, tiny_gateway

from graft.gateway.canonical import key_of, names_of, normalised
from graft.gateway.forest import CallForest, Node, common_length
from graft.types import Author, Span

GATEWAY = tiny_gateway()


def forest() -> CallForest:
    return GATEWAY.forest(TASK)


def tokens_of(node: Node) -> list[int]:
    return [token for one in node.path() for token in one.span.tokens]


def policy(tokens: list[int]) -> Span:
    count = len(tokens)
    lists = [tokens, [0.0] * count, [0.0] * count, [0] * count, [True] * count]
    return Span(None, Author.POLICY, tokens, *lists)


def test_common_length():
    rng = random.Random(0)
    for _ in range(500):
        a = [rng.randrange(3) for _ in range(rng.randrange(9))]
        b = [rng.randrange(3) for _ in range(rng.randrange(9))]
        slow = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        assert common_length(a, b) == (min(len(a), len(b)) if slow is None else slow), (a, b)


def test_random_prompts_and_answers_read_back_and_share_what_is_equal():
    rng = random.Random(1)
    for _ in range(200):
        trees, own, ends = forest(), {}, []
        for _ in range(rng.randrange(1, 8)):
            start = rng.choice([None, *(node for node, _ in ends)])
            known = tokens_of(start) if start is not None else []
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
            node = trees.place(prompt, start, own)
            assert node is not None and tokens_of(node) == known + prompt
            answer = [rng.randrange(2) for _ in range(rng.randrange(1, 4))]
            node = trees.add(policy(answer), node)
            own[node] = 0
            ends.append((node, known + prompt + answer))
        for node, tokens in ends:  # spans that were cut since end where they ended
            assert tokens_of(node) == tokens
        for node in [*trees.roots, *(one for end, _ in ends for one in end.path())]:
            firsts = [c.span.tokens[0] for c in node.children if c.span.author is not Author.POLICY]
            assert len(firsts) == len(set(firsts))  # no two prompts begin with the same token
        episode = trees.episode()
        assert all(s.parent is None or s.parent < i for i, s in enumerate(episode.spans))
        assert sum(map(len, episode.spans)) <= sum(len(tokens) for _, tokens in ends)


def test_answers_of_other_attempts_are_not_shared():
    trees = forest()
    root = trees.place([1, 2], None, {})
    theirs = trees.add(policy([3, 4]), root)
    mine = trees.place([3, 4, 5], root, {})
    assert mine is not None and theirs not in mine.path()
    again = trees.place([3, 4, 6], root, {theirs: 0})
    assert again is not None and theirs in again.path()


def call(arguments: object, text: str | None = "") -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": "x", "function": function}]}


def test_what_is_equal_for_a_model_has_one_key():
    same = [
        ('{"a":1,"b":[2.0]}', {"b": [2], "a": 1.0}),
        ("", {}),
        (None, {}),
        ('{"a": "\\u00e9"}', {"a": "é"}),
        ('{"n": 12345678901234567890}', '{"n": 12345678901234567000}'),
        ("not json", "not json"),
    ]
    for one, other in same:
        assert key_of(call(one)) == key_of(call(other, None)), (one, other)
    different = [({"a": 1}, {"a": "1"}), ({"a": 1}, {"a": True}), ({"a": 1}, {}), ("x", "y")]
    for one, other in different:
        assert key_of(call(one)) != key_of(call(other)), (one, other)
    text = {"role": "assistant", "content": "5"}
    assert key_of(text) == key_of({**text, "content": " 5\n", "reasoning_content": "hm"})
    assert key_of({"role": "user", "content": "5"}) != key_of({"role": "user", "content": "5 "})
    assert key_of({"role": "tool", "content": "5", "tool_call_id": "a"}) == key_of(
        {"role": "tool", "content": "5", "tool_call_id": "b"}
    )


def test_names_of_prefixes_and_tools():
    messages = [{"role": "user", "content": text} for text in "abc"]
    names = names_of(messages)
    assert len(set(names)) == 4 and names_of(messages[:2]) == names[:3]
    tools = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
    assert names_of(messages, tools)[-1] == names_of(messages, tools[::-1])[-1] != names[-1]


def test_a_split_answer_is_joined():
    split = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "so "},
        call({"a": 1}),
    ]
    joined = normalised(split)
    assert len(joined) == 2 and key_of(joined[1]) == key_of(call('{"a": 1}', "so"))
