"""The system calls that a child may not make: a classic BPF program, assembled here.

It is a list of refused calls, not of allowed ones: Python and numpy use some hundred calls that differ
between C libraries, while the calls that could reach out of the sandbox are known. Calls newer than this
list fail with ENOSYS. Filters add up, and installing one takes the kernel some time: the host has the long
one already, and children that could use the calls which the host itself needs add a short one.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

from . import kernel

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEWEST_KNOWN = 462  # mseal, Linux 6.10

ALLOW = 0x7FFF_0000
ASK = 0x7FC0_0000  # the host decides
KILL = 0x8000_0000


def refuse(number: int) -> int:
    return 0x0005_0000 | number


NO = refuse(errno.EPERM)
IGNORE = refuse(0)  # does nothing, and reports success

REFUSED = """
    socket=41/198 bind=49/200 listen=50/201 accept=43/202 accept4=288/242 connect=42/203
    sendmmsg=307/269 setsockopt=54/208
    inotify_init=253/ inotify_init1=294/26 io_setup=206/0
    ptrace=101/117 process_vm_readv=310/270 process_vm_writev=311/271 kcmp=312/272
    process_madvise=440/440 process_mrelease=448/448
    pidfd_getfd=438/438 pidfd_send_signal=424/424
    umount2=166/39 pivot_root=155/41 chroot=161/51
    open_tree=428/428 move_mount=429/429 fsopen=430/430 fsconfig=431/431 fsmount=432/432
    fspick=433/433 mount_setattr=442/442 statmount=457/457 listmount=458/458
    open_by_handle_at=304/265 name_to_handle_at=303/264
    bpf=321/280 perf_event_open=298/241 userfaultfd=323/282
    io_uring_setup=425/425 io_uring_enter=426/426 io_uring_register=427/427
    add_key=248/217 request_key=249/218 keyctl=250/219
    shmget=29/194 shmat=30/196 shmctl=31/195 semget=64/190 semctl=66/191 msgget=68/186
    msgctl=71/187 mq_open=240/180 mq_unlink=241/181
    memfd_create=319/279 memfd_secret=447/447 vmsplice=278/75
    kexec_load=246/104 kexec_file_load=320/294 init_module=175/105 finit_module=313/273
    delete_module=176/106 reboot=169/142 swapon=167/224 swapoff=168/225 quotactl=179/60
    quotactl_fd=443/443 acct=163/89 settimeofday=164/170 clock_settime=227/112
    clock_adjtime=305/266 adjtimex=159/171 sethostname=170/161 setdomainname=171/162
    syslog=103/116 vhangup=153/58 fanotify_init=300/262 personality=135/92 lookup_dcookie=212/18
    nfsservctl=180/42 iopl=172/ ioperm=173/ modify_ldt=154/ uselib=134/ ustat=136/ sysfs=139/
"""
"""name=number on x86_64/number on aarch64, with none where the call does not exist. memfd_create:
memory that RLIMIT_AS does not see. shmget and its kin: memory that outlives its maker. bind and
connect: a socket of socketpair could reach others by name. sendmsg: it can pass open files, which then
are in no process's table and escape the count. setsockopt: larger buffers, which are kernel memory.
inotify and io_setup: few exist per user or machine, so one call could take all."""

NEEDED_BY_THE_HOST = """
    mount=165/40 unshare=272/97 setns=308/268 pidfd_open=434/434
    landlock_create_ruleset=444/444 landlock_add_rule=445/445 landlock_restrict_self=446/446
"""
"""Refused to children only."""

REFUSED_WITHOUT_NAMESPACES = """
    fork=57/ vfork=58/ tkill=200/130 rt_sigqueueinfo=129/138 rt_tgsigqueueinfo=297/240
    chmod=90/ fchmod=91/52 fchmodat=268/53 fchmodat2=452/452 chown=92/ lchown=94/ fchown=93/55
    fchownat=260/54 utime=132/ utimes=235/ futimesat=261/ utimensat=280/88
    setxattr=188/5 lsetxattr=189/6 fsetxattr=190/7 removexattr=197/14 lremovexattr=198/15
    fremovexattr=199/16 truncate=76/45
    setpriority=141/140 sched_setaffinity=203/122 sched_setscheduler=144/119
    sched_setparam=142/118 sched_setattr=314/274 ioprio_set=251/30 migrate_pages=256/238
    move_pages=279/239 get_robust_list=274/100
"""
"""Calls that a mount or pid namespace makes harmless: they start processes that could outlive the call,
change modes, owners and times of files (Landlock does not guard them), or slow the user's other
processes."""

CREATING = """
    creat=85/ mkdir=83/ mkdirat=258/34 mknod=133/ mknodat=259/33 link=86/ linkat=265/37
    symlink=88/ symlinkat=266/36 rename=82/ renameat=264/38 renameat2=316/276
"""
"""Calls that without a mount namespace wait for the host, besides files that are opened for writing."""

HOST_NAMESPACES = (kernel.NEWPID, kernel.NEWNS, kernel.NEWUSER)
"""Namespaces that the host and a child that confines itself create, one at a time. The first two need
a privilege; a host without privileges creates the third, and its children are refused it afterwards."""
NAMESPACE_FLAGS = 0x7E02_0000  # every CLONE_NEW*
CLONE_THREAD = 0x0001_0000
AF_UNIX = 1
STREAMS = (1, 1 | 0o2000000, 1 | 0o4000, 1 | 0o2004000)
"""SOCK_STREAM, with close-on-exec or not, blocking or not. Datagram sockets of a pair can still send to
a name; pairs of streams cannot."""
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4  # without it the host could not look into the process
PR_SET_MM = 35  # would give false addresses to the host
RLIMIT_FSIZE, RLIMIT_AS = 1, 9
GROUPS, LISTENERS, SCRATCH = 249, 250, 251
"""Descriptors of the host that user code cannot have, as they are too high: the folder of control groups,
the socket on which children send their listeners, and the folder in which the host makes those of its
calls."""
IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902)
"""TIOCSTI, TIOCLINUX: type into the terminal; FIOSETOWN, SIOCSPGRP: as F_SETOWN."""
FCNTLS = (8, 10, 15, 1026, 1031)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_NOTIFY: the kernel then sends signals to a process of the caller's
choice, on another's behalf; F_SETPIPE_SZ: larger buffers, which are kernel memory."""
MADV_PAGEOUT = 21  # memory in swap is not in any count
O_ACCMODE, O_CREAT, O_TRUNC = 3, 0o100, 0o1000
CHECKED = {
    "x86_64": {"clone": 56, "clone3": 435, "socketpair": 53, "prctl": 157, "ioctl": 16,
               "kill": 62, "tgkill": 234, "prlimit64": 302, "unshare": 272, "fcntl": 72,
               "sendto": 44, "madvise": 28, "open": 2, "openat": 257, "openat2": 437,
               "fallocate": 285, "sendmsg": 46, "setrlimit": 160,
               "fork": 57, "vfork": 58, "mkdirat": 258},
    "aarch64": {"clone": 220, "clone3": 435, "socketpair": 199, "prctl": 167, "ioctl": 29,
                "kill": 129, "tgkill": 131, "prlimit64": 261, "unshare": 97, "fcntl": 25,
                "sendto": 206, "madvise": 233, "openat": 56, "openat2": 437, "fallocate": 47,
                "sendmsg": 211, "setrlimit": 164, "mkdirat": 34},
}  # fmt: skip
"""Calls that depend on an argument."""


def numbers(table: str, machine: str) -> list[int]:
    """The second of "open=2/56 fork=57/" on aarch64: [56]."""
    column = ("x86_64", "aarch64").index(machine)
    found = [entry.partition("=")[2].split("/")[column] for entry in table.split()]
    return [int(number) for number in found if number]


# One instruction: operation, jump if true, jump if false, constant. Jumps count from the next one.
Instruction = tuple[int, int, int, int]


def load(offset: int) -> Instruction:
    return (0x20, 0, 0, offset)


def back(verdict: int) -> Instruction:
    return (0x06, 0, 0, verdict)


def jump_if_equal(value: int, then: int, otherwise: int) -> Instruction:
    return (0x15, then, otherwise, value)


def jump_if_at_least(value: int, then: int, otherwise: int) -> Instruction:
    return (0x35, then, otherwise, value)


def jump_if_any_bit(bits: int, then: int, otherwise: int) -> Instruction:
    return (0x45, then, otherwise, bits)


NUMBER = load(0)
ARCHITECTURE = load(4)


def argument(index: int) -> Instruction:
    """The low half of an argument; those that are tested are 32-bit or checked bit by bit."""
    return load(16 + 8 * index)


def when(number: int, body: list[Instruction]) -> list[Instruction]:
    """`body` if the call has this number; execution continues after it, and reloads the number."""
    return [NUMBER, jump_if_equal(number, 0, len(body)), *body]


def unless_equal(index: int, values: Iterable[int], verdict: int) -> list[Instruction]:
    """`verdict` unless the argument is one of `values`."""
    values = list(values)
    tests = [jump_if_equal(value, len(values) - at, 0) for at, value in enumerate(values)]
    return [argument(index), *tests, back(verdict)]


def if_equal(index: int, values: Iterable[int], verdict: int) -> list[Instruction]:
    """`verdict` if the argument is one of `values`."""
    tests = [i for value in values for i in (jump_if_equal(value, 0, 1), back(verdict))]
    return [argument(index), *tests]


def unless_null(index: int, verdict: int) -> list[Instruction]:
    """`verdict` unless the argument, a pointer of 64 bits, is 0."""
    low, high = argument(index), load(16 + 8 * index + 4)
    return [low, jump_if_equal(0, 0, 2), high, jump_if_equal(0, 1, 0), back(verdict)]


def if_truncated_by_reader(index: int) -> list[Instruction]:
    """Refuse the flags O_RDONLY | O_TRUNC, which empty a file that is opened for reading."""
    flags = [jump_if_any_bit(O_TRUNC, 0, 2), jump_if_any_bit(O_ACCMODE, 1, 0)]
    return [argument(index), *flags, back(NO)]


def host_program(machine: str, *, is_root: bool, has_groups: bool = False) -> list[Instruction]:
    """The filter of the host and its children. A host that is root needs no user namespaces, so that
    its children cannot have them either. One with control groups needs clone3, which their own filter
    refuses to children."""
    namespaces = HOST_NAMESPACES[: 2 if is_root else 3]
    call = CHECKED[machine]
    code = [ARCHITECTURE, jump_if_equal(ARCHITECTURES[machine], 1, 0), back(KILL), NUMBER]
    # also catches x32, whose numbers begin at 2^30
    code += [jump_if_at_least(NEWEST_KNOWN + 1, 0, 1), back(refuse(errno.ENOSYS))]
    code += refuse_all(numbers(REFUSED, machine))
    if not has_groups:
        code += refuse_clone3(machine)
    code += when(call["clone"], [argument(0), jump_if_any_bit(NAMESPACE_FLAGS, 0, 1), back(NO)])
    code += when(call["socketpair"], unless_equal(0, [AF_UNIX], NO))
    code += when(call["socketpair"], unless_equal(1, STREAMS, NO))
    code += when(call["sendto"], unless_null(4, NO))
    code += when(call["ioctl"], if_equal(1, IOCTLS, NO))
    code += when(call["fcntl"], if_equal(1, FCNTLS, NO))
    code += when(call["madvise"], if_equal(2, [MADV_PAGEOUT], refuse(errno.EINVAL)))
    code += when(call["sendmsg"], unless_equal(0, [LISTENERS], NO))
    code += when(call["unshare"], unless_equal(0, namespaces, NO))
    return [*code, back(ALLOW)]


def asking_program(machine: str) -> list[Instruction]:
    """The filter of a host without namespaces, whose listener decides on files that its children write.
    The host has it too, and waits for nobody: what it makes and writes is in SCRATCH and GROUPS."""
    call = CHECKED[machine]
    code = when(call["mkdirat"], if_equal(0, [SCRATCH, GROUPS], ALLOW))
    code += when(call["openat"], if_equal(0, [GROUPS], ALLOW))
    code += [NUMBER, *verdict_on_all(numbers(CREATING, machine), ASK)]
    for name, index in (("open", 1), ("openat", 2)):
        if name in call:
            writes = [argument(index), jump_if_any_bit(O_ACCMODE | O_CREAT, 0, 1), back(ASK)]
            code += when(call[name], writes)
    return [*code, back(ALLOW)]


def child_program(
    machine: str, *, only_process: int | None, can_ask: bool = True
) -> list[Instruction]:
    """The additional filter of children; the first filter checks the architecture. `only_process`:
    there are no namespaces, and this is the only process that the child may be and may signal. With
    namespaces the host decides on new processes; where it cannot be asked, there are none."""
    call = CHECKED[machine]
    code = [NUMBER, *refuse_all(numbers(NEEDED_BY_THE_HOST, machine)), *refuse_clone3(machine)]
    refused = [PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_MM]
    code += when(call["prctl"], if_equal(0, refused, NO))
    if only_process is None:
        new_process = ASK if can_ask else refuse(errno.EAGAIN)
        for name in ("fork", "vfork"):
            code += when(call[name], [back(new_process)]) if name in call else []
        thread = [argument(0), jump_if_any_bit(CLONE_THREAD, 1, 0), back(new_process)]
        code += when(call["clone"], thread)
        set_by_host = RLIMIT_AS
    else:
        set_by_host = RLIMIT_FSIZE
        code += [NUMBER, *refuse_all(numbers(REFUSED_WITHOUT_NAMESPACES, machine))]
        thread = [argument(0), jump_if_any_bit(CLONE_THREAD, 1, 0), back(NO)]
        code += when(call["clone"], thread)
        code += when(call["kill"], unless_equal(0, [only_process], NO))
        code += when(call["tgkill"], unless_equal(0, [only_process], NO))
        code += when(call["prlimit64"], unless_equal(0, [0, only_process], NO))
        # with FALLOC_FL_KEEP_SIZE it takes disk beyond RLIMIT_FSIZE; the C library then writes zeros
        code += when(call["fallocate"], [back(refuse(errno.EOPNOTSUPP))])
        # Landlock knows O_TRUNC since Linux 6.2; before, a file that may be read could be emptied
        code += when(call["openat2"], [back(refuse(errno.ENOSYS))])
        for name, index in (("open", 1), ("openat", 2)):
            if name in call:
                code += when(call[name], if_truncated_by_reader(index))
    # a program that lowers its own limit is no reason for an error
    code += when(call["setrlimit"], if_equal(0, [set_by_host], IGNORE))
    limit = [argument(1), jump_if_equal(set_by_host, 0, 5), *unless_null(2, IGNORE)]
    code += when(call["prlimit64"], limit)
    return [*code, back(ALLOW)]


def refuse_clone3(machine: str) -> list[Instruction]:
    """It keeps its flags in memory, where no filter sees them; on ENOSYS the C library falls back to
    clone."""
    return [jump_if_equal(CHECKED[machine]["clone3"], 0, 1), back(refuse(errno.ENOSYS))]


def refuse_all(calls: list[int]) -> list[Instruction]:
    return verdict_on_all(calls, NO)


def verdict_on_all(calls: list[int], verdict: int) -> list[Instruction]:
    return [i for number in calls for i in (jump_if_equal(number, 0, 1), back(verdict))]


def assemble(code: list[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
