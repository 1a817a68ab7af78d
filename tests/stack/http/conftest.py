"""Servers that the tests of a module share: one with two keys, one without any."""

from collections.abc import AsyncGenerator

import pytest_asyncio

from tests.stack.http.raw import KEYS
from tests.support.servers.serving import Served, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked() -> AsyncGenerator[Served]:
    async with serving(server={"api_keys": KEYS}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local() -> AsyncGenerator[Served]:
    async with serving(server={"max_body_bytes": 65536}) as running:
        yield running
