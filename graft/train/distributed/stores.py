"""torch's key-value store on one address: torch's own listens on all interfaces of the machine."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from graft.http import is_loopback
from graft.serving.listening import listening
from graft.trust.restricted_pickle import SECRET


def open_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens on the address of `host`; port 0 takes a free one.

    The store knows no users: nothing that is read from it, or from connections that are made through it,
    is executed (`graft.trust.restricted_pickle`).
    """
    fd: int | None = None
    try:
        listener = listening(host, port)
    except ValueError:
        pass  # a name of this machine for others, such as behind NAT: then on all interfaces
    else:
        listener.listen(1024)
        port, fd = listener.getsockname()[1], listener.detach()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd
    )


def keep_local() -> str:
    """Have gloo listen on the loopback interface where all processes are on this machine.

    Where they are not, and share no secret: a warning.
    """
    is_here = is_loopback(os.environ.get("MASTER_ADDR"))
    is_whole = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "?")
    if is_here and is_whole and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if is_here or is_whole or os.environ.get(SECRET):
        return ""
    return (
        f"the processes of this run are on several machines and {SECRET} is not set: whoever reaches their "
        f"ports can send them messages (data only, no code). Set {SECRET} to one random text on all machines"
    )
