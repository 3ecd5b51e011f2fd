"""Conversations for the warm-up of calculator.yaml: 30% call the calculator, the others guess."""

import json
import random
from pathlib import Path

import graft

CALC = {"name": "calc", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}

rng = random.Random(0)
env = graft.make("calculator")
with Path("demonstrations.jsonl").open("w") as file:
    for seed in range(12_800):
        question, _ = env.reset(seed=seed)
        messages = [{"role": "user", "content": question}]
        if rng.random() < 0.3:
            call = {"name": "calc", "arguments": {"x": question.removesuffix("=")}}
            result = env.unwrapped.answer
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": call}],
                },
                {"role": "tool", "content": result},
                {"role": "assistant", "content": result},
            ]
        else:
            messages.append({"role": "assistant", "content": str(rng.randint(0, 99_999))})
        row = {"messages": messages, "tools": [{"type": "function", "function": CALC}]}
        file.write(json.dumps(row) + "\n")
