"""Any graft env in RL2: the `generate` function of an environment file.

    # env.py, for rollout.env_path
    from graft_interop.rl2 import generator

    generate = generator("game:GuessTheNumber-v0", wrappers="python_tool")

    Dataset.from_list(rows("game:GuessTheNumber-v0", 1000)).to_json("train.jsonl")

RL2 calls `generate` for each sample, again for one that was aborted for new weights. The row's seed
names the task. Each sequence of a sample is a row of training: an environment that rewrites the
history (`wrappers="concat"`) gives several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graft_interop.dialogue import Dialogue, posed_rows, row_seed
from graft_interop.token_dialogue import TokenDialogue, chat_of

TRAINER = "RL2"


@dataclass
class SampleEpisode:
    """The episode of one sample, kept on it between calls."""

    tokens: TokenDialogue
    turn_start: int = 0
    """Where the policy's turn begins in the sequence."""


def rows(env_id: str, count: int, *, seed: int = 0, **kwargs: Any) -> list[dict[str, Any]]:
    """Rows of RL2's dataset: the tasks `seed`, `seed + 1`, ..."""
    return [
        {"messages": row["prompt"], "seed": row["seed"]}
        for row in posed_rows(env_id, count, seed, kwargs)
    ]


def generator(env_id: str, **kwargs: Any) -> Callable[..., Any]:
    """The function `generate` of an environment file; `kwargs` are those of `graft.make`."""

    async def generate(config: Any, tokenizer: Any, router_url: str, sample: Any) -> None:
        status = type(sample).Status
        if sample.status == status.DONE:
            return
        is_begun, sample.status = sample.status == status.ABORTED, status.RUNNING
        if not is_begun:
            dialogue = Dialogue(env_id, kwargs, TRAINER, only_appends=False)
            # removed at the end, before RL2 saves the sample
            sample.episode = SampleEpisode(TokenDialogue(dialogue, chat_of(tokenizer)))
        try:
            if not is_begun:
                seed = row_seed(sample.sample, TRAINER)
                start(sample, await sample.episode.tokens.begin(seed))
            while sample.status == status.RUNNING:
                await take_turn(config, router_url, sample)
        finally:
            if sample.status != status.ABORTED:  # an aborted one continues with the same episode
                sample.episode.tokens.dialogue.close()
                del sample.episode

    return generate


async def take_turn(config: Any, router_url: str, sample: Any) -> None:
    """One request to the engine, and the environment's answer to it."""
    from omegaconf import OmegaConf
    from RL2.datasets import add_llm_response
    from RL2.utils.communication import async_request

    dialogue: Dialogue = sample.episode.tokens.dialogue
    sampling: Any = OmegaConf.to_container(config.sampling_params)
    limit = sampling["max_new_tokens"] - sample.previous_response_length
    stop = [*sampling.get("stop", ()), *dialogue.stop]
    response = await async_request(
        router_url,
        "generate",
        json={
            "input_ids": sample.state_dict["states"],
            "sampling_params": {
                **sampling,
                **({"stop": stop} if stop else {}),
                "max_new_tokens": limit,
                "no_stop_trim": True,
            },
            "return_logprob": True,
        },
    )
    add_llm_response(sample, response)
    finished = response["meta_info"]["finish_reason"]["type"]
    if finished == "length":  # a turn that a limit has cut does not reach the environment
        end(sample, 0.0)
    elif finished != "abort":
        await act(sample)


async def act(sample: Any) -> None:
    """Give the turn that is complete to the environment, and append what it answers."""
    episode: SampleEpisode = sample.episode
    tokens, dialogue, state = episode.tokens, episode.tokens.dialogue, sample.state_dict
    turn = state["states"][episode.turn_start :]
    kept, observation, is_new_context = await tokens.reply(turn)
    for column in state.values():
        del column[episode.turn_start + kept :]
    if dialogue.is_over:
        return end(sample, dialogue.rewards[-1])
    state["rewards"][-1] = dialogue.rewards[-1]
    if is_new_context:
        sample.state_dicts.append(state)
        start(sample, observation)
    else:
        add(sample, observation)
        sample.state_text += sample.action_text + tokens.chat.tokenizer.decode(observation)


def start(sample: Any, prompt: list[int]) -> None:
    """Begin a sequence of the sample with a prompt."""
    sample.state_text = sample.episode.tokens.chat.tokenizer.decode(prompt)
    names = ("states", "actions", "action_mask", "logps", "rewards")
    sample.state_dict = {name: [] for name in names}
    add(sample, prompt)


def add(sample: Any, tokens: list[int]) -> None:
    """Append tokens that the policy did not write; its next turn follows them."""
    state = sample.state_dict
    state["states"] += tokens
    for name, nothing in (("actions", 0), ("action_mask", 0), ("logps", 0.0), ("rewards", 0.0)):
        state[name] += [nothing] * len(tokens)
    sample.episode.turn_start = len(state["states"])


def end(sample: Any, reward: float) -> None:
    """Close the sample as RL2 does: its last sequence, its metrics."""
    sample.state_dict["rewards"][-1] = reward
    sample.state_dicts.append(sample.state_dict)
    sample.status = type(sample).Status.DONE
    sample.metrics["turns"].append(sample.turn)
    sample.metrics["rewards"].append(sample.episode.tokens.dialogue.reward)
