"""graft's environments in verl's agent loop, with its real classes; the server is a script.

verl pins older versions of what graft uses, so it is not in the test environment. A folder for PYTHONPATH:
pip install --no-deps --target DIR verl==0.9.1 tensordict pyvers orjson cloudpickle torchdata codetiming
pylatexenc dill hydra-core antlr4-python3-runtime==4.9.3 cachetools fastapi
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted import END, ScriptedPolicy, byte_tokenizer

from graft.envs import make
from graft_interop.verl import rows

pytest.importorskip("hydra")  # first: verl takes seconds to find that it is missing
agent_loop = pytest.importorskip("verl.experimental.agent_loop.agent_loop")

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GUESS = "game:GuessTheNumber-v0"
EXAMPLE = Path(__file__).parents[2] / "examples" / "trainers" / "verl_agent_loops.yaml"


class ScriptedServer(ScriptedPolicy):
    """Answers as verl's LLMServerClient does; token i of a turn has the log-prob -i."""

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.sampling = sampling_params
        tokens = self.next_tokens(prompt_ids, sampling_params["max_tokens"])
        known = [-float(i) for i in range(len(tokens))] if sampling_params["logprobs"] else None
        return TokenOutput(token_ids=tokens, log_probs=known)


def play(server: ScriptedServer, row: dict[str, Any], length: int = 4000, **settings: Any) -> Any:
    """What verl's AgentLoopWorker does with a row and the settings file."""
    return asyncio.run(run_loop(server, row, length, settings))


async def run_loop(
    server: ScriptedServer, row: dict[str, Any], length: int, settings: dict[str, Any]
) -> Any:
    import hydra
    from omegaconf import OmegaConf
    from transformers import PreTrainedTokenizerFast

    plain = byte_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, **plain.special_tokens_map
    )
    tokenizer.chat_template = plain.chat_template
    rollout = {"name": "vllm", "prompt_length": 4000, "response_length": length}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    (entry,) = OmegaConf.load(EXAMPLE)
    loop = hydra.utils.instantiate(
        config=OmegaConf.create({**entry, **settings}),
        trainer_config=agent_loop.DictConfigWrap(config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen3",
        dataset_cls=None,
        data_config=agent_loop.DictConfigWrap(config.data),
        tools=agent_loop.ToolListWrap([]),
    )
    assert isinstance(loop, agent_loop.AgentLoopBase)
    return await loop.run({"temperature": 1.0, "logprobs": True}, **row)


def test_an_episode_is_one_response_with_a_mask_and_the_sum_of_the_rewards():
    (row,) = rows(GUESS, 1, seed=1, wrappers={"tools": {"use": "calculator", "format": "gem"}})
    hidden = make(GUESS).reset(1)[1]["answer"]
    wrong, right = f"\\boxed{{{hidden - 1}}}", f"\\boxed{{{hidden}}}"
    server = ScriptedServer(wrong, right)
    output = play(server, row)
    text = server.decode(output.prompt_ids + output.response_ids)
    assert row["prompt"][0]["content"] in server.shown[0] and text.startswith(server.shown[1])
    sampled = [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if m]
    assert server.decode(sampled) == wrong + END + right + END
    logprobs = output.response_logprobs
    of_sampled = [x for x, m in zip(logprobs, output.response_mask, strict=True) if m]
    assert of_sampled == [-float(i) for text in (wrong, right) for i in range(len(text) + 1)]
    assert (output.reward_score, output.num_turns) == (1.0, 4)
    assert output.extra_fields == {"turn_scores": [0.0, 1.0], "tool_rewards": []}
    tensors = output.as_dict()
    assert tensors["rm_scores"][-1] == 1.0 and tensors["rm_scores"].sum() == 1.0
    assert tensors["response_mask"].sum() == len(wrong) + len(right) + 2


def test_a_result_inside_the_turn_is_appended_as_it_is():
    (row,) = rows("calculator", 1, seed=0)
    server = ScriptedServer("[2+3] and more", "86")
    output = play(server, row, env="calculator", args={})
    assert server.sampling["stop"] == ["]"] and server.sampling["include_stop_str_in_output"]
    # what follows the stop string is cut; the result follows it in the same turn
    assert server.shown[1].startswith(server.shown[0] + "[2+3]5")
    assert output.reward_score == 1.0
    assert len(output.response_mask) == len(output.response_logprobs) == len(output.response_ids)


def test_a_turn_that_the_budget_cuts_is_not_acted_upon():
    (row,) = rows(GUESS, 1, seed=1)
    server = ScriptedServer("I think for a long time")
    output = play(server, row, length=10, args={})
    assert (len(output.response_ids), output.response_mask) == (10, [1] * 10)
    assert (output.reward_score, output.num_turns) == (0.0, 0)


def test_a_row_without_a_seed_and_a_rewritten_history_are_refused():
    with pytest.raises(ValueError, match="different tasks"):
        play(ScriptedServer(), {"extra_info": {}})
    with pytest.raises(ValueError, match="leave concat"):
        play(ScriptedServer(), {"extra_info": {"seed": 1}}, args={"wrappers": "concat"})
