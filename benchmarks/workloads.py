"""The CPU workloads, shared by the benchmarks: a 3.16M-parameter Qwen3, characters as tokens, fp32.

A  64 prompts of 6 characters x 8 samples x 32 forced tokens: little to share, matrix products rule
B  16 prompts of 256 characters x 8 samples, ended where the model ends them (at most 64 tokens):
   36k tokens in full sequences, about 7.5k unique ones
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from graft.algos.presets import build
from graft.envs.base import BaseEnv
from graft.models.decoder import Decoder
from graft.models.device_choice import prefer_blas
from graft.models.order_probe import find_order
from graft.models.shape import ModelShape
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.types import Episode, Sampling, Task, Turn

CHARACTERS = "0123456789+-*/=. abcdefghijklmn"
SHAPE = ModelShape(
    family="qwen3", width=256, layers=4, heads=8, kv_heads=4, head_dim=32, ff=768, max_positions=512
)


@dataclass(frozen=True)
class Workload:
    prompts: int
    prompt_length: int
    samples: int
    max_tokens: int
    is_forced: bool


WORKLOADS = {
    "A": Workload(prompts=64, prompt_length=6, samples=8, max_tokens=32, is_forced=True),
    "B": Workload(prompts=16, prompt_length=256, samples=8, max_tokens=64, is_forced=False),
}


def prompt(rng: random.Random, length: int) -> str:
    noise = "".join(rng.choice(CHARACTERS) for _ in range(length - 6))
    return f"{noise}{rng.randint(10, 99)}+{rng.randint(10, 99)}="


def digits_share(text: str) -> float:
    """The reward: how much of the text is digits."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


class Digits(BaseEnv):
    """One turn; the reward is the share of digits."""

    def __init__(self, length: int = 6) -> None:
        super().__init__()
        self.length = length

    def pose(self) -> str:
        return prompt(self.rng, self.length)

    def respond(self, action: str) -> Turn:
        return Turn(reward=digits_share(action), terminated=True)


class GraftTrainer:
    """graft's GRPO step on a workload, rollout and update apart."""

    def __init__(self, work: Workload, seed: int = 0, tokens_per_micro: int = 2048) -> None:
        from graft.engine.native.engine import NativeEngine

        tokenizer = FastTokenizer.characters(CHARACTERS)
        self.work, self.chat = work, Chat(tokenizer)
        self.policy = Decoder(replace(SHAPE, vocab_size=tokenizer.vocab_size)).initialise(seed)
        prefer_blas(self.policy.device, self.policy.dtype)
        self.policy.use_order(find_order(self.policy))  # as recipes do: `model.exact`
        eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self.engine = NativeEngine(self.policy, tokenizer=tokenizer, eos_ids=eos)
        _, self.credit, loss, reduction = build("grpo")
        optimizer = Optimizer([self.policy], lr=1e-4, schedule=schedule("constant", 0, 1, 0.0))
        self.learner = Learner(self.policy, optimizer, loss, reduction, tokens_per_micro)
        self.step = 0

    def rollout(self) -> list[Episode]:
        work = self.work
        self.step += 1
        sampling = Sampling(
            max_tokens=work.max_tokens, min_tokens=work.max_tokens if work.is_forced else 0
        )
        setup = RolloutSetup(
            engine=self.engine,
            chat=self.chat,
            make_env=lambda task: Digits(work.prompt_length),
            sampling=sampling,
            salt=self.step,
        )
        tasks = [
            Task(f"{self.step}:{i}", "digits", seed=self.step * 1000 + i)
            for i in range(work.prompts)
        ]
        return collect(tasks, setup, independent(work.samples))

    def batch(self, episodes: list[Episode]):
        """A batch with advantages, as the loop makes it."""
        batch = to_batch(trajectories_of(episodes))
        return batch.replace(advantages=self.credit(batch.zeros(), batch))

    def learn(self, episodes: list[Episode]) -> dict[str, float]:
        metrics = self.learner.update(self.batch(episodes))
        self.engine.load(None, version=self.step)
        return metrics
