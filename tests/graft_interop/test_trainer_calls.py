"""Trainers that cannot be installed here: the calls that their rollouts make, from their public source.

OpenRLHF 0.11.0 (3c3be62), RL2 (9161ede), GEM's script for Oat (4069f2f), ROLL 0.3.0 (8eb27cc).
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections import defaultdict
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scripted import END, ScriptedPolicy, byte_tokenizer

import graft
from graft.envs import make
from graft.envs.wrappers import get_wrapper_fns
from graft_interop import openrlhf, rl2
from graft_interop.gem_ids import as_gem, register_envs

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
GUESS = "game:GuessTheNumber-v0"
TOOL: Any = {"tools": {"use": "calculator", "format": "gem"}}


def hidden(seed: int) -> int:
    return make(GUESS).reset(seed)[1]["answer"]


def boxed(number: int) -> str:
    return f"\\boxed{{{number}}}"


def load_file(name: str) -> Any:
    """A file of examples/trainers, as trainers load the file of an agent or environment."""
    spec = importlib.util.spec_from_file_location("custom_module", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Modules of a trainer with the members that the adapters import: `a__b` is the module a.b."""
    for name, members in modules.items():
        parts = name.split("__")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package, ModuleType(package)))
        module = ModuleType(".".join(parts))
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)


class VllmLike(ScriptedPolicy):
    """The engine that OpenRLHF gives an executor; token i of a turn has the log-prob -i."""

    async def generate(self, prompt_ids: list[int], sampling_params: Any) -> Any:
        self.sampling = sampling_params
        limit = sampling_params.max_tokens
        tokens = self.next_tokens(prompt_ids, limit)
        tables = [{t: SimpleNamespace(logprob=-float(i))} for i, t in enumerate(tokens)]
        finish = "stop" if tokens[-1:] == self.encode(END) else "length"
        output = SimpleNamespace(token_ids=tokens, logprobs=tables, finish_reason=finish)
        return SimpleNamespace(outputs=[output])


def execute(
    monkeypatch: pytest.MonkeyPatch, engine: VllmLike, label: str, max_length: int = 4000
) -> dict[str, Any]:
    install(monkeypatch, openrlhf__utils__agent={"AgentExecutorBase": type("Base", (), {})})
    executor = load_file("openrlhf_agent.py").AgentExecutor()
    sampling = SimpleNamespace(max_tokens=500, logprobs=0, stop=[])
    return asyncio.run(
        executor.execute(
            prompt="shown",
            label=label,
            sampling_params=sampling,
            max_length=max_length,
            hf_tokenizer=byte_tokenizer(),
            llm_engine=engine,
            images=None,
        )
    )


def test_openrlhf_gets_tokens_ranges_and_the_sum_of_the_rewards(monkeypatch: pytest.MonkeyPatch):
    row = openrlhf.rows(GUESS, 1, seed=3, wrappers=TOOL)[0]
    texts = ["<calculator>2+3</calculator>", boxed(hidden(3))]
    engine = VllmLike(*texts)
    played = execute(monkeypatch, engine, row["label"])
    tokens, ranges = played["observation_tokens"], played["action_ranges"]
    assert row["prompt"][0]["content"] in engine.shown[0]
    assert engine.sampling.stop == ["</calculator>"] and engine.sampling.include_stop_str_in_output
    # the end behind the stop string is cut, and the template's own follows with the result
    assert [engine.decode(tokens[a:b]) for a, b in ranges] == [texts[0], texts[1] + END]
    assert engine.shown[1].startswith(f"{engine.shown[0]}{texts[0]}{END}\n<|im_start|>")
    assert (played["reward"], played["scores"], played["truncated"]) == (1.0, 1.0, False)
    assert played["extra_logs"] == {"turns": 2.0} and played["label"] == "3"
    logprobs = played["rollout_log_probs"]
    assert len(logprobs) == len(tokens)
    assert [logprobs[a:b] for a, b in ranges] == [
        [-float(i) for i in range(b - a)] for a, b in ranges
    ]


def test_openrlhf_is_told_of_turns_and_prompts_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    engine = VllmLike("x" * 1000)
    played = execute(monkeypatch, engine, "3")
    ((start, end),) = played["action_ranges"]
    assert end - start == 500 and played["truncated"] and played["reward"] == 0.0
    with pytest.raises(ValueError, match="max_len 50"):
        execute(monkeypatch, engine, "3", max_length=50)
    with pytest.raises(ValueError, match="different tasks"):
        execute(monkeypatch, engine, "an answer")


class Sample:
    """The members of RL2's Sample."""

    class Status(Enum):
        RUNNING = "running"
        ABORTED = "aborted"
        DONE = "done"

    def __init__(self, row: dict[str, Any]) -> None:
        self.sample, self.status = row, Sample.Status.RUNNING
        self.state_text = self.action_text = self.previous_action_text = ""
        self.state_dict: dict[str, list[Any]] = {}
        self.state_dicts: list[dict[str, list[Any]]] = []
        self.turn = self.previous_response_length = 0
        self.metrics: dict[str, list[float]] = defaultdict(list)


def add_llm_response(sample: Sample, response: dict[str, Any]) -> None:
    """As RL2 does: the sampled tokens with their log-probs, and whether the sample was aborted."""
    meta = response["meta_info"]
    sample.action_text = sample.previous_action_text + response["text"]
    for logp, token, _ in meta["output_token_logprobs"]:
        one = {"states": token, "actions": token, "action_mask": 1, "logps": logp, "rewards": 0.0}
        for name, value in one.items():
            sample.state_dict[name].append(value)
    if meta["finish_reason"]["type"] == "abort":
        sample.status = Sample.Status.ABORTED
        sample.previous_action_text = sample.action_text
        sample.previous_response_length += meta["completion_tokens"]
        return
    sample.turn += 1
    sample.previous_action_text, sample.previous_response_length = "", 0


class SglangLike(ScriptedPolicy):
    """The router that RL2 sends requests to; it aborts the request `aborts` after two tokens."""

    aborts = -1

    async def request(self, url: str, endpoint: str, json: dict[str, Any]) -> dict[str, Any]:
        limit = json["sampling_params"]["max_new_tokens"]
        tokens = self.next_tokens(json["input_ids"], limit)
        finish = "stop" if tokens[-1:] == self.encode(END) else "length"
        if len(self.shown) - 1 == self.aborts:
            tokens, finish = tokens[:2], "abort"
            self.texts.insert(self.aborts + 1, self.texts[self.aborts][2:])
        meta = {
            "output_token_logprobs": [(-1.0, token, None) for token in tokens],
            "finish_reason": {"type": finish},
            "completion_tokens": len(tokens),
        }
        return {"text": self.decode(tokens).removesuffix(END), "meta_info": meta}


def generate(monkeypatch: pytest.MonkeyPatch, server: SglangLike, function: Any) -> Sample:
    from omegaconf import OmegaConf

    install(
        monkeypatch,
        RL2__datasets={"add_llm_response": add_llm_response},
        RL2__utils__communication={"async_request": server.request},
    )
    config = OmegaConf.create({"sampling_params": {"max_new_tokens": 500, "temperature": 1.0}})
    sample = Sample(rl2.rows(GUESS, 1, seed=3)[0])
    for _ in range(3):  # RL2 calls again what was aborted, and what is done
        asyncio.run(function(config, byte_tokenizer(), "http://router", sample))
    return sample


def test_rl2_gets_one_sequence_of_a_conversation_also_after_an_abort(
    monkeypatch: pytest.MonkeyPatch,
):
    texts = ["<calculator>2+3</calculator>", boxed(hidden(3) - 1), boxed(hidden(3))]
    function = rl2.generator(GUESS, wrappers=TOOL)
    plain = generate(monkeypatch, SglangLike(*texts), function)
    server = SglangLike(*texts)
    server.aborts = 1
    sample = generate(monkeypatch, server, function)
    (state,) = sample.state_dicts
    assert state == plain.state_dicts[0] and len(server.shown) == 4
    assert len({len(column) for column in state.values()}) == 1
    sampled = [t for t, m in zip(state["states"], state["action_mask"], strict=True) if m]
    assert server.decode(sampled) == f"{texts[0]}{texts[1]}{END}{texts[2]}{END}"
    assert sum(state["rewards"]) == state["rewards"][-1] == 1.0
    assert dict(sample.metrics) == {"turns": [3], "rewards": [1.0]}
    assert sample.status == Sample.Status.DONE and not hasattr(sample, "episode")


def test_rl2_gets_a_sequence_for_each_prompt_of_a_rewritten_history(
    monkeypatch: pytest.MonkeyPatch,
):
    server = SglangLike(boxed(hidden(3) - 1), boxed(hidden(3)))
    sample = generate(monkeypatch, server, load_file("rl2_env.py").generate)
    first, second = sample.state_dicts
    assert [one["rewards"][-1] for one in (first, second)] == [0.0, 1.0]
    assert server.shown[1].count("<|im_start|>user") == 1  # one prompt with all observations
    assert "higher" in server.shown[1] and "higher" not in server.shown[0].split("\n")[-2]
    assert sample.metrics["rewards"] == [1.0]


def collect(
    gem: Any, get_wrappers: Any, env_id: str, wrappers: str
) -> list[tuple[int, list[float]]]:
    """The loop of Oat's actor on two environments, until two episodes are finished."""
    env = gem.make_vec(
        [env_id] * 2,
        vec_kwargs=[{"seed": 3 + j} for j in range(2)],
        wrappers=get_wrappers(wrappers, tokenizer=None),
        async_mode=False,
    )
    answers = [hidden(3), hidden(4)]
    observations, _ = env.reset()
    episodes: list[list[float]] = [[] for _ in range(env.num_envs)]
    finished: list[tuple[int, list[float]]] = []
    while len(finished) < 2:
        down = 0 if episodes[0] else 1  # first a wrong number, then the right one
        actions = [boxed(answer - down) for answer in answers]
        assert all(isinstance(observation, str) for observation in observations)
        observations, reward, terminated, truncated, info = env.step(actions)
        done = terminated | truncated
        for i in range(env.num_envs):
            episodes[i].append(float(reward[i]))
            if done[i]:
                finished.append((info[i].get("prev_ep_tool_use_counter", 0), episodes[i]))
                episodes[i] = []
    assert isinstance(env.envs[0].reset()[0], str)
    return finished


@pytest.mark.parametrize("wrappers", ["", "concat", "concat,episode_tracking"])
def test_oats_actor_plays_with_graft_in_the_place_of_gem(wrappers: str):
    finished = collect(graft, get_wrapper_fns, GUESS, wrappers)
    assert finished == [(0, [0.0, 1.0]), (0, [0.0, 1.0])]


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("wrappers", ["", "concat", "concat,episode_tracking"])
def test_oats_actor_plays_through_gems_own_registry(wrappers: str):
    gem = pytest.importorskip("gem")
    from gem.wrappers.wrapper_factory import get_wrapper_fns as gems

    (name,) = register_envs(GUESS)
    assert register_envs(GUESS) == [name] == ["graft/game:GuessTheNumber-v0"]
    assert collect(gem, gems, name, wrappers) == [(0, [0.0, 1.0]), (0, [0.0, 1.0])]


@pytest.mark.peer
@pytest.mark.slow
def test_roll_makes_an_environment_by_its_name_in_a_settings_file():
    gem = pytest.importorskip("gem")
    (name,) = register_envs("game:Minesweeper-v0")
    env = gem.make(env_id=name, rows=4, cols=4, num_mines=2, max_turns=3)
    observation, info = env.reset(seed=7)
    board = info["suffix"]
    template = "{observation}\n{suffix}"
    assert template.format(observation=observation, suffix=board).count(board) == 1
    steps = 0
    is_terminated = False
    while not is_terminated:
        turn = env.step(action="no move")
        observation, _, is_terminated, _, info = turn
        info.pop("suffix", None)
        steps += 1
    assert steps <= 3
    env.close()


def test_an_episode_out_of_turns_is_terminated_for_roll():
    env = as_gem("calculator", seed=5, max_uses=1)
    assert env.reset()[1]["seed"] == 5 and env.reset()[1]["seed"] != 5
    turn = env.step("[1+1]")
    while not turn.terminated:
        turn = env.step("[1+1]")
    assert turn.truncated


@pytest.mark.peer
@pytest.mark.slow
def test_an_unknown_id_is_refused_when_it_is_registered():
    pytest.importorskip("gem")
    with pytest.raises(ValueError, match="unknown env"):
        register_envs("game:Gess-v0")
