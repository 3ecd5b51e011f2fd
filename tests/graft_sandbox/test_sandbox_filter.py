"""The system-call filter, played through by hand on both architectures."""

from __future__ import annotations

import errno
import struct

import pytest

from graft_sandbox.inside import seccomp
from graft_sandbox.inside.seccomp import ALLOW, KILL, Instruction, refuse

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


def test_clone3_is_for_a_host_with_control_groups_alone(machine: str):
    host = seccomp.host_program(machine, is_root=False, has_groups=True)
    assert verdict(host, machine, 435) == ALLOW
    for process in (None, OWN):
        child = seccomp.child_program(machine, only_process=process)
        assert verdict(child, machine, 435) == refuse(errno.ENOSYS)


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


def test_pairs_of_sockets_are_streams_of_unix_and_reach_no_one_by_name(machine: str):
    code = seccomp.host_program(machine, is_root=False)
    call = seccomp.CHECKED[machine]
    stream, datagram, packets, close_on_exec = 1, 2, 5, 0o2000000
    pair = call["socketpair"]
    assert [verdict(code, machine, pair, family, stream) for family in (1, 2, 16)] == [
        ALLOW,
        NO,
        NO,
    ]
    assert verdict(code, machine, pair, 1, stream | close_on_exec) == ALLOW
    for kind in (datagram, packets, datagram | close_on_exec):
        assert verdict(code, machine, pair, 1, kind) == NO
    for address in (1, 2**32, 2**63):  # sendto with an address
        assert verdict(code, machine, call["sendto"], 5, 0, 0, 0, address) == NO
    assert verdict(code, machine, call["sendto"], 5, 0, 0, 0, 0) == ALLOW
    # only the host's own channel, a descriptor above the limit of user code
    assert verdict(code, machine, call["sendmsg"], seccomp.LISTENERS) == ALLOW
    assert verdict(code, machine, call["sendmsg"], 3) == NO


def test_no_signal_can_be_sent_by_way_of_a_file_and_no_buffer_grows(machine: str):
    code = seccomp.host_program(machine, is_root=False)
    call = seccomp.CHECKED[machine]
    set_flags, set_owner, set_signal, set_owner_ex, notify, set_pipe = 4, 8, 10, 15, 1026, 1031
    for command in (set_owner, set_signal, set_owner_ex, notify, set_pipe):
        assert verdict(code, machine, call["fcntl"], 0, command) == NO
    assert verdict(code, machine, call["fcntl"], 0, set_flags) == ALLOW
    for request in (0x8901, 0x8902):  # FIOSETOWN, SIOCSPGRP
        assert verdict(code, machine, call["ioctl"], 0, request) == NO
    set_option = {"x86_64": 54, "aarch64": 208}[machine]
    assert verdict(code, machine, set_option, 3, 1, 7) == NO


def test_a_child_is_refused_the_calls_that_the_host_needs(machine: str):
    host = seccomp.host_program(machine, is_root=False)
    child = seccomp.child_program(machine, only_process=None)
    unshare = seccomp.CHECKED[machine]["unshare"]
    assert verdict(host, machine, unshare, 0x10000000) == ALLOW
    assert verdict(child, machine, unshare, 0x10000000) == NO
    prctl = seccomp.CHECKED[machine]["prctl"]
    parent_death, dumpable, name, memory_map = 1, 4, 15, 35
    assert verdict(child, machine, prctl, name) == ALLOW
    for option in (parent_death, dumpable, memory_map):
        assert verdict(child, machine, prctl, option) == NO
    kill = seccomp.CHECKED[machine]["kill"]
    assert verdict(child, machine, kill, 77, 9) == ALLOW  # its namespace has no other processes


def test_with_namespaces_the_host_is_asked_about_new_processes_and_sets_their_memory(machine: str):
    call = seccomp.CHECKED[machine]
    memory, files = 9, 7
    for can_ask, answer in ((True, seccomp.ASK), (False, refuse(errno.EAGAIN))):
        child = seccomp.child_program(machine, only_process=None, can_ask=can_ask)
        assert verdict(child, machine, call["clone"], SIGCHLD) == answer
        assert verdict(child, machine, call["clone"], seccomp.CLONE_THREAD) == ALLOW
        assert all(
            verdict(child, machine, call[n]) == answer for n in ("fork", "vfork") if n in call
        )
        assert verdict(child, machine, call["setrlimit"], memory) == seccomp.IGNORE
        assert verdict(child, machine, call["setrlimit"], files) == ALLOW
        for pointer in (8, 2**40):
            assert verdict(child, machine, call["prlimit64"], 0, memory, pointer) == seccomp.IGNORE
            assert verdict(child, machine, call["prlimit64"], 0, files, pointer) == ALLOW
        assert verdict(child, machine, call["prlimit64"], 0, memory, 0) == ALLOW  # only reads it


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


def test_without_namespaces_nothing_is_emptied_by_a_reader_or_allocated_unseen(machine: str):
    """Landlock does not guard O_TRUNC before Linux 6.2."""
    child = seccomp.child_program(machine, only_process=OWN)
    call = seccomp.CHECKED[machine]
    read, write, create, truncate = 0, 1, 0o100, 0o1000
    for name, before in (("open", [0]), ("openat", [0, 0])):
        if name in call:
            for flags in (read, write | truncate, write | truncate | create, read | create):
                assert verdict(child, machine, call[name], *before, flags) == ALLOW
            for flags in (read | truncate, read | truncate | create):
                assert verdict(child, machine, call[name], *before, flags) == NO
    assert verdict(child, machine, call["openat2"]) == refuse(errno.ENOSYS)
    assert verdict(child, machine, call["fallocate"]) == refuse(errno.EOPNOTSUPP)


def test_without_namespaces_the_host_is_asked_before_files_are_written(machine: str):
    asking, call = seccomp.asking_program(machine), seccomp.CHECKED[machine]
    read, write, read_write, create, append = 0, 1, 2, 0o100, 0o2000
    for name, before in (("open", [0]), ("openat", [0, 0])):
        if name in call:
            assert verdict(asking, machine, call[name], *before, read) == ALLOW
            for flags in (write, read_write, read | create, write | append):
                assert verdict(asking, machine, call[name], *before, flags) == seccomp.ASK
    for number in seccomp.numbers(seccomp.CREATING, machine):
        assert verdict(asking, machine, number) == seccomp.ASK
    for folder in (seccomp.SCRATCH, seccomp.GROUPS):  # the host itself
        assert verdict(asking, machine, call["mkdirat"], folder) == ALLOW
    assert verdict(asking, machine, call["openat"], seccomp.GROUPS, 0, write) == ALLOW
    assert verdict(asking, machine, call["openat"], seccomp.SCRATCH, 0, write) == seccomp.ASK
    assert verdict(asking, machine, READ[machine]) == ALLOW
    child = seccomp.child_program(
        machine, only_process=OWN
    )  # may not raise the limit of a file again
    assert verdict(child, machine, call["setrlimit"], seccomp.RLIMIT_FSIZE) == seccomp.IGNORE
    for pid in (0, OWN):
        limit = [pid, seccomp.RLIMIT_FSIZE]
        assert verdict(child, machine, call["prlimit64"], *limit, 1) == seccomp.IGNORE
        assert verdict(child, machine, call["prlimit64"], *limit, 0) == ALLOW  # only reads it


def test_jumps_fit_and_the_kernel_takes_the_length(machine: str):
    for code in (
        seccomp.host_program(machine, is_root=False),
        seccomp.child_program(machine, only_process=None),
        seccomp.child_program(machine, only_process=OWN),
        seccomp.asking_program(machine),
    ):
        assert len(code) < 4096
        assert all(0 <= then < 256 and 0 <= other < 256 for _, then, other, _ in code)
        assert len(seccomp.assemble(code)) == 8 * len(code)
