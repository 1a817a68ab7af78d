"""Listing: ids of both editions, pages in both orders, and a bound on what one page reads."""

import pytest

from apis.storage.kv_store import Entry
from providers.kv_store.memory import Memory
from providers.responses.store.listing import Listing

OLD = ["resp_00ff", "resp_0a11", "resp_77aa", "resp_ffee"]
NEW = ["resp_019a00", "resp_019a01", "resp_019b00"]


async def listing() -> Listing:
    kv = Memory(Memory.Config())
    for record_id in [*OLD, *NEW]:
        await kv.put(f"t/response/{record_id}", b"{}")
    await kv.put("t/response_of/x", b"{}")
    await kv.put("u/response/resp_019a02", b"{}")
    return Listing(kv, "t/response/", "resp_")


def every(record_id: str, _entry: Entry) -> str:
    return record_id


def nothing(_record_id: str, _entry: Entry) -> str | None:
    return None


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_pages_in_both_orders_hold_each_record_once(limit: int) -> None:
    subject = await listing()
    for order, expected in (("desc", [*NEW[::-1]]), ("asc", [*NEW])):
        seen: list[str] = []
        after = None
        while True:
            page = await subject.read_page(every, after=after, limit=limit, order=order)  # type: ignore[arg-type]  # of the tuple
            seen += page.data
            after = page.last_id
            if not page.has_more:
                break
        assert sorted(seen) == sorted([*OLD, *NEW])
        new = [record_id for record_id in seen if record_id in NEW]
        assert new == expected
        assert seen.index(new[0]) == (0 if order == "desc" else len(OLD)), "the first edition's are older"


async def test_a_page_that_finds_nothing_ends_with_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.responses.store.listing._MAX_READ_ROWS", 2)
    subject = await listing()
    page = await subject.read_page(nothing, after=None, limit=10, order="desc")
    assert (page.data, page.last_id, page.has_more) == ([], NEW[1], True)
