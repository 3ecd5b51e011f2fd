"""Any graft env in verl: an agent loop that plays one episode for each row.

    # agent_loops.yaml, for actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: graft
      _target_: graft_interop.verl.agent_loop
      env: game:GuessTheNumber-v0
      args: {wrappers: python_tool}

    Dataset.from_list(rows("game:GuessTheNumber-v0", 1000)).to_parquet("train.parquet")

verl makes a loop for each rollout and calls `run` with the row's columns; the row's
`extra_info["seed"]` names the task. The sum of the rewards is the rollout's `reward_score`, so verl
calls no reward function.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any
from uuid import uuid4

from graft_interop.dialogue import Dialogue, posed_rows, row_seed
from graft_interop.token_dialogue import TokenDialogue, chat_of

TRAINER = "verl"


def agent_loop(env: str, args: Any = None, name: str = "", **given: Any) -> Any:
    """The `_target_` of the settings file; `name` and `given` are verl's.

    `args` are the keywords of `graft.make`.
    """
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(args, resolve=True) if OmegaConf.is_config(args) else args
    return loop_class()(env, plain or {}, **given)


def rows(
    env_id: str, count: int, *, seed: int = 0, agent_name: str = "graft", **kwargs: Any
) -> list[dict[str, Any]]:
    """Rows of verl's parquet files: the tasks `seed`, `seed + 1`, ...; `kwargs` are those of the loop."""
    return [
        {
            "data_source": env_id,
            "agent_name": agent_name,
            "prompt": row["prompt"],
            "reward_model": {"style": "env", "ground_truth": ""},
            "extra_info": {"index": number, "seed": row["seed"]},
        }
        for number, row in enumerate(posed_rows(env_id, count, seed, kwargs))
    ]


@cache
def loop_class() -> type[Any]:
    """The AgentLoopBase of an env."""
    try:
        from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
    except ImportError as error:
        raise ImportError(f"verl 0.9 is not installed, or lacks a part: {error}") from error

    class VerlAgentLoop(AgentLoopBase):
        def __init__(self, env_id: str, args: Mapping[str, Any], **given: Any) -> None:
            super().__init__(**given)
            self.env_id, self.args = env_id, dict(args)

        async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
            """Play one episode: the prompt, then the policy's turns and observations as the response."""
            seed = row_seed(row.get("extra_info") or {}, TRAINER)
            chat = chat_of(self.tokenizer, self.apply_chat_template_kwargs)
            dialogue = Dialogue(self.env_id, self.args, TRAINER)
            try:
                return await self.play(TokenDialogue(dialogue, chat), seed, sampling_params)
            finally:
                dialogue.close()

        async def play(
            self, tokens: TokenDialogue, seed: int, sampling_params: dict[str, Any]
        ) -> Any:
            dialogue, budget = tokens.dialogue, self.rollout_config.response_length
            prompt = await tokens.begin(seed)
            if len(prompt) > (limit := self.rollout_config.prompt_length):
                raise ValueError(
                    f"the task of seed {seed} has {len(prompt)} tokens, more than data.max_prompt_length="
                    f"{limit}; raise it: a prompt that is cut lacks its instructions"
                )
            request, seconds = uuid4().hex, {"generate_sequences": 0.0, "tool_calls": 0.0}
            response: list[int] = []
            mask: list[int] = []
            logprobs: list[float] = []
            is_cut = False
            while not dialogue.is_over and not is_cut and len(response) < budget:
                left = budget - len(response)
                started = time.monotonic()
                output = await self.server_manager.generate(
                    request_id=request,
                    prompt_ids=[*prompt, *response],
                    sampling_params={**sampling_params, **self.stops(dialogue), "max_tokens": left},
                )
                sampled, answered = list(output.token_ids[:left]), time.monotonic()
                seconds["generate_sequences"] += answered - started
                kept, observation = len(sampled), []
                is_cut = len(sampled) >= left and not has_end(sampled, tokens)
                if not is_cut:  # a turn that the budget has cut does not reach the environment
                    kept, observation, _ = await tokens.reply(sampled)
                    seconds["tool_calls"] += time.monotonic() - answered
                response += [*sampled[:kept], *observation]
                mask += [1] * kept + [0] * len(observation)
                logprobs += [*list(output.log_probs or ())[:kept], *[0.0] * len(observation)]
            return AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=response[:budget],
                response_mask=mask[:budget],
                response_logprobs=logprobs[:budget] if len(logprobs) == len(mask) else None,
                reward_score=dialogue.reward,
                num_turns=2 * len(dialogue.rewards),
                metrics=seconds,  # pyright: ignore[reportArgumentType]  (pydantic reads a dict)
                extra_fields={"turn_scores": list(dialogue.rewards), "tool_rewards": []},
            )

        def stops(self, dialogue: Dialogue) -> dict[str, Any]:
            """The engine's settings for strings that end a turn; tokens behind one are cut in any case."""
            if not dialogue.stop:
                return {}
            kept = {"vllm": "include_stop_str_in_output", "sglang": "no_stop_trim"}
            name = kept.get(str(self.rollout_config.name))
            return {"stop": dialogue.stop, name: True} if name else {}

    return VerlAgentLoop


def has_end(sampled: list[int], tokens: TokenDialogue) -> bool:
    """Whether the policy ended its turn: by the template's end, eos or a stop string."""
    chat = tokens.chat
    text = chat.tokenizer.decode(sampled)
    return chat.is_closed(sampled) or any(stop in text for stop in tokens.dialogue.stop)
