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
    """D5: also in another process, and for all turns after it."""
    kept = Kept(cache_bytes=cache_bytes)
    a = await kept.say("a")
    b = await kept.say("b", a)
    past = await kept.history.load_history(b, tenant=TENANT)
    await kept.history.delete(b, tenant=TENANT)
    await kept.history.delete(a, tenant=TENANT)
    c = await kept.save("c", past, previous_id=b)
    again = await kept.save("again", past, previous_id=b)
    d = await kept.say("d", c)
    other = await kept.say("other", c)
    for history in (kept.history, kept.other_process()):
        for response_id, expected in (
            (c, "a A b B c C"),
            (again, "a A b B again AGAIN"),
            (d, "a A b B c C d D"),
            (other, "a A b B c C other OTHER"),
        ):
            loaded = await history.load_history(response_id, tenant=TENANT)
            assert read_messages(loaded) == expected
            assert len(loaded.tool_results) == len(expected.split()) // 2
    tree = await kept.history.load_tree(d, tenant=TENANT, limit=10)
    assert [(row["id"], row["previous_response_id"]) for row in tree.responses][:3] == [(b, None), (c, b), (d, c)]
    for response_id in (c, again, d, other):
        await kept.history.delete(response_id, tenant=TENANT)
    assert await kept.store.keys() == []


async def test_a_turn_after_a_deletion_stands_on_its_own_predecessor() -> None:
    """D5: the place of a deleted turn is not taken by another one, which its successors would follow."""
    kept = Kept()
    a = await kept.say("a")
    b = await kept.say("b", a)
    past = await kept.history.load_history(b, tenant=TENANT)
    await kept.history.delete(b, tenant=TENANT)
    x = await kept.say("x", a)
    late = await kept.save("late", past, previous_id=b)
    y = await kept.say("y", x)
    assert [await kept.said(each) for each in (late, x, y)] == ["a A b B late LATE", "a A x X", "a A x X y Y"]


async def test_deletions_beside_continuations_lose_no_chain() -> None:
    """D5: whatever the order of their reads and writes."""
    for seed in range(60):
        kept = Kept()
        kept.store.dice = random.Random(seed)
        a = await kept.say("a")
        b = await kept.say("b", a)
        past = [await kept.history.load_history(each, tenant=TENANT) for each in (a, b)]
        *made, _, _ = await asyncio.gather(
            kept.save("c", past[1], previous_id=b),
            kept.save("x", past[0], previous_id=a),
            kept.save("y", past[0], previous_id=a),
            kept.history.delete(a, tenant=TENANT),
            kept.history.delete(b, tenant=TENANT),
        )
        told = [read_messages(await kept.other_process().load_history(each, tenant=TENANT)) for each in made]
        assert told == ["a A b B c C", "a A x X", "a A y Y"], seed
        await asyncio.gather(*(kept.history.delete(each, tenant=TENANT) for each in made))
        assert await kept.store.keys() == [], seed


async def test_the_turn_before_a_background_response_is_kept_until_that_has_ended() -> None:
    """D5: deleted, the response before it is unknown, and is still the history of the one that runs."""
    kept = Kept()
    a = await kept.say("a")
    past = await kept.history.load_history(a, tenant=TENANT)
    ids = ResponseIds()
    ops = await kept.history.branch_ops(past, ids.response_id, 100, tenant=TENANT)
    await kept.store.write(ops)
    await kept.history.delete(a, tenant=TENANT)
    with pytest.raises(InvalidRequest):
        await kept.history.load_history(a, tenant=TENANT)
    assert past.position is not None
    kept_past = await kept.other_process().load_history(a, tenant=TENANT, kept_position=past.position)
    assert read_messages(kept_past) == "a A"
    b = await kept.save("b", kept_past, previous_id=a, ids=ids, background=True)
    assert await kept.said(b) == "a A b B"
    await kept.history.delete(b, tenant=TENANT)
    assert await kept.store.keys() == []
    with pytest.raises(InvalidRequest):
        await kept.history.branch_ops(past, ResponseIds().response_id, 100, tenant=TENANT)


async def test_a_chain_that_is_read_while_it_is_deleted_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: reading prolongs the life of what is stored, and of nothing else."""
    kept = Kept(retention_s=10 * DAY_S)
    a = await kept.say("a")
    await days_later(kept, 6, monkeypatch)
    read, scan = asyncio.Event(), Memory.scan

    async def scan_slowly(self: Memory, prefix: str, **options: Any) -> list[tuple[str, Entry]]:
        rows = await scan(self, prefix, **options)
        if prefix.startswith(f"{TENANT}/turn/"):
            read.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return rows

    monkeypatch.setattr(Memory, "scan", scan_slowly)
    loading = asyncio.create_task(kept.history.load_history(a, tenant=TENANT))
    await read.wait()
    monkeypatch.undo()
    await days_later(kept, 6, monkeypatch)
    await kept.history.delete(a, tenant=TENANT)
    await asyncio.wait({loading})
    assert await kept.store.keys() == []
