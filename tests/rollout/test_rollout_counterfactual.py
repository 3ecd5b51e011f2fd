"""CPO's branch: with an engine that follows a script, then with a small random model."""

import asyncio
import json
import math

import pytest
import torch

from graft.actions.actions import load_actions
from graft.algos.credits.groups import cpo
from graft.engine.native.engine import NativeEngine
from graft.envs import make
from graft.models.decoder import Decoder
from graft.models.extra_actions import extend
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import BRANCHES
from graft.rollout.branches.counterfactual import FIRST_GAIN, Counterfactual
from graft.rollout.branches.twin import branch_off, force
from graft.rollout.collect import collect
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.outcomes import is_flat
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.types import NO_ACTION, Author, Episode, Leaf, Sampling, Status, Task
from tests.rollout.scripted import EOS, LETTERS, SORTING, Swapping, call, encoded, scripted

TASK = Task("t", "swapping")
NO = [[*encoded("no"), EOS]]
"""An attempt that fails: prompt "S?", then tokens 2 "n", 3 "o", 4 the end."""
DONE = [*encoded("Done."), EOS]
SWAPS = [call("swap", "A", "B")[1:], DONE]
"""What follows a forced " swap": its arguments, then the end; reward 1."""
SWAP = call("swap", "A", "B")[0]


def near(place: int):
    """A policy that would call at this place rather than anywhere else."""
    return lambda at, action: -1.0 if at == place else -50.0


def grown(scripts, branch, **changes) -> tuple[Episode, RolloutSetup]:
    where = scripted(scripts, **changes)
    (episode,) = collect([TASK], where, branch)
    return episode, where


def forcing(samples: int = 1, **changes) -> Counterfactual:
    return Counterfactual(**{"samples": samples, "tools": ["swap"], "top_k": 1, **changes})


def texts(episode: Episode, leaf: int) -> list[str]:
    rows = [row for row in episode.trajectories() if row.leaf_index == leaf]
    return [span.text for span in rows[0].spans]


def test_a_group_that_failed_is_rewritten_and_shares_its_beginnings():
    episode, where = grown([NO, NO, SWAPS, SWAPS], forcing(2), likely=near(3))
    assert [leaf.status for leaf in episode.leaves] == [Status.REPLACED] * 2 + [Status.DONE] * 2
    assert [leaf.twin for leaf in episode.leaves] == [None, None, 0, 1]
    assert [leaf.reward for leaf in episode.leaves] == [0, 0, 1, 1]
    for number in (2, 3):
        want = ["S?", "n", " swap", " A and B", " => B, A\n", "Done."]
        assert texts(episode, number) == want
        assert texts(episode, number - 2) == ["S?", "n", "o"]
        own, twin = (set(episode.walk(episode.leaves[i].tips[0])) for i in (number - 2, number))
        assert len(own & twin) == 2
        metrics = episode.leaves[number].metrics
        assert metrics == {"turns": 2, "tool_calls": 1, "tool_failures": 0, "rewritten": 1}
    assert all(not context.is_open for context in where.engine.contexts)
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    assert [row.leaf_index for row in rows] == [2, 3]
    advantages = cpo()(batch.zeros(), batch)
    assert advantages[batch.mask].tolist() == [1.0] * batch.num_tokens
    # "n", the forced call, two arguments, "Done." and the end, twice: also beyond the length of y
    assert batch.num_tokens == 2 * (1 + 1 + 2 + 6)


def test_the_environment_receives_the_whole_turn():
    received = []
    grown(
        [NO, SWAPS],
        forcing(),
        likely=near(3),
        make_env=lambda: Swapping(lambda e: received.append(e.received[-1])),
    )
    assert received == ["no", "n swap A and B", "Done."]
    assert (received[1].tool, received[1].arguments) == ("swap", ("A", "B"))


def test_the_forced_decision_is_trained_with_what_the_policy_thought_of_it():
    episode, where = grown([NO, SWAPS], forcing(), likely=lambda at, action: -at - action / 1000)
    (span,) = (span for span in episode.spans if span.info.get("forced"))
    assert span.info == {"forced": "swap"}
    assert LETTERS.decode(span.tokens) == " swap"
    assert span.actions == [SWAP] + [NO_ACTION] * 4
    assert span.mask == [True] + [False] * 4
    assert span.logprobs == [pytest.approx(-2 - SWAP / 1000), 0, 0, 0, 0]
    assert (span.entropies, span.modes, span.version) == ([0.0] * 5, [0] * 5, 3)
    # scored at all places at once: the word's tokens and the routing action, in language
    assert where.engine.scored == [
        ([*encoded("S?no"), EOS], [2, 3, 4], [encoded(" swap"), [SWAP]], 0),
    ]


def test_a_place_is_scored_by_the_word_too():
    """At place 4 the word is likelier than the routing action anywhere."""

    def likely(place, action):
        return -0.1 if place == 4 and action != SWAP else -1.0

    episode, _ = grown([NO, SWAPS], forcing(), likely=likely)
    assert texts(episode, 1)[:3] == ["S?", "no", " swap"]


def test_a_place_is_drawn_again_the_same_and_by_another_salt_otherwise():
    def places(salt: int) -> list[str]:
        text = [[*encoded("so do can he"), EOS]]
        branch = forcing(6, top_k=10, top_p=1.0)
        episode, _ = grown([text] * 6 + [SWAPS] * 6, branch, salt=salt)
        return [texts(episode, leaf)[1] for leaf in range(6, 12)]

    assert places(1) == places(1)
    assert len({*places(1), *places(2)}) > 4


def test_a_group_with_any_reward_is_left_alone():
    won = [call("swap", "A", "B"), DONE]
    episode, where = grown([NO, won], forcing(2))
    assert [leaf.reward for leaf in episode.leaves] == [0, 1]
    assert [leaf.status for leaf in episode.leaves] == [Status.DONE] * 2
    assert where.engine.scored == []


def test_gate_all_adds_a_twin_to_every_attempt_and_can_find_harm_in_a_call():
    won = [call("swap", "A", "B"), DONE]  # tokens: prompt 2, call 13, answer 9, then "Done."
    place = 2 + len(" swap A and B") + len(" => B, A\n")
    branch = forcing(2, gate="all")
    episode, _ = grown([NO, won, SWAPS, SWAPS], branch, likely=lambda at, action: -abs(at - place))
    assert [leaf.status for leaf in episode.leaves] == [Status.DONE] * 4
    assert [leaf.reward for leaf in episode.leaves] == [0, 1, 1, 0]
    assert [leaf.twin for leaf in episode.leaves] == [None, None, 0, 1]
    batch = to_batch(trajectories_of([episode]))
    root = 0.5**0.5
    first = [row[row != 0][0].item() for row in cpo()(batch.zeros(), batch)]
    assert first == [pytest.approx(-root, abs=1e-5), pytest.approx(root, abs=1e-5), 1, -1]
    branch.settle([episode])
    assert branch.averages["swap"] == pytest.approx(0.9 * FIRST_GAIN + 0.1 * 0)
    assert not is_flat(episode)


def test_replacing_is_a_choice_under_either_gate():
    kept, _ = grown([NO, SWAPS], forcing(replace=False))
    assert [leaf.status for leaf in kept.leaves] == [Status.DONE] * 2
    won = [call("swap", "A", "B"), DONE]
    gone, _ = grown([won, SWAPS], forcing(gate="all", replace=True))
    assert [leaf.status for leaf in gone.leaves] == [Status.REPLACED, Status.DONE]


def test_flatness_is_of_the_attempts_without_a_forced_action():
    episode = Episode(TASK, [], [Leaf((0,), 0.0, Status.REPLACED), Leaf((0,), 1.0, twin=0)])
    assert is_flat(episode)
    episode.leaves.append(Leaf((0,), 1.0))
    assert not is_flat(episode)


def test_what_is_hidden_in_the_environment_stands_as_it_stood():
    """Swap, then text and a swap back, then the end: wrong. The kept prefix has one swap or two."""
    factual = [call("swap", "A", "B"), [*encoded("So"), *call("swap", "A", "B")], DONE]
    answer = len(" swap A and B => B, A\n")
    envs = []

    def place(at: int) -> Leaf:
        envs.clear()

        class Kept(Swapping):
            forkable = False

            def __init__(self):
                super().__init__()
                envs.append(self)

        episode, _ = grown([factual, SWAPS], forcing(), likely=near(at), make_env=Kept)
        assert episode.leaves[0].reward == 0
        return episode.leaves[1]

    within = place(
        2 + answer + 1
    )  # between "S" and "o": one swap is kept, the forced one undoes it
    assert (within.reward, within.metrics["turns"], within.metrics["tool_calls"]) == (0, 3, 2)
    assert envs[-1].received == [" swap A and B", "S swap A and B", "Done."]
    behind = place(2 + answer + 2 + answer)  # before "Done.": two swaps are kept
    assert (behind.reward, behind.metrics["turns"], behind.metrics["tool_calls"]) == (1, 4, 3)
    assert envs[-1].order == "B, A"


def test_the_sorting_task_is_replayed_too(monkeypatch):
    """Items 1, 0 in ascending order: a swap and a swap back, then a third that was forced."""
    factual = [call("swap", "A", "B"), call("swap", "B", "A"), DONE]

    # letters that the scripted tokenizer has
    monkeypatch.setattr("graft_envs.earl.sorting.sort_question", lambda *given: "S?")
    monkeypatch.setattr("graft_envs.earl.sorting.system_text", lambda *given: "S")

    def brief():
        return make("earl:sort", syntax="actions", items=[1, 0], reverse=False)

    episode, _ = grown(
        [factual, SWAPS], forcing(), make_env=brief, likely=lambda at, action: float(at)
    )
    assert texts(episode, 0)[2:5:2] == [" => B, A\n", " => A, B\n"]
    assert texts(episode, 1)[-5:] == ["Done.", " swap", " A and B", " => B, A\n", "Done."]
    assert episode.leaves[0].reward == 0
    assert episode.leaves[1].reward == 0.5  # right, but without a comparison


def test_without_a_place_the_call_comes_right_after_the_prompt():
    only_calls = [call("swap", "A", "B"), call("swap", "A", "B")]
    episode, where = grown([only_calls, SWAPS], forcing(), max_turns=2)
    assert where.engine.scored[0][1] == [2]
    assert texts(episode, 0) == ["S?", " swap A and B", " => B, A\n", " swap A and B"]
    assert texts(episode, 1) == ["S?", " swap", " A and B", " => B, A\n", "Done."]
    assert [leaf.status for leaf in episode.leaves] == [Status.REPLACED, Status.DONE]


def test_budgets_hold_for_twins():
    tight = 2 + 2 + len(" swap") + 4  # room for " A a"
    episode, _ = grown([NO, SWAPS], forcing(), likely=near(4), max_context=tight)
    assert texts(episode, 1) == ["S?", "no", " swap", " A a"]
    assert episode.leaves[1].status is Status.TRUNCATED
    turn = Sampling(max_tokens=2 + len(" swap") + 3)  # of the whole turn, forced or not
    episode, _ = grown([NO, SWAPS], forcing(), likely=near(4), sampling=turn)
    assert texts(episode, 1)[-1] == " A "
    full, _ = grown([NO, SWAPS], forcing(), likely=near(4), max_context=5)
    assert texts(full, 1) == ["S?", "no", " swap"]
    assert [leaf.status for leaf in full.leaves] == [Status.REPLACED, Status.TRUNCATED]


def test_a_failed_attempt_is_never_rewritten():
    def fault(env):
        if env.received[-1] == "hah":
            raise OSError("gone")

    failed = [[*encoded("hah"), EOS]]
    episode, _ = grown([failed, NO, SWAPS], forcing(2), make_env=lambda: Swapping(fault))
    statuses = [Status.ENV_ERROR, Status.REPLACED, Status.DONE]
    assert [leaf.status for leaf in episode.leaves] == statuses
    assert episode.leaves[2].twin == 1
    branch = forcing(2)
    episode, where = grown([failed, failed], branch, make_env=lambda: Swapping(fault))
    assert [leaf.status for leaf in episode.leaves] == [Status.ENV_ERROR] * 2
    assert where.engine.scored == []
    branch.settle([episode])
    assert branch.averages == {"swap": FIRST_GAIN}


def test_a_twin_that_fails_replaces_nothing():
    def fault(env):
        if "swap" in env.received[-1]:
            raise OSError("gone")

    branch = forcing()
    episode, _ = grown([NO, SWAPS], branch, make_env=lambda: Swapping(fault))
    assert [leaf.status for leaf in episode.leaves] == [Status.DONE, Status.ENV_ERROR]
    branch.settle([episode])
    assert branch.averages == {"swap": FIRST_GAIN}  # nothing was learned of the tool


def test_a_replay_that_goes_another_way_costs_the_twin_only():
    lives = iter(range(9))

    class Fickle(Swapping):
        forkable = False

        def __init__(self):
            super().__init__()
            self.life = next(lives)

        def respond(self, action):
            turn = super().respond(action)
            return turn._replace(terminated=turn.terminated or self.life == 2)

    factual = [call("swap", "A", "B"), call("swap", "A", "B"), DONE]
    episode, _ = grown([factual], forcing(), make_env=Fickle, likely=lambda at, action: float(at))
    assert [leaf.status for leaf in episode.leaves] == [Status.DONE]
    assert "turn 1 ended the episode" in episode.spans[-1].info["error"]


def test_the_tool_of_a_step_follows_what_tools_have_brought():
    branch = Counterfactual(1, seed=5)
    branch.restore({"averages": {"compare": 0.0509}})
    drawn = []
    for step in range(2000):
        branch.begin(step)
        drawn.append(branch.tool_of_step(SORTING))
    want = math.e / (math.e + math.exp(0.001 / 0.0509))  # swap has not been tried: 0.001
    assert drawn.count("compare") / 2000 == pytest.approx(want, abs=0.03)
    assert Counterfactual(1, seed=6).tool_of_step(SORTING) in SORTING.tools


def test_a_resumed_run_forces_the_same_tools():
    def run(branch: Counterfactual, steps: range) -> list[str]:
        drawn = []
        for step in steps:
            branch.begin(step)
            tool = branch.tool_of_step(SORTING)
            gain = 1.0 if tool == "swap" else -0.5
            leaves = [Leaf((0,), 0.0, Status.REPLACED), Leaf((0,), gain, twin=0)]
            branch.settle([Episode(TASK, [], leaves)])
            drawn.append(tool)
        return drawn

    whole = Counterfactual(1, seed=2)
    drawn = run(whole, range(1, 21))
    assert set(drawn) == {"compare", "swap"}
    first, second = Counterfactual(1, seed=2), Counterfactual(1, seed=2)
    begun = run(first, range(1, 11))
    second.restore(json.loads(json.dumps(first.state)))
    assert begun + run(second, range(11, 21)) == drawn
    assert second.state == whole.state


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"no actions to force; set actions\.file"):
        grown([NO], forcing(), actions=None)
    with pytest.raises(ValueError, match="cannot force python; the actions have compare, swap"):
        grown([NO], forcing(tools=["python"]))
    with pytest.raises(ValueError, match="gate='some': must be one of zero_groups, all"):
        forcing(gate="some")
    with pytest.raises(ValueError, match=r"tools='swap': must be a list of names"):
        forcing(tools="swap")
    with pytest.raises(ValueError, match="top_k='3': must be a whole number"):
        forcing(top_k="3")
    with pytest.raises(ValueError, match=r"top_p='0\.9': must be numbers"):
        forcing(top_p="0.9")
    with pytest.raises(ValueError, match="replace='no': must be true, false"):
        forcing(replace="no")
    assert BRANCHES["counterfactual"].endswith(":Counterfactual")


# with a model


def calculating(name: str, page_size: int = 16) -> RolloutSetup:
    """A random model of single characters; "compact" has actions, "compact-tags" tokens alone."""
    tokenizer = FastTokenizer.characters(make("calculator").alphabet)
    actions = load_actions(name, tokenizer)
    shape = ModelShape(
        vocab_size=tokenizer.vocab_size, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ff=16
    )
    decoder = Decoder(shape).initialise(3)
    if actions.space.extra:
        decoder = extend(decoder, actions.init_tokens)
    syntax = "actions" if actions.space.extra else "compact"
    engine = NativeEngine(
        decoder, tokenizer=tokenizer, eos_ids=(tokenizer.eos_id,), kv_tokens=8192, page_size=page_size,
        space=actions.space,
    )  # fmt: skip
    return RolloutSetup(
        engine=engine,
        chat=Chat(tokenizer),
        make_env=lambda task: make("calculator", syntax=syntax),
        sampling=Sampling(max_tokens=40),
        actions=actions,
    )


def allowed_of(where: RolloutSetup) -> torch.Tensor:
    table = torch.from_numpy(where.actions.space.allowed.copy())
    wide = torch.zeros(len(table), where.engine.decoder.head_weight.shape[0], dtype=torch.bool)
    wide[:, : table.shape[1]] = table
    return wide


@pytest.mark.parametrize("name", ["compact", "compact-tags"])
@pytest.mark.parametrize("gate", ["zero_groups", "all"])
def test_every_logprob_of_a_twin_is_the_trainers(name, gate):
    where = calculating(name)
    tasks = [Task(f"t{i}", "calculator", seed=i) for i in range(4)]
    episodes = collect(tasks, where, Counterfactual(3, gate=gate))
    twins = [leaf for episode in episodes for leaf in episode.leaves if leaf.twin is not None]
    assert len(twins) >= 10
    assert sum(leaf.metrics["tool_calls"] > 0 for leaf in twins) >= 3
    rows = trajectories_of(episodes)
    batch = to_batch(rows)
    with torch.no_grad():
        forest = Forest(rows, batch.mask, torch.device("cpu"))
        logp, _ = forest.logprobs(where.engine.decoder, allowed=allowed_of(where))
        alone = [  # each row alone: nothing shared
            Forest([row], to_batch([row]).mask, torch.device("cpu")).logprobs(
                where.engine.decoder, allowed=allowed_of(where)
            )[0]
            for row in rows
        ]
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)
    for n, single in enumerate(alone):
        mask = batch.mask[n, : single.shape[1]]
        torch.testing.assert_close(
            single[0][mask], batch.logprobs[n][batch.mask[n]], atol=1e-5, rtol=0
        )
    forced = [span for e in episodes for span in e.spans if span.info.get("forced")]
    assert len(forced) == len(twins) and all(any(span.mask) for span in forced)
    assert where.engine.stats["pages_free"] == where.engine.stats["pages_total"]


def test_a_twin_computes_nothing_again_that_it_shares():
    where = calculating("compact", page_size=4)

    async def play() -> None:
        async with EpisodeBuilder(Task("t", "calculator", seed=1), where) as builder:
            await builder.open()
            builder.keep_open = True
            trajectory = await builder.root()
            await trajectory.finish()
            at = len(trajectory.context.tokens) - 2
            before = where.engine.stats["prefill_tokens"]
            twin = await branch_off(builder, trajectory, at)
            forced = where.actions.entry("calculator")
            force(twin, forced, [-1.0], "calculator")
            assert twin.context.tokens == [*trajectory.context.tokens[:at], *forced.tokens]
            await twin.turn()
            computed = where.engine.stats["prefill_tokens"] - before
            assert at > 12 and computed <= 3 + len(
                forced.tokens
            )  # the rest of a page that is shared

    asyncio.run(play())


def test_in_tags_the_tag_itself_is_forced_and_trained():
    where = calculating("compact-tags")
    (episode,) = collect([Task("t", "calculator", seed=2)], where, Counterfactual(2))
    for leaf in episode.leaves:
        if leaf.twin is None:
            continue
        spans = [episode.spans[i] for i in episode.walk(leaf.tips[0])]
        (entry,) = (span for span in spans if span.info.get("forced"))
        assert (entry.author, entry.text, entry.mask) == (Author.POLICY, "[", [True])
        assert spans[spans.index(entry) + 1].modes[0] != 0  # inside at once
