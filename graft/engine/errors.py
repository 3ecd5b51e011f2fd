"""What an engine raises when it cannot sample; the rollout turns it into `Status.ENGINE_ERROR`."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine could not serve this sample; the text has what was seen and what to change."""
