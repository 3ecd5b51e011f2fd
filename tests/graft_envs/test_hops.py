"""Multi-hop questions: one search is not enough, the facts are fixed, the teacher is honest."""

from __future__ import annotations

import copy
import json
import pickle
import random
import time
from typing import Any

import pytest

from graft.envs import make
from graft.envs.splits import split_of
from graft.types import Author
from graft_envs.hops.facts import LETTERS, LINKS, MAX_PEOPLE, NUMBERS, build_town
from graft_envs.hops.syntax import SYNTAXES, ask_in_words
from graft_envs.hops.tools import ExactFacts, RankedFacts
from graft_sandbox import methods
from tests.graft_envs.earl.earl_rows_kit import follow

both_syntaxes = pytest.mark.parametrize("syntax", sorted(SYNTAXES))
KNOWING = {"tool_rate": 1.0, "stop_short": 0.0, "wrong_query": 0.0}

pytestmark = pytest.mark.skipif(
    not any(works for name, works, _ in methods() if name != "none"), reason="no sandbox here"
)


def test_a_question_worked_by_hand():
    env = make("hops")
    facts = env.town.facts
    prompt, info = env.reset(1)
    path, _, factor = prompt.partition("*")
    person, link, number = path.split(".")
    relations = {letter: relation for relation, letter in LETTERS.items()}
    other = facts[person, relations[link]]
    amount = facts[other, relations[number]]
    calls = [f"({person} {link})", f"({other} {number})", f"[{amount}*{factor}]"]
    results = [f"{other};", f"{amount};", f"{int(amount) * int(factor)};"]
    assert [env.step(call).observation for call in calls] == results
    last = env.step(f"={int(amount) * int(factor)}")
    assert info["answer"] == str(int(amount) * int(factor))
    assert (last.reward, last.terminated, last.info["is_right"]) == (1.0, True, True)
    assert last.info["tools/search/calls"] == 2
    assert last.info["tools/python/calls"] == 1


@both_syntaxes
def test_the_prompt_names_the_hops_and_the_answer_is_their_end(syntax: str):
    for hops in (1, 2, 3):
        env = make("hops", syntax=syntax, hops=(hops, hops))
        for seed in range(20):
            prompt, info = env.reset(seed)
            meta = env.task().meta
            assert len(meta["relations"]) == hops
            assert prompt == SYNTAXES[syntax].question(*meta.values())
            found = meta["person"]
            for relation in meta["relations"]:
                found = env.town.facts[found, relation]
            assert info["answer"] == str(int(found) * meta["factor"])


def test_a_question_in_english():
    text = ask_in_words("Kara Voss", ["boss", "mentor", "rent"], 37)
    assert text.endswith(
        "What is the rent of the mentor of the boss of Kara Voss, multiplied by 37?"
    )
    assert len(text.split()) < 45  # a prompt of less than 120 tokens


@both_syntaxes
def test_a_teacher_who_does_everything_right_is_always_paid(syntax: str):
    """The real sandbox and the real search answer, so the trace must hold their results exactly."""
    env = make("hops", syntax=syntax, hops=(1, 3))
    for seed in range(6):
        env.reset(seed)
        turns = follow(env, env.demonstrate(random.Random(seed), **KNOWING))
        assert turns[-1].reward == 1.0
        assert turns[-1].info["tools/search/calls"] == len(env.relations)
        assert turns[-1].info["tools/python/calls"] == 1
        assert all(turn.info["tool_ok"] for turn in turns[:-1])


@both_syntaxes
def test_every_kind_of_demonstration_has_the_answers_of_the_env(syntax: str):
    env = make("hops", syntax=syntax, hops=(1, 3))
    for seed in range(20):
        env.reset(seed)
        turns = follow(env, env.demonstrate(random.Random(seed)))
        assert [turn.is_over for turn in turns] == [False] * (len(turns) - 1) + [True]


@pytest.mark.parametrize(
    ("rates", "calls"),
    [
        ({"tool_rate": 0.0}, {0}),
        ({**KNOWING, "stop_short": 1.0}, {1, 2}),
        ({**KNOWING, "wrong_query": 1.0}, {3}),
    ],
)
def test_a_teacher_who_falls_short_is_wrong(rates: dict[str, float], calls: set[int]):
    env = make("hops")
    seen: set[int] = set()
    right = 0
    for seed in range(100):
        env.reset(seed)
        trace = env.demonstrate(random.Random(seed), **rates)
        seen.add(sum(author is Author.ENV for author, _ in trace))
        right += trace[-1][1] == f"={env.answer}"
    assert seen == calls
    assert right <= 2  # two people may have the same rent


def test_the_default_teacher_is_right_one_time_in_five():
    env = make("hops")
    right = 0
    for seed in range(800):
        env.reset(seed)
        right += env.demonstrate(random.Random(seed))[-1][1] == f"={env.answer}"
    # 0.8 call, 0.3 of these go to the end, 0.8 of these make the right call
    assert right / 800 == pytest.approx(0.8 * 0.3 * 0.8, abs=0.05)


@both_syntaxes
def test_the_limit_counts_both_tools_and_the_teacher_keeps_it(syntax: str):
    env = make("hops", syntax=syntax)
    assert env.max_uses == 5
    assert make("hops", hops=(1, 3)).max_uses == 6
    for limit in (0, 2):
        env = make("hops", syntax=syntax, max_uses=limit)
        env.reset(0)
        trace = env.demonstrate(random.Random(0), **KNOWING)
        assert sum(author is Author.ENV for author, _ in trace) == limit
        assert follow(env, trace)[-1].terminated
        env.reset(0)
        calls = [text for author, text in make_trace(syntax) if author is Author.POLICY][:3]
        turns = [env.step(call) for call in calls[: limit + 1]]
        assert [turn.info["tool_ok"] for turn in turns] == [True] * limit + [False]
        assert turns[-1].observation == env.styles["search"].spent


def make_trace(syntax: str) -> Any:
    env = make("hops", syntax=syntax)
    env.reset(0)
    return env.demonstrate(random.Random(0), **KNOWING)


@pytest.mark.parametrize(
    "call",
    ["(zzz M)", "(kab)", "()", ")", "]", "[]", "[1+1]", "[01*3]", "[9**9]", "[1*1234567]", "[a]"],
)
def test_a_call_that_makes_no_sense_is_answered_and_the_episode_goes_on(call: str):
    env = make("hops")
    env.reset(0)
    turn = env.step(call)
    assert (turn.observation, turn.is_over, turn.info["tool_ok"]) == ("?;", False, False)


def test_all_that_is_ever_written_is_in_the_alphabet():
    env = make("hops", hops=(1, 3))
    written = {"?", ";"}
    for seed in range(60):
        written |= {*env.reset(seed)[0]}
        written |= {*"".join(text for _, text in env.demonstrate(random.Random(seed)))}
    assert written <= {*env.alphabet}
    assert {*"".join(env.town.names)} <= {*env.alphabet}
    assert env.alphabet == "".join(sorted(set(env.alphabet)))
    assert make("hops", syntax="words").alphabet == ""


def rewards_of(syntax: str, cases: dict[str, float]) -> None:
    env = make("hops", syntax=syntax)
    for text, reward in cases.items():
        _, info = env.reset(3)
        assert env.step(text.replace("ANSWER", info["answer"])).reward == reward


def test_only_a_number_behind_the_equals_sign_counts_in_the_compact_syntax():
    cases = {"=ANSWER": 1.0, "ANSWER": 0.0, "==ANSWER": 0.0, "=ANSWER=": 0.0, "=": 0.0, "": 0.0}
    rewards_of("compact", cases)


def test_only_the_boxed_number_counts_in_the_syntax_words():
    cases = {
        "<think>so</think> <answer>\\boxed{ANSWER}</answer>": 1.0,
        "ANSWER": 0.0,
        "<answer>ANSWER</answer>": 0.0,
        "\\boxed{7ANSWER}": 0.0,
        "\\boxed{1} then \\boxed{ANSWER": 0.0,
    }
    rewards_of("words", cases)


def test_towns_are_the_same_everywhere_and_have_strangers_for_distractors():
    town = build_town(2000, short=True)
    assert town is build_town(2000, short=True)
    assert (town.names[:3], town.facts[town.names[0], "rent"]) == PINNED
    assert len(set(town.names)) == 2000
    assert {len(name) for name in town.names} == {3}
    assert len(town.facts) == 2000 * 5
    assert all(town.facts[name, link] != name for name in town.names for link in LINKS)
    amounts = [int(town.facts[name, number]) for name in town.names for number in NUMBERS]
    assert (min(amounts) >= 100, max(amounts) <= 999, len(set(amounts)) > 800) == (True,) * 3
    worded = build_town(2000, short=False)
    renamed = dict(zip(worded.names, town.names, strict=True))
    assert all(
        town.facts[renamed[name], relation] == renamed.get(value, value)
        for (name, relation), value in worded.facts.items()
    )


PINNED = (["lew", "qub", "gil"], "546")


@both_syntaxes
def test_no_test_question_begins_with_a_person_of_training(syntax: str):
    persons: dict[str, set[str]] = {}
    for split in ("train", "test"):
        env = make("hops", syntax=syntax, split=split)
        persons[split] = set()
        for seed in range(600):
            env.reset(seed)
            persons[split].add(env.person)
    assert not persons["train"] & persons["test"]
    town = make("hops", syntax=syntax).town
    numbers = {name: number for number, name in enumerate(town.names)}
    assert {split_of(f"person {numbers[name]}") for name in persons["test"]} == {"test"}
    assert len(persons["test"]) > 80


def test_a_search_in_the_syntax_words_finds_the_fact_first_and_then_one_like_it():
    env = make("hops", syntax="words")
    search, facts = env.tools["search"], env.town.facts
    for name, relation in random.Random(0).sample(list(facts), 100):
        first, second = search(f"{relation} of {name}").splitlines()
        assert first == (
            f"Doc 1(Title: {name}) The {relation} of {name} is {facts[name, relation]}."
        )
        assert second.startswith("Doc 2(Title: ") and second != first
    assert search("zzz") == "No documents found."


def test_forks_go_their_own_ways_with_counters_of_their_own():
    env = make("hops")
    env.reset(0)
    call, _, further, *_ = [text for _, text in make_trace("compact")]
    env.step(call)
    twin = env.fork()
    assert twin.town is env.town
    assert twin.tools["search"] is env.tools["search"]
    assert twin.step(further).info["tools/search/calls"] == 2
    assert env.step("1").info["tools/search/calls"] == 1
    state = json.loads(json.dumps(twin.get_state()))
    again = make("hops")
    again.set_state(state)
    assert again.step(further).info["tools/search/calls"] == 3


def test_posing_demonstrating_and_forking_take_less_than_a_millisecond():
    env = make("hops")
    seconds: list[float] = []
    for seed in range(60):
        started = time.perf_counter()
        make("hops").reset(seed)
        env.reset(seed)
        env.demonstrate(random.Random(seed))
        env.fork()
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1e-3  # the quickest: this machine has other things to do


@pytest.mark.parametrize("kind", [ExactFacts, RankedFacts])
def test_sources_travel_to_other_processes_by_their_settings(kind: Any):
    source = kind(100)
    source.open()
    sent = pickle.dumps(source)
    assert len(sent) < 200
    there = pickle.loads(sent)
    there.open()
    name = build_town(100, short=kind is ExactFacts).names[0]
    query = f"{name} M" if kind is ExactFacts else f"mentor of {name}"
    assert there.retrieve([query, "?"], 1) == source.retrieve([query, "?"], 1)
    assert there.fingerprint == source.fingerprint
    assert copy.deepcopy(make("hops", people=100).tools["search"]) is not None


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ({"hops": (0, 2)}, "hops=.*1 <= low"),
        ({"hops": (3, 2)}, "hops="),
        ({"people": 10}, "people=10: must be between 50"),
        ({"people": MAX_PEOPLE + 1}, f"and {MAX_PEOPLE}"),
        ({"syntax": "wrods"}, "did you mean 'words'|known: compact, words"),
        ({"split": "dev"}, "split='dev'"),
        ({"max_uses": -1}, "max_uses=-1"),
    ],
)
def test_bad_arguments_are_named(args: dict[str, Any], what: str):
    with pytest.raises(ValueError, match=what):
        make("hops", **args)
