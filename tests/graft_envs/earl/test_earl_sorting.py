"""Sorting hidden items: transitions, three syntaxes, formulas worked by hand, teachers, splits."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import ENVS, make
from graft.envs.splits import split_of
from graft.tools.sorting import (
    SYMBOLS,
    Hidden,
    SortingCall,
    apply_check,
    apply_compare,
    apply_swap,
    find_in_tags,
    find_in_words,
)
from graft.types import Author, CallText, Turn
from graft_envs.earl.efficiency import (
    least_compares,
    least_swaps,
    linear_efficiency,
    order_efficiency,
    reference_compares,
    reference_swaps,
    sort_by_comparing,
    sort_efficiency,
)
from graft_envs.earl.sorting import Sorting
from graft_envs.earl.sorting_sets import SETS, all_permutations, draw_facts
from tests.graft_envs.earl.earl_rows_kit import follow

ALL = ("compare", "swap", "check")
THREE = Hidden((2, 0, 1), ("A", "B", "C"))
syntaxes = pytest.mark.parametrize("syntax", ["tags", "words", "actions"])


def env_with(kind: str, items: list[int], reverse: bool = False, **options: Any) -> Sorting:
    """A running episode with these items; for "compare" the question is about A and B."""
    env = make(f"earl:{kind}", **options)
    env.reset(0)
    env.kind, env.items, env.reverse = kind, items, reverse
    env.symbols, env.order = list(SYMBOLS[: len(items)]), list(SYMBOLS[: len(items)])
    env.pair = ["A", "B"] if kind == "compare" else []
    return env


@pytest.mark.parametrize(
    ("a", "b", "observation"),
    [
        ("A", "B", "A > B"),
        ("B", "A", "B < A"),
        ("A", "A", "A = A"),
        ("A", "X", "Cannot compare due to undefined symbols X."),
        ("Y", "X", "Cannot compare due to undefined symbols Y, X."),
        ("X", "X", "Cannot compare due to undefined symbols X."),
        ("D", "A", "Cannot compare due to undefined symbols D."),
        ("", "A", "Cannot compare due to undefined symbols ."),
    ],
)
def test_comparing_changes_nothing(a: str, b: str, observation: str):
    assert apply_compare(THREE, a, b) == (THREE, observation)


def test_swapping_exchanges_places_and_not_values():
    state, observation = apply_swap(THREE, "A", "C")
    assert (state, observation) == (Hidden((2, 0, 1), ("C", "B", "A")), "C, B, A")
    assert apply_compare(state, "A", "B")[1] == "A > B"
    assert apply_swap(state, "C", "B")[1] == "B, C, A"
    for a, b in [("A", "A"), ("A", "X"), ("X", "Y"), ("", "")]:
        assert apply_swap(THREE, a, b) == (THREE, "A, B, C")
    assert THREE.order == ("A", "B", "C")


def test_a_check_returns_properties_of_the_hidden_value():
    results = {
        name: [apply_check(THREE, symbol, name)[1] for symbol in "ABC"]
        for name in ("negative", "positive", "even", "is odd")
    }
    assert results == {  # values 2, 0, 1
        "negative": ["False", "False", "False"],
        "positive": ["True", "False", "True"],
        "even": ["True", "True", "False"],
        "is odd": ["False", "False", "True"],
    }
    assert apply_check(THREE, "X", "even")[1] == "Cannot check due to undefined symbol X."
    assert apply_check(THREE, "A", "prime")[1].startswith("Error: known properties are negative")


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<compare> A, B </compare>", SortingCall("compare", ("A", "B"))),
        ("so <swap>B,A</swap> \n", SortingCall("swap", ("B", "A"))),
        (
            "<compare> A, B </compare> <result> A > B </result>\n<swap> A, B </swap>",
            SortingCall("swap", ("A", "B")),
        ),
        ("<swap> x <swap> A, B </swap>", SortingCall("swap", ("A", "B"))),
        ("<compare> A </compare>", SortingCall("compare", None)),
        ("<compare> A, B, C </compare>", SortingCall("compare", None)),
        ("<compare></compare>", SortingCall("compare", None)),
        ("A, B </compare>", SortingCall("compare", None)),
        ("<check> A, is even </check>", SortingCall("check", ("A", "is even"))),
        ("<compare> A, B </compare> and", None),
        ("<compare> A, B", None),
        ("", None),
    ],
)
def test_a_turn_in_tags_is_a_call_if_it_ends_with_a_closing_tag(
    text: str, call: SortingCall | None
):
    assert find_in_tags(text, ALL) == call


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("compare A and B", SortingCall("compare", ("A", "B"))),
        ("First I swap B and A \n", SortingCall("swap", ("B", "A"))),
        ("compare A and B: A < B\nswap A and Z", SortingCall("swap", ("A", "Z"))),
        ("check if A is even", SortingCall("check", ("A", "even"))),
        ("compare A and B: A < B", None),
        ("compare a and b", None),
        ("recompare A and B", None),
        ("compare AB and C", None),
        ("compare A, B", None),
        ("", None),
    ],
)
def test_a_turn_in_words_is_a_call_if_it_ends_with_one(text: str, call: SortingCall | None):
    assert find_in_words(text, ALL) == call


def test_only_offered_tools_are_called():
    assert find_in_tags("<check> A, even </check>", ("compare", "swap")) is None
    assert find_in_words("check if A is even", ("compare", "swap")) is None


def test_both_syntaxes_are_written_as_in_the_original():
    tags = env_with("sort", [1, 0])
    assert tags.stop == ("</compare>", "</swap>")
    assert tags.step("<compare> A, B </compare>").observation == " <result> A > B </result>"
    assert tags.step("<swap> A, B </swap>").observation == " <result> B, A </result>"
    words = env_with("sort", [1, 0], syntax="words", tools=ALL)
    assert {"compare A and B", "swap E and D", "check if C is odd"} < set(words.stop)
    assert words.step("I compare A and B").observation == ": A > B\n"
    assert words.step(" swap A and B").observation == " => B, A\n"
    assert words.step(" check if A is odd").observation == ": True\n"
    assert tags.observe_as == words.observe_as == "inline"


def test_the_prompt_shows_the_tools_in_the_syntax():
    tags, words = (make("earl:sort", syntax=syntax).reset(0)[0] for syntax in ("tags", "words"))
    assert "<compare> A, B </compare> <result> A > B </result>" in tags[0]["content"]
    assert "<swap> A, B </swap> <result> B, A </result>" in tags[0]["content"]
    assert "compare A and B: A > B" in words[0]["content"]
    assert "swap A and B => B, A" in words[0]["content"]
    assert tags[1] == words[1]
    order = make("earl:order", split="test").reset(0)[0]
    assert "compare A" not in order[0]["content"].replace("<", "").replace(">", "")


def test_with_actions_only_what_actions_made_is_a_call():
    env = env_with("sort", [1, 0], syntax="actions", tools=ALL)
    assert (env.stop, env.observe_as) == ((), "inline")
    turns = [
        env.step(CallText("Now compare A and B", "compare", ("A", "B"))),
        env.step(CallText("", "swap", ("A", "B"))),  # what the text looks like does not matter
        env.step(CallText(" check if A is odd", "check", ("A", "is odd"))),
    ]
    assert [turn.observation for turn in turns] == ["A > B", "B, A", "True"]
    for text in ("compare A and B", " swap A and B", "<swap> A, B </swap>"):
        end = env.fork().step(text)
        assert end.terminated
        assert (end.info["tool_uses"], end.info["compares"], end.info["swaps"]) == (3, 1, 1)


def test_an_action_for_a_tool_that_the_task_does_not_offer_is_answered_and_counted():
    env = env_with("order", [1, 0], syntax="actions", split="test")
    turn = env.step(CallText(" compare A and B", "compare", ("A", "B")))
    assert turn.observation == "Error: there is no tool 'compare'; known: swap"
    assert (turn.info["tool_ok"], turn.info["compares"], turn.is_over) == (False, 1, False)
    assert env.step(CallText(" calculate 1 =", "calculator", ("1",))).info["tool_uses"] == 2
    assert env.step(CallText(" swap", "swap", ("A",))).observation.startswith(
        "Error: swap takes two"
    )
    tags = env_with("order", [1, 0], split="test")
    same = tags.step(CallText("<compare> A, B </compare>", "compare", ("A", "B")))
    assert same.observation == f" <result> {turn.observation} </result>"
    assert same.info == turn.info


def test_the_prompt_explains_keywords_and_shows_calls_as_the_actions_write_them():
    system = make("earl:sort", syntax="actions", tools=ALL).reset(0)[0][0]["content"]
    assert "by their keywords" in system
    assert system.splitlines()[1:] == [
        "- how two items relate: compare A and B: A > B",
        "- exchange two items; shows the new order: swap A and B => B, A",
        "- whether an item is negative, positive, even or odd: check if A is even: True",
    ]


def test_a_teachers_call_names_its_tool():
    env = env_with("sort", [1, 0], syntax="actions")
    trace = env.demonstrate(random.Random(0))
    assert trace == [
        (Author.POLICY, " compare A and B"),
        (Author.ENV, "A > B"),
        (Author.POLICY, " swap A and B"),
        (Author.ENV, "B, A"),
        (Author.POLICY, "Done."),
    ]
    calls = [text for _, text in trace if isinstance(text, CallText)]
    assert [(call.tool, call.arguments) for call in calls] == [
        ("compare", ("A", "B")),
        ("swap", ("A", "B")),
    ]


def test_every_call_counts_alike_in_every_syntax():
    calls = [("compare", "A", "B"), ("compare", "A", "X"), ("swap", "A", "A"), ("swap", "A", "B")]
    ends: list[Turn] = []
    for syntax in ("tags", "words", "actions"):
        env = env_with("sort", [1, 0], syntax=syntax)
        turns = [env.step(env.syntax.write(*call)) for call in calls]
        assert [turn.info["tool"] for turn in turns] == ["compare", "compare", "swap", "swap"]
        assert [turn.info["tool_ok"] for turn in turns] == [True, False, False, True]
        assert [turn.info["tool_uses"] for turn in turns] == [1, 2, 3, 4]
        ends.append(env.step("Done."))
    assert ends[0] == ends[1] == ends[2]
    # 2 compares (least 1, reference 2) and 2 swaps (least 1, reference 2): efficiency 0
    assert ends[0] == Turn(
        reward=0.5,
        terminated=True,
        info={
            "tools/compare/calls": 2,
            "tools/swap/calls": 2,
            "tool_uses": 4,
            "compares": 2,
            "swaps": 2,
            "is_right": True,
            "efficiency": 0.0,
        },
    )


def test_a_malformed_call_is_answered_and_counted():
    env = env_with("sort", [1, 0])
    turn = env.step("<compare> A </compare>")
    assert turn.observation == " <result> Error: compare takes two arguments, A, B </result>"
    assert turn.info == {
        "tool": "compare",
        "tool_ok": False,
        "tools/compare/calls": 1,
        "tools/swap/calls": 0,
        "tool_uses": 1,
        "compares": 1,
        "swaps": 0,
    }
    assert not turn.is_over


def test_limits_of_comparing_are_the_papers():
    assert [least_compares(n) for n in (2, 3, 4, 5)] == [1, 3, 5, 7]
    assert [reference_compares(n) for n in (2, 3, 4, 5)] == [2, 6, 8, 15]


def test_least_swaps_are_items_minus_cycles():
    assert least_swaps("ABC", "ABC") == 0
    assert least_swaps("BAC", "ABC") == 1
    assert least_swaps("BCA", "ABC") == 2
    assert least_swaps("BADCE", "ABCDE") == 2
    assert least_swaps("EABCD", "ABCDE") == 4
    # the mean over all orders of n is n - H(n): for 4, 4 - 25/12
    total = sum(least_swaps(order, "ABCD") for order in itertools.permutations("ABCD"))
    assert total / 24 == pytest.approx(4 - 25 / 12)
    assert [reference_swaps(n, n - 1) for n in (2, 3, 4, 5)] == [2, 3, 6, 10]
    assert reference_swaps(2, 0) == 1


def test_the_efficiency_falls_in_a_straight_line():
    assert [linear_efficiency(used, 5, 8) for used in (5, 6, 8, 20)] == [
        1.0,
        pytest.approx(2 / 3),
        0.0,
        0.0,
    ]
    assert linear_efficiency(2, 3, 9) == 1.0
    assert linear_efficiency(4, 3, 3) == 0.0


@pytest.mark.parametrize(
    ("n", "compares", "swaps", "least", "efficiency"),
    [
        (4, 5, 1, 1, 1.0),
        (4, 6, 2, 1, ((1 - 1 / 3) + (1 - 1 / 5)) / 2),
        (4, 4, 1, 1, 0.0),  # fewer comparisons than the order needs
        (4, 8, 1, 1, 0.5),
        (4, 5, 6, 1, 0.5),
        (4, 50, 50, 1, 0.0),
        (5, 11, 4, 4, (0.5 + 1.0) / 2),
        (3, 3, 3, 2, 0.5),
        (2, 1, 0, 0, 1.0),
    ],
)
def test_sorting_pays_for_few_comparisons_and_few_swaps(
    n: int, compares: int, swaps: int, least: int, efficiency: float
):
    assert sort_efficiency(n, compares, swaps, least) == pytest.approx(efficiency)


def test_ordering_pays_for_few_swaps():
    assert order_efficiency(3, 1, 1) == 1.0
    assert order_efficiency(3, 2, 1) == 0.5
    assert order_efficiency(3, 3, 1) == 0.0
    assert order_efficiency(2, 2, 1) == 0.0  # reference 2


@syntaxes
def test_a_scripted_sort_is_paid_by_the_formula(syntax: str):
    env = env_with("sort", [2, 0, 1], syntax=syntax)  # ascending: B, C, A, two swaps away
    calls = [("A", "B"), ("A", "C"), ("B", "C"), ("B", "C")]
    for pair in calls:
        env.step(env.syntax.write("compare", *pair))
    env.step(env.syntax.write("swap", "A", "B"))
    env.step(env.syntax.write("swap", "A", "C"))
    turn = env.step("Sorted.")
    # comparisons: 1 - (4 - 3)/(6 - 3) = 2/3; swaps: as few as possible
    assert turn.reward == pytest.approx((1 + (2 / 3 + 1) / 2) / 2)
    assert turn.info["efficiency"] == pytest.approx((2 / 3 + 1) / 2)
    assert turn.terminated


def test_a_wrong_order_earns_nothing_and_a_guess_half():
    env = env_with("sort", [2, 0, 1])
    env.step("<compare> A, B </compare>")
    assert env.step("Done.").reward == 0.0
    env = env_with("sort", [0, 1, 2])
    assert env.step("").reward == 0.5  # sorted, but without a comparison
    env = env_with("sort", [0, 1, 2], reverse=True)
    assert env.step("").reward == 0.0


@pytest.mark.parametrize(
    ("calls", "answer", "reward"),
    [
        (1, "<answer> A > B </answer>", 1.0),
        (1, "<answer>B<A</answer>", 1.0),
        (1, "<answer>A < B</answer> no, <answer> A > B </answer>", 0.0),  # the first one counts
        (0, "<answer> A > B </answer>", 0.5),
        (2, "<answer> A > B </answer>", 0.5),
        (1, "<answer> A < B </answer>", 0.0),
        (1, "<answer> A = B </answer>", 0.0),
        (1, "A > B", 0.0),
        (1, "<answer></answer>", 0.0),
        (1, "", 0.0),
    ],
)
@syntaxes
def test_comparing_is_paid_in_full_for_exactly_one_call(
    syntax: str, calls: int, answer: str, reward: float
):
    env = env_with("compare", [1, 0], syntax=syntax)
    for _ in range(calls):
        env.step(env.syntax.write("compare", "A", "B"))
    assert env.step(answer).reward == reward


def test_an_answer_before_the_call_counts_as_part_of_the_response():
    env = env_with("compare", [1, 0])
    env.step("I say <answer> A > B </answer>, let me see: <compare> A, B </compare>")
    assert env.step("Yes.").reward == 1.0


@syntaxes
def test_at_the_turn_limit_the_order_is_graded_as_it_stands(syntax: str):
    env = env_with("order", [1, 0], syntax=syntax, max_turns=3)
    swap = env.syntax.write("swap", "A", "B")
    turns = [env.step(swap) for _ in range(3)]
    assert [turn.is_over for turn in turns] == [False, False, True]
    assert (turns[2].truncated, turns[2].terminated) == (True, False)
    assert turns[2].reward == 0.5  # right after three swaps, of which one was needed
    assert turns[2].info["swaps"] == 3
    with pytest.raises(RuntimeError, match="reset"):
        env.step(swap)


def test_the_turns_of_the_table_are_the_envs():
    for name in SETS:
        assert make(f"earl:{name}").max_turns == ENVS[f"earl:{name}"].turns == 32


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_the_teacher_needs_no_more_comparisons_than_the_least(n: int):
    for values in itertools.permutations(range(n)):
        value_of = dict(zip(SYMBOLS, values, strict=False))
        compared: list[tuple[str, str]] = []

        def is_less(a: str, b: str, value_of: Any = value_of, compared: Any = compared) -> bool:
            compared.append((a, b))
            return value_of[a] < value_of[b]

        found = sort_by_comparing(SYMBOLS[:n], is_less)
        assert found == sorted(SYMBOLS[:n], key=value_of.__getitem__)
        assert len(compared) == least_compares(n)


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("split", ["train", "test"])
@syntaxes
def test_a_demonstration_earns_everything(name: str, split: str, syntax: str):
    env = make(f"earl:{name}", split=split, syntax=syntax)
    for seed in range(25):
        env.reset(seed)
        trace = env.demonstrate(random.Random(seed))
        calls = [text for author, text in trace[:-1] if author is Author.POLICY]
        assert all(isinstance(text, CallText) for text in calls)
        if syntax != "actions":  # the text alone is enough
            assert all(text.endswith(env.stop) for text in calls)
            trace = [(author, str(text)) for author, text in trace]
        turn = follow(env.fork(), trace)[-1]
        assert (turn.reward, turn.terminated) == (1.0, True)
        assert turn.info["efficiency"] == 1.0


def test_every_small_instance_can_be_sorted_for_the_full_reward():
    for n in (2, 3, 4):
        for values in itertools.permutations(range(n)):
            for reverse in (False, True):
                env = env_with("sort", list(values), reverse=reverse)
                assert follow(env, env.demonstrate(random.Random(0)))[-1].reward == 1.0


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("split", ["train", "test"])
def test_tasks_counts_and_directions_come_in_their_shares(name: str, split: str):
    env = make(f"earl:{name}", split=split)
    sampled, n = SETS[name][split], 1000
    tasks: Counter[str] = Counter()
    counts: Counter[int] = Counter()
    backwards = 0
    for seed in range(n):
        env.reset(seed)
        assert sorted(env.items) == list(range(len(env.items)))
        tasks[env.kind] += 1
        counts[len(env.items)] += 1
        backwards += env.reverse
    assert set(tasks) == set(sampled.tasks)
    assert set(counts) == set(sampled.counts)
    shares = [(tasks[task], share) for task, share in sampled.tasks.items()]
    for seen, share in [
        *shares,
        *((counts[size], share) for size, share in sampled.counts.items()),
    ]:
        assert abs(seen - n * share) <= 4 * math.sqrt(n * share * (1 - share))
    assert 437 <= backwards <= 563  # 500, four deviations of 15.8


def test_all_permutations_can_be_given_one_by_one():
    """The teacher sorts each in the least swaps; over all of four items that is 4 - 25/12 a piece."""
    orders = all_permutations(4)
    assert (len(orders), orders[0], orders[1], orders[-1]) == (
        24,
        [0, 1, 2, 3],
        [0, 1, 3, 2],
        [3, 2, 1, 0],
    )
    for reverse in (False, True):
        swaps = compares = 0
        for items in orders:
            env = make("earl:sort-4", syntax="actions", split="test", items=items, reverse=reverse)
            for seed in (0, 1):  # whatever the seed
                env.reset(seed)
                assert (env.items, env.reverse, env.kind) == (items, reverse, "sort")
            end = follow(env, env.demonstrate(random.Random(0)))[-1]
            assert end.reward == 1.0
            swaps += end.info["swaps"]
            compares += end.info["compares"]
        assert swaps == pytest.approx(24 * (4 - 25 / 12))
        assert compares == 24 * 5


def test_an_instance_of_given_items_keeps_to_its_task():
    env = make("earl:order", items=[1, 2, 0], reverse=False)
    env.reset(3)
    assert {"A", "B", "C"} == {name for fact in env.facts for name in fact.split()[::2]}
    assert env.target == ["C", "A", "B"]
    with pytest.raises(ValueError, match="in order already"):
        make("earl:order", split="test", items=[0, 1], reverse=False).reset(0)
    for items in ([0], [0, 0], [0, 1, 2, 3, 4, 5]):
        with pytest.raises(ValueError, match="2 to 5 different"):
            make("earl:sort", items=items)


def test_facts_fix_the_order_and_add_up_to_n_minus_2():
    rng = random.Random(0)
    extra: Counter[int] = Counter()
    for _ in range(300):
        items = rng.sample(range(5), 5)
        facts = draw_facts(rng, items)
        value_of = dict(zip(SYMBOLS, items, strict=False))
        pairs: set[frozenset[str]] = set()
        for fact in facts:
            a, sign, b = fact.split()
            assert (value_of[a] < value_of[b]) == (sign == "<")
            pairs.add(frozenset((a, b)))
        assert len(pairs) == len(facts)
        extra[len(facts) - 4] += 1
        agree = [
            order
            for order in itertools.permutations(SYMBOLS)
            if all(
                (order.index(f.split()[0]) < order.index(f.split()[2])) == (f.split()[1] == "<")
                for f in facts
            )
        ]
        assert agree == [tuple(sorted(SYMBOLS, key=value_of.__getitem__))]
    assert set(extra) == {0, 1, 2, 3}
    assert min(extra.values()) > 45  # 75, four deviations of 7.5
    assert {len(draw_facts(rng, [1, 0])) for _ in range(9)} == {1}


def test_no_task_begins_in_order():
    env = make("earl:order", split="test")
    for seed in range(300):
        messages, _ = env.reset(seed)
        assert env.order != env.target
        assert all(fact in messages[1]["content"] for fact in env.facts)
        way = "descending" if env.reverse else "ascending"
        assert way in messages[1]["content"]


def instances(env_id: str, split: str, **options: Any) -> set[str]:
    env = make(env_id, split=split, **options)
    seen: set[str] = set()
    for seed in range(400):
        messages, _ = env.reset(seed)
        seen.add(f"{messages[1]['content']} {env.items}")
    return seen


def test_one_in_ten_hidden_orders_of_four_and_five_is_held_out():
    assert len(instances("earl:sort-4", "test")) == 3 + 2  # of 24 ascending, 24 descending
    assert len(instances("earl:sort-4", "train")) == 21 + 22
    assert len(instances("earl:sort-4-5", "test")) == 3 + 2 + 12 + 12
    assert len(instances("earl:sort-4", "test", held_out=False)) == 48
    env = make("earl:sort-4", split="test")
    env.reset(0)
    assert split_of(f"sort {env.items} {env.reverse}") == "test"


def test_two_items_are_named_one_way_in_training_and_the_other_in_test():
    for split, pair in (("train", ["A", "B"]), ("test", ["B", "A"])):
        env = make("earl:compare", split=split)
        assert {tuple(env.items) for seed in range(20) if env.reset(seed)} == {(0, 1), (1, 0)}
        pairs = {tuple(env.pair) for seed in range(200) if env.reset(seed)}
        assert len(pairs) == 10  # any two of five letters
        assert all((a < b) == (split == "train") for a, b in pairs)
        env = make("earl:order", split=split)
        for seed in range(60):
            env.reset(seed)
            if env.kind == "order" and len(env.items) == 2:
                assert env.facts[0].split()[::2] == pair
    env = make("earl:sort")
    seen = {tuple(env.items) for seed in range(600) if env.reset(seed) and len(env.items) == 3}
    assert len(seen) == 6  # nothing is held back where the prompt shows nothing


def test_the_task_keeps_what_the_original_keeps_beside_a_row():
    env = make("earl:order", split="test")
    messages, info = env.reset(2)
    task = env.task()
    assert task.prompt == tuple(messages)
    assert task.data_source == "sorting"
    assert set(task.meta) == {"task", "tools", "items", "symbols", "reverse", "conditions"}
    assert task.meta["tools"] == ["swap"]
    assert task.answer == info["answer"] == env.target


def test_settings_that_make_no_sense_are_refused():
    for options, said in (
        ({"tools": ["swap"]}, "without compare, swap"),
        ({"tools": ["compare", "swap", "look"]}, "compare, swap, check"),
        ({"syntax": "tag"}, "'tag'.*'tags'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"split": "dev"}, "split='dev'"),
    ):
        with pytest.raises(ValueError, match=said):
            make("earl:sort", **options)
    with pytest.raises(ValueError, match="sorting set 'sort-6'"):
        Sorting(name="sort-6")


@settings(max_examples=50)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["compare", "swap", "check", "calculator", ""]),
            st.lists(st.sampled_from([*"ABCDEX", "is odd", "is", ""]), max_size=4),
        ),
        min_size=1,
        max_size=40,
    ),
    name=st.sampled_from(["sort", "order", "compare"]),
)
@syntaxes
def test_no_call_makes_it_raise(calls: list[tuple[str, list[str]]], name: str, syntax: str):
    env = make(f"earl:{name}", syntax=syntax)
    env.reset(0)
    for count, (tool, arguments) in enumerate(calls, 1):
        turn = env.step(CallText("", tool, arguments))
        assert turn.info["tool_uses"] == count
        assert 0 < len(turn.observation) < 200
        assert sorted(env.order) == sorted(env.symbols)
        assert turn.is_over == (count == 32)
        if turn.is_over:
            break
