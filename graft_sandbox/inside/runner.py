"""Run the user's code as the main program, and print short tracebacks.

Hash seeds and the random generators start the same in every call, so the same code prints the same.
"""

from __future__ import annotations

import _ast
import atexit
import contextlib
import importlib
import linecache
import os
import sys
import traceback
import types
from typing import Any

OWN = ("<python>", "<cell ")
"""Prefixes of the file names that the user's code has in tracebacks."""
PARSE_ONLY = 0x400  # the flag of ast.parse; importing ast is not needed


def prepare(preload: list[str]) -> None:
    """Do in the host, before it forks, the work that every child would otherwise repeat."""
    import io
    import site

    import_random_quietly()
    for name in preload:
        with contextlib.suppress(Exception):  # the code that imports it will see the error
            importlib.import_module(name)
    sys.modules["random"].seed(0)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(0)
    site.setquit()  # names that Python's -S flag leaves out
    site.setcopyright()
    site.sethelper()
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    for code in ("1 + 1", "1 / 0", "x = ("):  # the first run is slow
        run_code(code, "<python>", {}, echo=True)
    sys.stdout, sys.stderr = stdout, stderr
    linecache.clearcache()


def import_random_quietly() -> None:
    """Import `random` without its hook that seeds it after every fork: children start from the host's
    seed, and seeding would be a tenth of the cost of a call."""
    register = os.register_at_fork
    os.register_at_fork = lambda **_: None
    try:
        importlib.import_module("random")
    finally:
        os.register_at_fork = register


def print_at_once() -> None:
    """Flush stdout after every line."""
    stdout: Any = sys.stdout
    stdout.reconfigure(line_buffering=True)


def fresh_main() -> dict[str, Any]:
    """A new, empty main module; its names."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path.insert(0, "")
    return module.__dict__


def run_program(code: str, *, echo: bool) -> int:
    """Run `code` to its end, waiting for its threads. Returns the exit code."""
    if echo:  # the output of a program that is killed shall be complete
        print_at_once()
    status = run_code(code, "<python>", fresh_main(), echo=echo)
    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:  # the user's own exit functions
        status = show(error)
    return status if flush() else status or 1


def run_session(control: int) -> None:
    """Run one piece of code after another in the same main module, until the caller closes the socket.

    The reply to each piece is its exit code, such as b"1\\n".
    """
    names = fresh_main()
    print_at_once()
    count, process = 0, os.getpid()
    while (head := _read(control, 8)) and (cell := _read(control, int(head, 16))) is not None:
        count += 1
        code = cell.decode(errors="surrogatepass")
        status = run_code(code, f"<cell {count}>", names, echo=True)
        flush()
        if os.getpid() != process:  # a fork made by the code must not read the control socket
            os._exit(status)
        os.write(control, b"%d\n" % status)


def run_code(code: str, name: str, names: dict[str, Any], *, echo: bool) -> int:
    """0, or the code of `sys.exit`, or 1 after an exception, which is printed.

    With `echo` the value of a last line that is an expression is shown, as at a prompt.
    """
    lines = [f"{line}\n" for line in code.split("\n")]
    linecache.cache[name] = (len(code), None, lines, name)
    try:
        tree: Any = compile(code, name, "exec", PARSE_ONLY, dont_inherit=True)
        last = tree.body[-1] if echo and tree.body else None
        if isinstance(last, _ast.Expr):
            tree.body.pop()
            exec(compile(tree, name, "exec", dont_inherit=True), names)
            value = compile(_ast.Expression(last.value), name, "eval", dont_inherit=True)
            sys.displayhook(eval(value, names))
        else:
            exec(compile(tree, name, "exec", dont_inherit=True), names)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        return show(error)
    return 0


def show(error: BaseException) -> int:
    """Print the traceback with the user's own lines only. Always 1, the exit code."""
    try:
        sys.stdout.flush()
        report = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        _keep_own_lines(report)
        print("".join(report.format()), end="", file=sys.stderr)
        sys.stderr.flush()
    except BaseException:  # no memory left, or an exception that cannot be printed
        os.write(2, type(error).__name__.encode(errors="replace") + b"\n")
    return 1


def _keep_own_lines(report: traceback.TracebackException) -> None:
    own = [line for line in report.stack if line.filename.startswith(OWN)]
    report.stack = traceback.StackSummary.from_list(own)
    for inner in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if inner is not None:
            _keep_own_lines(inner)


def flush() -> bool:
    """False if the output could not be written."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the user may have replaced them
        return False
    return True


def _read(descriptor: int, size: int) -> bytes | None:
    """The next `size` bytes; None if the socket closes before."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 16))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
