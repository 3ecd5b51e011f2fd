"""When a tool itself breaks, as opposed to being called badly."""


class ToolError(RuntimeError):
    """The tool could not do its work (a dead server, no disk); not the policy's doing.

    A bad call is no ToolError: it is answered with text, which the policy can learn from.
    """
