"""The generator of every env: known numbers, even spread, a state of one integer."""

from __future__ import annotations

import copy
import json
import pickle

from graft.envs.random_state import RandomState


def test_the_stream_is_splitmix64():
    """The first outputs for seed 1234567, as published with the algorithm's test vectors."""
    dice = RandomState(1234567)
    assert [dice.getrandbits(64) for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_faces_come_up_equally_often_and_neighbouring_seeds_have_nothing_in_common():
    dice = RandomState(7)
    count = [0] * 6
    for _ in range(6_000):
        count[dice.randint(1, 6) - 1] += 1
    assert all(870 < times < 1_130 for times in count)  # 1,000 +- 4.5 standard deviations
    firsts = [RandomState(seed).getrandbits(1) for seed in range(10_000)]
    assert 4_780 < sum(firsts) < 5_220


def test_every_width_of_bits_and_every_method_of_random_works():
    dice = RandomState(3)
    for bits in (1, 5, 53, 64, 65, 200):
        drawn = [dice.getrandbits(bits) for _ in range(200)]
        assert min(drawn) >= 0 and max(drawn).bit_length() == bits
    assert all(0.0 <= dice.random() < 1.0 for _ in range(1000))
    assert sorted(dice.sample(range(10), 10)) == list(range(10))
    assert dice.choice("ab") in "ab"
    assert abs(sum(dice.gauss(0.0, 1.0) for _ in range(4000)) / 4000) < 0.07
    assert dice.getrandbits(0) == 0


def test_its_state_is_one_integer_that_survives_json_copies_and_pickles():
    dice = RandomState(9)
    dice.gauss(0.0, 1.0)
    state = json.loads(json.dumps(dice.getstate()))
    assert isinstance(state, int)
    twins = [copy.deepcopy(dice), copy.copy(dice), pickle.loads(pickle.dumps(dice)), RandomState(0)]
    twins[-1].setstate(state)
    want = [dice.getrandbits(30), dice.gauss(0.0, 1.0)]
    assert all([twin.getrandbits(30), twin.gauss(0.0, 1.0)] == want for twin in twins)


def test_without_a_seed_streams_differ():
    assert len({RandomState().getrandbits(64) for _ in range(20)}) == 20
