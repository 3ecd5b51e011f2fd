"""What an engine raises when it cannot sample; the rollout turns it into `Status.ENGINE_ERROR`."""

from __future__ import annotations

from graft.trust.masking import mask


class EngineError(RuntimeError):
    """The engine could not serve this sample; the text has what was seen and what to change."""

    def __init__(self, text: str = "") -> None:
        super().__init__(mask(text))  # servers repeat what they were sent
