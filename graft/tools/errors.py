"""Failures of tools: an answer that begins with "Error: " for a bad call, ToolError for a broken tool."""

from graft.trust.masking import mask

ERROR = "Error: "
"""The beginning of a tool's answer to a call that it could not carry out."""


def is_error(result: str) -> bool:
    """True if a tool's answer says that the call failed.

    >>> is_error("Error: division by zero"), is_error("170")
    (True, False)
    """
    return result.startswith(ERROR)


class ToolError(RuntimeError):
    """The tool could not do its work (a dead server, no disk); the policy is not the cause.

    A bad call is no ToolError: it is answered with text, from which the policy can learn.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(mask(text))  # servers repeat what they were sent
