"""Tests that are coroutines run in an event loop of their own; a gateway with a tiny policy."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from graft.gateway.gateway import Gateway
from graft.gateway.session import AgentSession
from tests.gateway.tiny import TASK, tiny_gateway


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = tiny_gateway()
    yield gateway
    gateway.policy.engine.close()


@pytest.fixture
def session(gateway: Gateway) -> AgentSession:
    return gateway.open(TASK)
