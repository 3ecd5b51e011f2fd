"""Any graft env in verifiers, and in trainers that use it such as prime-rl: a taskset and its harness.

    # guess_number.py, an importable module: verifiers' id of it is "guess-number"
    from graft_interop.verifiers_taskset import taskset

    GuessTaskset, GuessHarness = taskset("game:GuessTheNumber-v0", wrappers="python_tool")
    __all__ = ["GuessHarness", "GuessTaskset"]

Each task is a seed. The harness is the loop: it sends the conversation to the model, acts with the
reply up to a stop string, and adds what the environment answers. The reward is the sum of the
rewards. Where the environment rewrites the history, the trace gets a branch.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from graft.http import HttpClient, HttpFault, json_of
from graft.types import Message
from graft_interop.dialogue import REWRITES, Dialogue, posed_rows, until_stop
from graft_interop.messages import calls_of, text_of
from graft_interop.verifiers import library

TRAINER = "verifiers"
REQUEST_SECONDS = 3600.0
"""For one reply of the model; verifiers' own timeouts are shorter where they are set."""


def taskset(env_id: str, *, num_tasks: int = 1000, **kwargs: Any) -> tuple[type[Any], type[Any]]:
    """The Taskset and the Harness of an env; `kwargs` are those of `graft.make`.

    `num_tasks` and `first_seed` are settings of the taskset too: `--taskset.num-tasks 200`.
    """
    vf, default_count = library(), num_tasks

    class GraftData(vf.TaskData):
        seed: int

    class GraftTask(vf.Task[GraftData]):
        @vf.reward
        async def episode(self, trace: Any) -> float:
            return trace.info.get("graft", {}).get("reward", 0.0)

        @vf.metric
        async def turns(self, trace: Any) -> float:
            return float(trace.num_turns)

    class GraftTasksetConfig(vf.TasksetConfig):
        num_tasks: int = default_count
        first_seed: int = 0

    class GraftTaskset(vf.Taskset[GraftTask, GraftTasksetConfig]):
        def load(self) -> Any:
            count, first = self.config.num_tasks, self.config.first_seed
            for row in posed_rows(env_id, count, first, kwargs):
                text = "\n\n".join(text_of(message) for message in row["prompt"])
                name = f"{env_id}:{row['seed']}"
                yield GraftTask(
                    GraftData(prompt=text, name=name, seed=row["seed"]), self.config.task
                )

    class GraftHarnessConfig(vf.HarnessConfig):
        pass

    class GraftHarness(vf.Harness[GraftHarnessConfig]):
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            *given: Any,
            **_: Any,
        ) -> Any:
            data = given[1]
            dialogue = Dialogue(env_id, kwargs, TRAINER, only_appends=False)
            client = HttpClient(
                timeout=REQUEST_SECONDS,
                retries=0,  # verifiers repeats requests itself
                headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
                is_direct=True,
            )

            async def complete(messages: list[Message], tools: Any) -> Message:
                body = {
                    "model": ctx.model,
                    "messages": messages,
                    **({"tools": tools} if tools else {}),
                }
                url = f"{endpoint}/chat/completions"
                return await client.request_async(url, json.dumps(body).encode(), reply_of)

            try:
                await play(dialogue, data.seed, complete)
            except HttpFault as fault:  # also the end that a limit of verifiers' sets
                return vf.ProgramResult(1, "", str(fault))
            finally:
                trace.info["graft"] = {"reward": dialogue.reward, "rewards": dialogue.rewards}
                dialogue.close()
            return vf.ProgramResult(0, "", "")

    return GraftTaskset, GraftHarness


async def play(
    dialogue: Dialogue, seed: int, complete: Callable[[list[Message], Any], Awaitable[Message]]
) -> None:
    """One episode: requests of the whole conversation, until the environment ends it."""
    if dialogue.env.observe_as == "raw":
        raise ValueError(
            "a chat wrapper has applied a template, and verifiers sends messages; use concat_with_action, "
            "or no history wrapper"
        )
    messages = await dialogue.begin_async(seed)
    while not dialogue.is_over:
        reply = await complete(messages, dialogue.tools)
        await dialogue.reply_async(until_stop(as_written(reply), dialogue.stop))
        if dialogue.observed_as in REWRITES:
            messages = list(dialogue.messages)
        else:
            messages = [*messages, reply, *as_answers(dialogue.fresh, reply)]


def reply_of(body: bytes) -> Message:
    """The message in a chat completion."""
    message = json_of(body)["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


def as_written(message: Message) -> str:
    """The policy's text with the calls that a server has taken out of it, as Hermes models write them."""
    calls = [json.dumps({"name": name, "arguments": given}) for name, given in calls_of(message)]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join(part for part in (text_of(message), *written) if part)


def as_answers(fresh: Sequence[Message], reply: Message) -> list[Message]:
    """Results of tools with the ids of their calls; a call that was only text is answered by the user."""
    ids = [call.get("id") for call in reply.get("tool_calls") or ()]
    if len(ids) != len(fresh) or any(message["role"] != "tool" for message in fresh):
        return [{**message, "role": "user"} for message in fresh]
    return [{**one, "tool_call_id": call} for one, call in zip(fresh, ids, strict=True)]
