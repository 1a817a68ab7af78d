"""Turns that are added while those before them are deleted: none loses its history."""

import asyncio
import random
from typing import Any

import pytest

from apis.errors import InvalidRequest
from apis.storage.kv_store import Entry
from providers.kv_store.memory import Memory
from providers.responses.events.ids import ResponseIds
from tests.providers.responses.store.kept import CACHES, DAY_S, TENANT, Kept, days_later, read_messages


@CACHES
async def test_a_turn_whose_predecessor_was_deleted_meanwhile_has_its_history(cache_bytes: int) -> None:
    """Also in another process, and for all turns after it."""
    stored = Kept(cache_bytes=cache_bytes)
    a = await stored.say("a")
    b = await stored.say("b", a)
    past = await stored.history.load_history(b, tenant=TENANT)
    await stored.history.delete(b, tenant=TENANT)
    await stored.history.delete(a, tenant=TENANT)
    c = await stored.save("c", past, previous_id=b)
    again = await stored.save("again", past, previous_id=b)
    d = await stored.say("d", c)
    other = await stored.say("other", c)
    for history in (stored.history, stored.other_process()):
        for response_id, expected in (
            (c, "a A b B c C"),
            (again, "a A b B again AGAIN"),
            (d, "a A b B c C d D"),
            (other, "a A b B c C other OTHER"),
        ):
            loaded = await history.load_history(response_id, tenant=TENANT)
            assert read_messages(loaded) == expected
            assert len(loaded.tool_results) == len(expected.split()) // 2
    tree = await stored.history.load_tree(d, tenant=TENANT, limit=10)
    assert [(row["id"], row["previous_response_id"]) for row in tree.responses][:3] == [(b, None), (c, b), (d, c)]
    for response_id in (c, again, d, other):
        await stored.history.delete(response_id, tenant=TENANT)
    assert await stored.store.keys() == []


async def test_a_turn_after_a_deletion_follows_its_own_predecessor() -> None:
    """The place of a deleted turn is not taken by another one, which its successors would follow."""
    stored = Kept()
    a = await stored.say("a")
    b = await stored.say("b", a)
    past = await stored.history.load_history(b, tenant=TENANT)
    await stored.history.delete(b, tenant=TENANT)
    x = await stored.say("x", a)
    late = await stored.save("late", past, previous_id=b)
    y = await stored.say("y", x)
    assert [await stored.said(each) for each in (late, x, y)] == ["a A b B late LATE", "a A x X", "a A x X y Y"]


async def test_deletions_during_continuations_lose_no_chain() -> None:
    """This holds for any order of their reads and writes."""
    for seed in range(60):
        stored = Kept()
        stored.store.dice = random.Random(seed)
        a = await stored.say("a")
        b = await stored.say("b", a)
        past = [await stored.history.load_history(each, tenant=TENANT) for each in (a, b)]
        *responses, _, _ = await asyncio.gather(
            stored.save("c", past[1], previous_id=b),
            stored.save("x", past[0], previous_id=a),
            stored.save("y", past[0], previous_id=a),
            stored.history.delete(a, tenant=TENANT),
            stored.history.delete(b, tenant=TENANT),
        )
        histories = [
            read_messages(await stored.other_process().load_history(each, tenant=TENANT)) for each in responses
        ]
        assert histories == ["a A b B c C", "a A x X", "a A y Y"], seed
        await asyncio.gather(*(stored.history.delete(each, tenant=TENANT) for each in responses))
        assert await stored.store.keys() == [], seed


async def test_the_turn_before_a_background_response_is_kept_until_that_has_ended() -> None:
    """Deleted, the response before it is unknown, and is still the history of the one that runs."""
    stored = Kept()
    a = await stored.say("a")
    past = await stored.history.load_history(a, tenant=TENANT)
    ids = ResponseIds()
    ops = await stored.history.branch_ops(past, ids.response_id, 100, tenant=TENANT)
    await stored.store.write(ops)
    await stored.history.delete(a, tenant=TENANT)
    with pytest.raises(InvalidRequest):
        await stored.history.load_history(a, tenant=TENANT)
    assert past.position is not None
    kept_past = await stored.other_process().load_history(a, tenant=TENANT, kept_position=past.position)
    assert read_messages(kept_past) == "a A"
    b = await stored.save("b", kept_past, previous_id=a, ids=ids, background=True)
    assert await stored.said(b) == "a A b B"
    await stored.history.delete(b, tenant=TENANT)
    assert await stored.store.keys() == []
    with pytest.raises(InvalidRequest):
        await stored.history.branch_ops(past, ResponseIds().response_id, 100, tenant=TENANT)


async def test_a_chain_that_is_read_while_it_is_deleted_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading prolongs the life of what is stored, and of nothing else."""
    stored = Kept(retention_s=10 * DAY_S)
    a = await stored.say("a")
    await days_later(stored, 6, monkeypatch)
    read, scan = asyncio.Event(), Memory.scan

    async def scan_slowly(self: Memory, prefix: str, **options: Any) -> list[tuple[str, Entry]]:
        rows = await scan(self, prefix, **options)
        if prefix.startswith(f"{TENANT}/turn/"):
            read.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return rows

    monkeypatch.setattr(Memory, "scan", scan_slowly)
    loading = asyncio.create_task(stored.history.load_history(a, tenant=TENANT))
    await read.wait()
    monkeypatch.undo()
    await days_later(stored, 6, monkeypatch)
    await stored.history.delete(a, tenant=TENANT)
    await asyncio.wait({loading})
    assert await stored.store.keys() == []
