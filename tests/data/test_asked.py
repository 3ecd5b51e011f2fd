"""Rows that ask the same are found in any layout and wording, and others are not."""

from __future__ import annotations

import pytest

from graft.data.asked import AskedRows, AskedText, repeated, texts_of

LONG = "Natalia sold clips to 48 of her friends in April. How many clips did she sell altogether?"
SHORT = "Who wrote Emma?"


def chat(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "72"}]}


def find(held_out: list[dict], trained: dict) -> set[int]:
    rows = AskedRows([texts_of(row) for row in held_out])
    return rows.find([AskedText.of(text) for text in texts_of(trained)])


SAME = {
    "openai": chat(LONG),
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": LONG}, {"from": "gpt", "value": "72"}]
    },
    "alpaca": {"instruction": "Solve this.", "input": LONG, "output": "72"},
    "verl": {"prompt": [{"role": "user", "content": f"{LONG} Let's think step by step."}]},
    "verl-json": {"prompt": f'[{{"role": "user", "content": "{LONG}"}}]'},
    "plain": {"problem": LONG, "solution": "72"},
    "extra": {"prompt": "See below.", "extra_info": {"question": LONG}},
    "spelling": chat(f"Question:  {LONG.upper()[:-1]}"),
    "template": chat(f"You are given a problem.\n<problem>{LONG}</problem>\nBox the answer."),
}


@pytest.mark.parametrize("layout", SAME)
def test_a_question_is_found_in_every_layout(layout: str):
    plain = {"question": LONG, "answer": "72"}
    assert find([{"question": SHORT}, plain], SAME[layout]) == {1}
    assert find([{"question": SHORT}, SAME[layout]], plain) == {1}


@pytest.mark.parametrize(
    "text",
    [
        LONG.replace("48", "49"),
        LONG.replace("April", "May"),
        "How many clips did she sell altogether?",
        f"{SHORT} And why?"[4:],
        "",
    ],
)
def test_another_question_is_not(text: str):
    assert find([{"question": LONG}, {"question": SHORT}], chat(text)) == set()


def test_a_short_question_has_to_be_a_whole_sentence():
    held_out = [{"question": SHORT}, {"question": "12?"}]
    assert find(held_out, chat(f"Answer in one word. {SHORT}")) == {0}
    assert find(held_out, chat("Who wrote Emma Woodhouse's letters?")) == set()
    assert find(held_out, chat("12?")) == {1}
    assert find(held_out, chat("What is more than\n12?")) == set()


def test_a_request_that_all_rows_repeat_is_no_question():
    ours = "Think first, then give the answer alone inside the tags that you know."
    theirs = "Solve the following problem step by step, and box what you have found at the end."
    names = ["Emma", "Ulysses", "Middlemarch", "Walden", "Dracula"]
    held_out = [{"question": f"{ours} Who wrote {name}?"} for name in names]
    rows = AskedRows([texts_of(row) for row in held_out])
    trained = [texts_of(chat(f"Who wrote {name}?\n{theirs}")) for name in [*names[:2], *"abcd"]]
    without = repeated(trained)
    found = [rows.find(AskedText.of(text, without) for text in texts) for texts in trained]
    assert found == [{0}, {1}, set(), set(), set(), set()]


def test_rows_that_one_prompt_does_not_tell_apart_are_compared_by_what_does():
    def hidden(*items: int) -> dict:
        return {
            "prompt": [
                {
                    "role": "user",
                    "content": "Sort the items A, B and C with as few calls as you can.",
                }
            ],
            "extra_info": {"interaction_kwargs": {"items": list(items)}},
        }

    assert find([hidden(2, 1, 0), hidden(0, 2, 1)], hidden(0, 2, 1)) == {1}
    assert find([hidden(2, 1, 0)], {"prompt": hidden(2, 1, 0)["prompt"]}) == set()
    picture = {"problem": "Find the length of the side x.", "images": [{"bytes": b"1"}]}
    assert texts_of(picture) == []
    assert find([{"nums": [3, 4, 5], "target": 12}], {"nums": [3, 4, 5], "target": 12}) == {0}
