"""The columns in which EARL's scripts write their tasks, for `graft data make --form tasks`.

calc-countdown  reward_model.ground_truth "4"             extra_info {task: countdown, expr: (5 + 7) / 3, ...}
countdown-1     reward_model.ground_truth "[3, 5, 7]->4"  extra_info {nums: [3, 5, 7], target: "4", expr: ...}
"""

from __future__ import annotations

from typing import Any

from graft.tools.calculator import evaluate, format_number

NAMES = {"calc-gsm8k": "gsm8kr"}
"""The original's names of tasks, where they differ from the ids here without "calc-"."""


def calc_columns(source: str, name: str, env: Any) -> dict[str, Any]:
    """The columns of the current question of `env`, the task `name`; without the prompt."""
    is_countdown = hasattr(env, "solution")
    expression = env.solution if is_countdown else env.expression
    answer = format_number(evaluate(env.solution)) if is_countdown else str(env.answer)
    gold, more = answer, {}
    if source == "countdown":
        numbers = env.answer["numbers"]
        gold = f"{numbers}->{answer}"
        extra = {"nums": numbers, "target": answer, "expr": expression}
    else:
        extra = {"answer": answer, "question": env.prompt}
    if source == "calc_bench":
        extra |= {"task": NAMES.get(name, name.removeprefix("calc-")), "expr": expression}
        more = {"expr": expression}
    elif source == "basic_calculator_tutorial":
        more = {"expr": f"{expression}\n#### {answer}"}
    return {
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": extra,
        **more,
    }
