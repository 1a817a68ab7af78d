"""Background responses and others while the SQLite file may not grow: nothing passes for stored, and all recovers."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from apis.errors import StoreUnavailable
from tests.support.laws.stream_laws import check_stream
from tests.support.sdk.requests import create, responses
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until_ended, until_text

FULL_BYTES = 1024 * 1024
TURN: list[dict[str, Any]] = [
    {"text": "a"},
    {"wait_s": 0.5},
    {"text": ["b" * 1000] * 200},
    {"wait_s": 0.2},
    {"text": "c"},
]
BACKGROUND = {"background": {"lease_s": 1, "poll_s": 0.1}}


async def fill(served: Served) -> int:
    """Write until the store is full; returns how many entries it took."""
    entries = 0
    for size in (16 * 1024, 1024, 16):
        try:
            while True:
                await served.stack.kv_store.put(f"filling/{entries:06}", b"x" * size)
                entries += 1
        except StoreUnavailable as exc:
            assert "full" in exc.message  # noqa: PT017 - the loop is what is tested
    return entries


async def test_a_full_disk_refuses_what_is_to_be_stored_and_loses_nothing_that_was(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = {"provider": "sqlite", "path": str(path), "max_bytes": FULL_BYTES}
    async with serving(scripted(TURN), kv_store=store, responses=BACKGROUND) as served:
        old_response = await create(served, input="kept")
        await create(served, store=False)  # makes the key that seals thoughts, which is kept in the store
        running = await create(served, background=True)
        await until_text(responses(served), running.id)
        entries = await fill(served)
        for fields in ({"background": True}, {}):
            with pytest.raises(APIStatusError) as caught:
                await create(served, **fields)
            assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
        events = [event async for event in await create(served, stream=True)]
        check_stream(events)
        assert events[-1].type == "response.failed"
        assert (await create(served, store=False)).status == "completed"
        assert (await responses(served).retrieve(old_response.id)).output_text == old_response.output_text
        assert (await responses(served).retrieve(running.id)).status == "in_progress"

        loop = asyncio.get_running_loop()
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("DELETE FROM entries WHERE CAST(key AS TEXT) LIKE 'filling/%'")
        freed_at = loop.time()
        assert (await create(served)).status == "completed"
        healthy_s = loop.time() - freed_at
        response = await until_ended(responses(served), running.id, within_s=20)
        assert response.status in ("failed", "completed")
        if response.status == "completed":
            assert response.output_text == old_response.output_text
        print(f"full after {entries} more entries, healthy {healthy_s:.2f} s after there is room: {response.status}")
        stream = [event async for event in await responses(served).retrieve(running.id, stream=True)]
        check_stream(stream)
