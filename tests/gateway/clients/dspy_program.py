"""A DSPy program: ReAct with tools, or one prediction (`--predict`); `--adapter` writes the prompts."""

import argparse
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--predict", action="store_true")
parser.add_argument("--adapter", default="chat", help="or json, two-step")
parser.add_argument("--api", default="chat", help="or responses")
args = parser.parse_args()


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


model = dspy.LM("openai/policy", cache=False, model_type=args.api, max_tokens=500)
adapters = {"chat": dspy.ChatAdapter, "json": dspy.JSONAdapter}
dspy.configure(lm=model, adapter=adapters[args.adapter]())
if args.predict:
    program = dspy.Predict("question -> answer: int")
else:
    program = dspy.ReAct("question -> answer: int", tools=[add, multiply], max_iters=5)
print(f"The answer is {program(question=args.question).answer}.")
