"""Any graft env in OpenRLHF: the AgentExecutor of an agent file.

    # agent.py, for --train.agent_func_path
    from graft_interop.openrlhf import agent_executor

    AgentExecutor = agent_executor("game:GuessTheNumber-v0", wrappers="python_tool")

    Dataset.from_list(rows("game:GuessTheNumber-v0", 1000)).to_json("train.jsonl")

OpenRLHF calls `execute` for each attempt with the row's label, which is the seed of the task. The
executor works on tokens: what was sampled is never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from graft_interop.dialogue import Dialogue, posed_rows, row_seed
from graft_interop.token_dialogue import TokenDialogue, chat_of

TRAINER = "OpenRLHF"


def rows(env_id: str, count: int, *, seed: int = 0, **kwargs: Any) -> list[dict[str, Any]]:
    """Rows for --data.input_key prompt --data.label_key label: the tasks `seed`, `seed + 1`, ..."""
    return [
        {"prompt": row["prompt"], "label": str(row["seed"])}
        for row in posed_rows(env_id, count, seed, kwargs)
    ]


def agent_executor(env_id: str, **kwargs: Any) -> type[Any]:
    """The class `AgentExecutor` of an agent file; `kwargs` are those of `graft.make`."""
    try:
        from openrlhf.utils.agent import AgentExecutorBase
    except ImportError as error:
        raise ImportError(f"OpenRLHF is not installed, or lacks a part: {error}") from error

    class OpenRLHFExecutor(AgentExecutorBase):
        async def execute(
            self,
            prompt: str,
            label: str,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> dict[str, Any]:
            """One attempt at the task of the seed `label`; `prompt` shows the same task."""
            seed = row_seed({"seed": label}, TRAINER)
            dialogue = Dialogue(env_id, kwargs, TRAINER)
            try:
                tokens = TokenDialogue(dialogue, chat_of(hf_tokenizer))
                played = await play(tokens, seed, sampling_params, max_length, llm_engine)
            finally:
                dialogue.close()
            return {
                "prompt": prompt,
                "label": label,
                "images": images,
                "reward": dialogue.reward,
                "scores": dialogue.reward,
                "extra_logs": {"turns": float(len(dialogue.rewards))},
                **played,
            }

    return OpenRLHFExecutor


async def play(
    tokens: TokenDialogue, seed: int, sampling_params: Any, max_length: int, llm_engine: Any
) -> dict[str, Any]:
    """Turns until the episode or the context ends: all tokens, and which of them were sampled."""
    dialogue, params = tokens.dialogue, deepcopy(sampling_params)
    if dialogue.stop:
        params.stop, params.include_stop_str_in_output = dialogue.stop, True
    per_turn = params.max_tokens  # None: what the context leaves
    context = await tokens.begin(seed)
    if len(context) >= max_length:
        raise ValueError(
            f"the task of seed {seed} has {len(context)} tokens, and --data.max_len {max_length} leaves no "
            "room for an answer; raise it"
        )
    ranges: list[tuple[int, int]] = []
    logprobs = None if params.logprobs is None else [0.0] * len(context)
    is_truncated = False
    while not dialogue.is_over and not is_truncated and len(context) < max_length:
        left = max_length - len(context)
        params.max_tokens = min(per_turn or left, left)
        request = await llm_engine.generate(list(context), deepcopy(params))
        sample = request.outputs[0]
        sampled = list(sample.token_ids)
        is_truncated = sample.finish_reason == "length"
        kept, observation = len(sampled), []
        if not is_truncated:  # a turn that a limit has cut does not reach the environment
            kept, observation, _ = await tokens.reply(sampled)
        ranges.append((len(context), len(context) + kept))
        context += [*sampled[:kept], *observation]
        if logprobs is not None:
            logprobs += [*logprobs_of(sample, kept), *[0.0] * len(observation)]
    return {
        "observation_tokens": context,
        "action_ranges": ranges,
        "rollout_log_probs": logprobs,
        "truncated": is_truncated or not dialogue.is_over,
    }


def logprobs_of(sample: Any, count: int) -> list[float]:
    """The log-probs of the first `count` sampled tokens, as vLLM gives them."""
    pairs: Sequence[tuple[int, Any]] = list(zip(sample.token_ids, sample.logprobs, strict=True))
    return [float(table[token].logprob) for token, table in pairs[:count]]
