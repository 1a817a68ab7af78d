"""A site, a canary, and a GuardedFetcher that may go to the site alone."""

from collections.abc import AsyncGenerator

import pytest

from providers.fetcher.safe import GuardedFetcher
from tests.support.servers.fetcher_hosts import Canary, Site, fetching


@pytest.fixture
async def site() -> AsyncGenerator[Site]:
    async with Site() as site:
        yield site


@pytest.fixture
async def canary() -> AsyncGenerator[Canary]:
    async with Canary() as canary:
        yield canary


@pytest.fixture
async def safe(site: Site) -> AsyncGenerator[GuardedFetcher]:
    async with fetching([site.port]) as safe:
        yield safe
