"""The alarm rules: each turns recent metrics into value / limit, and an alarm begins at 1.

The advice that an alarm prints is the matching case of its metric in docs/metrics.md.

Learning makes some metrics look unhealthy: attempts double in length once the tool is used, and in a solved
task all attempts earn the same and the entropy goes to 0. The rules for entropy, length and groups without
spread therefore also look at the reward.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from graft.tolerances import tolerances
from graft.train.monitor.alarm_history import (
    FULL_REWARD,
    KEPT,
    TWINS_GAIN,
    WINDOW,
    AlarmHistory,
)

Level = Literal["warn", "alarm"]

FLAT_SHARE = 0.6
"""Share of groups without spread in reward."""
TWINS_GAIN_ENOUGH = 0.05
"""Gain of forced calls from which on they give a signal to groups without spread."""
ENTROPY_LEFT, ENTROPY_GONE, ENTROPY_NONE = 0.1, 0.02, 0.01
"""Shares of the entropy at the start: too little unless the reward rose, too little in any case. The last
is in nats: too little for any exploration."""
GAP_MOVED = 0.2
"""Highest normal log-prob gap where the policy was updated since it sampled: e^0.2 is a ratio at the edge
of PPO's range."""
GAP_GREW = 5.0
LENGTH_GREW = 2.0
CUT_SHARE, CUT_ROSE = 0.5, 0.2
CLIPPED = 0.3
TOOL_FAILURES, TOOL_FAILURES_ROSE, TOOLS_USED = 0.5, 0.3, 0.05
FAILED_SHARE, FAILED_SOME = 0.2, 0.05
"""Shares of failed attempts: one that wastes the run, and one that deserves a look."""
NO_GRADIENT = 1e-9
SPIKE = 10.0
SAMPLE_SIZE, SAMPLE_SIZE_GONE = 0.5, 0.3
WAITING = 0.5

GAP = "sampling/sampling_logp_difference/mean"
ESS = "sampling/importance_sampling_ratio/ess"
LENGTH, CUT = "completions/mean_length", "completions/clipped_ratio"
FAILURES = "tools/failure_frequency"


class AlarmFinding(NamedTuple):
    """The result of a rule: the alarm begins when `ratio`, value / limit, is 1 or more."""

    ratio: float
    seen: str = ""
    """The numbers, as a sentence without its full stop."""
    level: Level = "warn"
    case: str = ""
    """Replaces the rule's own, where the advice depends on the numbers."""


HEALTHY = AlarmFinding(0.0)


class AlarmRule(NamedTuple):
    """One alarm. A step without its metric is not judged."""

    metric: str
    judge: Callable[[float, float, AlarmHistory], AlarmFinding | None]
    """Gets the means of the metric over the latest and over the first WINDOW steps; None: not judged."""
    case: str = ""
    """Opening of the case on the metric's page whose advice the alarm prints."""
    steps: int = WINDOW
    """Values that the metric must have."""


def flat_groups(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    reward, gain = history.now("reward"), history.now(TWINS_GAIN) or 0.0
    if not history.context.is_grouped or history.is_solved or gain >= TWINS_GAIN_ENOUGH:
        return HEALTHY
    mean = "" if reward is None else f" (mean reward {reward:.3g})"
    is_failing = reward is not None and reward <= 0.1 * FULL_REWARD
    return AlarmFinding(
        now / FLAT_SHARE,
        f"{now:.0%} of the groups of the last {WINDOW} steps have no spread in reward{mean}, so they "
        "have no gradient",
        "alarm" if now >= 0.9 else "warn",
        "Reward near 0" if is_failing else "Reward in between",
    )


def entropy_collapse(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    if history.is_solved:
        return HEALTHY
    left = max(now, 1e-9)
    ratio = ENTROPY_GONE * began / left
    if not history.has_learned:
        ratio = max(ratio, ENTROPY_LEFT * began / left, ENTROPY_NONE / left)
    return AlarmFinding(
        ratio,
        f"entropy is {now:.3g} over the last {WINDOW} steps, {now / max(began, 1e-9):.0%} of the "
        f"{began:.3g} at the start, and {_reward_change(history)}",
        "alarm",
    )


def log_prob_gap(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    limit, was_updated = _gap_limit(history)
    if was_updated:
        explained = f"even the updates between sampling and learning explain about {limit:g}"
        case = "Above 0.2 with several updates"
    else:
        explained = f"rounding in {history.context.dtype} explains far less than {limit:g}"
        case = "Above 1e-3"
    return AlarmFinding(
        now / limit,
        f"log-probs of engine and learner differ by {now:.2g} on average ({_steps(history, GAP)}), and "
        f"{explained}",
        "alarm",
        case,
    )


def log_prob_gap_grows(now: float, began: float, history: AlarmHistory) -> AlarmFinding | None:
    limit, was_updated = _gap_limit(history)
    if now >= limit:  # there `log_prob_gap` begins
        return None
    floor = limit / (2 if was_updated else 10)
    return AlarmFinding(
        min(now / (GAP_GREW * max(began, 1e-12)), now / floor),
        f"the log-prob gap between engine and learner has grown from {began:.2g} to {now:.2g} (mean "
        f"of the last {WINDOW} steps; the alarm is at {limit:g})",
    )


def length_explosion(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    if history.is_solved or history.gained >= history.spread / 4:  # longer and better
        return HEALTHY
    return AlarmFinding(
        now / (LENGTH_GREW * max(began, 1.0)),
        f"attempts have grown from {began:,.0f} to {now:,.0f} tokens (mean of the last {WINDOW} steps), "
        f"and {_reward_change(history)}",
    )


def cut_attempts(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    if history.is_solved:
        return HEALTHY
    return AlarmFinding(
        max(now / CUT_SHARE, (now - began) / CUT_ROSE),
        f"{now:.0%} of the attempts of the last {WINDOW} steps reached a budget ({began:.0%} at the "
        "start)",
    )


def clip_fraction(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    return AlarmFinding(
        now / CLIPPED,
        f"{now:.0%} of the trained tokens of the last {WINDOW} steps are outside the clip range",
    )


def tool_failures(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    if (history.now("tools/rate") or 0.0) < TOOLS_USED:
        return HEALTHY
    return AlarmFinding(
        max(now / TOOL_FAILURES, (now - began) / TOOL_FAILURES_ROSE),
        f"{now:.0%} of the tool calls of the last {WINDOW} steps failed ({began:.0%} at the start)",
    )


def broken_attempts(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    reason = f", mostly: {history.failure}" if history.failure else ""
    are_few = len(history.latest("rollout/failed")) < WINDOW  # one step may be chance
    return AlarmFinding(
        now / (FAILED_SHARE if are_few else FAILED_SOME),
        f"{now:.0%} of the attempts of {_steps(history, 'rollout/failed')} failed{reason}",
        "alarm" if now >= FAILED_SHARE else "warn",
    )


def missing_attempts(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    [missing] = history.latest("rollout/missing", 1)
    text = f"the branch produced {missing:.0%} fewer attempts than rollout.samples"
    return AlarmFinding(2.0 if missing > 0 else 0.0, text)


def stale_engine(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    [oldest] = history.latest("staleness/max", 1)
    if oldest <= history.context.staleness:
        return HEALTHY
    means = history.latest("staleness/mean", 4)
    grows = len(means) == 4 and all(b - a > 0.9 for a, b in pairwise(means))
    cause = " and grows by one at every step: the engine takes no new weights" if grows else ""
    return AlarmFinding(
        oldest,
        f"tokens that are {oldest:g} versions old were trained, and rollout.staleness allows "
        f"{history.context.staleness}; their age is beyond the bound{cause}",
        "alarm",
    )


def reward_falls(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    best = now if history.best is None else history.best
    changes = [abs(b - a) for a, b in pairwise(history.recent["reward"])]
    # the median of |b - a| of normal noise is 0.95 of its std; one fall hardly moves the median
    noise = median(changes) / 0.95
    return AlarmFinding(
        (best - now) / max(history.spread / 2, 2 * noise),
        f"reward has fallen to {now:.3g} over the last {WINDOW} steps, from {best:.3g} in its best "
        f"{WINDOW} steps",
        "alarm",
    )


def gradient_spike(now: float, began: float, history: AlarmHistory) -> AlarmFinding | None:
    norms = history.latest("grad_norm", KEPT)
    positive = [norm for norm in norms if norm > 0]  # a step without any spread has none
    if len(positive) < WINDOW:
        return None
    usual, worst = max(median(positive), began), max(norms[-WINDOW:])
    # where few groups have spread the gradient is usually tiny, and ten times that is harmless
    harmless = history.context.max_grad_norm or 1.0
    return AlarmFinding(
        min(worst / (SPIKE * usual), worst / harmless),
        f"grad_norm reached {worst:.3g}, {worst / usual:.0f} times its usual {usual:.3g}",
    )


def no_gradient(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    norms, flat = history.latest("grad_norm", KEPT), history.now("frac_reward_zero_std")
    is_reported = (
        history.context.is_grouped and flat is not None and flat >= FLAT_SHARE
    )  # by `flat_groups`
    if history.is_solved or is_reported:
        return HEALTHY
    return AlarmFinding(
        NO_GRADIENT / max(*norms, 1e-30), f"the gradient has been 0 for {KEPT} steps", "alarm"
    )


def sample_size(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    return AlarmFinding(
        SAMPLE_SIZE / max(now, 1e-9),
        f"the effective sample size of the importance weights is {now:.2f} over the last {WINDOW} "
        f"steps: the batch is worth {now:.0%} of its tokens",
        "alarm" if now < SAMPLE_SIZE_GONE else "warn",
    )


def starved_learner(now: float, began: float, history: AlarmHistory) -> AlarmFinding:
    # where sampling runs ahead, time/rollout is the time that the learner waits
    total = history.now("step_time")
    if (
        total is None or not history.context.staleness
    ):  # without it the two take turns: the learner waits
        return HEALTHY
    share = now / max(total, 1e-9)
    return AlarmFinding(
        share / WAITING,
        f"the learner waited for rollouts in {share:.0%} of the last {WINDOW} steps' time "
        f"({now:.1f} of {total:.1f} s per step)",
    )


RULES: dict[str, AlarmRule] = {
    "flat_groups": AlarmRule("frac_reward_zero_std", flat_groups),
    "entropy_collapse": AlarmRule("entropy", entropy_collapse, "It falls"),
    "log_prob_gap": AlarmRule(GAP, log_prob_gap, steps=1),
    "log_prob_gap_grows": AlarmRule(GAP, log_prob_gap_grows, "It grows"),
    "length_explosion": AlarmRule(LENGTH, length_explosion, "It doubles"),
    "cut_attempts": AlarmRule(CUT, cut_attempts),
    "clip_fraction": AlarmRule("clip_ratio/region_mean", clip_fraction),
    "tool_failures": AlarmRule(FAILURES, tool_failures),
    "broken_attempts": AlarmRule("rollout/failed", broken_attempts, steps=1),
    "missing_attempts": AlarmRule("rollout/missing", missing_attempts, steps=1),
    "stale_engine": AlarmRule("staleness/max", stale_engine, steps=1),
    "reward_falls": AlarmRule("reward", reward_falls, "It rises and then falls"),
    "gradient_spike": AlarmRule("grad_norm", gradient_spike, "Repeated spikes"),
    "no_gradient": AlarmRule("grad_norm", no_gradient, "0 for many steps", steps=KEPT),
    "sample_size": AlarmRule(ESS, sample_size),
    "starved_learner": AlarmRule("time/rollout", starved_learner, "The learner waits"),
}
"""Name of the alarm -> its rule."""

WATCHED = (
    *dict.fromkeys(rule.metric for rule in RULES.values()),
    "reward_std",
    TWINS_GAIN,
    "optimizer_steps",
    "tools/rate",
    "staleness/mean",
    "step_time",
)
"""Metrics that the rules read."""


def _gap_limit(history: AlarmHistory) -> tuple[float, bool]:
    """The highest normal mean gap, and whether the policy was updated between sampling and learning."""
    updates, ages = history.latest("optimizer_steps"), history.latest("staleness/max")
    if max(updates, default=0.0) > 1 or max(ages, default=0.0) > 0:  # in any step of the mean
        return GAP_MOVED, True
    return tolerances(history.context.dtype).mean_gap, False


def _reward_change(history: AlarmHistory) -> str:
    now, began = history.now("reward"), history.began("reward")
    if now is None or began is None:
        return "no reward was recorded"
    return f"the reward went from {began:.3g} to {now:.3g}"


def _steps(history: AlarmHistory, metric: str) -> str:
    count = len(history.latest(metric))
    return "this step" if count == 1 else f"the last {count} steps"
