"""Compute a recorded step again, and find the first difference.

Of every step whose episodes are recorded, a run keeps everything that the step was computed from:

    episodes/step_000012.jsonl   what was learned from
    learned/step_000012.npz      advantages and the learner's log-probs, token by token
    learned/step_000012.json     fingerprints of the weights before and after, and the machine
    metrics.jsonl                loss, gradient norm and the rest

To replay step 12 the newest checkpoint before it is loaded, such as rl-000010; steps 11 and 12 are learned
again from their episodes, in one process and without an engine or an environment. Numbers are compared
with the recorded ones in the order of their computation: weights, rewards, advantages, log-probs, loss,
gradients, weights again. The first difference is the place to look.

A learner draws nothing from a random state, so on the machine of the run every number is the same to the
last bit. Elsewhere sums have another order, and numbers are compared with a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from graft.algos.presets import algorithm_of
from graft.config import Config, ConfigError, EngineSection
from graft.models.decoder import Decoder
from graft.replay.comparison import (
    DIFFERS,
    StepDifference,
    compare_step,
    compare_weights,
)
from graft.replay.learner_snapshot import LearnerSnapshot, cosine, first_gradient
from graft.replay.recorded_step import CannotReplay, RecordedStep
from graft.replay.result import OtherSettings, Replay
from graft.replay.source import (
    choose_checkpoint,
    explain_removal,
    is_among,
    prepared,
    recorded_metrics,
    settings_of,
    with_rates,
)
from graft.tolerances import tolerances
from graft.train.algorithm import preset_of
from graft.train.build import build_run, refuse_critic
from graft.train.components import RunComponents
from graft.train.learner import Learner
from graft.train.learner_build import make_learner, set_rates
from graft.train.memory.plan import has_reference
from graft.train.model import load_reference
from graft.train.rl import StepResult, learn
from graft.train.rollouts.rollout_engine import make_engine
from graft.train.rollouts.step_rollouts import StepRollouts
from graft.train.run_dir.checkpoint import Checkpoint
from graft.train.run_dir.fingerprint import StepRecord, device_name
from graft.train.run_dir.small_state import get_random_states, set_random_states
from graft.train.teachers.pin import pin_teachers
from graft.trust.ownership import settings_from

PROBE_TOKENS = 1024
"""KV pool of the engine that checks the adapters."""


def replay(
    run: Path,
    step: int,
    *,
    start: int | None = None,
    overrides: Sequence[str] = (),
    device: str = "",
    trust: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Compute RL step `step` of a run again.

    start      the step whose checkpoint to begin with, instead of the newest one before
    overrides  key=value of algo.* and train.*: also compute the step under these
    device     where to compute; "": as in the run's settings
    trust      run code that a stranger's run names, and read its pickles
    """
    with settings_from(run / "config.yaml", trust, overrides):
        return _replay(run, step, start, overrides, device, report)


def _replay(
    run: Path,
    step: int,
    start: int | None,
    overrides: Sequence[str],
    device: str,
    report: Callable[[str], None],
) -> Replay:
    settings, other_settings = settings_of(run, overrides)
    metrics = recorded_metrics(run)
    if step not in metrics:
        known = f"it has steps {min(metrics)} to {max(metrics)}" if metrics else "it has none yet"
        raise ConfigError(f"'{run}' has no RL step {step}; {known}")
    checkpoint = choose_checkpoint(run, step, start, settings)
    numbers = range(checkpoint.step + 1, step + 1)
    chain = [RecordedStep(run, number, metrics.get(number, {})) for number in numbers]
    for each in chain:
        _ = each.episodes  # missing files are reported before anything is loaded
    last = chain[-1]
    config = pin_teachers(prepared(settings, last.record, device), run, may_write=False)
    before = get_random_states(), torch.get_num_threads()
    try:
        components, learner = _restored(config, checkpoint, run)
        inexact = _why_inexact([each.record for each in chain], learner)
        tolerance = tolerances(learner.policy.dtype).relative if inexact else 0.0
        found = Replay(
            run, step, checkpoint.path.name, inexact, tolerance, recorded={**last.metrics}
        )
        found.findings += _loaded(chain[0], checkpoint, learner, bool(inexact))
        for each in chain[:-1]:
            report(f"learning step {each.number} again")
            if each.record is not None:
                set_rates(learner, with_rates(config, each.record))
            made = _learn(components, learner, each)
            compared = compare_step(each, made, learner, found.tolerance, bool(found.inexact))
            found.findings += [f for f in compared if f.verdict == DIFFERS]
        if len(chain) > 1:
            found.findings.append(compare_weights(last, "before", learner, bool(inexact)))
        report(f"learning step {step} again")
        set_rates(learner, config)
        snapshot = LearnerSnapshot(learner) if overrides else None
        learned = deepcopy(components.algo.state)
        with first_gradient(learner, bool(overrides)) as gradient:
            made = _learn(components, learner, last)
        found.metrics = made.metrics
        found.findings += compare_step(last, made, learner, found.tolerance, bool(found.inexact))
        if snapshot is not None:
            report(f"and with {' '.join(overrides)}")
            components.algo.restore(learned)  # as before the step
            other = prepared(other_settings, last.record, device, overrides)
            other = pin_teachers(other, run, may_write=False)
            found.other = _learn_otherwise(
                other, overrides, components, learner, snapshot, last, gradient
            )
        return found
    finally:
        set_random_states(before[0])
        torch.set_num_threads(before[1])


def _restored(config: Config, checkpoint: Checkpoint, run: Path) -> tuple[RunComponents, Learner]:
    """The learner as it was when the checkpoint was written."""
    with explain_removal(checkpoint, config):
        components = _assemble(config, checkpoint)
        learner = _learner(components, run)
        checkpoint.restore(learner)
        components.algo.restore(checkpoint.state())
    return components, learner


def _assemble(config: Config, checkpoint: Checkpoint) -> RunComponents:
    components = build_run(config, checkpoint.path, with_engine=False)
    if config.lora.rank:
        # new adapters are checked on an engine before training: the native one, briefly
        native = EngineSection(name="native", kv_tokens=PROBE_TOKENS)
        own = config.model_copy(update={"engine": native})
        components.engine = make_engine(
            own, components.policy, components.tokenizer, components.actions
        )
    return components


def _learner(components: RunComponents, run: Path) -> Learner:
    reference = None
    if has_reference(components.config) and not components.config.lora.rank:
        path = run / "reference"
        if not path.is_dir():
            raise CannotReplay(
                f"{path} is missing: the reference model of the KL term, which a run "
                "writes before its first step"
            )
        reference = load_reference(path, components.policy)
    return make_learner(components, reference)


def _why_inexact(records: Sequence[StepRecord | None], learner: Learner) -> str:
    """The first reason why results may not be bit-equal here."""
    device, kind = learner.policy.device, str(learner.policy.dtype).removeprefix("torch.")
    for record in records:
        if record is None:
            return "the run did not record its machine"
        if record.world > 1:
            return f"{record.world} processes trained, and this is one"
        if record.device != device_name(device):
            return f"it ran on {record.device}, and this is {device_name(device)}"
        if record.dtype != kind:
            return f"it computed in {record.dtype}, and this machine does in {kind}"
        if record.torch != torch.__version__:
            return f"it ran with torch {record.torch}, and this is {torch.__version__}"
    if device.type != "cpu" and (
        learner.lora is not None or not isinstance(learner.policy, Decoder)
    ):
        what = "adapters" if learner.lora is not None else "a model of transformers"
        return f"a GPU may add in another order each time with {what}"
    return ""


def _learn(
    components: RunComponents, learner: Learner, step: RecordedStep, cut_anew: bool = False
) -> StepResult:
    """`cut_anew` uses the learner's own micro-batch size instead of the run's."""
    record = step.record
    if record is not None and not cut_anew:
        learner.tokens_per_micro = record.tokens_per_micro
    if record is not None and record.device.startswith("cpu"):
        torch.set_num_threads(record.threads)
    learner.keeps_logprobs = True
    set_aside = step.metrics.get("rollout/set_aside", 0.0)
    rollouts = StepRollouts(step.episodes, int(set_aside), seconds=1.0, cursor=0)
    return learn(step.number, rollouts, components.algo, learner)


def _loaded(
    step: RecordedStep, checkpoint: Checkpoint, learner: Learner, is_inexact: bool
) -> Iterator[StepDifference]:
    """Whether the checkpoint holds the weights that the next step started from. Checkpoints are
    independent of the layout, so this is exact, except for adapters, which are merged again."""
    found = compare_weights(step, "before", learner, is_inexact and learner.lora is not None)
    yield found._replace(what=f"checkpoint {checkpoint.path.name}")
    record, updates = step.record, learner.optimizer.steps
    if record is not None and record.updates != updates:
        yield StepDifference(
            step.number,
            "optimizer",
            DIFFERS,
            f"{updates} updates are in the checkpoint, {record.updates} were made before this step",
        )


def _learn_otherwise(
    config: Config,
    overrides: Sequence[str],
    components: RunComponents,
    learner: Learner,
    snapshot: LearnerSnapshot,
    step: RecordedStep,
    gradient: Mapping[str, Tensor],
) -> OtherSettings:
    """The same step from the same start, with other settings."""
    preset = preset_of(config)
    refuse_critic(config, preset)
    if preset.needs_critic and learner.critic is None:
        raise ConfigError(
            f"{' '.join(overrides)}: algo.name={config.algo.name} needs a critic, and this run has "
            "trained none"
        )
    if has_reference(config) and not learner.has_reference:
        raise ConfigError(
            f"{' '.join(overrides)}: a KL term needs the model that RL started from, which this run "
            "did not keep; a run with algo.kl_coef above 0 does"
        )
    algo = algorithm_of(preset, components.algo.branch)
    state = components.algo.state
    if preset.credit != components.algo.preset.credit:
        state.pop("credits", None)  # of other credits
    algo.restore(state)
    changed = replace(components, config=config, algo=algo)
    snapshot.rewind(learner)
    other = make_learner(changed, learner.reference if has_reference(config) else None)
    if other.anchor is not None:
        other.anchor = learner.anchor
    snapshot.resume(other)
    with first_gradient(other, True) as instead:
        made = _learn(changed, other, step, is_among("train.tokens_per_micro", overrides))
    return OtherSettings(list(overrides), made.metrics, cosine(gradient, instead))
