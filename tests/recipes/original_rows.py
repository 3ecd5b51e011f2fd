"""A few rows of every dataset that a bundled recipe names, in the columns of the original.

Keys are locations: a path relative to the working directory, or OWNER/NAME of a dataset on the hub with
its splits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]


def arpo_row(number: int, source: str, answer: str) -> dict[str, Any]:
    """verl's columns, as ARPO's parquet files have them."""
    question = f"What is {number} + {number}?"
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": "Solve the task step by step; tools are in tags."},
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": number, "question": question},
        "metadata": {"ability": "math"},
    }


ARPO = [arpo_row(n, "deepscaler" if n % 2 else "hotpotqa", str(2 * n)) for n in range(1, 41)]

ARPO_SFT = [
    {
        "conversations": [
            {"from": "human", "value": f"What is {n} + {n}?"},
            {
                "from": "gpt",
                "value": f"<think>I add.</think> <python>print({n} + {n})</python> "
                f"<result>{2 * n}</result> <answer>\\boxed{{{2 * n}}}</answer>",
            },
        ],
        "system": "Solve the task step by step; tools are in tags.",
    }
    for n in range(1, 9)
]

EASYRL_TRAIN = [
    {
        "data_source": "train-math-deepscaler",
        "prompt": [
            {"role": "system", "content": "Reason, then answer in a box."},
            {"role": "user", "content": f"What is {n}/2?"},
        ],
        "ground_truth": f"$\\frac{{{n}}}{{2}}$",
    }
    for n in range(1, 9)
]
EASYRL_VALID = [
    {
        "prompt": row["prompt"],
        "ground_truth": row["ground_truth"],
        "extra_info": {"data_source": source, "pass@k": k},
    }
    for row, (source, k) in zip(
        EASYRL_TRAIN, [("gsm8k", 1), ("gsm8k", 1), ("amc", 2), ("aime24", 2)], strict=False
    )
]

COUNTDOWN = [
    {
        "messages": [{"role": "user", "content": f"Using [{n}, {n + 1}], make {2 * n + 1}."}],
        "target": 2 * n + 1,
        "nums": [n, n + 1],
    }
    for n in range(1, 41)
]
"""RL-GRPO's columns."""


def gsm_row(number: int, split: str) -> dict[str, Any]:
    """verl's columns of GSM8K; EARL's rewriting is in `extra_info`."""
    n, question = number, f"Ann has {number} apples and buys {number + 2}. How many has she?"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n + 2)},
        "extra_info": {
            "split": split,
            "index": n,
            "question": question,
            "answer": f"{n} + {n + 2} = <<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2}\n#### {2 * n + 2}",
            "question_rewrite": f"Ann has {n}00 apples and buys {n + 2}00. How many has she?",
            "answer_rewrite": f"<<{n}00+{n + 2}00={2 * n + 2}00>>\n#### {2 * n + 2}00",
            "rewrite_tag": "yes" if n % 5 else "no",
        },
    }


TEACHERS_ROWS = [
    {
        "messages": [{"role": "user", "content": f"{n}+{n}="}],
        "spans": [
            {"author": "policy", "text": f"[{n}+{n}]"},
            {"author": "env", "text": f"{2 * n};"},
            {"author": "policy", "text": f"{2 * n}"},
        ],
    }
    for n in range(1, 9)
]

FILES: dict[str, Rows] = {
    "runs/teacher-rows.jsonl": TEACHERS_ROWS,
    "data/rl_train_with_sys_prompt.parquet": EASYRL_TRAIN,
    "data/rl_valid_with_sys_prompt.parquet": EASYRL_VALID,
    "data/gsm_8k_rewrite/train.parquet": [gsm_row(n, "train") for n in range(1, 10)],
    "data/gsm_8k_rewrite/test.parquet": [gsm_row(n, "test") for n in range(11, 15)],
}

GEM_MATHS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 9)]
GEM_QUESTIONS = [
    {"problem": f"Which letter is number {n}?", "answer": ["a", "A"]} for n in range(1, 9)
]
GEM_PROGRAMS = [
    {
        "problem": f"Read a number and print it plus {n}.",
        "tests": json.dumps({"inputs": ["1\n", "2\n"], "outputs": [f"{1 + n}\n", f"{2 + n}\n"]}),
    }
    for n in range(1, 41)
]

HUB: dict[str, dict[str, Rows]] = {
    "axon-rl/MATH-12k": {"train": GEM_MATHS},
    "axon-rl/HotpotQA": {"train": GEM_QUESTIONS},
    "axon-rl/PrimeIntellect-15k": {"train": GEM_PROGRAMS},
    "dongguanting/ARPO-RL-Reasoning-10K": {"train_10k": ARPO},
    "dongguanting/ARPO-RL-DeepSearch-1K": {"hard_search_1k": ARPO},
    "dongguanting/ARPO-SFT-54K": {"final_sft_edition9": ARPO_SFT},
    "Majis699/countdown-0": {"train": COUNTDOWN},
}


def write_original_rows(working: Path, hub: Path) -> None:
    """Every file below `working`, every dataset of the hub below `hub` ($GRAFT_DATA)."""
    for name, rows in FILES.items():
        write_rows(working / name, rows)
    for name, splits in HUB.items():
        for split, rows in splits.items():
            write_rows(hub / name / f"{split}.parquet", rows)


def write_rows(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
