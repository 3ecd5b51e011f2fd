"""Errors in a notebook: the line of the cell, and the sentence that says what to do.

    Cell In[3], line 1
    ----> 1 graft.train("quikstart")
    ConfigError: unknown recipe 'quikstart'; did you mean 'quickstart'?

The 40 frames between are graft's own and help nobody who can act on the sentence; GRAFT_DEBUG=1 shows them,
and `%debug` still has them. Errors of your own code, and faults of graft, keep their whole traceback.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from graft.ours import FOLDERS


def shorten_tracebacks() -> None:
    """Install the short form in the running IPython shell, unless exceptions are handled there already."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), _show)


def _show(
    shell: Any,
    kind: type[Exception],
    error: Exception,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    from graft.commands.errors import is_for_the_user

    if is_for_the_user(error) and not os.environ.get("GRAFT_DEBUG"):
        lines = _short_lines(shell, kind, error, trace)
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]  # IPython asks for it
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)


def _short_lines(
    shell: Any, kind: type[Exception], error: Exception, trace: TracebackType | None
) -> list[str]:
    """IPython's own form, without graft's frames and without the errors that led to this one."""
    cause, is_quiet = error.__cause__, error.__suppress_context__
    error.__cause__, error.__suppress_context__ = None, True
    try:
        return shell.InteractiveTB.structured_traceback(kind, error, _outside(trace), tb_offset=1)
    finally:
        error.__cause__, error.__suppress_context__ = cause, is_quiet


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """The frames before the first one of graft, as a copy."""
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(FOLDERS):
        return None
    return TracebackType(_outside(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
