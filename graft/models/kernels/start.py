"""Whether Triton starts on this machine."""

from __future__ import annotations

from subprocess import SubprocessError

from triton.runtime import driver


def why_not_started() -> str:
    """Why it does not; empty if it does. Some versions compile a part of themselves here, which needs a C
    compiler."""
    try:
        driver.active.get_current_target()
    except (RuntimeError, OSError, SubprocessError) as error:
        return f"Triton does not start: {error}"
    return ""
