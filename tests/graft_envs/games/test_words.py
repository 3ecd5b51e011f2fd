"""The word lists: plain lower-case words, common ones within the long list."""

from __future__ import annotations

from graft_envs.games import words


def test_words_are_lower_case_ascii_sorted_by_length_and_without_repeats():
    for known, longest in ((words.basic(), 10), (words.full(), 15)):
        assert all(word.isascii() and word.isalpha() and word.islower() for word in known)
        assert {len(word) for word in known} == set(range(3, longest + 1))
        assert list(known) == sorted(set(known), key=lambda word: (len(word), word))


def test_the_common_words_are_in_the_long_list():
    assert (len(words.basic()), len(words.full())) == (3704, 62916)
    assert set(words.basic()) <= set(words.full())


def test_a_length_selects():
    assert words.basic(3)[:3] == ("act", "add", "age")
    assert all(len(words.basic(length)) >= 150 for length in range(3, 11))
    assert words.basic(11) == ()
    assert "crane" in words.dictionary(5) and "colour" in words.dictionary(6)
    assert "qzxvj" not in words.dictionary(5)


def test_the_lists_come_with_their_licence():
    text = (words.DATA / "LICENSE-scowl.txt").read_text("utf-8")
    assert "Copyright 2000-2011 by Kevin Atkinson" in text
