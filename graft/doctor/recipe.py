"""Is this recipe ready? Every check that can be made before training, cheapest first.

    nothing is loaded   trackers, tokenizer, a first prompt, chat template, memory, disk space
    no model is used    the reward on right answers, garbage and cheats, every tool, copies of the environment
    with the model      the engine's health, the agent of task.agent, a few attempts, their loss mask, the
                        end of turns, teachers, the log-probs of engine and learner, micro-batches, adapters

A check whose requirement failed earlier is left out. One process makes all checks, whatever the recipe
asks for; the folder of the run is not touched.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.algos.presets import build
from graft.config import Config
from graft.doctor.agents import agent_checks
from graft.doctor.conversation import conversation_check, find_example
from graft.doctor.deadline import Probe, checked
from graft.doctor.environments import EnvChecks, first_tasks
from graft.doctor.resources import checkpoint_check, memory_check, tracker_check
from graft.doctor.teachers import teacher_checks
from graft.rollout.batching import trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.train.algorithm import branch_part
from graft.train.build import build_run, is_chatty
from graft.train.components import RunComponents
from graft.train.learner import Learner
from graft.train.learner_build import make_learner
from graft.train.model import (
    is_transformers_only,
    load_tokenizer,
    make_chat,
    recipe_shape,
    source_of,
)
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.monitor.run_check import (
    agreement,
    answers,
    check_turn_ends,
    count,
    eos,
    first_rows,
    mask,
    micro,
    turns_of,
)
from graft.train.monitor.settings_check import positions_check, settings_checks
from graft.train.rollouts.agents import EXTERNAL
from graft.train.step_metrics import commonest_failure
from graft.train.teachers.paths import REFERENCE
from graft.types import Episode, Task, Trajectory

QUICK, ASKING, LOADING = 60.0, 300.0, 1800.0
"""Seconds per check: of files, of sampling, of loading a model."""
TASKS, SAMPLES = 4, 2
"""Attempts that are sampled."""
MAX_TOKENS, MAX_TURNS = 256, 4
"""Tokens of each, enough for the comparisons."""


class Examination:
    """Checks a recipe, line by line; `close` releases the engine."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder` replaces the run's folder for files that an engine may write."""
        self.requested = config
        self.config = config.changed(
            {
                "run.dir": str(folder),
                "run.name": "doctor",
                "parallel.tp": 1,
                "engine.tp": 1,
                "cluster.address": "",
            }
        )
        self.envs: EnvChecks | None = None
        self.has_env = False
        self.components: RunComponents | None = None
        self.learner: Learner | None = None
        self.episodes: list[Episode] = []
        self._fits = True

    def lines(self) -> Iterator[Check]:
        config = self.config
        if several := self._several():
            seen = f"the recipe asks for {', '.join(several)}; here one process checks all of it"
            yield Check("processes", PASS, seen)
        yield from checked("settings", self._settings, QUICK)
        yield from checked("trackers", lambda: tracker_check(self.requested.run.trackers), QUICK)
        yield from checked("tokenizer", self._tokenizer, QUICK)
        yield from self._with_tokenizer("env", self._environment, ASKING)
        yield from self._with_tokenizer("template", self._template, QUICK)
        yield from self._with_tokenizer("positions", self._positions, QUICK)
        yield from self._with_tokenizer("memory", self._memory, QUICK)
        yield from self._with_tokenizer(
            "checkpoints", lambda: checkpoint_check(config, self.requested.run), QUICK
        )
        if self.has_env and self.envs is not None:
            yield from checked("reward", self.envs.rewards, ASKING)
            yield from checked("cheats", self.envs.cheats, ASKING)
            yield from checked("tools", self.envs.tools, ASKING)
            yield from checked("isolation", self.envs.isolation, ASKING)
        if why := self._why_not_to_open():
            yield Check("model", WARN, f"not opened: {why}. Checks that need it were left out")
            return
        yield from checked("model", self._model, LOADING)
        yield from self._with_components("engine", self._engine, ASKING)
        yield from self._with_components("learner", self._learner, ASKING)
        if config.task.agent == EXTERNAL:
            seen = "task.agent=external: agents elsewhere claim the attempts, so none was made here"
            way_out = 'name one for this check: graft doctor RECIPE task.agent="python agent.py"'
            yield Check("agent", WARN, seen, way_out)
        elif config.task.agent:  # agents take the time that they need
            yield from self._with_components("agent", self._agent, LOADING)
            yield from self._with_components("attempts", self._attempts, LOADING)
        elif config.task.env:
            yield from self._with_components("attempts", self._attempts, ASKING)
        yield from self._with_components("loss mask", self._loss_mask, QUICK)
        if self.learner is not None and self._sampled():
            yield from self._of_attempts()

    def _why_not_to_open(self) -> str:
        if self.envs is None:
            return "it has no tokenizer"
        if self.config.task.env and not self.has_env:
            return "its environment does not work"
        return "" if self._fits else "it would not fit"

    def close(self) -> None:
        if self.components is not None:
            self.components.setup.close()

    def _with_tokenizer(self, name: str, probe: Probe, deadline: float) -> list[Check]:
        """Left out without a tokenizer; that has been reported."""
        return [] if self.envs is None else checked(name, probe, deadline)

    def _with_components(self, name: str, probe: Probe, deadline: float) -> list[Check]:
        return [] if self.components is None else checked(name, probe, deadline)

    def _several(self) -> list[str]:
        """Keys of the recipe that ask for more than one process."""
        parallel, cluster = self.requested.parallel, self.requested.cluster
        found = [f"parallel.tp={parallel.tp}"] * (parallel.tp > 1)
        engine_tp = self.requested.engine.tp
        found += [f"engine.tp={engine_tp}"] * (engine_tp > 1)
        return [*found, *[f"cluster.address={cluster.address}"] * bool(cluster.address)]

    def _settings(self) -> Iterator[Check]:
        yield from settings_checks(self.config) or [Check("settings", PASS, "they go together")]

    def _positions(self) -> Iterator[Check]:
        if not is_transformers_only(self.config, source_of(self.config)):
            yield from filter(None, [positions_check(self.config, recipe_shape(self.config))])

    def _memory(self) -> Check:
        check, self._fits = memory_check(self.config, bool(self._several()))
        return check

    def _tokenizer(self) -> Check:
        config = self.config
        tokenizer = load_tokenizer(config, source_of(config))
        self.envs = EnvChecks(config, make_chat(config, tokenizer))
        return Check("tokenizer", PASS, f"{tokenizer.vocab_size:,} tokens")

    def _environment(self) -> Iterator[Check]:
        assert self.envs is not None
        yield from self.envs.prompts()
        self.has_env = bool(self.config.task.env)
        yield from self.envs.held_out()

    def _template(self) -> Iterator[Check]:
        config, envs = self.config, self.envs
        assert envs is not None
        chat = envs.chat
        matters = not self.has_env or is_chatty(config, envs.make_env)
        seen = "a conversation that grows keeps every earlier turn, thoughts and tools included"
        if note := chat.history_note():
            here = "Here it does not matter: no message follows an attempt's first turn"
            seen = note if matters else f"{note}\n{here}"
        yield Check("template", PASS, seen)
        vocab_size = chat.tokenizer.vocab_size
        if not is_transformers_only(config, source_of(config)):
            vocab_size = recipe_shape(config).vocab_size
        probes = [envs.make_env(task) for task in first_tasks(config, 1)] if self.has_env else []
        stop = [text for probe in probes for text in probe.stop]
        yield check_turn_ends(chat, vocab_size, stop)

    def _model(self) -> Check:
        components = self.components = build_run(self.config)
        policy = components.policy
        size = sum(weight.numel() for weight in policy.parameters())
        dtype = str(policy.dtype).removeprefix("torch.")
        seen = f"{policy.shape.family}, {size:,} parameters in {dtype} on {policy.device}"
        return Check("model", PASS, "; ".join([seen, *components.notes]))

    def _engine(self) -> Check:
        """The engine is healthy and takes the weights of the learner."""
        components = self.components
        assert components is not None
        engine: Any = components.engine
        if hasattr(engine, "health"):
            engine.health()
        engine.load(components.weights_to_publish(), 0)
        shares = "the learner's own tensors" if components.shares_weights else "a copy of them"
        return Check("engine", PASS, f"{self.config.engine.name}, with {shares}")

    def _learner(self) -> Iterator[Check]:
        """Building a learner with adapters compares them in engine and learner."""
        assert self.components is not None
        # the weights that RL would start from are the present ones
        is_taught = REFERENCE in self.config.distill.teachers.values()
        reference = self.components.policy if is_taught and not self.config.lora.rank else None
        self.learner = make_learner(self.components, reference)
        if self.config.lora.rank:
            seen = f"of rank {self.config.lora.rank}: with random non-zero ones, engine and learner agree"
            yield Check("adapters", PASS, seen)

    def _agent(self) -> Iterator[Check]:
        """The agent attempts a task, and again with the same answers."""
        components = self.components
        assert components is not None
        part, _ = branch_part(self.config, components.algo.preset)
        setup = self._short_setup(components)
        yield from agent_checks(setup, first_tasks(self.config, 1)[0], part != "independent")

    def _short_setup(self, components: RunComponents) -> RolloutSetup:
        """Attempts that end soon; their rewards are not computed."""
        rollout, is_agent = self.config.rollout, bool(self.config.task.agent)

        def unpaid(own: Any) -> Any:
            # tried already, and calls may cost money; without any an agent's attempt has no reward
            reward = _nothing if is_agent and own.reward is not None else None
            return replace(own, reward=reward)

        setup = components.setup
        return replace(
            unpaid(setup),
            sampling=replace(setup.sampling, max_tokens=min(rollout.max_tokens, MAX_TOKENS)),
            max_turns=rollout.max_turns if is_agent else min(rollout.max_turns, MAX_TURNS),
            by_env={name: unpaid(own) for name, own in setup.by_env.items()},
            deadline=min(rollout.deadline, ASKING / 2),
        )

    def _attempts(self) -> Check:
        components, rollout = self.components, self.config.rollout
        assert components is not None
        setup = self._short_setup(components)
        tasks = first_tasks(self.config, TASKS)
        self.episodes = collect(tasks, setup, independent(SAMPLES))
        leaves = [leaf for episode in self.episodes for leaf in episode.leaves]
        failed = sum(not leaf.status.is_trainable for leaf in leaves)
        sampled = self._sampled()
        seen = f"{count(len(leaves), 'attempt')} at {len(tasks)} tasks, {failed} failed"
        if failed:
            seen += f", mostly: {commonest_failure(self.episodes)}"
            verdict = FAIL if failed == len(leaves) else WARN
            return Check("attempts", verdict, seen, "repair the environment or tool that is named")
        if not sampled:
            longest = max(len(episode.spans[0]) for episode in self.episodes)
            seen += f"; prompts of up to {longest} tokens leave no space for an answer"
            way_out = f"raise rollout.max_context={rollout.max_context}"
            return Check("attempts", FAIL, seen, way_out)
        tokens = sum(len(s) for row in sampled for s in row.spans if s.author == "policy")
        return Check("attempts", PASS, f"{seen}, {tokens:,} tokens sampled")

    def _sampled(self) -> list[Trajectory]:
        """Attempts with at least one sampled token."""
        return [row for row in trajectories_of(self.episodes) if any(turns_of(row))]

    def _loss_mask(self) -> Check:
        assert self.components is not None
        found = find_example(self.components, self.config, self.episodes)
        if found is None:
            return Check("loss mask", WARN, "no conversation to show: no teacher, and no attempt")
        episode, origin = found
        return conversation_check(episode, self.components.tokenizer, origin)

    def _of_attempts(self) -> Iterator[Check]:
        components, learner = self.components, self.learner
        assert components is not None and learner is not None
        rows = self._sampled()
        some = first_rows(rows, learner.tokens_per_micro)
        temperature = self.config.rollout.temperature
        # a KL term would need a reference model; it adds to each token and mixes no rows
        loss = build(replace(components.algo.preset, kl_coef=0.0))[2]
        yield from checked("mask", lambda: mask(rows), QUICK)
        yield from checked("eos", lambda: eos(rows, components.chat), QUICK)
        longest = self.config.rollout.max_tokens
        yield from checked(
            "answers", lambda: answers(self.episodes, components.chat, longest), QUICK
        )
        if learner.teachers is not None:
            yield from checked(
                "teacher", lambda: teacher_checks(self.config, learner, some), ASKING
            )
        yield from checked("log-probs", lambda: agreement(learner, some, temperature), ASKING)
        yield from checked(
            "micro", lambda: micro(learner, some, loss, components.algo.prepare), ASKING
        )


def _nothing(task: Task, trajectory: Trajectory) -> float:
    return 0.0


def examine_recipe(config: Config) -> Iterator[Check]:
    with (
        tempfile.TemporaryDirectory(prefix="graft-doctor-", ignore_cleanup_errors=True) as folder,
        closing(Examination(config, Path(folder))) as examination,
    ):
        yield from examination.lines()
