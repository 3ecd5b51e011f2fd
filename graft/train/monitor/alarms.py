"""Alarms: messages about metrics that look unhealthy, with the numbers, why they matter and what to try.

    alarms = Alarms(dtype="bfloat16", staleness=2)
    for alarm in alarms.check(12, metrics):        # once after every RL step
        display.alarm(alarm.text, alarm.level)

Every rule (`alarm_rules`) computes value / limit. An alarm begins when that ratio reaches 1, and can begin
again only after the ratio was below 0.8. Groups without spread, with a limit of 60% over five steps:

    step         1    2    3    4    5    6    7    8    9    10   11   12   13   14   15
    flat groups  .5   .6   .7   .7   .8   .8   .5   .2   .2   .2   .2   .7   .9   .9   .9
    mean of five                     .66  .72  .70  .60  .50  .38  .26  .30  .44  .58  .72
    ratio                            1.1  1.2  1.2  1.0  .83  .63  .43  .50  .73  .97  1.2
                                     begins                   ends                     begins
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graft.train.monitor.alarm_history import KEPT, AlarmContext, AlarmHistory
from graft.train.monitor.alarm_rules import RULES, WATCHED, Level
from graft.train.monitor.metric_docs import METRICS

END = 0.8
"""An alarm ends when its ratio is below this."""
MAX_REASON = 300
"""Characters of a failure's reason that an alarm repeats."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One message; `level` is "warn" (look at it) or "alarm" (the run is probably wasted)."""

    step: int
    metric: str
    level: Level
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Alarms:
    """Checks every RL step of one run against all rules.

    `dtype` is the policy's, `staleness` and `max_grad_norm` are the recipe's, `is_grouped` says whether the
    credit compares attempts at the same task.
    """

    def __init__(
        self,
        dtype: str = "float32",
        staleness: int = 0,
        max_grad_norm: float = 1.0,
        is_grouped: bool = True,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`state` is a `to_json` to continue from."""
        state = state or {}
        dtype = dtype.removeprefix("torch.")
        context = AlarmContext(dtype, staleness, max_grad_norm, is_grouped)
        self.history = AlarmHistory(context, state)
        begun = state.get("standing", {})
        self.active: dict[str, int] = {name: step for name, step in begun.items() if name in RULES}
        """Alarms that have begun and not ended -> the step in which they began."""

    def check(self, step: int, metrics: Mapping[str, Any], failure: str = "") -> list[Alarm]:
        """The alarms that begin with this step. `failure` is the commonest reason of failed attempts."""
        if failure:
            self.history.failure = failure[:MAX_REASON]
        seen = self.history.add(metrics, WATCHED)
        begun: list[Alarm] = []
        for name, rule in RULES.items():
            finding = None
            if rule.metric in seen and len(self.history.latest(rule.metric, KEPT)) >= rule.steps:
                finding = rule.judge(*self.history.means(rule.metric), self.history)
            if finding is None:
                continue
            if name in self.active:
                if finding.ratio < END:
                    del self.active[name]
            elif finding.ratio >= 1.0:
                self.active[name] = step
                advice = METRICS[rule.metric].case(finding.case or rule.case)
                text = f"{finding.seen}. {advice}"
                begun.append(Alarm(step, rule.metric, finding.level, text))
        return begun

    def to_json(self) -> dict[str, Any]:
        """The state that a resumed run continues from; plain JSON, of bounded size."""
        return {**self.history.to_json(), "standing": {**self.active}}
