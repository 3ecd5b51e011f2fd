"""Why a run ends before its last step."""

from __future__ import annotations


class RunStopped(RuntimeError):
    """The run cannot continue; the text says why and what to do. Saved files are intact."""
