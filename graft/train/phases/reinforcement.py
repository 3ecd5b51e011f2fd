"""The RL phase: a learner, checks before the first step, then `rl.train_step` until the last."""

from __future__ import annotations

from collections.abc import Sequence

from graft.rollout.collector import RolloutRequest
from graft.train.algorithm import preset_of
from graft.train.errors import RunStopped
from graft.train.learner import Learner
from graft.train.learner_build import make_learner
from graft.train.memory.plan import has_reference
from graft.train.monitor.check import FAIL, PASS
from graft.train.monitor.labels import PHASE_WORDS
from graft.train.monitor.run_check import check_attempts
from graft.train.monitor.settings_check import reads_rewards
from graft.train.phases.context import RunContext
from graft.train.phases.evaluation import evaluate_held_out, precision
from graft.train.phases.reference import frozen_policy, keep_policy
from graft.train.phases.step_hooks import RunHooks
from graft.train.rl import train_step
from graft.train.rollouts.agents import EXTERNAL
from graft.train.rollouts.collected_rollouts import CollectedRollouts
from graft.train.rollouts.frozen_players import has_frozen_reference
from graft.train.run_dir.checkpoint import Checkpoint
from graft.train.tasks import TaskStream, probe_of
from graft.train.teachers.paths import REFERENCE
from graft.types import Author, Episode

CHECKED_TASKS = 2
"""Attempted before the first step where no evaluation has made attempts."""


def reinforce(run: RunContext, resumed: Checkpoint | None) -> None:
    """Train with RL until the recipe's last step."""
    config, algo = run.config, run.components.algo
    reference = None
    if has_reference(config) and not config.lora.rank:
        reference = frozen_policy(run, REFERENCE, is_new=resumed is None)
    elif has_frozen_reference(config) and resumed is None:
        keep_policy(run, REFERENCE)
    learner = make_learner(run.components, reference)
    run.show_notes()
    tasks = TaskStream(config.task.envs, config.run.seed, run.state.get("cursor", 0))
    done = 0
    if resumed is None:
        run.publish(0)
        run.state["before"] = evaluate_held_out(run, "before")
        if run.state["before"]:
            run.state["standard_error"] = precision(run, "before")
        run.save("rl", 0, learner)
    else:
        resumed.restore(learner)
        done = resumed.step
        algo.restore(run.state)
    # agents elsewhere would have to claim attempts for it: those of the first step are checked instead
    is_late = config.task.agent == EXTERNAL
    if done < config.train.steps and not is_late:
        _check_attempts(run, learner, done, _first_look(run, done))
    run.publish(done)
    source = CollectedRollouts(run.components, run.collector, tasks)
    if resumed is not None:
        source.restore(resumed.ahead())
    hooks = RunHooks(run, learner, done, source.window)
    if is_late:
        hooks.on_first = lambda episodes: _check_attempts(
            run, learner, done, [one for one in episodes if _is_of(one, done)]
        )
    run.display.phase(PHASE_WORDS["rl"], config.train.steps)
    try:
        for step in range(done + 1, config.train.steps + 1):
            train_step(step, source, algo, learner, hooks)
            run.stop_together()
    except KeyboardInterrupt:
        # the interrupted step is repeated: its tasks come from the cursor of the last one
        run.save("rl", hooks.done, learner)
        run.writer.finish()
        raise


def _first_look(run: RunContext, version: int) -> list[Episode]:
    """The attempts of the evaluation before; a few new ones where it has none that are sampled alike."""
    components, episodes = run.components, run.episodes
    drawn = components.setup.sampling
    # nothing was evaluated, the run continues from a checkpoint, or attempts were sampled in another way
    if not episodes or components.held_out.sampling != drawn:
        run.publish(version)
        tasks = components.held_out_tasks(CHECKED_TASKS)
        request = RolloutRequest(tasks, "a first look", held_out=True, sampling=drawn)
        episodes = run.collector.submit(request).result()
    return episodes


def _is_of(episode: Episode, version: int) -> bool:
    """Whether the weights of a version have sampled it: those of a resumed run may be older."""
    sampled = [span for span in episode.spans if span.author is Author.POLICY]
    return all(span.version == version for span in sampled)


def _check_attempts(
    run: RunContext, learner: Learner, version: int, episodes: Sequence[Episode]
) -> None:
    """The cheap checks of `graft doctor`, on attempts that the current weights have sampled."""
    components = run.components
    items = run.config.held_out_envs
    probes = [components.held_out.make_env(probe_of(item)) for item in items]
    stop = [text for probe in probes for text in probe.stop]
    rollout = run.config.rollout
    chat, limit = components.chat, rollout.max_tokens
    is_read = reads_rewards(preset_of(run.config))
    for check in check_attempts(learner, episodes, chat, rollout.temperature, stop, limit, is_read):
        if check.verdict != PASS:
            run.display.note(str(check))
        if check.verdict == FAIL:
            raise RunStopped(
                f"stopped before step {version + 1}: {check.name}: {check.seen}. {check.remedy}"
            )
