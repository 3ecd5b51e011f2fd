"""Alarms: a run that is sick says so, with the numbers, why they matter and what to try.

    alarms = Alarms(dtype="bfloat16", staleness=2)
    for alarm in alarms.look(12, metrics):        # once after every RL step
        display.note(alarm.text)

Every condition turns recent numbers into a load, and 1 is its limit. It speaks when the load reaches
1, and again only after the load has been below 0.8. Groups without spread, 60% of them over five steps
being the limit:

    step         1    2    3    4    5    6    7    8    9    10   11   12   13   14   15
    flat groups  .5   .6   .7   .7   .8   .8   .5   .2   .2   .2   .2   .7   .9   .9   .9
    mean of five                     .66  .72  .70  .60  .50  .38  .26  .30  .44  .58  .72
    load                             1.1  1.2  1.2  1.0  .83  .63  .43  .50  .73  .97  1.2
                                     speaks                   is over                  speaks

Learning makes some of these look bad and is no sickness: where the tool is used at last, attempts
become twice as long, where the task is solved, all attempts earn the same and nothing is left to be
unsure about. So entropy, length and flat groups are held against the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

WINDOW = 5
"""Steps that are looked at together: one step's number may be chance."""
KEPT = 20
"""Numbers of a metric that are remembered, besides the first WINDOW of the run."""
OVER = 0.8
"""A condition has gone away when its load is below this."""
RIGHT = 1.0
"""What a right attempt earns in the environments of this house; `graft eval --solved` has the same."""
SOLVED, STILL_SOLVED = 0.8, 0.65
"""Shares of RIGHT: a mean reward that says the task is as good as solved, and one that has merely
wavered since."""

FLAT = 0.6
"""Share of groups that teach nothing."""
TWINS_TEACH = 0.05
"""What forced calls bring, from which on they teach the groups that are flat without them."""
ENTROPY_LEFT, ENTROPY_GONE, ENTROPY_NONE = 0.1, 0.02, 0.01
"""Shares of its start: too little unless the reward rose for it, too little in any case; in nats, so
little that nothing else is ever tried."""
GAPS = {"float32": 1e-3, "bfloat16": 5e-2}
"""Mean log-prob gap that rounding does not explain: 100 times and 3 times the most that it was seen
to do (1e-5, and 1.6e-2 with real weights on a GPU)."""
GAP_MOVED = 0.2
"""The same where the policy has moved since it sampled: e^0.2 is a ratio at the edge of PPO's range."""
GAP_GREW = 5.0
LENGTH_GREW = 2.0
CUT_SHARE, CUT_ROSE = 0.5, 0.2
CLIPPED = 0.3
TOOL_FAILURES, TOOL_FAILURES_ROSE, TOOLS_USED = 0.5, 0.3, 0.05
BROKEN, FAILING = 0.2, 0.05
"""Shares of attempts that fail: so many that the run is being wasted, so many that it is worth a look."""
NO_GRADIENT = 1e-9
SPIKE = 10.0
SAMPLE_SIZE, SAMPLE_SIZE_GONE = 0.5, 0.3
WAITING = 0.5

GAP = "sampling/sampling_logp_difference/mean"
SAMPLE_SIZE_NAME = "sampling/importance_sampling_ratio/ess"
TWINS_GAIN = "training/rewrites/gain"
"""Written only in steps that force calls; in the others forcing has brought 0."""

Level = Literal["warn", "alarm"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One remark; `level` is "warn" (look at it) or "alarm" (this run is probably being wasted)."""

    step: int
    metric: str
    level: Level
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class AlarmFinding(NamedTuple):
    """What a condition makes of the numbers; it says `text` if `load` is 1 or more."""

    load: float
    level: Level = "warn"
    text: str = ""


FINE = AlarmFinding(0.0)


class AlarmHistory:
    """The first and the latest numbers of each metric that is watched, and nothing else."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.start: dict[str, list[float]] = {k: [*v] for k, v in state.get("start", {}).items()}
        self.recent: dict[str, list[float]] = {k: [*v] for k, v in state.get("recent", {}).items()}
        self.best: float | None = state.get("best")
        """The best mean reward of WINDOW steps in a row."""
        self.highest: float | None = state.get("highest")
        """The best reward of a single step."""
        self.failure: str = state.get("failure", "")
        """Why most attempts failed when some last did."""

    def to_json(self) -> dict[str, Any]:
        return {
            "start": {name: [*values] for name, values in self.start.items()},
            "recent": {name: [*values] for name, values in self.recent.items()},
            "best": self.best,
            "highest": self.highest,
            "failure": self.failure,
        }

    def take(self, metrics: Mapping[str, Any]) -> set[str]:
        """Remember this step's numbers; which of them there were. What is no number is left out."""
        seen: set[str] = set()
        for name in WATCHED:
            value = _number(metrics.get(name, 0.0 if name == TWINS_GAIN else None))
            if value is None:
                continue
            seen.add(name)
            first = self.start.setdefault(name, [])
            if len(first) < WINDOW:
                first.append(value)
            self.recent[name] = [*self.recent.get(name, []), value][-KEPT:]
        if "reward" in seen:
            now, last = self.now("reward"), self.recent["reward"][-1]
            self.highest = last if self.highest is None else max(self.highest, last)
            if now is not None:
                self.best = now if self.best is None else max(self.best, now)
        return seen

    def last(self, name: str) -> float | None:
        values = self.recent.get(name)
        return values[-1] if values else None

    def now(self, name: str) -> float | None:
        """Mean of the latest WINDOW values; None before there are as many."""
        values = self.recent.get(name, [])
        return fmean(values[-WINDOW:]) if len(values) >= WINDOW else None

    def began(self, name: str) -> float | None:
        """Mean of the first WINDOW values; None before there are as many."""
        values = self.start.get(name, [])
        return fmean(values) if len(values) >= WINDOW else None

    @property
    def spread(self) -> float:
        """How far apart the attempts at a task were when the run began: the scale of its rewards."""
        return max(self.began("reward_std") or 0.0, 0.1)

    @property
    def has_learned(self) -> bool:
        """True if the reward is half a spread above where it began."""
        return self.gained >= self.spread / 2

    @property
    def gained(self) -> float:
        """Reward above where it began; 0 while nobody knows."""
        now, began = self.now("reward"), self.began("reward")
        return 0.0 if now is None or began is None else now - began

    @property
    def is_solved(self) -> bool:
        """True if nearly all earn what a right attempt does, or did and still come near it. A step
        that earned more than RIGHT shows that rewards have another scale here: then nobody knows."""
        now = self.now("reward")
        if now is None or self.best is None or self.highest is None:
            return False
        has_other_scale = self.highest > RIGHT + 1e-6
        return self.best >= SOLVED * RIGHT and now >= STILL_SOLVED * RIGHT and not has_other_scale


class AlarmContext(NamedTuple):
    """What a run's recipe says about its numbers."""

    dtype: str
    staleness: int
    max_grad_norm: float
    is_grouped: bool = True
    """Whether attempts are compared with the others at their task."""


def flat_groups(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    share, reward = memory.now("frac_reward_zero_std"), memory.now("reward")
    if share is None or not setting.is_grouped:
        return None
    if memory.is_solved or (memory.now(TWINS_GAIN) or 0.0) >= TWINS_TEACH:
        return FINE
    seen = "" if reward is None else f" (mean reward {reward:.3g})"
    if reward is not None and reward <= 0.1 * RIGHT:
        remedy = (
            "Nearly every attempt fails: try easier tasks, a warm-up (sft.steps, sft.data) or more "
            "attempts per task (rollout.samples)"
        )
    else:
        remedy = (
            "If this is all that a task can earn, it is solved. Otherwise some tasks are always solved "
            "and some never: try tasks in between, more attempts per task (rollout.samples), or fresh "
            "groups in their place (rollout.dynamic_rounds=4, which algo.name=dapo has)"
        )
    return AlarmFinding(
        share / FLAT,
        "alarm" if share >= 0.9 else "warn",
        f"{share:.0%} of the groups of the last {WINDOW} steps have no spread in reward{seen}. An "
        "attempt is compared with the others at its task, so these groups teach nothing and cost as "
        f"much as any. {remedy}",
    )


def entropy_collapse(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    now, began = memory.now("entropy"), memory.began("entropy")
    if now is None or began is None:
        return None
    if memory.is_solved:
        return FINE
    left = max(now, 1e-9)
    load = ENTROPY_GONE * began / left
    if not memory.has_learned:
        load = max(load, ENTROPY_LEFT * began / left, ENTROPY_NONE / left)
    return AlarmFinding(
        load,
        "alarm",
        f"entropy is {now:.3g} over the last {WINDOW} steps, {now / max(began, 1e-9):.0%} of the "
        f"{began:.3g} this run began with, and {_reward_words(memory)}. A policy that is sure of every "
        "token makes the same attempt again and again, and what it never tries it cannot learn. Try a "
        "lower train.lr, algo.entropy_coef=0.001, algo.name=dapo (it clips rising tokens later), "
        "algo.kl_coef=0.01, and rollout.temperature=1",
    )


def log_prob_gap(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    gaps = memory.recent.get(GAP, [])[-WINDOW:]
    if not gaps:
        return None
    now, (limit, has_moved) = fmean(gaps), _gap_limit(memory, setting)
    if has_moved:
        explained = f"even the updates between sampling and learning explain about {limit:g}"
        remedy = (
            "a lower train.lr, fewer train.epochs and train.minibatches, a lower rollout.staleness"
        )
    else:
        explained = f"rounding in {setting.dtype} explains far less than {limit:g}"
        remedy = (
            "engine.name=native (it holds the learner's own tensors), `graft doctor RECIPE` (template, "
            "temperature, weights that are served), model.dtype=float32"
        )
    return AlarmFinding(
        now / limit,
        "alarm",
        f"log-probs of engine and learner are {now:.2g} apart on average ({_steps(len(gaps))}), and "
        f"{explained}. What is trained is then not what was sampled, and the gradient points "
        f"elsewhere. Try {remedy}; algo.importance_cap=2 weighs tokens by the difference",
    )


def log_prob_gap_grows(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    now, began = memory.now(GAP), memory.began(GAP)
    limit, has_moved = _gap_limit(memory, setting)
    if now is None or began is None or now >= limit:  # beyond the limit `log_prob_gap` speaks
        return None
    floor = limit / (2 if has_moved else 10)
    return AlarmFinding(
        min(now / (GAP_GREW * max(began, 1e-12)), now / floor),
        "warn",
        f"the log-prob gap between engine and learner has grown from {began:.2g} to {now:.2g} (mean "
        f"of the last {WINDOW} steps; the alarm is at {limit:g}). A gap that grows is usually an engine "
        "that misses updates, or a policy that leaves the range in which both round alike. Look at "
        "sampling/sampling_logp_difference/max for single tokens; try a lower train.lr, "
        "algo.importance_cap=2, or engine.name=native",
    )


def length_explosion(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    name = "completions/mean_length"
    now, began = memory.now(name), memory.began(name)
    if now is None or began is None:
        return None
    if memory.is_solved or memory.gained >= memory.spread / 4:  # longer, and it pays: as wanted
        return FINE
    return AlarmFinding(
        now / (LENGTH_GREW * max(began, 1.0)),
        "warn",
        f"attempts have grown from {began:,.0f} to {now:,.0f} tokens (mean of the last {WINDOW} steps), "
        f"and {_reward_words(memory)}. Length without reward costs rollout time, and often it is "
        "repetition: read some attempts. Try algo.name=dr_grpo or algo.reduction=token (a row's "
        "length in the denominator rewards long failures), algo.overlong, a smaller rollout.max_tokens",
    )


def cut_attempts(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    name = "completions/clipped_ratio"
    now, began = memory.now(name), memory.began(name)
    if now is None or began is None:
        return None
    if memory.is_solved:
        return FINE
    return AlarmFinding(
        max(now / CUT_SHARE, (now - began) / CUT_ROSE),
        "warn",
        f"{now:.0%} of the attempts of the last {WINDOW} steps ran out of budget (it began with "
        f"{began:.0%}). They never give their answer, so they are trained as failures however good "
        "they were. Try a larger rollout.max_tokens, rollout.max_context or rollout.max_turns, "
        "whichever cuts; algo.mask_truncated=true leaves them out, algo.overlong makes length cost",
    )


def clip_fraction(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    now = memory.now("clip_ratio/region_mean")
    if now is None:
        return None
    return AlarmFinding(
        now / CLIPPED,
        "warn",
        f"{now:.0%} of the trained tokens of the last {WINDOW} steps lie outside the clip range. They "
        "get no gradient, and the policy has moved far from the one that sampled. Try a lower train.lr, "
        "fewer train.epochs or train.minibatches, a lower rollout.staleness",
    )


def tool_failures(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    name = "tools/failure_frequency"
    now, began, used = memory.now(name), memory.began(name), memory.now("tools/rate")
    if now is None or began is None:
        return None
    if used is None or used < TOOLS_USED:
        return FINE
    return AlarmFinding(
        max(now / TOOL_FAILURES, (now - began) / TOOL_FAILURES_ROSE),
        "warn",
        f"{now:.0%} of the tool calls of the last {WINDOW} steps failed (it began with {began:.0%}). A "
        "policy learns to avoid a tool that does not answer. Read a failed call in episodes/: if the "
        "tool is at fault (a server that is down, a timeout that is too short), repair it; if the calls "
        "are malformed, show the format in the prompt or in a warm-up (sft.steps)",
    )


def broken_attempts(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    shares = memory.recent.get("rollout/failed", [])[-WINDOW:]
    if not shares:
        return None
    now = fmean(shares)
    reason = f", mostly: {memory.failure}" if memory.failure else ""
    return AlarmFinding(
        now / (FAILING if len(shares) == WINDOW else BROKEN),  # one step's number may be chance
        "alarm" if now >= BROKEN else "warn",
        f"{now:.0%} of the attempts of {_steps(len(shares))} broke{reason}. A tool, the environment or "
        "the engine raised, or a wait passed rollout.deadline. They are not trained, and if hard tasks "
        "break more often, the rest is a biased sample. Each reason is with its span in "
        "episodes/step_*.jsonl (info.error), and in `graft view RUN`; repair it, or raise "
        "rollout.deadline",
    )


def missing_attempts(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    missing = memory.last("rollout/missing")
    if missing is None:
        return None
    return AlarmFinding(
        2.0 if missing > 0 else 0.0,
        "warn",
        f"the branch grew {missing:.0%} fewer attempts than rollout.samples asks for. The step learns "
        "from less than the recipe says, and groups that are too small compare badly. Its any_number = "
        "True allows that: begin rollout.samples attempts with builder.root() or path.fork(), or lower "
        "rollout.samples to what it grows",
    )


def no_gradient(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    norms, flat = memory.recent.get("grad_norm", []), memory.now("frac_reward_zero_std")
    if len(norms) < KEPT:
        return None
    is_said = setting.is_grouped and flat is not None and flat >= FLAT  # by `flat_groups`
    if memory.is_solved or is_said:
        return FINE
    return AlarmFinding(
        NO_GRADIENT / max(*norms, 1e-30),
        "alarm",
        f"the gradient has been 0 for {KEPT} steps: nothing is learned. Every attempt earns the same "
        "(look at reward and reward_std), or no token is trained (num_trained_tokens). Try easier tasks, "
        "a warm-up (sft.steps, sft.data), more rollout.tasks; `graft doctor RECIPE` tries the reward",
    )


def stale_engine(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    oldest = memory.last("staleness/max")
    if oldest is None:
        return None
    if oldest <= setting.staleness:
        return FINE
    means = memory.recent.get("staleness/mean", [])[-4:]
    grows = len(means) == 4 and all(b - a > 0.9 for a, b in pairwise(means))
    why = (
        "It has grown by one at every step: the engine takes no new weights"
        if grows
        else "The bound is not kept"
    )
    return AlarmFinding(
        oldest,
        "alarm",
        f"tokens that are {oldest:g} versions old were trained, and rollout.staleness allows "
        f"{setting.staleness}. {why}. Old tokens come from a policy that no longer exists, and their "
        "gradient misleads. Look at time/sync (0: nothing is sent) and at the engine's log; "
        "engine.sync=file is the slower and safer way to send weights",
    )


def reward_falls(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    now, best = memory.now("reward"), memory.best
    if now is None or best is None:
        return None
    rewards = memory.recent["reward"]
    steps = [abs(b - a) for a, b in pairwise(rewards)]
    # the median of |b - a| of a normal noise is 0.95 of its std: one fall does not make it noise
    noise = median(steps) / 0.95
    return AlarmFinding(
        (best - now) / max(memory.spread / 2, 2 * noise),
        "alarm",
        f"reward has fallen to {now:.3g} over the last {WINDOW} steps; its best {WINDOW} steps had "
        f"{best:.3g}. What was learned is being lost. Go on from an earlier checkpoint "
        "(run.keep_last, run.eval_every keep them) with a lower train.lr, or hold the policy with "
        "algo.kl_coef=0.01; look first at entropy, grad_norm and the log-prob gap of the steps before",
    )


def gradient_spike(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    norms, began = memory.recent.get("grad_norm", []), memory.began("grad_norm")
    known = [norm for norm in norms if norm > 0]  # a step of flat groups has none at all
    if began is None or len(known) < WINDOW:
        return None
    usual, worst = max(median(known), began), max(norms[-WINDOW:])
    # where few groups teach, a gradient is usually next to nothing, and ten times that is harmless
    harmless = setting.max_grad_norm or 1.0
    return AlarmFinding(
        min(worst / (SPIKE * usual), worst / harmless),
        "warn",
        f"grad_norm reached {worst:.3g}, {worst / usual:.0f} times its usual {usual:.3g}. "
        "train.max_grad_norm bounds what one step can do, but a batch like this has something in it: "
        "an attempt that is very long, a token that was nearly impossible, a tool's answer that is "
        "trained by mistake. Read the step's episodes; try a lower train.lr or train.max_grad_norm, "
        "and more train.warmup if it is early",
    )


def sample_size(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    now = memory.now(SAMPLE_SIZE_NAME)
    if now is None:
        return None
    return AlarmFinding(
        SAMPLE_SIZE / max(now, 1e-9),
        "alarm" if now < SAMPLE_SIZE_GONE else "warn",
        f"the effective sample size of the importance weights is {now:.2f} over the last {WINDOW} "
        f"steps: the batch is worth {now:.0%} of its tokens, and a few of them decide the update. The "
        "data is too old, or the engine too far from the learner. Try a lower rollout.staleness, a "
        "lower train.lr, a lower algo.importance_cap; look at the log-prob gap",
    )


def starved_learner(memory: AlarmHistory, setting: AlarmContext) -> AlarmFinding | None:
    # where sampling runs ahead, a step's rollout takes as long as the learner still waits for it
    waited, total = memory.now("time/rollout"), memory.now("step_time")
    if waited is None or total is None:
        return None
    if not setting.staleness:  # then the two take turns, and waiting is how it is meant
        return FINE
    share = waited / max(total, 1e-9)
    return AlarmFinding(
        share / WAITING,
        "warn",
        f"the learner waited for rollouts in {share:.0%} of the last {WINDOW} steps' time "
        f"({waited:.1f} of {total:.1f} s a step). The devices that learn stand idle. Try more "
        "cluster.workers (`graft scale RUN N`), a larger rollout.concurrency, a larger "
        "rollout.staleness, shorter attempts; tools/NAME/seconds shows tools that are slow",
    )


Judge = Callable[[AlarmHistory, AlarmContext], AlarmFinding | None]

CONDITIONS: dict[str, tuple[str, Judge]] = {
    "flat_groups": ("frac_reward_zero_std", flat_groups),
    "entropy_collapse": ("entropy", entropy_collapse),
    "log_prob_gap": (GAP, log_prob_gap),
    "log_prob_gap_grows": (GAP, log_prob_gap_grows),
    "length_explosion": ("completions/mean_length", length_explosion),
    "cut_attempts": ("completions/clipped_ratio", cut_attempts),
    "clip_fraction": ("clip_ratio/region_mean", clip_fraction),
    "tool_failures": ("tools/failure_frequency", tool_failures),
    "broken_attempts": ("rollout/failed", broken_attempts),
    "missing_attempts": ("rollout/missing", missing_attempts),
    "stale_engine": ("staleness/max", stale_engine),
    "reward_falls": ("reward", reward_falls),
    "gradient_spike": ("grad_norm", gradient_spike),
    "no_gradient": ("grad_norm", no_gradient),
    "sample_size": (SAMPLE_SIZE_NAME, sample_size),
    "starved_learner": ("time/rollout", starved_learner),
}
"""Name -> the metric it is about, and how it is judged. A step without that metric says nothing."""

WATCHED = (
    *dict.fromkeys(metric for metric, _ in CONDITIONS.values()),
    "reward_std",
    TWINS_GAIN,
    "optimizer_steps",
    "tools/rate",
    "staleness/mean",
    "step_time",
)


MOST_OF_A_REASON = 300
"""Characters of a failure's reason that an alarm repeats."""


class Alarms:
    """Looks at every RL step of one run: its policy's dtype, rollout.staleness, train.max_grad_norm,
    and whether its credit compares attempts at the same task."""

    def __init__(
        self,
        dtype: str = "float32",
        staleness: int = 0,
        max_grad_norm: float = 1.0,
        is_grouped: bool = True,
    ) -> None:
        self.setting = AlarmContext(
            dtype.removeprefix("torch."), staleness, max_grad_norm, is_grouped
        )
        self.memory = AlarmHistory()
        self.standing: dict[str, int] = {}
        """Conditions that have begun and not gone away -> the step in which they spoke."""

    def look(self, step: int, metrics: Mapping[str, Any], failure: str = "") -> list[Alarm]:
        """What begins with this step; nothing that was said already and still holds. `failure` is the
        commonest reason why attempts failed."""
        if failure:
            self.memory.failure = failure[:MOST_OF_A_REASON]
        seen = self.memory.take(metrics)
        begun: list[Alarm] = []
        for name, (metric, judge) in CONDITIONS.items():
            finding = judge(self.memory, self.setting) if metric in seen else None
            if finding is None:
                continue
            if name in self.standing:
                if finding.load < OVER:
                    del self.standing[name]
            elif finding.load >= 1.0:
                self.standing[name] = step
                begun.append(Alarm(step, metric, finding.level, finding.text))
        return begun

    def to_json(self) -> dict[str, Any]:
        """All that a resumed run needs to go on; plain JSON, of bounded size."""
        return {**self.memory.to_json(), "standing": {**self.standing}}

    @classmethod
    def from_json(
        cls,
        state: Mapping[str, Any],
        dtype: str = "float32",
        staleness: int = 0,
        max_grad_norm: float = 1.0,
        is_grouped: bool = True,
    ) -> Alarms:
        """Go on from what `to_json` gave, or begin where it is empty; the rest is as for a new one."""
        alarms = cls(dtype, staleness, max_grad_norm, is_grouped)
        alarms.memory = AlarmHistory(state)
        standing = state.get("standing", {})
        alarms.standing = {name: step for name, step in standing.items() if name in CONDITIONS}
        return alarms


def _number(value: Any) -> float | None:
    """A number that can be added up, or None for everything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1e300 else None  # false for NaN, too


def _gap_limit(memory: AlarmHistory, setting: AlarmContext) -> tuple[float, bool]:
    """The mean gap that is too much, and whether the policy had moved since it sampled."""
    updates = memory.recent.get("optimizer_steps", [])[-WINDOW:]
    ages = memory.recent.get("staleness/max", [])[-WINDOW:]
    if max(updates, default=0.0) > 1 or max(ages, default=0.0) > 0:  # in any step of the mean
        return GAP_MOVED, True
    return GAPS.get(setting.dtype, GAPS["bfloat16"]), False


def _reward_words(memory: AlarmHistory) -> str:
    now, began = memory.now("reward"), memory.began("reward")
    if now is None or began is None:
        return "no reward says that this was worth it"
    return f"the reward is {now:.3g} where it began with {began:.3g}"


def _steps(count: int) -> str:
    return "this step" if count == 1 else f"the last {count} steps"
