"""What every metric of a run means, when it is healthy, and what to try when it is not.

    explain("frac_reward_zero_std").what      "Share of the groups (the attempts at one task) in which ..."
    explain("tools/search/calls").what        "Calls of search per attempt ..."

    explain("spread").name                    "reward_std": the display's word for it
    explain("pass@8").what                    "Probability that at least one of 8 attempts ..."

The second is found under "tools/{tool}/calls": what stands in braces is any text without a slash. The
same texts are `graft explain WORD`, the tooltips of the viewer and docs/metrics.md, which
`python -m graft.train.monitor.metric_docs > docs/metrics.md` writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from graft.registry import UnknownName
from graft.train.monitor.alarms import CONDITIONS
from graft.train.monitor.labels import MEANINGS, SCORES, WATCHED


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """One metric in words."""

    name: str
    what: str
    """What it is, as a formula in words."""
    healthy: str
    """What it does in a run that learns, and why; empty: a word that is no metric."""
    remedy: str
    """What to look at or to change when it does something else; empty: it is a mere count."""
    range: tuple[float | None, float | None] | None = None
    """Least and most that are healthy, where numbers can say so; None on one side: no bound there."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


AREAS: dict[str, tuple[MetricDoc, ...]] = {
    "What is earned": (
        MetricDoc(
            "reward",
            "Mean reward over the step's attempts. Attempts that broke are left out; counterfactual "
            "twins are not counted, the attempts that they replace are.",
            "Rises over tens of steps, with noise from step to step because every step has other "
            "tasks. This is the curve to watch, not the loss.",
            "Flat from the start: look at frac_reward_zero_std (no signal), advantages/std and "
            "learning_rate, and read some attempts. It rises and then falls: a lower train.lr, "
            "algo.kl_coef=0.01, an earlier checkpoint. It rises and eval/sampled does not: the "
            "reward is being gamed or the tasks are memorised; read the best attempts.",
        ),
        MetricDoc(
            "reward_std",
            "Standard deviation of reward within a group (the attempts at one task), averaged over "
            "groups.",
            "Clearly above 0 while the policy learns; goes to 0 when the tasks are solved. Of rewards 0 "
            "and 1 the most is 0.5, where half of the attempts succeed.",
            "0 for long: every attempt at a task earns the same, and nothing is learned. See "
            "frac_reward_zero_std.",
        ),
        MetricDoc(
            "reward/{component}",
            "Mean of {component}, one of several rewards in task.reward, before its weight; reward is their "
            "weighted sum.",
            "The one that stands for the task rises; those for form are reached early and stay.",
            "Form rises and the task does not: lower the weight of the form, so that it does not pay to "
            "answer well-formed nonsense.",
        ),
        MetricDoc(
            "frac_reward_zero_std",
            "Share of the groups (the attempts at one task) in which all attempts earned the same.",
            "Below about 0.6. The advantage is the difference to the others of the group, so a flat "
            "group has no gradient. A share near 1 is fine only when the reward is at its best: the "
            "tasks are solved.",
            "Reward near 0: tasks are too hard; take easier ones, a warm-up (sft.steps), more "
            "attempts (rollout.samples). Reward high: tasks are too easy; take harder ones. In "
            "between: rollout.dynamic_rounds=4 or algo.name=dapo draw fresh groups in their place.",
            (0.0, 0.6),
        ),
        MetricDoc(
            "advantages/std",
            "Standard deviation of the advantage over all trained tokens.",
            "About 1 with grpo and ppo, which divide by the std; a flat group contributes zeros, so "
            "half of the groups flat gives about 0.7. About reward_std with dr_grpo and rloo.",
            "0 says that this step had no signal at all: see frac_reward_zero_std.",
            (0.05, 2.0),
        ),
    ),
    "Loss and gradient": (
        MetricDoc(
            "loss",
            "What is minimised: the policy term, with KL and entropy terms where the recipe has them, "
            "summed with the weights of algo.reduction. In a warm-up: the cross-entropy of the "
            "learned tokens, in nats.",
            "In RL near 0, and that is normal: the advantages of a group sum to zero, and with one "
            "update per batch every ratio is 1. It says nothing about progress; watch the reward. In "
            "a warm-up it falls.",
            "A warm-up's loss that does not fall: a higher sft.lr, longer sft.warmup if it jumps; look "
            "with `graft data show` at what is learned. Not a finite number: the run stops and keeps "
            "the batch.",
        ),
        MetricDoc(
            "loss/policy",
            "The policy term alone: mean over trained tokens of -advantage * ratio, clipped as the "
            "algorithm says (for reinforce: -advantage * log-prob).",
            "Around 0, of either sign, for the same reason as the loss.",
            "Far from 0 and growing: the policy moves far within one batch; see clip_ratio/region_mean.",
        ),
        MetricDoc(
            "loss/value",
            "With a critic: half the squared error of its values against the returns, mean over "
            "trained tokens, the larger of plain and clipped.",
            "Falls in the first tens of steps, to below half the variance of the rewards. It can never "
            "reach 0 where rewards are chance.",
            "It does not fall: a higher algo.critic_lr. It grows: a lower one.",
            (0.0, None),
        ),
        MetricDoc(
            "grad_norm",
            "Length of the whole gradient as one vector, before it is clipped to train.max_grad_norm.",
            "Steady within a factor of a few, and 0 in a step whose groups are all flat. Single spikes "
            "are clipped and do no harm.",
            "Spikes again and again: a lower train.lr, longer train.warmup; read the attempts of "
            "such a step. Always far above train.max_grad_norm: every step is clipped, so the "
            "learning rate is what decides; that is allowed.",
        ),
        MetricDoc(
            "learning_rate",
            "The learning rate of this step: train.lr (in a warm-up sft.lr) after train.warmup and "
            "train.schedule.",
            "As planned. Usual for RL of a whole model: 1e-6 to 1e-5; with adapters about ten times "
            "that; a tiny model from random weights takes 1e-4 and more.",
            "Reward does not move, and entropy neither: raise train.lr three times. Entropy falls "
            "to 0 or the reward breaks down: lower it three times.",
        ),
        MetricDoc(
            "critic/grad_norm",
            "Length of the critic's gradient before clipping.",
            "Falls with loss/value, then steady.",
            "Spikes again and again: a lower algo.critic_lr.",
        ),
        MetricDoc(
            "critic/learning_rate",
            "The critic's learning rate of this step (algo.critic_lr; 0 there takes train.lr).",
            "As planned; often larger than the policy's.",
            "See loss/value.",
        ),
        MetricDoc(
            "optimizer_steps",
            "Optimizer steps taken on this batch.",
            "train.epochs x train.minibatches; with 1 the data is exactly of the policy that learns.",
            "More than planned or fewer: a minibatch without rows is left out; train.minibatches "
            "wants as many groups (rollout.tasks).",
            (1.0, None),
        ),
    ),
    "How the policy moves": (
        MetricDoc(
            "entropy",
            "How unsure the policy is: -sum p log p over its next-token distribution, in nats, mean "
            "over trained tokens; what a grammar forbids is not counted. 0: always the same token; "
            "0.69: a coin.",
            "Falls slowly while the reward rises. It goes to nearly 0 only when the task is solved.",
            "Falls to a tenth and the reward has not risen: a collapse, nothing new is tried any more. "
            "A lower train.lr, algo.entropy_coef=0.001, algo.name=dapo, algo.kl_coef. It rises "
            "steadily: a lower algo.entropy_coef, a lower train.lr; the text turns into noise.",
        ),
        MetricDoc(
            "kl",
            "Estimate of KL(policy || reference), in nats per trained token (algo.kl_kind): with d = "
            "log-prob less the reference's, k3 is exp(-d) + d - 1. 0 where an action beyond the "
            "vocabulary was chosen. There with algo.kl_coef in the loss.",
            "Begins at 0 and grows slowly; a policy that learns must leave its reference. Hundredths to "
            "a few tenths are usual.",
            "It jumps or passes 1: a higher algo.kl_coef, a lower train.lr. It stays at 0 and the "
            "reward too: a lower algo.kl_coef.",
            (0.0, 1.0),
        ),
        MetricDoc(
            "clip_ratio/low_mean",
            "Share of trained tokens with a negative advantage whose ratio (probability now / when "
            "sampled) is below 1 - low: they have fallen as far as they may.",
            "0 with one update per batch, a few per cent with several.",
            "As clip_ratio/region_mean.",
            (0.0, 0.3),
        ),
        MetricDoc(
            "clip_ratio/high_mean",
            "Share of trained tokens with a positive advantage whose ratio is above 1 + high: they "
            "have risen as far as they may.",
            "0 with one update per batch, a few per cent with several.",
            "High while the entropy falls: rare tokens are held back; a wider range upwards "
            "(algo.loss={clip: {low: 0.2, high: 0.28}}, as dapo has).",
            (0.0, 0.3),
        ),
        MetricDoc(
            "clip_ratio/region_mean",
            "Share of trained tokens that have moved out of the clip range in the direction their "
            "advantage asks for, and so have no gradient (cispo: a bounded one).",
            "Exactly 0 with one update per batch; a few per cent with several; 15% and more is usual "
            "for gspo, whose range is narrow.",
            "Above 0.3: the policy runs away from its data. A lower train.lr, fewer train.epochs or "
            "train.minibatches, a lower rollout.staleness.",
            (0.0, 0.3),
        ),
    ),
    "Engine against learner": (
        MetricDoc(
            "sampling/sampling_logp_difference/mean",
            "Mean over trained tokens of |log-prob that the learner computes - log-prob that the engine "
            "sampled with|. With several updates per batch, or rollout.staleness above 0, it holds "
            "the policy's own movement too.",
            "Rounding only: below 1e-5 in float32, usually below 8e-3 in bfloat16 on a GPU (1.6e-2 was "
            "seen). With several updates below 0.2.",
            "Beyond 1e-3 (float32) or 5e-2 (bfloat16) the engine samples from something else than is "
            "trained: old weights, another temperature, a mask, a template. `graft doctor RECIPE` "
            "compares them; engine.name=native holds the learner's own tensors; "
            "algo.importance_cap=2 corrects what is left.",
            (0.0, 0.05),
        ),
        MetricDoc(
            "sampling/sampling_logp_difference/max",
            "The largest such difference of any trained token of the step.",
            "Below 1e-3 in float32; tenths are usual in bfloat16, where one unlikely token is enough.",
            "Far above p999: a single token is off. Look for it in the viewer (colour by ratio): often "
            "the last token of a turn, or one that the grammar or a stop string has touched.",
        ),
        MetricDoc(
            "sampling/sampling_logp_difference/p999",
            "The difference that all but a thousandth of the trained tokens stay below.",
            "Ten to a hundred times the mean: below 1e-4 in float32, up to 0.3 in bfloat16.",
            "As sampling/sampling_logp_difference/mean.",
        ),
        MetricDoc(
            "sampling/importance_sampling_ratio/mean",
            "Mean weight of a trained token, min(probability by the learner before the update / by "
            "the engine, algo.importance_cap). There with a cap; rollout.staleness brings one.",
            "0.95 to 1.05: without the cap the mean would be exactly 1 on average.",
            "Well below 1: the cap cuts much, or engine and learner differ; see "
            "sampling/sampling_logp_difference/mean and sampling/importance_sampling_ratio/ess.",
            (0.9, 1.1),
        ),
        MetricDoc(
            "sampling/importance_sampling_ratio/ess",
            "Effective sample size of these weights as a share: (their mean)^2 / mean of their squares. "
            "1: all tokens count alike; 0.3: the batch is worth 30% of its tokens. There with a cap.",
            "Above 0.9 on fresh data, above 0.5 on old.",
            "Below 0.5 few tokens decide the update, below 0.3 the data is too stale: a lower "
            "rollout.staleness, a lower train.lr, a lower algo.importance_cap.",
            (0.5, 1.0),
        ),
        MetricDoc(
            "sampling/entropy_top_k",
            "How the engine knows entropies: from so many of its likeliest tokens (a lower bound); 0: "
            "exactly, from all of them. The learner's own entropy is always exact.",
            "0 with engine.name=native; 20 or so with a server. It matters for branches that fork by "
            "entropy (arpo, aepo) and for the credit entropy_aware.",
            "Forks come at the wrong places: an engine that is exact, or more tokens in engine.args.",
            (0.0, None),
        ),
        MetricDoc(
            "staleness/mean",
            "Versions of the weights between sampling a token and learning from it, mean over trained "
            "tokens.",
            "0 where sampling and learning take turns; below rollout.staleness otherwise.",
            "At the bound all the time: rollouts are too slow for so many steps ahead, or sampling "
            "runs ahead for nothing; see time/rollout and rollout/steps_waiting.",
            (0.0, None),
        ),
        MetricDoc(
            "staleness/max",
            "Versions between sampling and learning of the oldest trained token.",
            "At most rollout.staleness; older ones are never trained.",
            "Beyond the bound: the engine misses updates. Look at time/sync and at its log.",
            (0.0, None),
        ),
    ),
    "Length": (
        MetricDoc(
            "completions/mean_length",
            "The policy's own tokens per trained row (prompts and tool results not counted; the "
            "descriptions of actions are), mean.",
            "Well below the budget. It may grow while the reward grows: longer reasoning or more calls.",
            "Doubles and the reward does not follow: repetition, or a loss that favours long failures. "
            "algo.name=dr_grpo or algo.reduction=token, algo.overlong, a smaller rollout.max_tokens. "
            "Shrinks to almost nothing: look at what the shortest attempts earn.",
        ),
        MetricDoc(
            "completions/min_length",
            "The policy's tokens in the shortest trained row.",
            "Long enough for an answer.",
            "0 or 1: attempts that end at once; look at stop strings and at the template's end token.",
            (1.0, None),
        ),
        MetricDoc(
            "completions/max_length",
            "The policy's tokens in the longest trained row.",
            "Below rollout.max_tokens x rollout.max_turns and rollout.max_context.",
            "Always at the budget: see completions/clipped_ratio.",
        ),
        MetricDoc(
            "completions/clipped_ratio",
            "Share of attempts that a budget cut off: rollout.max_tokens, rollout.max_turns or "
            "rollout.max_context.",
            "Low, or falling. An attempt that is cut has no answer and counts as a failure.",
            "Above a half, or rising: a larger budget, algo.mask_truncated=true (they are not trained), "
            "algo.overlong (length costs before the end).",
            (0.0, 0.5),
        ),
    ),
    "Attempts": (
        MetricDoc(
            "rollout/turns",
            "Turns per attempt, mean: how often the policy spoke and was answered, or ended.",
            "1 where there are no tools or games; otherwise what the task needs.",
            "At rollout.max_turns: attempts do not come to an end; raise it, or say in the prompt how "
            "to finish.",
        ),
        MetricDoc(
            "rollout/failed",
            "Share of attempts that broke: a tool, the environment or the engine raised, or a wait passed "
            "rollout.deadline. They are not trained.",
            "0.",
            "The reason stands in the failed span of episodes/ (info.error). Repair the tool or "
            "environment, or raise rollout.deadline. From a quarter on, with none that ended, the run stops.",
            (0.0, 0.05),
        ),
        MetricDoc(
            "rollout/missing",
            "Share of attempts that the branch should have grown (rollout.samples a task) and has not.",
            "0.",
            "A branch of your own leaves attempts out, which its any_number = True allows: begin "
            "rollout.samples of them with growth.root() or path.fork(), or lower rollout.samples.",
            (0.0, 0.0),
        ),
        MetricDoc(
            "rollout/no_room",
            "Share of attempts whose prompt alone fills rollout.max_context, so that they could not "
            "say a word.",
            "0.",
            "Raise rollout.max_context, or leave such tasks out.",
            (0.0, 0.0),
        ),
        MetricDoc(
            "rollout/set_aside",
            "Groups that were drawn and not used because all their attempts earned the same (dynamic "
            "sampling: rollout.dynamic_rounds, dapo).",
            "0 without dynamic sampling; with it, less than rollout.tasks.",
            "Several times rollout.tasks: most of the sampling is thrown away; easier or harder tasks "
            "would be cheaper.",
            (0.0, None),
        ),
        MetricDoc(
            "rollout/workers",
            "Processes that sampled in this step.",
            "cluster.workers, or what `graft scale RUN N` asked for last.",
            "Fewer: one died and is being replaced; the run's log names it.",
            (1.0, None),
        ),
        MetricDoc(
            "rollout/redone",
            "Episodes that were done again because the worker that had them died or was lost.",
            "0. Each is counted once and trained once, whoever did it in the end.",
            "Again and again: workers run out of memory or are killed; look at their last lines, lower "
            "rollout.concurrency or engine.kv_tokens.",
            (0.0, 0.0),
        ),
        MetricDoc(
            "rollout/steps_waiting",
            "Steps whose attempts were done and waited for the learner when it came for the next; with "
            "rollout.staleness above 0.",
            "Between 0 and rollout.staleness; 0 means that the learner waits, the most that sampling does.",
            "Always 0: rollouts are the slow half; see time/rollout. Always at rollout.staleness: the "
            "learner is; a larger rollout.staleness would only make the data older.",
            (0.0, None),
        ),
        MetricDoc(
            "rollout/discarded",
            "Unfinished attempts that were thrown away when new weights came (rollout.unfinished=discard).",
            "0 with rollout.unfinished=continue. Otherwise well below the attempts of a step.",
            "As many as a step's attempts: long ones never get to their end, and only short ones are "
            "learned from. rollout.unfinished=continue.",
            (0.0, None),
        ),
    ),
    "Tools": (
        MetricDoc(
            "tools/rate",
            "Share of attempts that called a tool at least once.",
            "What the task needs; near 1 where nothing works without.",
            "It falls to 0: calls fail (tools/failure_frequency) or do not pay; look at the rewards of "
            "attempts with a call. It stays at 0: a warm-up that shows calls (sft.steps).",
        ),
        MetricDoc(
            "tools/call_frequency",
            "Calls along an attempt, mean, forked or not.",
            "Settles at what the task needs.",
            "Grows without end: a limit (max_uses of the wrapper), or a reward that calls cost.",
        ),
        MetricDoc(
            "tools/failure_frequency",
            "Failed calls per call: answered with an error, malformed, or refused.",
            "Falls as the policy learns the format; some per cent stay where code is written.",
            "Above a half, or rising: read a failed call. The tool's fault: repair it, raise its "
            "timeout. The policy's: show the format in the prompt or in a warm-up.",
            (0.0, 0.5),
        ),
        MetricDoc(
            "tools/calls_made",
            "Calls of the step in all, those answered with an error or a refusal too; a call that several "
            "attempts go through is counted once. Those of tools/broken are not among them.",
            "Attempts x tools/call_frequency, less what branches share.",
            "",
            (0.0, None),
        ),
        MetricDoc(
            "tools/{tool}/calls",
            "Calls of {tool} per attempt that were carried out, failed ones included.",
            "What the task needs.",
            "0 though the tool is needed: is it described in the prompt, and does its name fit the format?",
            (0.0, None),
        ),
        MetricDoc(
            "tools/{tool}/failures",
            "Calls of {tool} per attempt that were answered with an error.",
            "Well below tools/{tool}/calls.",
            "Nearly as many as calls: read one in episodes/.",
            (0.0, None),
        ),
        MetricDoc(
            "tools/{tool}/seconds",
            "Seconds that an attempt waited for {tool}, mean; of tools that wait.",
            "Small against time/rollout. Attempts wait side by side, so it is not added to the step's time.",
            "It makes the step slow: more of its concurrency, a cache, a shorter timeout, and "
            "rollout.staleness=1, so that learning goes on meanwhile.",
            (0.0, None),
        ),
        MetricDoc(
            "tools/refused",
            "Calls per attempt beyond the wrapper's max_uses; in steps that have any.",
            "Falls: the policy learns how many it has.",
            "It stays: say the limit in the prompt, or raise it.",
            (0.0, None),
        ),
        MetricDoc(
            "tools/malformed",
            "Calls per attempt that could not be read: a closing tag without an opening one, JSON that is "
            "none; in steps that have any.",
            "Falls quickly.",
            "It stays: examples in the prompt, a warm-up (sft.steps), or actions.file, which holds "
            "calls to a syntax.",
            (0.0, None),
        ),
        MetricDoc(
            "tools/invented",
            "Results per attempt that the policy wrote itself (the opening of a result, which only the "
            "environment writes); in steps that have any.",
            "Falls to 0: an invented result never helps.",
            "It stays: is the call's closing string among the stop strings, and is the result of a "
            "warm-up masked (sft.mask_results)?",
            (0.0, None),
        ),
        MetricDoc(
            "tools/broken",
            "Share of attempts that ended in a call because the tool, or the environment behind it, raised "
            "or passed rollout.deadline; in steps that have any.",
            "Not there at all.",
            "A fault outside the policy: see rollout/failed.",
            (0.0, 0.0),
        ),
    ),
    "Branches": (
        MetricDoc(
            "branch/roots",
            "Attempts per task that began at the prompt (branches arpo and aepo).",
            "The branch's initial_rollouts; aepo chooses by itself.",
            "",
        ),
        MetricDoc(
            "branch/forks",
            "Forks per task, behind observations.",
            "About rollout.samples less branch/roots, where attempts see observations to fork behind.",
            "0: attempts call no tools, or branch_probability is too low; then attempts are filled up "
            "from the prompt.",
            (0.0, None),
        ),
        MetricDoc(
            "branch/rate",
            "Forks per decision, a decision being one attempt after one observation.",
            "Near branch_probability of the branch, above it where observations make unsure.",
            "",
            (0.0, None),
        ),
        MetricDoc(
            "branch/entropy_change",
            "Mean over decisions: entropy of the first tokens after an observation less that of the "
            "attempt's first tokens, both as a share of ln(vocabulary).",
            "Above 0 early: results surprise. Falls as the policy learns to read them.",
            "",
        ),
        MetricDoc(
            "branch/shared_tokens",
            "Of the policy's tokens along all attempts, the share that was not sampled again because "
            "attempts share it.",
            "Grows with forks that come late; 0.1 to 0.3 is usual.",
            "",
        ),
        MetricDoc(
            "training/rewrites/mean",
            "Counterfactual twins (attempts with a forced call) per attempt of the policy's own, in "
            "steps that have any (branch counterfactual).",
            "Falls as groups earn something by themselves.",
            "Always near its most: the groups still fail as a whole; see training/rewrites/gain.",
            (0.0, None),
        ),
        MetricDoc(
            "training/rewrites/gain",
            "Mean of a twin's reward less that of the attempt whose twin it is.",
            "Above 0: forced calls are worth learning.",
            "0: no call helps; look at what the tool answers to a forced call.",
            (0.0, None),
        ),
    ),
    "Amount and time": (
        MetricDoc(
            "num_tokens",
            "RL: the policy's tokens in the step's episodes, each once, twins included. Warm-up: all "
            "tokens of the step's examples, prompts included.",
            "Steady, or as completions/mean_length.",
            "",
            (1.0, None),
        ),
        MetricDoc(
            "num_trained_tokens",
            "Tokens with a loss, each once, however many rows share it.",
            "Near num_tokens in RL; of a chat, what the assistant says.",
            "0 or far too few: the mask is wrong. `graft data show` (SFT) and the viewer show it.",
            (1.0, None),
        ),
        MetricDoc(
            "num_forward_tokens",
            "All tokens of the rows that are trained, prompts and observations included, each once, "
            "however many rows share it: what the learner computes.",
            "A few times num_trained_tokens.",
            "Many times as much: prompts or tool results are long against what is learned from them.",
            (1.0, None),
        ),
        MetricDoc(
            "tokens_per_second",
            "RL: num_tokens per second of rollout, or of the whole step where sampling runs ahead "
            "(rollout.staleness). Warm-up: num_tokens per second of the step.",
            "Steady.",
            "It falls as attempts grow: fewer run side by side in the same memory (engine.kv_tokens, "
            "rollout.concurrency). Low from the start: slow tools (tools/{tool}/seconds) or a small batch.",
        ),
        MetricDoc(
            "step_time",
            "Seconds of the whole step.",
            "Steady, or as completions/mean_length.",
            "Compare time/rollout, time/learn and time/sync: the largest is where to save.",
        ),
        MetricDoc(
            "time/rollout",
            "Seconds until the step's attempts were there, tools and environments included. Where "
            "sampling runs ahead (rollout.staleness): seconds the learner still had to wait for them.",
            "Most of the step where answers are long; less than half of it where sampling runs ahead.",
            "A few long attempts keep all waiting: a smaller rollout.max_tokens, rollout.staleness=1. "
            "Slow tools: tools/{tool}/seconds.",
        ),
        MetricDoc(
            "time/learn",
            "Seconds of batch, log-probs, gradients and optimizer.",
            "Less than time/rollout where answers are long.",
            "More train.tokens_per_micro if memory allows (`graft plan RECIPE`), train.recompute=false, "
            "fewer train.epochs.",
        ),
        MetricDoc(
            "time/sync",
            "Seconds to bring the new weights to the engines.",
            "0 where the engine holds the learner's own tensors; otherwise small against the step.",
            "engine.sync=memory instead of file, cluster.sync=broadcast, a faster disk under "
            "engine.exchange.",
            (0.0, None),
        ),
    ),
    "Held out": (
        MetricDoc(
            "eval/sampled",
            "Mean reward of run.eval_tasks held-out tasks, one attempt each at rollout.temperature; "
            "attempts that fail count as 0. Every run.eval_every steps (in a warm-up sft.eval_every).",
            "Rises with the reward. With n tasks its error is about 0.5 / sqrt(n): 0.035 for 200.",
            "Reward rises and this does not: tasks are memorised or the reward is gamed.",
        ),
        MetricDoc(
            "eval/greedy",
            "The same, always choosing the likeliest token.",
            "A little above eval/sampled.",
            "Far above: the policy is right and unsure; it still has something to learn. Below: "
            "greedy text repeats itself.",
        ),
        MetricDoc(
            "eval/tool_rate",
            "Share of the sampled held-out attempts that called a tool.",
            "As tools/rate.",
            "As tools/rate.",
            (0.0, 1.0),
        ),
        MetricDoc(
            "eval/loss",
            "Warm-up: cross-entropy of the learned tokens of held-out rows, in nats.",
            "Falls with loss, and stays a little above it.",
            "Rises while the loss falls: overfitting; fewer sft.epochs, sft.stop_at, more rows.",
            (0.0, None),
        ),
        MetricDoc(
            "eval/accuracy",
            "Warm-up: share of the learned tokens of held-out rows that are the likeliest one.",
            "Rises; 1 only where every word is determined.",
            "As eval/loss.",
            (0.0, 1.0),
        ),
        MetricDoc(
            "eval/num_tokens",
            "Warm-up: learned tokens of the held-out rows, over which the two above are means.",
            "Thousands, or the two are noisy.",
            "A larger sft.eval_share, or more rows in sft.eval_data.",
            (1.0, None),
        ),
        MetricDoc(
            "accuracy",
            "Warm-up with sft.stop_at, every 25 steps: mean reward of those of 128 held-out attempts that "
            "called a tool, or of all where none did; without an environment eval/accuracy.",
            "Rises until it reaches sft.stop_at, where the warm-up ends.",
            "It stays low: more sft.steps, a higher sft.lr; are the demonstrations right?",
            (0.0, None),
        ),
        MetricDoc(
            "epoch",
            "Warm-up with sft.data: passes over the rows so far, steps x sft.batch / rows that are "
            "learned.",
            "Up to sft.epochs. After two or three passes rows are learned by heart.",
            "eval/loss rises: fewer sft.epochs.",
            (0.0, None),
        ),
    ),
}
"""Heading -> its metrics, in the order of docs/metrics.md."""

METRICS: dict[str, MetricDoc] = {entry.name: entry for area in AREAS.values() for entry in area}
"""Every metric that graft writes; a loss, credit or environment of your own may add others."""


WORDS: dict[str, MetricDoc] = {
    word: MetricDoc(word, text, "", "") for word, text in MEANINGS.items()
}
"""Words that commands print and that are no metric."""

ALIASES: dict[str, str] = {
    **{row.word: row.metric for row in WATCHED if row.word != row.metric},
    **SCORES,
    **{alarm: metric for alarm, (metric, _) in CONDITIONS.items()},
}
"""Words of the display, and names of alarms -> the metric behind them."""


def explain(name: str) -> MetricDoc:
    """The text of one metric or word, with what stands in the name's braces filled in.

    >>> explain("tools/search/calls").name, explain("tools/search/calls").what
    ('tools/search/calls', 'Calls of search per attempt that were carried out, failed ones included.')
    >>> explain("spread").name, explain("Held out").name
    ('reward_std', 'held out')
    """
    typed = " ".join(name.split())
    for spelled in dict.fromkeys((typed, typed.lower(), typed.lower().replace(" ", "_"))):
        if (found := _find(ALIASES.get(spelled, spelled))) is not None:
            return found
    close = nearest_metrics(name)
    meant = f"nearest: {', '.join(close)}. " if close else ""
    raise UnknownName(f"unknown metric {name!r}; {meant}`graft explain` lists all of them")


def _find(name: str) -> MetricDoc | None:
    known = METRICS | WORDS
    if name in known:
        return known[name]
    for pattern, entry in known.items():
        if (filled := _fill(pattern, name)) is not None:
            texts = {
                field: _put(getattr(entry, field), filled)
                for field in ("what", "healthy", "remedy")
            }
            return replace(entry, name=name, **texts)
    return None


def nearest_metrics(name: str, most: int = 3) -> list[str]:
    """Known names and words that are spelled alike, or that hold what was typed.

    >>> nearest_metrics("ess"), nearest_metrics("rewrad"), nearest_metrics("spred")
    (['sampling/importance_sampling_ratio/ess'], ['reward', 'reward_std'], ['spread'])
    """
    wanted = name.strip().lower()
    parts = {known: known.split("/") for known in METRICS}
    found = [known for known, words in parts.items() if wanted and wanted in words]
    found += get_close_matches(wanted, [*ALIASES, *WORDS], n=most, cutoff=0.75)
    found += get_close_matches(wanted, list(METRICS), n=most, cutoff=0.6)
    if not found and len(wanted) >= 3:
        found = [known for known in METRICS if wanted in known]
    if not found:  # the last word alone: "actor/entropy" is somebody else's name for "entropy"
        last = {words[-1]: known for known, words in parts.items()}
        close = get_close_matches(wanted.rpartition("/")[2], list(last), n=most, cutoff=0.7)
        found = [last[word] for word in close]
    return list(dict.fromkeys(found))[:most]


def _fill(pattern: str, name: str) -> Mapping[str, str] | None:
    """{"tool": "search"} for "tools/{tool}/calls" and "tools/search/calls"; None if it does not fit."""
    if "{" not in pattern:
        return None
    shape = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(pattern))
    found = re.fullmatch(shape, name)
    return None if found is None else found.groupdict()


def _put(text: str, filled: Mapping[str, str]) -> str:
    for word, value in filled.items():
        text = text.replace(f"{{{word}}}", value)
    return text


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every number that a run writes to `metrics.jsonl`: what it is, what it does in a run that",
        "learns, and what to try when it does something else. `graft explain WORD` prints the same text,",
        "`graft view` shows it as a tooltip. Means are over trained tokens unless said otherwise, and over",
        "all optimizer steps of a step.",
        "",
        "This page is written by `python -m graft.train.monitor.metric_docs > docs/metrics.md`.",
    ]
    for heading, entries in AREAS.items():
        lines += ["", f"## {heading}"]
        for entry in entries:
            lines += [
                "",
                f"### `{entry.name}`",
                "",
                entry.what,
                "",
                f"**Healthy:** {entry.healthy}",
            ]
            if entry.remedy:
                lines += ["", f"**If not:** {entry.remedy}"]
    lines += [
        "",
        "## Words of the display",
        "",
        "Short for a metric, in the display and in tables:",
        "",
    ]
    lines += ["| word | metric |", "|---|---|"]
    lines += [f"| {word} | `{metric}` |" for word, metric in ALIASES.items()]
    lines += [
        "",
        "No metric, and known to `graft explain` too:",
        "",
        "| word | meaning |",
        "|---|---|",
    ]
    lines += [f"| {word} | {text} |" for word, text in MEANINGS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
