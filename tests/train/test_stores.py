"""Stores listen where they are told to, and nowhere else."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from graft.train.distributed.stores import keep_local, open_store

SECONDS = timedelta(seconds=20)


def listeners(port: int) -> set[str]:
    """Addresses in /proc/net/tcp on which this port is listened on, in hexadecimal."""
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            host, _, number = address.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(host)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux lists sockets in /proc")
def test_a_store_listens_on_its_own_address_alone():
    store = open_store("127.0.0.1", 0, SECONDS)
    other = TCPStore("127.0.0.1", store.port, is_master=False, timeout=SECONDS)
    other.set("key", "value")
    assert store.get("key") == b"value"
    assert listeners(store.port) == {"0100007F"}


def test_a_name_that_is_no_address_of_this_machine_still_works(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("graft.train.distributed.stores.listening", _refuse)
    store = open_store("127.0.0.1", port, SECONDS)
    store.set("key", "value")
    assert store.get("key") == b"value"


def _refuse(host: str, port: int) -> socket.socket:
    raise ValueError("cannot listen")


@pytest.mark.parametrize(
    ("address", "local", "want"),
    [
        ("127.0.0.1", "2", "lo"),
        ("localhost", "2", "lo"),
        ("10.0.0.1", "2", None),
        ("127.0.0.1", "1", None),
    ],
)
def test_gloo_stays_on_one_machine(monkeypatch, address, local, want):
    import os

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {
        "MASTER_ADDR": address,
        "LOCAL_WORLD_SIZE": local,
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    keep_local()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == want
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")  # so that the fixture removes it
