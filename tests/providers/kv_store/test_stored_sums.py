"""The bytes of a large tenant are measured once for all workers that start, and before anything is refused."""

import asyncio

import pytest

from apis.errors import InvalidRequest
from apis.storage.quota import StorageQuota
from providers.kv_store.memory import Memory
from tests.support.forwarding_store import ForwardingStore

KEY = "/stored_bytes/t/sum"
PAGES = 12
PAGE_BYTES = 7_500


class PagedStore(ForwardingStore):
    """A store whose tenant has PAGES of bytes; it counts the reads of them."""

    def __init__(self) -> None:
        super().__init__(Memory(Memory.Config()))
        self.reads = 0
        self.is_measured = asyncio.Event()

    async def measure(self, prefix: str, *, after: str = "") -> tuple[int, str]:
        self.reads += 1
        page = len(after) + 1
        if page > PAGES:
            self.is_measured.set()
            return 0, ""
        return PAGE_BYTES, "x" * page


async def start(store: PagedStore, max_bytes: int) -> StorageQuota:
    """Return the quota of a worker that has just started, after its first request."""
    quota = StorageQuota(store, max_bytes)
    await quota.require_room("t")
    for _ in range(20):
        await asyncio.sleep(0)
    return quota


async def test_the_second_worker_begins_with_the_sum_of_the_first() -> None:
    store = PagedStore()
    await start(store, 1_000_000)
    async with asyncio.timeout(20):
        await store.is_measured.wait()
    await asyncio.sleep(0)
    stored = await store.get(KEY)
    assert stored is not None
    assert (stored.value, store.reads) == (b"%d" % (PAGES * PAGE_BYTES), PAGES + 1)
    quota = await start(store, 1_000_000)
    quota.add([("t/1", 20_000)])
    await quota.require_room("t")
    assert store.reads == PAGES + 1


async def test_a_stored_sum_alone_refuses_nothing() -> None:
    store = PagedStore()
    await store.put(KEY, b"500000")
    quota = await start(store, 100_000)
    await quota.require_room("t")
    assert store.reads == PAGES + 1
    store.is_measured.clear()
    with pytest.raises(InvalidRequest, match="90000 bytes"):
        await (await start(store, 80_000)).require_room("t")


async def test_workers_that_start_together_measure_once() -> None:
    store = PagedStore()
    quotas = [StorageQuota(store, 1_000_000) for _ in range(6)]
    async with asyncio.timeout(20):
        while await store.get(KEY) is None:
            await quotas[0].require_room("t")
            await asyncio.sleep(0)
        for _ in range(3):
            for quota in quotas:
                await quota.require_room("t")
                await asyncio.sleep(0)
        await store.is_measured.wait()
    assert store.reads == PAGES + 1


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"[1]"])
async def test_a_damaged_sum_is_measured_again(damaged: bytes) -> None:
    store = PagedStore()
    await store.put(KEY, damaged)
    await start(store, 1_000_000)
    async with asyncio.timeout(20):
        await store.is_measured.wait()
    assert store.reads == PAGES + 1
