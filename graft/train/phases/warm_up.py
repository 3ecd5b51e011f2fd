"""The supervised phase: steps on examples, scores of held-out rows and tasks, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graft.config import Config
from graft.train.errors import RunStopped
from graft.train.learner import Learner
from graft.train.learner_build import sft_learner
from graft.train.memory.workload import SFT_CHECK_EVERY, SFT_CHECK_TASKS
from graft.train.monitor.labels import PHASE_WORDS
from graft.train.phases.context import RunContext
from graft.train.phases.evaluation import attempt_held_out, evaluate_held_out
from graft.train.phases.reference import frozen_policy
from graft.train.run_dir.checkpoint import Checkpoint
from graft.train.sft import held_out_scores, sft_step
from graft.train.sft_dataset import Prefetcher, SFTDataset, make_dataset


def warm_up(run: RunContext, resumed: Checkpoint | None) -> None:
    """Train on examples until the recipe's last step, or until `sft.stop_at` is reached."""
    sft = run.config.sft
    if not sft.is_on or is_warm(run.config, run.state):
        return
    run.state["sft_planned"] = [sft.steps, sft.epochs]
    dataset = _open_dataset(run)
    reference = None
    if sft.kl_coef and not run.config.lora.rank:
        reference = frozen_policy(run, "sft-reference", is_new=resumed is None)
    learner = sft_learner(run.components, dataset.steps, reference)
    run.show_notes()
    done = 0
    if resumed is not None:
        resumed.restore(learner)
        done = resumed.step
    run.display.phase(PHASE_WORDS["sft"], dataset.steps)
    clock = run.clock("sft")
    try:
        with Prefetcher(dataset) as examples:
            for step in range(done + 1, dataset.steps + 1):
                batch = examples(step)
                with run.interrupt.held(), run.journal.evidence(step, batch):
                    metrics = sft_step(learner, batch)
                    done = step
                    if dataset.passes:
                        metrics["epoch"] = min(step * dataset.passes, sft.epochs or math.inf)
                    metrics |= _held_out_metrics(run, learner, dataset, step)
                    run.journal.log(step, metrics, "sft")
                    run.journal.experts(step, learner, "sft")
                    is_good_enough = metrics.get("accuracy", -1.0) >= sft.stop_at > 0
                    run.state["sft_done"] = step == dataset.steps or is_good_enough
                    clock()
                    if run.is_save_due(step) or run.state["sft_done"]:
                        run.save("sft", step, learner)
                run.stop_together()
                if run.state["sft_done"]:
                    break
    except KeyboardInterrupt:
        run.save("sft", done, learner)
        run.writer.finish()
        raise


def is_warm(config: Config, state: Mapping[str, Any]) -> bool:
    """Whether the warm-up is over; one that is resumed with more steps is not."""
    planned = [config.sft.steps, config.sft.epochs]
    return bool(state.get("sft_done")) and state.get("sft_planned", planned) == planned


def _open_dataset(run: RunContext) -> SFTDataset:
    dataset = make_dataset(run.components)
    for note in dataset.notes:
        run.display.note(note)
    if run.state.setdefault("sft_rows", dataset.fingerprint) != dataset.fingerprint:
        raise RunStopped(
            f"the rows of {run.config.sft.data} are not those that this run began with, so it cannot "
            "continue with them; restore the file, or give this run another run.name"
        )
    return dataset


def _held_out_metrics(
    run: RunContext, learner: Learner, dataset: SFTDataset, step: int
) -> dict[str, float]:
    """Scores of held-out rows and tasks, where this step has any, and whether the warm-up may stop."""
    sft, env = run.config.sft, run.config.task.env
    is_due = sft.eval_every > 0 and step % sft.eval_every == 0
    may_stop = sft.stop_at > 0 and step % SFT_CHECK_EVERY == 0
    found: dict[str, float] = {}
    if dataset.held_out and (is_due or step == dataset.steps or (may_stop and not env)):
        found |= held_out_scores(learner, dataset.held_out())
        loss, share = found["eval/loss"], found["eval/accuracy"]
        run.display.note(f"held-out rows, step {step}: loss {loss:.3f}, tokens right {share:.1%}")
    if env and (is_due or may_stop):
        run.publish(step)
    if env and is_due:
        scores = evaluate_held_out(run, f"warm-up step {step}")
        found |= {f"eval/{name}": value for name, value in scores.items()}
    if may_stop:
        found["accuracy"] = _task_reward(run) if env else found["eval/accuracy"]
    kept = {name: value for name, value in found.items() if name.startswith("eval/")}
    run.state["sft"] = {**run.state.get("sft", {}), **dataset.counts, **kept}
    return found


def _task_reward(run: RunContext) -> float:
    """Mean reward of held-out attempts that call a tool; of all attempts, where none does."""
    tasks = run.components.held_out_tasks(SFT_CHECK_TASKS)
    sampling = replace(run.components.held_out.sampling, temperature=1.0)
    score = attempt_held_out(run, tasks, sampling)
    return score.reward_with_tool if score.tool_rate else score.reward
