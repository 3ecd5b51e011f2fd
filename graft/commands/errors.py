"""How an error ends a command: one line where the user can act on it, else the traceback of a bug."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import typer

from graft.commands.options import (
    command_meant,
    flag_meant,
    option_meant,
    setting_meant,
    value_given,
)
from graft.ours import FOLDERS, is_ours
from graft.trust.masking import mask


def complain(error: Exception) -> int:
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's, wherever typer keeps it
        error.show()  # type: ignore[attr-defined]
        param = getattr(error, "param", None)
        if help_text := getattr(param, "help", "") if "Missing" in str(error) else "":
            typer.echo(f"{getattr(param, 'name', '').upper()}: {help_text}", err=True)
        words = sys.argv[1:]
        hints = (
            option_meant(error),
            setting_meant(error, words),
            flag_meant(error, words),
            value_given(error, words),
            command_meant(error),
        )
        if hint := next(filter(None, hints), ""):
            typer.echo(hint, err=True)
        return 2
    from graft.actions.fields import ActionsError
    from graft.config import ConfigError
    from graft.registry import UnknownName
    from graft.train.monitor.printable import visible
    from graft.trust import NotTrusted

    if "out of memory" in str(error) and not os.environ.get("GRAFT_DEBUG"):
        seen = str(error).partition("\n")[0].partition("If reserved")[0].strip()
        typer.echo(
            f"graft: the device has no memory left: {seen} `graft plan RECIPE` shows what a recipe "
            "needs; other processes may hold some of it (nvidia-smi). Lower train.tokens_per_micro or "
            "engine.kv_tokens; the same command resumes from the last checkpoint.",
            err=True,
        )
        return 1
    if os.environ.get("GRAFT_DEBUG") or not is_for_the_user(error):
        typer.echo(visible(mask("".join(traceback.format_exception(error)))), err=True, nl=False)
        if not os.environ.get("GRAFT_DEBUG"):
            typer.echo("graft: this is a fault in graft or in your own code, shown above", err=True)
        return 1
    seen = str(error)
    if isinstance(error, OSError) and error.errno in DISK and error.filename is not None:
        seen = f"{error.filename}: {os.strerror(error.errno)}; {DISK[error.errno]}"
    typer.echo(f"graft: {visible(mask(seen))}", err=True)
    usage = (ConfigError, UnknownName, ActionsError, NotTrusted)
    is_usage = isinstance(error, usage) or type(error) is ValueError
    return 2 if is_usage or getattr(error, "is_usage", False) else 1


def error_text(error: BaseException) -> str:
    """The text with which other processes report an error of this one."""
    if isinstance(error, Exception) and is_for_the_user(error):
        return str(error)
    return "".join(traceback.format_exception(error))


DISK = {
    errno.EACCES: "this user may not use it: change its owner or mode, or name another folder",
    errno.EPERM: "this user may not use it: change its owner or mode, or name another folder",
    errno.EROFS: "its disk is read-only: name another folder",
    errno.ENOSPC: "its disk is full: free some space, and run the same command again",
    errno.EDQUOT: "this user's share of the disk is full: free some space, and run the same command again",
}
"""What the user can do about a file that the system refuses, wherever graft used it."""


def is_for_the_user(error: Exception) -> bool:
    """Raised by graft on purpose: a class of graft, or a plain one raised in one of its files."""
    if is_ours(type(error)):
        return True
    if isinstance(error, OSError) and error.errno in DISK and error.filename is not None:
        from graft.user_code import user_frame

        return not user_frame(error)
    frames = traceback.extract_tb(error.__traceback__)
    plain = (ValueError, ImportError, OSError)
    return bool(frames) and isinstance(error, plain) and frames[-1].filename.startswith(FOLDERS)
