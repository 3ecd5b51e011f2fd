"""Games in rollouts: every seat has a context, a leaf, a reward and a group of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graft.algos.credits.groups import grpo
from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.envs import make
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.branches.entropy import arpo
from graft.rollout.collect import collect
from graft.rollout.match import match_of
from graft.rollout.outcomes import is_flat, missing_share
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.errors import RunStopped
from graft.train.step_metrics import describe, refuse_unusable
from graft.types import Author, Completion, Episode, Finish, Sampling, Status, Task
from graft.user_code import UserCodeError
from tests.rollout.scripted import TextContext, TextEngine

LETTERS = FastTokenizer.characters("xo.:;\n123456789")
COMPACT = {"syntax": "compact"}


class PlayingEngine(TextEngine):
    """Continues a context with what `play` writes after its text; a fork knows its draw key."""

    version, vocab_size = 3, LETTERS.vocab_size

    def __init__(self, play: Callable[[str, int], str]) -> None:
        self.play = play
        self.opened = 0

    def open(self, tokens: Any, key: int | None = None) -> PlayingContext:
        self.opened += 1
        return PlayingContext(self, list(tokens), key or 0)


class PlayingContext(TextContext):
    def __init__(self, engine: PlayingEngine, tokens: list[int], key: int) -> None:
        super().__init__(engine, tokens)
        self.key = key

    def fork(self, key: int | None = None, at: int | None = None) -> PlayingContext:
        return PlayingContext(self.engine, self.tokens[:at], key or 0)

    async def sample(self, sampling: Sampling, grammar: Any = None) -> Completion:
        tokens = LETTERS.encode(self.engine.play(LETTERS.decode(self.tokens), self.key))
        finish = Finish.STOP if len(tokens) <= sampling.max_tokens else Finish.LENGTH
        return self.write(tokens[: sampling.max_tokens], finish, logprob=-0.5)


def setup_of(play: Callable[[str, int], str], env: str = "selfplay:tictactoe", **changes: Any):
    args = changes.pop("args", COMPACT)
    given = {"sampling": Sampling(max_tokens=4), "self_play": True, "max_context": 128, **changes}
    return RolloutSetup(
        engine=PlayingEngine(play),  # pyright: ignore[reportArgumentType]
        chat=Chat(LETTERS),
        make_env=lambda task: make(env, **args),
        **given,
    )


def playing(script: dict[str, str]) -> Callable[[str, int], str]:
    """The moves of each seat: {"x": "123", "o": "45"}; the number of own marks says which is next."""

    def play(text: str, key: int) -> str:
        board = text[text.rfind("\n") + 1 :] if text.count(":") == 1 else text.split(";")[-1]
        return f"{script[text[0]][board.count(text[0])]};"

    return play


def collected(setup: RolloutSetup, samples: int = 1, branch: Any = None) -> Episode:
    task = Task("t", "selfplay:tictactoe", seed=4)
    [episode] = collect([task], setup, branch or independent(samples))
    return episode


def test_each_seat_is_a_leaf_with_its_own_walk_and_reward():
    """X 1 2 3, O 4 5."""
    episode = collected(setup_of(playing({"x": "123", "o": "45"})))
    assert [(leaf.seat, leaf.match, leaf.reward) for leaf in episode.leaves] == [
        ("X", 0, 1.0),
        ("O", 0, -1.0),
    ]
    rows = [*episode.trajectories()]
    assert "".join(span.text for span in rows[0].spans) == "x\n.........:1;x..o.....:2;xx.oo....:3;"
    assert "".join(span.text for span in rows[1].spans) == "o\nx........:4;xx.o.....:5;"
    assert [span.author for span in rows[1].spans] == [
        Author.TASK,
        Author.POLICY,
        Author.ENV,
        Author.POLICY,
    ]
    # a seat's last turn has what it earned since: X's its win, O's the loss that X's next move brought
    assert [span.reward for span in rows[0].spans] == [0, 0, 0, 0, 0, 1.0]
    assert [span.reward for span in rows[1].spans] == [0, 0, 0, -1.0]
    assert rows[1].info["rewards"] == {"X": 1.0, "O": -1.0}
    assert Episode.loads(episode.dumps()) == episode


def test_the_group_of_a_row_is_its_seat():
    """Game 0: X wins. Games 1 and 2: X plays 1 again, and O wins. X: 1 -1 -1, O: -1 1 1."""
    keys: list[int] = []

    def play(text: str, key: int) -> str:
        if text[0] == "x" and key not in keys:
            keys.append(key)
        is_first = text[0] == "x" and keys.index(key) == 0
        script = {"x": "123" if is_first else "11", "o": "45"}
        return playing(script)(text, key)

    setup = setup_of(play)
    episode = collected(setup, samples=3)
    assert [leaf.seat for leaf in episode.leaves] == ["X", "O"] * 3
    assert [leaf.reward for leaf in episode.leaves] == [1, -1, -1, 1, -1, 1]
    assert (
        setup.engine.opened == 2
    )  # the three games share the prompts of X, and of O after X took 1
    batch = to_batch(trajectories_of([episode]))
    assert batch.group.tolist() == [0, 1, 0, 1, 0, 1]
    adv_N = grpo()(batch.zeros(), batch).sum(dim=1) / batch.mask.sum(dim=1)
    want = torch.tensor([1.414, -1.414, -0.707, 0.707, -0.707, 0.707])
    torch.testing.assert_close(adv_N, want, atol=1e-3, rtol=0)
    metrics = describe([episode])
    assert metrics["seat/X/reward"] == pytest.approx(-1 / 3)
    assert metrics["seat/O/reward"] == pytest.approx(1 / 3)
    assert metrics["reward"] == pytest.approx(0.0)
    assert metrics["reward_std"] == pytest.approx(2 * 2**0.5 / 3)  # of 1 -1 -1, in both groups
    assert missing_share([episode], 3) == 0.0 and not is_flat(episode)


def test_equal_rewards_of_each_seat_are_a_flat_group():
    assert is_flat(collected(setup_of(playing({"x": "123", "o": "45"})), samples=2))


def test_a_turn_that_is_cut_off_loses_and_a_seat_that_never_acted_is_not_trained():
    episode = collected(setup_of(lambda text, key: "111111"), samples=2)
    leaf, idle = episode.leaves[:2]
    assert (leaf.seat, leaf.reward, leaf.status) == ("X", -1.0, Status.TRUNCATED)
    assert (idle.seat, idle.reward, idle.status) == ("O", 1.0, Status.DONE)
    assert leaf.info["rewards"] == idle.info["rewards"] == {"X": -1.0, "O": 1.0}
    assert episode.spans[leaf.tips[0]].reward == -1.0
    assert [row.leaf.seat for row in trajectories_of([episode])] == ["X", "X"]
    assert describe([episode])["seat/O/reward"] == 1.0 and is_flat(episode)


def test_a_step_in_which_the_policy_never_acted_stops_the_run():
    other = PlayingEngine(lambda text, key: ":;")
    episode = collected(setup_of(playing({"o": "45"}), frozen={"X": other}))
    [leaf] = episode.leaves
    assert (leaf.seat, leaf.reward, leaf.has_acted) == ("O", 1.0, False)
    with pytest.raises(RunStopped, match="before the policy's first turn"):
        refuse_unusable([episode], trajectories_of([episode]))


def test_a_seat_without_turns_left_loses():
    episode = collected(setup_of(playing({"x": "123", "o": "45"}), max_turns=2))
    assert [leaf.reward for leaf in episode.leaves] == [-1.0, 1.0]
    assert [str(leaf.status) for leaf in episode.leaves] == ["truncated", "done"]


def test_a_failure_in_one_seat_ends_the_game_for_both_and_no_other():
    seen: list[int] = []

    def play(text: str, key: int) -> str:
        seen.append(key)
        if text[0] == "o" and len(seen) == 3:
            raise EngineError("the server is gone")
        return playing({"x": "123", "o": "45"})(text, key)

    episode = collected(setup_of(play), samples=2)
    statuses = [str(leaf.status) for leaf in episode.leaves]
    assert sorted(statuses) == ["done", "done", "engine_error", "engine_error"]
    assert len(trajectories_of([episode])) == 2
    assert sum("error" in span.info for span in episode.spans) == 1


def test_seats_of_a_simultaneous_game_do_not_see_each_others_turn():
    letters = FastTokenizer.bytes()

    class Claiming(PlayingContext):
        async def sample(self, sampling: Sampling, grammar: Any = None) -> Completion:
            text = letters.decode(self.tokens)
            tokens = letters.encode("\\boxed{hat}" if "You are A" in text else "\\boxed{cup}")
            self.tokens += tokens
            zeros = [-0.5] * len(tokens)
            modes = [0] * len(tokens)
            return Completion(tokens, tokens, zeros, zeros, modes, Finish.STOP, 0)

        def fork(self, key: int | None = None, at: int | None = None) -> Claiming:
            return Claiming(self.engine, self.tokens[:at], key or 0)

    class Engine(PlayingEngine):
        def open(self, tokens: Any, key: int | None = None) -> Claiming:
            return Claiming(self, list(tokens), 0)

    setup = RolloutSetup(
        engine=Engine(lambda text, key: ""),  # pyright: ignore[reportArgumentType]
        chat=Chat(letters),
        make_env=lambda task: make("selfplay:split"),
        sampling=Sampling(max_tokens=50),
        self_play=True,
    )
    episode = collected(setup)
    game = make("selfplay:split").game
    game.reset(4)
    want = [game.values["A"]["hat"] / 10, game.values["B"]["cup"] / 10]
    assert [leaf.reward for leaf in episode.leaves] == want
    assert [leaf.metrics["turns"] for leaf in episode.leaves] == [1, 1]


def test_a_frozen_seat_is_played_by_its_own_engine_and_not_recorded():
    other = PlayingEngine(playing({"x": "no", "o": "78"}))
    episode = collected(setup_of(playing({"x": "123", "o": "no"}), frozen={"O": other}))
    [leaf] = episode.leaves
    assert (leaf.seat, leaf.reward) == ("X", 1.0)
    assert "x.....o..:" in "".join(span.text for span in episode.spans)
    assert not any(span.text.startswith("o\n") for span in episode.spans)


def test_frozen_seats_must_leave_one_for_the_policy():
    engine = PlayingEngine(playing({"x": "123"}))
    for frozen in ({"Z": engine}, {"X": engine, "O": engine}):
        with pytest.raises(UserCodeError, match="leave one for the policy"):
            collected(setup_of(playing({"x": "123"}), frozen=frozen))


def test_programs_and_one_seat_need_no_match():
    setup = setup_of(playing({"x": "123", "o": "123456789"}), args={**COMPACT, "seat": "X"})
    played = collected(
        setup_of(playing({"x": "123"}), args={**COMPACT, "players": {"O": "minimax"}})
    )
    assert [leaf.seat for leaf in played.leaves] == ["X"]
    [leaf] = collected(replace(setup, self_play=False)).leaves
    assert leaf.seat == "" and leaf.info["seat"] == "X"


@pytest.mark.parametrize("env_id", ["game:GuessTheNumber-v0", "calculator", "hops"])
def test_environments_of_one_agent_are_no_match(env_id):
    assert match_of(make(env_id)) is None


def test_branches_and_wrappers_that_see_one_trajectory_are_refused():
    setup = setup_of(playing({"x": "123", "o": "45"}))
    with pytest.raises(UserCodeError, match=r"rollout\.branch=independent"):
        collected(setup, branch=arpo(2))
    wrapped = setup_of(playing({"x": "1"}), args={**COMPACT, "wrappers": "episode_tracking"})
    with pytest.raises(UserCodeError, match=r"task\.wrappers"):
        collected(wrapped)


def test_engine_logprobs_are_the_learners_for_every_seat():
    torch.manual_seed(0)
    shape = ModelShape(
        vocab_size=LETTERS.vocab_size, width=32, layers=2, heads=2, kv_heads=2, head_dim=16, ff=32
    )
    engine = NativeEngine(Decoder(shape).initialise(5), tokenizer=LETTERS, eos_ids=LETTERS.eos_ids)
    setup = RolloutSetup(
        engine=engine,
        chat=Chat(LETTERS),
        make_env=lambda task: make("selfplay:tictactoe", **COMPACT),
        sampling=Sampling(max_tokens=6),
        self_play=True,
        max_context=128,
    )
    tasks = [Task(f"t{n}", "selfplay:tictactoe", seed=n) for n in range(4)]
    episodes = collect(tasks, setup, independent(8))
    again = collect(tasks, setup, independent(8))
    assert [e.dumps() for e in episodes] == [e.dumps() for e in again]  # draws depend on keys alone
    rows = trajectories_of(episodes)
    assert {row.leaf.seat for row in rows} == {"X", "O"}
    batch = to_batch(rows)
    with torch.no_grad():
        logp, _ = Forest(rows, batch.mask, torch.device("cpu")).logprobs(engine.decoder)
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)
    engine.close()
