"""read_listing: pages in both orders, and a bound on what one page reads."""

import pytest

from apis.storage.kv_store import Entry, KVStore
from apis.wire.base import ListParams
from providers.kv_store.memory import Memory
from providers.responses.store.listing import read_listing

IDS = ["resp_019a00", "resp_019a01", "resp_019b00", "resp_019b01"]


async def filled_store() -> KVStore:
    kv = Memory(Memory.Config())
    for record_id in IDS:
        await kv.put(f"t/response/{record_id}", b"{}")
    await kv.put("t/response_of/x", b"{}")
    await kv.put("u/response/resp_019a02", b"{}")
    return kv


def every(record_id: str, _entry: Entry) -> str:
    return record_id


def nothing(_record_id: str, _entry: Entry) -> str | None:
    return None


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_pages_in_both_orders_hold_each_record_once(limit: int) -> None:
    kv = await filled_store()
    for order, expected in (("desc", IDS[::-1]), ("asc", IDS)):
        names: list[str] = []
        after = None
        while True:
            params = ListParams.model_validate({"after": after, "limit": limit, "order": order})
            page = await read_listing(kv, "t/response/", params, every, "response")
            names += page.data
            after = page.last_id
            if not page.has_more:
                break
        assert names == expected


async def test_a_page_that_finds_nothing_ends_with_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.responses.store.listing._MAX_READ_ROWS", 2)
    kv = await filled_store()
    page = await read_listing(kv, "t/response/", ListParams(limit=10), nothing, "response")
    assert (page.data, page.last_id, page.has_more) == ([], IDS[2], True)
