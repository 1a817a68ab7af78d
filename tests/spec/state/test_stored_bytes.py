"""Stored rows that are damaged, and stored bytes that would be too many: through the SDK, each has its own error."""

import asyncio
import gc
import logging
import re
from collections.abc import Callable, Sequence

import pytest
from openai import APIStatusError, BadRequestError, InternalServerError

from apis.storage.kv_store import Op, Put
from apis.storage.lease import Lease
from tests.support.sdk.conversations import conversations, user
from tests.support.sdk.requests import create, refusal, responses, stream
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import ENDED, until_status

SLOW = scripted([{"text": ["one "]}, {"wait_s": 30}, {"text": "two"}])
SOON = {"background": {"poll_s": 0.05, "lease_s": 1}}
HUGE_COUNT = re.compile(rb'"input_tokens":\d+')


async def rewrite(served: Served, part: str, change: Callable[[bytes], bytes]) -> None:
    """Change the stored values whose key contains `part`."""
    store = served.stack.kv_store
    rows = [(key, entry) for key, entry in await store.scan("") if part in key]
    assert rows
    await store.write([Put(key, change(entry.value)) for key, entry in rows])


def assert_corrupt(exc: APIStatusError) -> None:
    assert (exc.status_code, exc.code) == (500, "storage_corrupt")


async def test_a_response_that_does_not_validate_is_corrupt_for_every_reader(caplog: pytest.LogCaptureFixture) -> None:
    """A stored token count beyond 64 bits was a bug's 500 on each GET, stream, cancel and repeated key."""
    key = {"Idempotency-Key": "k"}
    async with serving(responses=SOON) as served:
        response = await create(served, background=True, extra_headers=key)
        await until_status(responses(served), response.id, "completed")
        await rewrite(
            served, f"/response/{response.id}", lambda old: HUGE_COUNT.sub(b'"input_tokens":' + b"9" * 30, old)
        )
        caplog.clear()
        for call in (
            responses(served).retrieve(response.id),
            responses(served).retrieve(response.id, stream=True),
            responses(served).cancel(response.id),
            create(served, background=True, extra_headers=key),
        ):
            with pytest.raises(InternalServerError) as caught:
                await call
            assert_corrupt(caught.value)
    assert response.id in caplog.text
    assert "Request id" not in str(caught.value)  # which a bug's message would hold


async def test_a_running_response_with_a_damaged_request_is_corrupt_and_delays_no_other() -> None:
    """The queue went round a damaged row, and each look at it was a bug."""
    one_place = {"background": {**SOON["background"], "max_running": 1}}
    async with serving(SLOW, responses=one_place) as served:
        running = await create(served, background=True)
        damaged = await create(served, background=True)
        waiting = await create(served, background=True)
        await rewrite(served, f"/request/{damaged.id}", lambda old: old.replace(b'"model":"scripted"', b'"model":[5]'))
        for call in (responses(served).retrieve(damaged.id), responses(served).cancel(damaged.id)):
            with pytest.raises(InternalServerError) as caught:
                await call
            assert_corrupt(caught.value)
        await responses(served).cancel(running.id)
        await until_status(responses(served), waiting.id, "in_progress", *ENDED)


async def test_a_chain_over_a_damaged_turn_is_corrupt() -> None:
    """The turns of a chain and the items of a conversation are read with the same care."""
    async with serving(responses={"cache_bytes": 0}) as served:
        first = await create(served)
        conversation = await conversations(served).create(items=[user("x")])
        await rewrite(served, f"/turn/{first.id[5:]}", lambda old: old.replace(b'"role":"user"', b'"role":"nobody"'))
        await rewrite(served, "/conversation_item/", lambda old: old.replace(b'"role":"user"', b'"role":"nobody"'))
        for fields in ({"previous_response_id": first.id}, {"conversation": conversation.id}):
            assert (await refusal(served, 500, **fields))["code"] == "storage_corrupt"


async def test_a_response_after_one_that_runs_is_refused_because_it_runs() -> None:
    """A previous response that has not ended was "not found"."""
    async with serving(SLOW, responses=SOON) as served:
        running = await create(served, background=True)
        error = await refusal(served, previous_response_id=running.id)
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_in_progress")
        assert "has not ended yet" in error["message"]
        await responses(served).cancel(running.id)


async def test_a_page_of_items_ends_at_eight_mebibytes() -> None:
    """A page of a hundred items of 30 MB took the process's memory."""
    async with serving() as served:
        conversation = await conversations(served).create()
        texts = [letter * 3_000_000 for letter in "abcde"]
        for text in texts:
            await conversations(served).items.create(conversation.id, items=[user(text)])
        for order, expected in (("asc", texts), ("desc", texts[::-1])):
            page = await conversations(served).items.list(conversation.id, order=order, limit=100)
            assert (len(page.data), page.has_more) == (2, True)
            item_texts = [item.content[0].text async for item in page]
            assert item_texts == expected


async def test_an_item_above_eight_mebibytes_is_a_page_of_its_own() -> None:
    """A page holds at least one item."""
    async with serving() as served:
        conversation = await conversations(served).create()
        for letter in "ab":
            await conversations(served).items.create(conversation.id, items=[user(letter * 9_000_000)])
        page = await conversations(served).items.list(conversation.id, order="asc")
        assert (len(page.data), page.has_more) == (1, True)
        page = await page.get_next_page()
        assert (len(page.data), page.has_more) == (1, False)


async def test_the_input_items_of_a_response_are_cut_into_the_same_pages() -> None:
    """The input of one response may be a whole body."""
    async with serving(scripted([{"text": "ok"}])) as served:
        response = await create(served, input=[user(letter * 3_000_000) for letter in "abcde"])
        page = await responses(served).input_items.list(response.id, order="asc", limit=100)
        assert (len(page.data), page.has_more) == (2, True)
        assert [item.content[0].text[0] async for item in page] == [*"abcde"]


@pytest.mark.parametrize("cache_bytes", [0, 1_000_000])
async def test_what_one_request_loads_has_a_limit_of_bytes(cache_bytes: int) -> None:
    """`conversation` and `previous_response_id` load all that is before them."""
    limits = {"max_history_bytes": 5500, "cache_bytes": cache_bytes}
    async with serving(scripted([{"text": "ok"}]), responses=limits) as served:
        conversation = await conversations(served).create()
        for _ in range(3):
            await conversations(served).items.create(conversation.id, items=[user("x" * 2000)])
        error = await refusal(served, conversation=conversation.id)
        assert (error["param"], error["code"]) == ("conversation", "history_too_large")
        last = await create(served, input="x" * 2000)
        last = await create(served, input="x" * 2000, previous_response_id=last.id)
        last = await create(served, input="x" * 2000, previous_response_id=last.id)
        error = await refusal(served, previous_response_id=last.id)
        assert (error["param"], error["code"]) == ("previous_response_id", "history_too_large")
        assert "max_history_bytes" in error["message"]


async def test_a_tenant_over_its_quota_stores_no_more_until_it_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses, conversations and idempotency records are counted as files are."""
    monkeypatch.setattr("apis.storage.quota._MIN_REFUSAL_S", 0.0)
    store = {"provider": "memory", "max_tenant_bytes": 30_000}
    keyed = {"Idempotency-Key": "k"}
    async with serving(scripted([{"text": "ok"}]), kv_store=store) as served:
        stored: list[str] = []
        async with asyncio.timeout(10):
            while True:
                try:
                    stored.append((await create(served, input="x" * 2000)).id)
                except BadRequestError as exc:
                    refused = exc
                    break
        assert refused.code == "storage_quota_exceeded"
        assert "max_tenant_bytes" in refused.message
        for call in (
            conversations(served).create(items=[user("x")]),
            create(served, store=False, extra_headers=keyed),
            create(served, background=True),
        ):
            with pytest.raises(BadRequestError) as caught:
                await call
            assert caught.value.code == "storage_quota_exceeded"
        assert (await create(served, store=False)).output_text == "ok"
        assert (await responses(served).retrieve(stored[0])).id == stored[0]
        for response_id in stored:
            await responses(served).delete(response_id)
        async with asyncio.timeout(10):
            while True:
                try:
                    await create(served)
                    break
                except BadRequestError:
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("background", [False, True])
async def test_an_answer_that_is_too_large_to_be_stored_ends_failed(
    monkeypatch: pytest.MonkeyPatch, *, background: bool
) -> None:
    """An answer of 200 MB stayed in progress, and the store answered no one else."""
    for module in ("providers.responses.store.history", "providers.kv_store.checks"):
        monkeypatch.setattr(f"{module}.MAX_VALUE_BYTES", 200_000)
    async with serving(scripted([{"text": ["x" * 30_000] * 10}], [{"text": "ok"}]), responses=SOON) as served:
        served.streams.check = not background  # the log cannot hold the end of an item that is too large
        async with asyncio.timeout(10):
            events = await stream(served, background=background)
        failed = events[-1]
        assert (failed.type, failed.response.error.code) == ("response.failed", "server_error")
        assert "cannot be stored" in failed.response.error.message
        stored = await responses(served).retrieve(failed.response.id)
        assert (stored.status, stored.output) == ("failed", [])
        assert (await create(served)).output_text == "ok"


async def test_an_answer_that_is_too_large_to_be_stored_is_an_error_without_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client is not led to have it generated again."""
    monkeypatch.setattr("providers.responses.store.history.MAX_VALUE_BYTES", 200_000)
    async with serving(scripted([{"text": ["x" * 30_000] * 10}])) as served:
        with pytest.raises(APIStatusError) as caught:
            await create(served)
        assert (caught.value.status_code, caught.value.code) == (413, "storage_value_too_large")


async def test_a_cancelled_background_response_leaves_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal, which was writing when the lease was taken, ended with a LeaseLost "never retrieved"."""
    write = Lease.write

    async def write_late(lease: Lease, ops: Sequence[Op] = (), *, durable: bool = False) -> bool:
        await asyncio.sleep(0.1)
        return await write(lease, ops, durable=durable)

    monkeypatch.setattr(Lease, "write", write_late)
    words = [line for _ in range(100) for line in ({"text": ["word "]}, {"wait_s": 0.02})]
    with caplog.at_level(logging.ERROR):
        async with serving(scripted(words), responses=SOON) as served:
            for _ in range(3):
                running = await create(served, background=True)
                await asyncio.sleep(0.15)
                assert (await responses(served).cancel(running.id)).status == "cancelled"
        gc.collect()
        await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text
    assert "LeaseLost" not in caplog.text
