"""The system-call filter, played through by hand on both architectures."""

from __future__ import annotations

import errno
import struct

import pytest

from graft.tools.sandbox.inside import seccomp
from graft.tools.sandbox.inside.seccomp import ALLOW, KILL, Instruction, refuse

OWN = 4242
NO = refuse(errno.EPERM)


def verdict(code: list[Instruction], machine: str, number: int, *arguments: int) -> int:
    """Run a filter the way the kernel does: an accumulator, forward jumps, and a result."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, seccomp.ARCHITECTURES[machine], 0, *values)
    at = accumulator = 0
    while True:
        operation, then, otherwise, constant = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x06:
            return constant
        else:
            is_true = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }[operation]
            at += then if is_true else otherwise


READ = {"x86_64": 0, "aarch64": 63}
SOCKET = {"x86_64": 41, "aarch64": 198}
SIGCHLD = 17


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_host_may_read_but_not_open_sockets(machine: str):
    code = seccomp.host_program(machine, is_root=False)
    assert verdict(code, machine, READ[machine]) == ALLOW
    assert verdict(code, machine, SOCKET[machine], 2, 2) == NO


def test_another_architecture_is_killed(machine: str):
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    assert verdict(seccomp.host_program(machine, is_root=False), other, READ[other]) == KILL


def test_calls_newer_than_the_list_do_not_exist(machine: str):
    code = seccomp.host_program(machine, is_root=False)
    for number in (463, 500, 0x4000_0000 + 41, 2**31 - 1):
        assert verdict(code, machine, number) == refuse(errno.ENOSYS)
    assert verdict(code, machine, 462) == ALLOW


def test_a_clone_makes_processes_but_no_namespaces(machine: str):
    code = seccomp.host_program(machine, is_root=False)
    clone = seccomp.CHECKED[machine]["clone"]
    assert verdict(code, machine, clone, SIGCHLD) == ALLOW
    for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(code, machine, clone, SIGCHLD | flag) == NO
    assert verdict(code, machine, 435) == refuse(errno.ENOSYS)  # clone3


def test_only_a_host_without_privileges_makes_user_namespaces(machine: str):
    unshare = seccomp.CHECKED[machine]["unshare"]
    new_pids, new_mounts, new_users = 0x20000000, 0x20000, 0x10000000
    for is_root in (True, False):
        code = seccomp.host_program(machine, is_root=is_root)
        assert verdict(code, machine, unshare, new_pids) == ALLOW
        assert verdict(code, machine, unshare, new_mounts) == ALLOW
        assert verdict(code, machine, unshare, new_users) == (NO if is_root else ALLOW)
        for flags in (0, new_pids | new_users, new_mounts | new_users, 0x40000000):
            assert verdict(code, machine, unshare, flags) == NO


def test_pairs_of_sockets_are_for_unix_only(machine: str):
    code = seccomp.host_program(machine, is_root=False)
    pair = seccomp.CHECKED[machine]["socketpair"]
    assert [verdict(code, machine, pair, family) for family in (1, 2, 16)] == [ALLOW, NO, NO]


def test_a_child_is_refused_the_calls_that_the_host_needs(machine: str):
    host = seccomp.host_program(machine, is_root=False)
    child = seccomp.child_program(machine, only_process=None)
    unshare = seccomp.CHECKED[machine]["unshare"]
    assert verdict(host, machine, unshare, 0x10000000) == ALLOW
    assert verdict(child, machine, unshare, 0x10000000) == NO
    prctl = seccomp.CHECKED[machine]["prctl"]
    assert verdict(child, machine, prctl, 1) == NO
    assert verdict(child, machine, prctl, 15) == ALLOW
    kill = seccomp.CHECKED[machine]["kill"]
    assert verdict(child, machine, kill, 77, 9) == ALLOW  # its namespace has no other processes


def test_without_namespaces_there_is_one_process_and_no_other(machine: str):
    child = seccomp.child_program(machine, only_process=OWN)
    call = seccomp.CHECKED[machine]
    assert verdict(child, machine, call["clone"], SIGCHLD) == NO
    assert verdict(child, machine, call["clone"], seccomp.CLONE_THREAD) == ALLOW
    for name in ("kill", "tgkill"):
        assert verdict(child, machine, call[name], OWN, 9) == ALLOW
        for pid in (OWN + 1, 1, 0, 2**32 - 1):
            assert verdict(child, machine, call[name], pid, 9) == NO
    assert verdict(child, machine, call["prlimit64"], 0) == ALLOW
    assert verdict(child, machine, call["prlimit64"], 1) == NO
    assert verdict(child, machine, READ[machine]) == ALLOW


def test_jumps_fit_and_the_kernel_takes_the_length(machine: str):
    for code in (
        seccomp.host_program(machine, is_root=False),
        seccomp.child_program(machine, only_process=None),
        seccomp.child_program(machine, only_process=OWN),
    ):
        assert len(code) < 4096
        assert all(0 <= then < 256 and 0 <= other < 256 for _, then, other, _ in code)
        assert len(seccomp.assemble(code)) == 8 * len(code)
