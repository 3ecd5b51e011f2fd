"""The learner of a Policy: episodes in, one update of the weights out, with the step of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.api.attributes import ExplainedAttributes
from graft.api.episode_checks import (
    check_episodes,
    refuse_foreign,
    refuse_lone_attempts,
    refuse_old,
    temperature_of,
    truncation_of,
)
from graft.api.policy import Policy, explain_writing
from graft.api.settings import settings
from graft.signatures import explain_arguments
from graft.types import Episode
from graft.user_code import UserCodeError, describe_value

if TYPE_CHECKING:
    from graft.config import Config

PartLike = str | Mapping[str, Any] | Callable[..., Any]
"""A name of a table, {name: {keyword: value}}, or a function."""


class PolicyLearner(ExplainedAttributes):
    """Trains a Policy in place: log-probs, advantages, loss, optimizer step.

    >>> learner = graft.Learner(policy, algo="grpo", lr=1e-6)
    >>> metrics = learner.step(episodes)
    >>> metrics["reward"], metrics["loss"], metrics["grad_norm"]

    A credit of your own gives each token its advantage, a loss of your own the value per token:

    >>> def centred(advantages, batch):            # [N, T], and the batch with rewards, masks, groups
    ...     return (batch.reward - batch.reward.mean())[:, None] * batch.mask
    >>> learner = graft.Learner(policy, credit=centred)

    policy            what is trained
    algo              grpo, dr_grpo, rloo, dapo, gspo, cispo, ppo, reinforce, rebn, cpo, arpo, aepo, ...
    lr                learning rate; `learner.lr` can be set between steps
    credit            instead of the algorithm's: a name, a function (advantages, batch) -> advantages,
                      or a list of these, applied in order
    loss              instead of its loss: a name or a function (logp, entropy, batch) -> (loss, metrics)
    reduction         instead of its reduction: token, sequence, unique_tokens, {"constant": {"length": n}}
    weights           instead of its weights: names or functions (logp, batch) -> weight, all multiplied
    kl_coef           weight of the KL to the reference; None: the algorithm's
    reference         the policy that the KL is measured to; None: `policy` as it is now
    entropy_coef      bonus on the entropy; None: the algorithm's
    importance_cap    cap of the weight between engine and learner; None: the algorithm's, 0: off
    mask_truncated    True: attempts that ran out of budget are not trained on
    max_tokens        tokens of an answer that dr_grpo, rebn and dapo reckon with: that of `collect`
    staleness         updates since their sampling after which episodes are still learned from; above 0
                      each token is weighed by its probability now over that when it was drawn
    epochs            passes over the episodes of a step
    minibatches       optimizer steps per pass
    warmup            steps of linear warm-up
    weight_decay      AdamW's, on matrices
    max_grad_norm     gradients are clipped to this norm; 0: not
    lora_rank         train adapters of this rank instead of the weights themselves; 0: no adapters
    lora_alpha        scale of the adapters
    tokens_per_micro  tokens per micro-batch: memory, not mathematics; 0: chosen
    seed              of the order of mini-batches and new adapters
    """

    @explain_arguments
    def __init__(
        self,
        policy: Policy,
        algo: str = "grpo",
        lr: float = 1e-6,
        *,
        credit: PartLike | Sequence[PartLike] | None = None,
        loss: PartLike | None = None,
        reduction: PartLike | None = None,
        weights: PartLike | Sequence[PartLike] | None = None,
        kl_coef: float | None = None,
        reference: Policy | None = None,
        entropy_coef: float | None = None,
        importance_cap: float | None = None,
        mask_truncated: bool = False,
        max_tokens: int = 256,
        staleness: int = 0,
        epochs: int = 1,
        minibatches: int = 1,
        warmup: int = 0,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        tokens_per_micro: int = 0,
        seed: int = 0,
    ) -> None:
        if not isinstance(policy, Policy):
            raise UserCodeError(
                f"Learner() takes a Policy, not {describe_value(policy)}; load one first: graft.load(...)"
            )
        if not isinstance(algo, str):
            raise UserCodeError(f"algo is {describe_value(algo)}; give a name, such as algo='grpo'")
        self.policy, self.algo = policy, algo
        self.config = settings(
            policy.config,
            algo={
                "name": algo,
                "credit": _listed(credit),
                "loss": _plain(loss),
                "reduction": _plain(reduction),
                "weights": None if weights is None else _listed(weights),
                "kl_coef": kl_coef,
                "entropy_coef": entropy_coef,
                "importance_cap": importance_cap,
                "mask_truncated": mask_truncated,
            },
            train={
                "lr": lr,
                "epochs": epochs,
                "minibatches": minibatches,
                "warmup": warmup,
                "weight_decay": weight_decay,
                "max_grad_norm": max_grad_norm,
                "tokens_per_micro": tokens_per_micro,
            },
            lora={"rank": lora_rank, "alpha": lora_alpha},
            rollout={"max_tokens": max_tokens, "staleness": staleness},
            run={"seed": seed},
        )
        self.components, self.trainer = _built(policy, self.config, reference)
        self.steps = 0

    @property
    def lr(self) -> float:
        """The learning rate, before its warm-up."""
        return self.trainer.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.trainer.optimizer.lr = settings(train={"lr": value}).train.lr

    @explain_arguments
    def step(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Learn from episodes; the numbers of the step, named as a run's metrics are.

        Ctrl-C waits until the weights are whole. Where something is wrong (a loss that is not finite,
        no attempt that came to its end, episodes of older weights) an exception says so and no weight has
        changed.
        """
        from graft.train.rl import learn
        from graft.train.rollouts.step_rollouts import StepRollouts
        from graft.train.run_dir.interrupt import Interrupt

        listed = check_episodes(episodes)
        refuse_foreign(listed, self.policy)
        refuse_old(listed, self.policy.version, self.config.rollout.staleness)
        for engine in self.policy.engines:
            engine.check_idle()
        self.trainer.temperature = temperature_of(listed)
        self.trainer.truncation = truncation_of(listed)
        refuse_lone_attempts(listed, self.components.algo.preset)
        rollouts = StepRollouts(listed)
        with Interrupt().held():
            try:
                step = self.policy.version + 1
                learned = learn(step, rollouts, self.components.algo, self.trainer)
            except BaseException:
                self.trainer.discard()
                raise
            self.steps += 1
            self.policy.advance()
        return learned.metrics

    @explain_arguments
    def save(self, folder: str | PathLike[str]) -> Path:
        """Write a checkpoint: the policy, and what the optimizer remembers. Returns its folder.

        `graft.load(folder)` opens the newest one as a policy; the last two are kept. In a new process:

        >>> policy = graft.load("mine")
        >>> learner = graft.Learner(policy, lr=1e-6)
        >>> learner.restore("mine")     # the next step has the numbers of a loop that was never stopped
        """
        from graft.train.run_dir.checkpoint_writer import CheckpointWriter

        policy = self.policy
        writer = CheckpointWriter(
            Path(folder) / "checkpoints",
            policy.tokenizer,
            keep_last=2,
            source="" if policy.path is None else str(policy.path),
            names=() if policy.actions is None else policy.actions.names,
            turn_ends=policy.chat.end_ids,
        )
        state = {"steps": self.steps, **self.components.algo.state}
        with explain_writing(Path(folder)):
            writer.folder.mkdir(parents=True, exist_ok=True)
        writer.save("rl", policy.version, self.trainer, state)
        return Path(folder) / "checkpoints" / f"rl-{policy.version:06d}"

    @explain_arguments
    def restore(self, folder: str | PathLike[str]) -> None:
        """Go on from the newest checkpoint that `save` wrote; its policy was loaded from there too."""
        from graft.train.run_dir.checkpoint import checkpoints

        found = checkpoints(Path(folder) / "checkpoints")
        if not found:
            raise UserCodeError(
                f"'{folder}' has no checkpoint; learner.save('{folder}') writes one"
            )
        if self.policy.path != found[-1].path or self.policy.version:
            raise UserCodeError(
                f"this learner's policy was loaded from {self.policy.path}, and the checkpoint is "
                f"{found[-1].path}; load it first: policy = graft.load('{folder}')"
            )
        found[-1].restore(self.trainer)
        state = found[-1].state()
        self.components.algo.restore(state)
        self.steps = state["steps"]
        self.policy.restore_version(found[-1].step)

    def __repr__(self) -> str:
        return f"Learner({self.policy!r}, algo={self.algo!r}, lr={self.lr:g}, {self.steps} steps)"


def _built(policy: Policy, config: Config, reference: Policy | None) -> tuple[Any, Any]:
    """The parts of a run that learning needs, and its learner."""
    from graft.algos.presets import algorithm_of
    from graft.rollout.branches.branch import independent
    from graft.train.algorithm import preset_of
    from graft.train.build import refuse_critic
    from graft.train.components import RunComponents
    from graft.train.learner_build import make_learner
    from graft.train.memory.plan import has_reference
    from graft.train.rollouts.rollout_engine import NoEngine
    from graft.train.teachers.check import readers

    preset = preset_of(config)
    refuse_critic(config, preset)
    if read_by := readers(preset):
        raise UserCodeError(
            f"algo={config.algo.name!r} learns from a teacher ({', '.join(read_by)}), and Learner has none; "
            "train it as a recipe with distill.teacher: graft.train(...)"
        )
    setup: Any = None  # nothing is sampled here
    components = RunComponents(
        config=config,
        tokenizer=policy.tokenizer,
        chat=policy.chat,
        policy=policy.model,
        actions=policy.actions,
        engine=NoEngine(policy.model.shape.vocab_size),
        algo=algorithm_of(preset, independent(1)),
        setup=setup,
        held_out=setup,
        notes=[],
    )
    needs_copy = has_reference(config) and not config.lora.rank
    if reference is not None and not needs_copy:
        why = (
            "adapters are measured to the model without them"
            if config.lora.rank
            else "there is no KL term"
        )
        raise UserCodeError(
            f"reference is not used: {why}; leave it out, or set kl_coef without lora_rank"
        )
    return components, make_learner(
        components, _frozen(reference or policy) if needs_copy else None
    )


def _frozen(policy: Policy) -> Any:
    """A copy of the policy as it is now, which nothing trains."""
    from graft.train.model import load_reference

    if policy.path is not None and not policy.updates:
        return load_reference(policy.path, policy.model)
    with tempfile.TemporaryDirectory(prefix="graft-reference-") as folder:
        return load_reference(policy.save(Path(folder)), policy.model)


def _listed(credit: PartLike | Sequence[PartLike] | None) -> list[Any]:
    if credit is None:
        return []
    if isinstance(credit, Sequence) and not isinstance(credit, str):
        return [_plain(one) for one in credit]
    return [_plain(credit)]


def _plain(part: Any) -> Any:
    if isinstance(part, Mapping):
        return dict(part)
    if part is None or isinstance(part, str) or callable(part):
        return part
    raise UserCodeError(
        f"a credit, loss, reduction or weight is {describe_value(part)}; give a name, "
        f"{{name: {{keyword: value}}}} or "
        "a function"
    )
