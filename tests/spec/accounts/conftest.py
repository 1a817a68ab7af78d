"""The stack with stored accounts that the tests of accounts talk to."""

from collections.abc import AsyncGenerator

import pytest_asyncio

from tests.support.servers.serving import Served
from tests.support.tenants.accounts import serving_accounts


@pytest_asyncio.fixture
async def served() -> AsyncGenerator[Served]:
    async with serving_accounts() as running:
        yield running
