"""Files of several tenants: a flood by one leaves places of the readers to the others."""

import asyncio

import pytest

from apis.documents.reader import Document
from apis.errors import RateLimited
from apis.fair_share import Tenants
from providers.fetcher.safe import GuardedFetcher
from providers.reader.child import ChildReader

MAX_CHARS = 10_000_000
TENANTS = Tenants(frozenset({"loud", "quiet"}))
TEXTS = {"loud": b"text " * 1_500_000, "quiet": b"text"}
"""Each file of the flood takes long, so that a process of the other tenant that begins slowly still ends before it."""


async def test_a_flood_of_files_of_one_tenant_leaves_a_reader_to_another() -> None:
    """One tenant uses half of the places."""
    reader = ChildReader(
        ChildReader.Config(parallel=2, max_tenant_waiting=5), None, GuardedFetcher(GuardedFetcher.Config()), TENANTS
    )
    order: list[str] = []

    async def read(tenant: str) -> None:
        await reader.extract_text(Document("a.txt", TEXTS[tenant]), MAX_CHARS, tenant=tenant)
        order.append(tenant)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(read("loud"))
        await asyncio.sleep(0)
        group.create_task(read("quiet"))
        await asyncio.sleep(0)
        with pytest.raises(RateLimited, match="files to be read"):
            await read("loud")
    assert order.index("quiet") <= 2
