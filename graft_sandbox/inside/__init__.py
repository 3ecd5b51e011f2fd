"""The code that runs inside the sandbox: a warm host process that forks one confined child per call.

This folder is a package of its own: a bare interpreter starts it that sees neither graft nor the
user's files, so it imports only the standard library and itself.

    host.py         the warm process: takes requests, forks, reaps, kills, watches memory and disk
    usage.py        the memory, files and threads that a call uses
    forks.py        decides on new processes, so that all of them stay within the memory of a call
    writes.py       decides on files that are written, where there are no namespaces
    cgroup.py       a control group for each call, where the user may make them
    cleanup.py      removes the folders of ended calls
    rootfs.py       the host's namespaces and its own file tree
    hidden.py       stands in for packages that the code must not import
    confinement.py  what a child may do: own pid and mount namespace, no privileges, limits
    seccomp.py      the system calls that a child may not make
    landlock.py     the files that a child may open, where there are no namespaces
    runner.py       the user's code: run it, echo its last value, print a short traceback
    kernel.py       the system calls that Python has no function for
"""

HEAD = 128
"""Bytes of a request: numbers, then spaces."""
READY, READY_WITH_GROUPS = b"R", b"G"
"""What a host sends when it can take requests; the second if its calls have control groups."""
