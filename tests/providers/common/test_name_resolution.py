"""Names are resolved in threads that the tenants share: one whose name servers never answer stops no other."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Sequence

import pytest

from providers.common.fair_turns import CURRENT_TURN, turn_of
from providers.common.net.checked_hosts import SystemResolver
from tests.support.waiting import until

ADDRESS = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 80))


@pytest.fixture
async def pending(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[list[str]]:
    """The slow names that the system is asked for: their name servers answer after the test."""
    end, names = threading.Event(), list[str]()

    def look_up(host: str, *_: object, **__: object) -> list[object]:
        if host.startswith("slow"):
            names.append(host)
            end.wait(30)
        return [ADDRESS]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield names
    end.set()


async def resolve(resolver: SystemResolver, tenant: str, host: str) -> Sequence[str]:
    CURRENT_TURN.set(turn_of(tenant))
    return await resolver.resolve(host, 80)


async def test_a_tenant_with_slow_names_stops_no_other(pending: list[str]) -> None:
    resolver = SystemResolver(several_tenants=True)
    slow = [asyncio.create_task(resolve(resolver, "loud", f"slow{number}.example")) for number in range(40)]
    await until(lambda: bool(pending))
    async with asyncio.timeout(10):
        for number in range(20):
            assert await resolve(resolver, "quiet", f"fast{number}.example") == ["192.0.2.1"]
    for task in slow:  # the look-ups go on, and hold their threads
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    more = [asyncio.create_task(resolve(resolver, "loud", f"slow{number}.example")) for number in range(40)]
    async with asyncio.timeout(10):
        for number in range(20):
            assert await resolve(resolver, "quiet", f"fast{number}.example") == ["192.0.2.1"]
    assert len(pending) <= 8
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)
    resolver.close()


async def test_a_tenant_alone_uses_all_threads(pending: list[str]) -> None:
    resolver = SystemResolver()
    slow = [asyncio.create_task(resolve(resolver, "alone", f"slow{number}.example")) for number in range(20)]
    await until(lambda: len(pending) == 16)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    resolver.close()
