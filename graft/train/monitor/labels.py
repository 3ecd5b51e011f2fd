"""The words that commands print beside numbers, and what each of them means.

    WATCHED            spread 0.412      the metric reward_std, in three digits
    SCORE_COLUMNS      held out  before  after  change
    MEANINGS["left"]   "Time until the phase ends, ..."

The display, the table of scores and `graft runs` take their words from here, so `graft explain WORD`
knows every one of them: a metric's text where the word stands for a metric, else its entry in `MEANINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class WatchedMetric(NamedTuple):
    """A metric that a person watches while a run goes on."""

    metric: str
    word: str
    form: Callable[[float], str]
    is_brief: bool = True
    """Whether it is in the one line that stays of a phase, too."""


WATCHED: tuple[WatchedMetric, ...] = (
    WatchedMetric("reward", "reward", "{:.3f}".format),
    WatchedMetric("accuracy", "accuracy", "{:.3f}".format),
    WatchedMetric("loss", "loss", "{:.3f}".format),
    WatchedMetric("reward_std", "spread", "{:.3f}".format, is_brief=False),
    WatchedMetric("entropy", "entropy", "{:.3f}".format),
    WatchedMetric("completions/mean_length", "length", "{:,.0f}".format, is_brief=False),
    WatchedMetric("tools/rate", "tools", "{:.0%}".format),
    WatchedMetric("sampling/sampling_logp_difference/mean", "gap", "{:.1e}".format, is_brief=False),
    WatchedMetric("clip_ratio/region_mean", "clipped", "{:.1%}".format, is_brief=False),
    WatchedMetric("tokens_per_second", "tokens/s", "{:,.0f}".format),
)
"""In the order in which they are shown. Where there is a reward the loss is left out: a policy-gradient
loss near 0 is normal and says nothing about progress."""

RECENT = 10
"""Steps of the middle column of the live table."""

LIVE_COLUMNS = ("now", f"last {RECENT}", "first")
SCORE_COLUMNS = ("held out", "before", "after", "change")
RUN_COLUMNS = ("run", "status", "step", "now", "held out", "settings", "active", "size")
PHASE_WORDS: Mapping[str, str] = {"sft": "warm-up", "rl": "reinforce"}

SCORES = {"sampled": "eval/sampled", "greedy": "eval/greedy", "tool_rate": "eval/tool_rate"}
"""Rows of the table of scores -> the metric that a run writes of the same evaluation."""

MEANINGS: dict[str, str] = {
    # the live table, and a line per step
    "now": "The value at the latest step; in `graft runs` the reward (in a warm-up the loss) of the latest "
    "step.",
    "last {n}": "Mean over the latest {n} steps that have the metric.",
    "first": "The value at the first step of the phase that this process saw; after a resumption that is "
    "the first step since then.",
    "left": "Time until the phase ends, if its remaining steps take as long as those so far.",
    "starting": "No step of the phase has ended yet.",
    "step": "One round of the loop: attempts, advantages, optimizer update. 12/60: step 12 of 60.",
    "steps": "Rounds of the loop that the phase has in all: train.steps, or sft.steps in a warm-up.",
    "train": "The run, before its first phase has begun.",
    "warm-up": "The supervised phase of a run (sft.*): it imitates demonstrations or rows before RL.",
    "reinforce": "The RL phase of a run (train.*): attempts are made, scored and learned from.",
    "alarm": "A metric says that the run is probably being wasted. The text names the numbers, the cause "
    "and what to try; all of them are in alarms.jsonl.",
    "alarms": "How many alarms and warnings the run has had; they are in alarms.jsonl.",
    "warning": "A metric looks unhealthy; less severe than an alarm. It is in alarms.jsonl too.",
    "run folder": "Where the run's files are: config.yaml, metrics.jsonl, episodes/, checkpoints/, "
    "summary.json.",
    # a transcript
    "task": "What the environment asks: the prompt of the attempt.",
    "policy": "What the model wrote.",
    "env": "What the environment or a tool answered; the model reads it and is not trained on it.",
    "context": "The history was rewritten here (a wrapper such as max_history): the next prompt begins "
    "context 2, 3, ...",
    "truncated": "An attempt that ran out of rollout.max_tokens, rollout.max_turns or "
    "rollout.max_context. It is trained.",
    "tool_error": "An attempt that ended because a tool raised; the policy did not cause it. Not trained.",
    "env_error": "An attempt that ended because the environment raised. Not trained.",
    "engine_error": "An attempt that ended because the engine could not sample. Not trained.",
    "timeout": "An attempt whose completion or environment took longer than rollout.deadline. Not trained.",
    "replaced": "An attempt in whose place its counterfactual twin is trained (branch counterfactual).",
    "aborted": "An attempt that was thrown away: the budget was met, or the run was stopping.",
    # scores before and after
    "held out": "Scores on tasks that are never trained on (task.eval_args): the mean reward before and "
    "after RL, at rollout.temperature.",
    "before": "The score before the first RL step, a warm-up included.",
    "after": "The score of the last checkpoint.",
    "change": "After less before.",
    # graft runs
    "run": "The run's name: its folder under runs/, or under the folder that was given.",
    "status": "running, done, failed or stopped: see each.",
    "settings": "The settings in which the listed runs differ, with this run's value; `--json` has all.",
    "active": "When the run last wrote anything.",
    "size": "What the run's folder takes on the disk.",
    "running": "A process on this machine runs it now.",
    "silent": "Its process lives, and has written nothing for five times as long as its last step took "
    "(at least a minute): a long evaluation, a tool that hangs, a machine that is stopped.",
    "done": "Of a run: it made all of its steps and wrote summary.json. Of an attempt: the environment "
    "ended it.",
    "failed": "The run ended with an error, which `graft watch RUN` prints; after `%`: the share of "
    "attempts that a tool, an environment or the engine ended.",
    "stopped": "The run was interrupted or killed; the same command goes on from its newest checkpoint.",
    # graft eval
    "checkpoint": "The model that was scored: a checkpoint's phase and step, or the name of a model.",
    "set": "The set of held-out tasks: a benchmark, an environment, or the label given with --on.",
    "data source": "The part of the set that the tasks come from, where a set has several.",
    "tasks": "How many tasks the scores are over.",
    "avg": "Mean reward over all attempts.",
    "avg@{k}": "Mean reward over {k} attempts at each task; in brackets the 95% interval over tasks.",
    "pass@{k}": "Probability that at least one of {k} attempts at a task is right (reward >= --solved), "
    "estimated without bias from all attempts; in brackets the 95% interval over tasks.",
    "maj@{k}": "Share of tasks in which the commonest answer of {k} attempts is right; in brackets the 95% "
    "interval over tasks.",
    "calls": "Mean number of tool calls of an attempt.",
    "measure": "What is compared: avg, pass@k or maj@k, over the tasks that both evaluations have.",
    "ours": "The score of this evaluation, over the tasks that both have.",
    "theirs": "The score of the evaluation given with --against, over the tasks that both have.",
    "difference": "Ours less theirs, task by task; in brackets the 95% bootstrap interval.",
    "p": "Two-sided p-value of the difference: the share of random swaps of the two sides, task by task, "
    "that give a difference at least as large.",
}
"""Words that are no metric -> what they mean. In braces: any number or name."""


def watched(metrics: Mapping[str, float], is_brief: bool = False) -> list[WatchedMetric]:
    """The rows of `WATCHED` that these metrics have."""
    return [
        row
        for row in WATCHED
        if row.metric in metrics
        and (row.is_brief or not is_brief)
        and not (row.metric == "loss" and "reward" in metrics)
    ]


def in_words(metrics: Mapping[str, float], is_brief: bool = False) -> str:
    """ "reward 0.500  tools 93%": what matters of a step in one line; unknown names are left out."""
    rows = watched(metrics, is_brief)
    return "  ".join(f"{row.word} {row.form(metrics[row.metric])}" for row in rows)
