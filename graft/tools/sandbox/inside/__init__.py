"""What runs behind the wall: a warm process that forks one confined cell per call.

This folder is a package of its own: it is started by a bare interpreter that sees neither graft nor
the user's files, so it imports only the standard library and itself.

    host.py      the warm process: takes requests, forks, reaps, kills
    room.py      where the host lives: namespaces with a file tree of their own
    cell.py      what one call may do: own pid and mount namespace, no privileges, limits
    seccomp.py   the system calls a cell may not make
    landlock.py  the files a cell may open, where there are no namespaces
    usage.py     how much memory and disk a call has taken
    runner.py    the user's code: run it, echo its last value, print a short traceback
    kernel.py    the system calls Python has no function for
"""
