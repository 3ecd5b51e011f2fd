"""Programs that try to get out of the sandbox, to pass its limits or to harm what runs beside them.

`GOT` is printed by a program that reached what it must not reach; everything else may end as it likes.
The programs do not contain this text, since tracebacks show their lines.
"""

# ruff: noqa: E501 (a program per line)
from __future__ import annotations

import os
import sys

from graft_sandbox.inside import seccomp

GOT = "GOT THROUGH"
PRINT_GOT = f"print(bytes.fromhex('{GOT.encode().hex()}').decode(), {{!r}})"


def reach(*attempts: str, imports: str = "") -> list[str]:
    """One program per attempt, which says so if the attempt raises nothing."""
    head = "import ctypes, fcntl, os, resource, signal, socket, sys\n"
    return [
        f"{head}{imports}\ntry:\n    exec({attempt!r})\n    {PRINT_GOT.format(attempt)}\n"
        "except BaseException as error:\n    print(type(error).__name__)\n"
        for attempt in attempts
    ]


FILES = reach(
    "open('/etc/passwd').read()",
    "open('/etc/shadow').read()",
    "open('/etc/hostname').read()",
    f"open({__file__!r}).read()",
    # a virtual environment in a home folder is visible, with the names of the folders above it
    f"[x for x in os.listdir('/home') if x not in {sys.prefix.split('/')!r}][0]",
    f"open({os.path.expanduser('~/.bashrc')!r}).read()",  # noqa: PTH111 (this user may have no home)
    "os.listdir('/var')",
    "os.listdir('/sys')",
    "os.listdir('/proc/1')",
    "open('/proc/1/environ').read()",
    "open('/proc/1/mem', 'rb').read(1)",
    "open('/proc/self/mem', 'rb').read(1)",
    "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "open('/proc/sys/kernel/core_pattern', 'w')",
    "open('/new', 'w')",
    "open('/etc/new', 'w')",
    "open('/dev/new', 'w')",
    "open('/dev/kmsg')",
    "open('/dev/mem')",
    "open('/dev/ptmx')",
    "open('/dev/shm/new', 'w')",
    "open(os.__file__, 'a')",
    "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "os.truncate(os.__file__, 0)",
    "os.unlink(os.__file__)",
    "os.rename(os.__file__, 'mine')",
    "os.link(os.__file__, 'mine')",
    "os.chmod(os.__file__, 0)",
    "os.mkdir('/lib/new')",
    "os.mknod('device', 0o020666, os.makedev(1, 1)); open('device', 'rb').read(1)",
    "os.chroot('.')",
    "os.symlink('/etc/passwd', 'link'); open('link').read()",
    "os.open('/', os.O_TMPFILE | os.O_WRONLY)",
    "import graft.types",
    "import graft.envs",
    "import reasoning_gym.factory",
    "import reasoning_gym; reasoning_gym.create_dataset",
    "import gem.core",
)

NETWORK = reach(
    *(
        f"socket.socket(socket.{family}, socket.{kind})"
        for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK")
        for kind in ("SOCK_STREAM", "SOCK_DGRAM")
    ),
    "socket.create_connection(('127.0.0.1', 22), 1)",
    "socket.getaddrinfo('example.org', 80)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "socket.socketpair()[0].bind('\\0graft')",
    "socket.socketpair()[0].bind('name')",
    "socket.socketpair()[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, bytes(4))])",
    "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
    "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
)

SIGNALS = [
    f"import os, signal, time\ntry:\n    {attempt}\nexcept OSError:\n    pass\ntime.sleep(0.05)\n"
    for attempt in (
        "os.kill(0, signal.SIGKILL)",
        "os.kill(0, signal.SIGSTOP)",
        "os.kill(0, signal.SIGTERM)",
        "os.kill(-1, signal.SIGKILL)",
        "os.kill(-1, signal.SIGSTOP)",
        "os.kill(os.getppid(), signal.SIGKILL)",
        "os.kill(1, signal.SIGKILL)",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "os.killpg(os.getpgid(0), signal.SIGKILL)",
        "os.killpg(1, signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "[os.kill(pid, signal.SIGSTOP) for pid in range(2, 300)]",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "os.setpriority(os.PRIO_PGRP, 0, 19)",
        "os.setpgid(0, os.getppid()); os.kill(0, signal.SIGKILL)",
        "os.setsid(); os.kill(0, signal.SIGKILL)",
        "os.fork() or (os.setsid(), os.kill(-1, signal.SIGKILL))",
        "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(1)",
    )
] + reach(
    "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "fcntl.fcntl(0, fcntl.F_SETSIG, 9)",
    "fcntl.ioctl(1, 0x8901, (1).to_bytes(4, 'little'))",
    "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
)

CALLS = [
    "import ctypes, errno\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    f"done = libc.syscall(ctypes.c_long(%d), *[ctypes.c_long(0)] * 6)\n"
    f"if done >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS): {PRINT_GOT.format(name)}\n"
    % seccomp.numbers(entry, machine)[0]
    for machine in [__import__("platform").machine()]
    if machine in seccomp.ARCHITECTURES
    for entry in (seccomp.REFUSED + seccomp.NEEDED_BY_THE_HOST).split()
    for name in [entry.partition("=")[0]]
    if seccomp.numbers(entry, machine)
]

_MAP = """
import ctypes, mmap, os, socket, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MB = 1 << 20
def touch(size, flags=0x22, fd=-1):
    at = libc.mmap(None, size, 3, flags, fd, 0)
    if at and at != 2**64 - 1:
        ctypes.memset(at, 1, size)
    return at
def fork(act, count):
    for _ in range(count):
        try:
            if os.fork() == 0:
                try:
                    act()
                    time.sleep(9)
                finally:
                    os._exit(0)
        except OSError:
            pass
"""
MEMORY = [
    "x = bytearray(10**10)",
    "x = []\nwhile True: x.append(bytes(1 << 20))",
    "x = 'x'\nwhile True: x += x",
    "x = [0] * 10**7\nwhile True: x += x",
    "x = {}\nfor n in range(10**9): x[n] = str(n)",
    "import numpy\nx = [numpy.ones(10**6) for _ in range(1000)]",
    "x = 1\nwhile True: x = x << (x.bit_length() + 1)",
    _MAP + "fork(lambda: touch(40 * MB), 40)\ntime.sleep(1)",
    _MAP + "fork(lambda: [touch(MB) for _ in range(99)], 60)\ntime.sleep(1)",
    _MAP + "for _ in range(30):\n    at = touch(40 * MB, 0x21); libc.madvise(at, 40 * MB, 4)\n"
    "    fork(lambda: 0, 1)\n    libc.munmap(at, 40 * MB)\ntime.sleep(1)",
    _MAP + "for _ in range(30):\n    at = touch(12 * MB, 0x21); libc.madvise(at, 12 * MB, 4)\n"
    "    fork(lambda: 0, 1)\n    libc.munmap(at, 12 * MB)\ntime.sleep(1)",
    _MAP + "zero = os.open('/dev/zero', 2)\n[touch(16 * MB, 1, zero) for _ in range(50)]\ntime.sleep(1)",
    _MAP + "zero = os.open('/dev/zero', 2)\nfork(lambda: touch(16 * MB, 1, zero), 40)\ntime.sleep(1)",
    _MAP + "[threading.Thread(target=lambda: [touch(MB) for _ in range(99)]).start() for _ in range(50)]",
    _MAP + "def fill():\n    kept = []\n    while True:\n        for end in socket.socketpair():\n"
    "            kept.append(end); end.setblocking(False)\n            try:\n"
    "                while True: end.send(bytes(4096))\n            except BlockingIOError: pass\n"
    "touch(50 * MB)\ntry: fill()\nexcept OSError: time.sleep(1)",
    _MAP + "def fill():\n    kept = []\n    try:\n        while True:\n            for end in socket.socketpair():\n"
    "                kept.append(end); end.setblocking(False)\n                try:\n"
    "                    while True: end.send(bytes(4096))\n                except BlockingIOError: pass\n"
    "    except OSError: time.sleep(9)\nfork(fill, 60)\ntime.sleep(1)",
    _MAP + "kept = []\ntry:\n    while True:\n        kept.append(os.pipe()); os.set_blocking(kept[-1][1], False)\n"
    "        os.write(kept[-1][1], bytes(65536))\nexcept OSError: time.sleep(1)",
    _MAP + "libc.sbrk(ctypes.c_long(10**9))\ntouch(60 * MB)\nfork(lambda: touch(60 * MB), 9)\ntime.sleep(0.5)",
    _MAP + "at = libc.mmap(None, 60 * MB, 3, 0x4022, -1, 0)\n"
    "fork(lambda: ctypes.memset(at, 1, 60 * MB), 30)\ntime.sleep(1)",
    _MAP + "import subprocess, sys\n"
    "[subprocess.Popen([sys.executable, '-c', 'x = bytearray(50 * 2**20); import time; time.sleep(9)'])"
    " for _ in range(9)]\ntime.sleep(1)",
    _MAP + "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\ntouch(500 * MB)",
    _MAP + "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))",
    _MAP + "[libc.madvise(touch(MB), MB, 21) for _ in range(200)]",
    _MAP + "os.ftruncate(0, 10**9)",
    _MAP + "while True: os.write(0, bytes(MB))",
    _MAP + "[libc.timer_create(1, None, ctypes.byref(ctypes.c_long())) for _ in range(10**5)]",
    "def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()",
    "import json\njson.loads('[' * 10**6)",
    "import re\nre.compile('(' * 10**5 + ')' * 10**5)",
    "eval('+'.join(['1'] * 10**6))",
    "import pickle, io\nx = []\nfor _ in range(10**6): x = [x]\npickle.dumps(x)",
    "x = []\nfor _ in range(10**6): x = [x]\nprint(x)",
]  # fmt: skip

DISK = [
    "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
    "for n in range(300): open(str(n), 'wb').write(bytes(1 << 20))\nimport time; time.sleep(1)",
    "import os, time\nkept = []\nfor n in range(99):\n    kept.append(os.open(str(n), 66)); os.unlink(str(n))\n"
    "    for _ in range(12): os.write(kept[-1], bytes(1 << 20))\ntime.sleep(1)",
    "import ctypes, os\nlibc = ctypes.CDLL(None)\nfor n in range(99):\n"
    "    libc.fallocate(os.open(str(n), 66), 1, ctypes.c_long(0), ctypes.c_long(10 << 20))",
    "import os\nfor n in range(99): os.posix_fallocate(os.open(str(n), 66), 0, 10 << 20)",
    "import os\nos.truncate(os.open('sparse', 66), 1 << 40)",
    "import mmap, os, time\nkept = []\nfor n in range(99):\n    file = os.open(str(n), 66)\n"
    "    for _ in range(8): os.write(file, bytes(1 << 20))\n    kept.append(mmap.mmap(file, 4096))\n"
    "    os.unlink(str(n)); os.close(file)\ntime.sleep(1)",
    "import os\nfor n in range(120_000): os.close(os.open(str(n), os.O_CREAT))",
    "import os\nfor n in range(120_000): os.mkdir(str(n))",
    "import os\nfor n in range(3000):\n    os.mkdir('d'); os.chdir('d')",
    "import os\nfor n in range(90):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('x')\nos.chmod('..', 0)",
    "import os\nos.umask(0)\nos.mkdir('m', 0o300)\nopen('m/f', 'w').write('x')",
    "import os\nos.mkdir('m'); open('m/f', 'w').write('x'); os.umask(0)\nos.mkdir('m/n', 0)\nos.mkdir('o', 0o100)",
    "import os\nos.symlink('loop', 'loop')\nos.symlink('.', 'here')\nos.mkfifo('fifo')",
    "import os\nopen('f', 'w')\nfor n in range(50_000): os.link('f', str(n))",
    "import os\nfor n in range(200): open(os.fsdecode(bytes([1 + n])) * 200, 'w')",
    "import os\nos.rmdir(os.getcwd())\nos.mkdir('x')",
    "import os\nos.mkdir('a')\nos.chdir('a')\nos.rmdir('../a')\nopen('f', 'w')",
    "import threading\ndef fill(n):\n    with open(str(n), 'wb') as file:\n        while True: file.write(bytes(1 << 20))\n"
    "[threading.Thread(target=fill, args=(n,)).start() for n in range(30)]",
    "import os\nwhile True:\n    os.mkdir('a'); os.rename('a', 'b'); os.rmdir('b')",
    "import os, time\nfile = os.open('f', 66)\nfor n in range(9**9): os.pwrite(file, b'x', n << 12)",
    # bursts after a rest, in which nobody looks
    "import time\ntime.sleep(0.15)\nfor n in range(40): open(str(n), 'wb').write(bytes(8 << 20))\ntime.sleep(1)",
    "import time\nfiles = [open(str(n), 'wb', 0) for n in range(30)]\ntime.sleep(0.15)\n"
    "for file in files: file.write(bytes(16 << 20))",
    "import os, threading, time\ndef write(n):\n    file = os.open(str(n), 66)\n"
    "    threading.Thread(target=os.close, args=(file,)).start(); os.write(file, content)\ncontent = bytes(15 << 20)\n"
    "for n in range(30): threading.Thread(target=write, args=(n,)).start()",
    "import os, time\ntime.sleep(0.1)\nfor n in range(30):\n    os.makedirs(f'{n}/b'); open(f'{n}/b/f', 'wb').write(bytes(8 << 20))\n"
    "    os.rename(f'{n}/b', f'{n}/c')",
    "import mmap, os\nkept = []\nfor n in range(12):\n    file = os.open(str(n), 66); os.ftruncate(file, 15 << 20)\n"
    "    kept.append(mmap.mmap(file, 15 << 20)); os.close(file); os.unlink(str(n))\n"
    "    kept[-1][::4096] = b'x' * len(kept[-1][::4096])",
    "import os\nkept = []\nfor n in range(12):\n    kept.append(os.open('.', os.O_RDWR | os.O_TMPFILE)); os.write(kept[-1], bytes(15 << 20))",
    "import os\nfile = os.open('f', 66); os.write(file, bytes(15 << 20))\n"
    "for n in range(12): os.copy_file_range(file, os.open(str(n), 66), 15 << 20, 0, 0)",
    "import resource\nfor _ in range(2): resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))",
    "import ctypes, os\nlimit = (ctypes.c_ulong * 2)(1 << 40, 1 << 40)\nctypes.CDLL(None).prlimit(os.getpid(), 1, limit, None)\n"
    "with open('f', 'wb') as file:\n    for _ in range(100): file.write(bytes(1 << 20))",
    "import os\nfor n in range(20_000): os.symlink('x' * 4000, str(n))",
    "import os\nfor n in range(20_000):\n    open('a', 'w').close(); os.rename('a', str(n))",
    "import os\nfor n in range(20_000): open('x' * 240 + str(n), 'w').close()",
    "import threading\ndef again():\n    while True:\n        try: open('f', 'w').close()\n        except OSError: pass\n"
    "[threading.Thread(target=again).start() for _ in range(30)]",
    "import os, re\nhere = re.match(r'(.*/)(\\d+)$', os.getcwd())\nif here:\n    for n in range(int(here[2]) + 20):\n"
    "        if str(n) != here[2]:\n            try: os.listdir(here[1] + str(n)); " + PRINT_GOT.format("a neighbour's folder") + "\n"
    "            except OSError: pass",
]  # fmt: skip

TIME = [
    "while True: pass",
    "import time; time.sleep(99)",
    "9**9**9",
    "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "import os\nwhile True: os.fork()",
    "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])",
    "import threading\nwhile True:\n    try: threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n"
    "    except RuntimeError: pass",
    "import threading, time\n[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(60)]",
    "import signal\nfor n in signal.valid_signals():\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "import atexit\n@atexit.register\ndef again():\n    while True: pass",
    "import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()",
    "class A:\n    def __del__(self):\n        while True: pass\nA()",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass",
    "import os\nfor _ in range(50):\n    if os.fork() == 0:\n        while True: pass",
    "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])",
    "input()\nwhile True: input()",
    "import select\nselect.select([], [], [])",
    "import sys\nwhile True:\n    try: sys.stdin.read()\n    except BaseException: pass",
    "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)\n"
    "while True: pass",
    "def f():\n    try: f()\n    finally: f()\nf()",
    "import asyncio\nasync def f():\n    while True: await asyncio.sleep(0)\nasyncio.run(f())",
    "import os\nos.nice(-20)\nwhile True: pass",
    "sum(iter(int, 1))",
]  # fmt: skip

OUTPUT = [
    "while True: print('x' * 1000)",
    "import os\nwhile True: os.write(2, b'x' * 65536)",
    "import os\nwhile True: os.write(1, os.urandom(4096)); os.write(2, b'\\0' * 4096)",
    "print('x' * 10**7)",
    "print('\\ud800')",
    "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 100)",
    "print('\\x1e' + '[1]')\nimport os; os._exit(0)",
    "import os\nfor n in range(3, 300):\n    try: os.write(n, b'0\\n')\n    except OSError: pass",
    "import os\n[os.close(n) for n in (0, 1, 2)]",
    "import os\nos.dup2(1, 0); os.dup2(2, 1)\nprint(1)",
    "import sys\nsys.stdout = sys.stderr = None\nprint(1)\n1/0",
    "import sys\nsys.stdout.close(); sys.stderr.close()\n1/0",
    "import sys\nsys.exit(2**70)",
    "import sys\nsys.exit(object())",
    "import sys\nsys.exit('x' * 10**6)",
    "raise SystemExit(-9)",
    "class E(BaseException):\n    def __str__(self): raise self\nraise E",
    "class E(Exception):\n    def __init__(self): raise E\nraise E",
    "raise ExceptionGroup('x' * 10**5, [ValueError(n) for n in range(10**4)])",
    "e = None\nfor n in range(10**4):\n    x = ValueError(n); x.__cause__ = e; e = x\nraise e",
    "import os\nos.write(1, b'\\xff' * 60000)",
    "print('MemoryError')\nimport sys\nsys.stderr.write('MemoryError')",
]

INTERPRETER = [
    "class A:\n    def __repr__(self): return 'x' * (1 << 28)\nA()",
    "class E(Exception):\n    def __str__(self): raise SystemExit(7)\nraise E",
    "e = ValueError()\nfor _ in range(20_000): e = ExceptionGroup('a', [e])\nraise e",
    "raise Exception('x' * (1 << 26))",
    "class A:\n    def __del__(self):\n        while True: pass\nA()",
    "import os, sys\nsys.stderr.write('ended 0 \\n'); os.write(1, b'ended 0 \\nbroken x\\n'); os._exit(3)",
    "import os\nfor n in range(3, 12):\n    try: os.write(n, b'0\\n')\n    except OSError: pass",
    "import ctypes; ctypes.string_at(0)",
    "import ctypes; ctypes.memset(id(1), 255, 64)",
    "import ctypes, random\nwhile True: ctypes.memset(id(random.random()), 255, 999)",
    "import os; os.abort()",
    "import sys; sys.modules.clear()\nimport os",
    "import builtins\nbuiltins.__dict__.clear()",
    "import sys\nfor name in list(sys.modules): sys.modules[name] = None\nprint(1)",
    "import os\nfor name in dir(os): setattr(os, name, None)",
    "import sys\nsys.settrace(lambda *_: 1/0)\nprint(1)",
    "import sys\nsys.setswitchinterval(1e-9)\nsys.setrecursionlimit(5)\nprint(1)",
    "import gc\nprint(len(gc.get_objects()))\n[print(x) for x in gc.get_objects()[:50]]",
    "import sys\nframe = sys._getframe()\nwhile frame: print(list(frame.f_locals)); frame = frame.f_back",
    "import sys\nframe = sys._getframe()\nwhile frame: frame.f_globals.clear(); frame = frame.f_back",
    "import runner", "from inside import host; host.main()",
    "import linecache, traceback\nlinecache.cache = traceback.print_exc = None\n1/0",
    "import os\nos.register_at_fork(after_in_child=lambda: 1/0)\nos.fork()",
    "import threading\nthreading.excepthook = 1\nthreading.Thread(target=lambda: 1/0).start()\nraise KeyboardInterrupt",
    "import os\nos.environ.clear(); os.execv('/bin/sh', ['sh', '-c', 'id'])",
    "import sys, os\nos.execv(sys.executable, ['python', '-c', 'import os; os.kill(0, 9)'])",
    "(" * 100_000, "[" * 5000 + "]" * 5000, "\0", "\ud800", "-" * 50_000 + "1", "#" * 500_000, "",
    "x = " + "lambda: " * 2000 + "1", "if 1:\n" * 200, "f'{" * 200, "'''", "\\", "\t\n \n\t",
    "exec('1+' * 50_000 + '1')", "import this\n" * 1000, "class A(A): pass", "del __builtins__\nprint(1)",
    "from __future__ import braces", "import ctypes\nctypes.pythonapi.Py_FinalizeEx()",
    "import _thread\n_thread.interrupt_main()\nwhile True: pass", "import faulthandler\nfaulthandler._sigabrt()",
    "import os\nos._exit(255)", "import ctypes; ctypes.CDLL(None).exit(3)", "import ctypes; ctypes.CDLL(None).raise_(9)",
]  # fmt: skip

PROGRAMS = {
    "files": FILES,
    "network": NETWORK,
    "signals": SIGNALS,
    "calls": CALLS,
    "memory": MEMORY,
    "disk": DISK,
    "time": TIME,
    "output": OUTPUT,
    "interpreter": INTERPRETER,
}
