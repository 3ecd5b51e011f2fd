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
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from graft.algos.presets import build
from graft.config import Config
from graft.data.chats import open_chats
from graft.doctor.agents import agent_checks
from graft.doctor.cheats import cheat_check
from graft.doctor.conversation import conversation_check
from graft.doctor.deadline import Probe, checked
from graft.doctor.isolation import isolation_check
from graft.doctor.resources import checkpoint_check, memory_check, tracker_check
from graft.doctor.rewards import TRIES, RewardTrial, reward_check
from graft.doctor.teachers import teacher_checks
from graft.doctor.tools import tool_checks
from graft.envs.base import as_messages
from graft.rewards import make_reward
from graft.rollout.action_spelling import ActionSpeller
from graft.rollout.batching import trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.demonstration import demonstration
from graft.rollout.examples import example
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.train.algorithm import branch_part
from graft.train.build import build_run, env_factory, is_chatty
from graft.train.components import RunComponents
from graft.train.learner import Learner
from graft.train.learner_build import make_learner
from graft.train.memory.frozen_shapes import REFERENCE
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
    count,
    ends,
    eos,
    few,
    mask,
    micro,
    turns_of,
)
from graft.train.monitor.settings_check import positions_check, settings_checks
from graft.train.rollouts.agents import EXTERNAL
from graft.train.step_metrics import commonest_failure
from graft.train.tasks import TaskStream, held_out_check
from graft.types import Episode, Task, Trajectory
from graft.user_code import source_of as source_code_of

QUICK, ASKING, LOADING = 60.0, 300.0, 1800.0
"""Seconds per check: of files, of sampling, of loading a model."""
TOOL_DEADLINE = 60.0
REWARDED, JUDGED = 8, 2
"""Tasks that the reward is tried on; fewer for a reward that calls a service, such as a judge."""
CHEATED = 8
"""Tasks that every cheat is played on."""
TASKS, SAMPLES = 4, 2
"""Attempts that are sampled."""
MOST_TOKENS, MOST_TURNS = 256, 4
"""Tokens of each, enough for the comparisons."""
LESSONS = 64
"""Demonstrations that are searched for one of several turns."""


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
        self.chat: Chat | None = None
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
        yield from self._with_chat("env", self._environment, ASKING)
        yield from self._with_chat("template", self._template, QUICK)
        yield from self._with_chat("positions", self._positions, QUICK)
        yield from self._with_chat("memory", self._memory, QUICK)
        yield from self._with_chat(
            "checkpoints", lambda: checkpoint_check(config, self.requested.run), QUICK
        )
        if self.has_env:
            yield from checked("reward", self._reward, ASKING)
            yield from checked("cheats", self._cheats, ASKING)
            yield from checked("tools", self._tools, ASKING)
            yield from checked("isolation", self._isolation, ASKING)
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
        yield from self._with_components("loss mask", self._conversation, QUICK)
        if self.learner is not None and self._sampled():
            yield from self._of_attempts()

    def _why_not_to_open(self) -> str:
        if self.chat is None:
            return "it has no tokenizer"
        if self.config.task.env and not self.has_env:
            return "its environment does not work"
        return "" if self._fits else "it would not fit"

    def close(self) -> None:
        if self.components is not None:
            self.components.setup.close()

    def _with_chat(self, name: str, probe: Probe, deadline: float) -> list[Check]:
        """Left out without a tokenizer; that has been reported."""
        return [] if self.chat is None else checked(name, probe, deadline)

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
        self.chat = make_chat(config, tokenizer)
        return Check("tokenizer", PASS, f"{tokenizer.vocab_size:,} tokens")

    def _environment(self) -> Iterator[Check]:
        """Each environment poses a task, and its prompt leaves space for an answer."""
        if self.chat is not None:
            for task in self._tasks(1):
                yield self._first_prompt(task, self.chat)
            self.has_env = bool(self.config.task.env)
            held_out = env_factory(self.config, self.chat.tokenizer, held_out=True)
            if (shared := held_out_check(self.config, self._make_env, held_out)) is not None:
                yield shared

    def _first_prompt(self, task: Task, chat: Chat) -> Check:
        config = self.config
        with closing(self._make_env(task)) as env:
            observation, info = env.reset(task.seed)
            if env.observe_as == "raw":
                length = len(chat.encode(str(observation), is_start=True))
            else:
                length = len(chat.prompt(as_messages(observation), info.get("tools")))
        most = config.rollout.max_context
        seen = f"{task.env}: its first prompt has {length:,} tokens of {most:,}"
        if length + config.rollout.max_tokens <= most:
            return Check("env", PASS, seen)
        way_out = (
            f"raise rollout.max_context={most} (a turn may have {config.rollout.max_tokens:,})"
        )
        return Check("env", FAIL if length >= most else WARN, seen, way_out)

    def _template(self) -> Iterator[Check]:
        config, chat = self.config, self.chat
        assert chat is not None
        matters = not self.has_env or is_chatty(config, self._make_env)
        seen = "a conversation that grows keeps every earlier turn, thoughts and tools included"
        if note := chat.history_note():
            here = "Here it does not matter: no message follows an attempt's first turn"
            seen = note if matters else f"{note}\n{here}"
        yield Check("template", PASS, seen)
        vocab_size = chat.tokenizer.vocab_size
        if not is_transformers_only(config, source_of(config)):
            vocab_size = recipe_shape(config).vocab_size
        probes = [self._make_env(task) for task in self._tasks(1)] if self.has_env else []
        stop = [text for probe in probes for text in probe.stop]
        yield ends(chat, vocab_size, stop)

    @property
    def _make_env(self) -> Callable[[Task], Any]:
        assert self.chat is not None
        return env_factory(self.config, self.chat.tokenizer)

    def _tasks(self, count: int) -> list[Task]:
        """The first tasks of each environment."""
        seed = self.config.run.seed
        streams = [TaskStream([item], seed) for item in self.config.task.envs]
        return [task for stream in streams for task in islice(stream, count)]

    def _named(self, check: Check, env: str) -> Check:
        """With the name of its environment, where there are several."""
        several = len(self.config.task.envs) > 1
        return check._replace(seen=f"{env}: {check.seen}") if several else check

    def _reward(self) -> Iterator[Check]:
        chat = self.chat
        assert chat is not None
        for config in self.config.of_each_env():
            reward = make_reward(config.task.reward) if config.task.reward else None
            trial = RewardTrial(self._make_env, reward, chat, config.rollout.max_turns)
            number, tries = (JUDGED, 1) if asks_a_service(reward) else (REWARDED, TRIES)
            tasks = list(islice(TaskStream(config.task.envs, config.run.seed), number))
            check = reward_check(trial, tasks, config.sft.demo_args, tries)
            yield self._named(check, config.task.label)

    def _cheats(self) -> Iterator[Check]:
        chat = self.chat
        assert chat is not None
        for config in self.config.of_each_env():
            reward = make_reward(config.task.reward) if config.task.reward else None
            if asks_a_service(reward):
                seen = "not played: the reward asks a service, and each of a hundred answers costs a request"
                yield self._named(Check("cheats", PASS, seen), config.task.label)
                continue
            trial = RewardTrial(self._make_env, reward, chat, config.rollout.max_turns)
            tasks = list(islice(TaskStream(config.task.envs, config.run.seed), CHEATED))
            yield self._named(cheat_check(trial, tasks), config.task.label)

    def _tools(self) -> Iterator[Check]:
        deadline = min(TOOL_DEADLINE, self.config.rollout.deadline)
        for task in self._tasks(1):
            for check in tool_checks(self._make_env(task), deadline):
                yield self._named(check, task.env)

    def _isolation(self) -> Iterator[Check]:
        for task in self._tasks(1):
            yield self._named(isolation_check(self._make_env, task), task.env)

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
        yield from agent_checks(setup, self._tasks(1)[0], part != "independent")

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
            sampling=replace(setup.sampling, max_tokens=min(rollout.max_tokens, MOST_TOKENS)),
            max_turns=rollout.max_turns if is_agent else min(rollout.max_turns, MOST_TURNS),
            by_env={name: unpaid(own) for name, own in setup.by_env.items()},
            deadline=min(rollout.deadline, ASKING / 2),
        )

    def _attempts(self) -> Check:
        components, rollout = self.components, self.config.rollout
        assert components is not None
        setup = self._short_setup(components)
        tasks = self._tasks(TASKS)
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

    def _conversation(self) -> Check:
        components = self.components
        assert components is not None
        found = self._example()
        if found is None:
            return Check("loss mask", WARN, "no conversation to show: no teacher, and no attempt")
        episode, origin = found
        return conversation_check(episode, components.tokenizer, origin)

    def _example(self) -> tuple[Episode, str] | None:
        """A row of the warm-up, a demonstration, or a sampled attempt."""
        components, config = self.components, self.config
        assert components is not None
        sft = config.sft
        if sft.is_on and sft.data:
            chats, marks = open_chats(sft.data, sft.skip_bad, sft.layout), sft.mask_results
            speller = (
                ActionSpeller(components.actions, components.tokenizer, marks)
                if components.actions
                else None
            )
            row = example(
                Task("row:1", ""),
                chats[0],
                components.chat,
                marks,
                speller,
                config.task.prefill,
                config.actions.start,
            )
            return row, f"the first row of {sft.data}"
        if sft.is_on or not config.task.agent:  # an agent's attempts are not the environment's
            with suppress(NotImplementedError, ValueError, AttributeError):
                return self._taught(components, self._tasks(1)[0]), "a demonstration"
        rows = trajectories_of(self.episodes)
        if not rows:
            return None
        longest = max(rows, key=lambda row: len(row.spans))
        only = replace(longest.episode, leaves=[longest.leaf])
        return only, "a sampled attempt"

    def _taught(self, components: RunComponents, task: Task) -> Episode:
        """A demonstration of more than one turn, if there is one among several draws."""
        config = self.config

        def taught(seed: int) -> Episode:
            return demonstration(
                task,
                components.setup.make_env(task),
                components.chat,
                seed=seed,
                actions=components.actions,
                prefill=components.setup.for_task(task).prefill,
                start_tool=config.actions.start,
                **config.sft.demo_args,
            )

        several = (episode for episode in map(taught, range(LESSONS)) if len(episode.spans) > 2)
        return next(several, None) or taught(0)

    def _of_attempts(self) -> Iterator[Check]:
        components, learner = self.components, self.learner
        assert components is not None and learner is not None
        rows = self._sampled()
        some = few(rows, learner.tokens_per_micro)
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


def asks_a_service(reward: Any) -> bool:
    """Whether a reward waits for others, as a judge does; bundled ones that only compute do not."""
    parts = [one.reward for one in getattr(reward, "components", ())] or [reward]
    ours = ("graft.rewards.answers", "graft.rewards.code")
    return any(
        getattr(one, "blocking", False)
        and getattr(source_code_of(one), "__module__", "") not in ours
        for one in parts
    )


def examine_recipe(config: Config) -> Iterator[Check]:
    with (
        tempfile.TemporaryDirectory(prefix="graft-doctor-", ignore_cleanup_errors=True) as folder,
        closing(Examination(config, Path(folder))) as examination,
    ):
        yield from examination.lines()
