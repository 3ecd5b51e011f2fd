"""mini-swe-agent with its bash tool; `--provider anthropic` speaks the other dialect."""

import argparse
import os

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--provider", default="openai")
args = parser.parse_args()

model = LitellmModel(model_name=f"{args.provider}/policy", set_cache_control="default_end")
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="You calculate with bash.",
    instance_template="{{task}}",
    step_limit=10,
)
print(agent.run(args.question)["submission"])
