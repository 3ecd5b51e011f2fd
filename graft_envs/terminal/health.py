"""A machine is ready when its health check succeeds."""

from __future__ import annotations

import time

from graft_envs.terminal.machine import Machine, MachineError
from graft_envs.terminal.task import HealthCheck


def wait_until_healthy(machine: Machine, health: HealthCheck) -> None:
    """Repeat the command until it succeeds; failures after the start period are counted."""
    began, failures = time.monotonic(), 0
    while (done := machine.execute(health.command, health.seconds)).exit_code:
        is_starting = time.monotonic() - began < health.start_period
        failures += not is_starting
        if failures >= health.retries:
            raise MachineError(
                f"the machine is not healthy after {failures} tries of {health.command!r}: "
                f"{done.output.strip()[-300:]!r}"
            )
        time.sleep(health.start_interval if is_starting else health.interval)
