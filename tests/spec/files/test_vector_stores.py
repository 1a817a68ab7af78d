"""Vector stores through the official SDK: upload, poll, search, filter, list, cancel, delete; across a restart too."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from apis.inference import Inference
from tests.support.models.hashing import Hashing
from tests.support.sdk.client import sdk_client
from tests.support.sdk.library import BREAD, POLL_MS, SHIPS, TEXTS, WHALES, filled, find_files, sections, upload
from tests.support.servers.serving import Served, serving

BOUND_S = 30
KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(more=sections(tmp_path)) as served:
        yield served


def model(inference: Inference) -> Hashing:
    assert isinstance(inference, Hashing)
    return inference


async def test_what_was_uploaded_is_found(served: Served) -> None:
    store_id, ids = await filled(served.client)
    page = await served.client.vector_stores.search(store_id, query="what do blue whales eat?")
    best = page.data[0]
    assert (best.filename, best.file_id) == ("whales.md", ids["whales.md"])
    assert best.content[0].text == WHALES.strip()
    assert 0.5 < best.score < 1
    assert [hit.score for hit in page.data] == sorted((hit.score for hit in page.data), reverse=True)
    assert await find_files(served.client, store_id, "sailing clipper", max_num_results=1) == ["ships.md"]
    assert set(await find_files(served.client, store_id, ["krill", "yeast"], max_num_results=2)) == {
        "whales.md",
        "bread.md",
    }
    store = await served.client.vector_stores.retrieve(store_id)
    assert (store.name, store.status, store.object) == ("library", "completed", "vector_store")
    assert store.file_counts.completed == store.file_counts.total == 3
    assert store.usage_bytes > 3 * 4 * 256


async def test_upload_and_poll_does_all_of_it(served: Served) -> None:
    store = await served.client.vector_stores.create()
    files = served.client.vector_stores.files
    file = await files.upload_and_poll(
        vector_store_id=store.id, file=("whales.md", WHALES.encode()), poll_interval_ms=POLL_MS
    )
    assert (file.status, file.last_error, file.vector_store_id) == ("completed", None, store.id)
    assert file.chunking_strategy is not None
    assert file.chunking_strategy.to_dict() == {
        "type": "static",
        "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400},
    }
    (content,) = (await files.content(file.id, vector_store_id=store.id)).data
    assert content.text == WHALES.strip("\n")
    batch = await served.client.vector_stores.file_batches.upload_and_poll(
        store.id, files=[("a.md", SHIPS.encode()), ("b.md", BREAD.encode())], poll_interval_ms=POLL_MS
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", 2)
    listed = [
        f.id async for f in served.client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id)
    ]
    assert len(listed) == 2
    assert file.id not in listed


async def test_filters_thresholds_and_rankers(served: Served) -> None:
    store_id, ids = await filled(served.client, whales={"year": 1851, "sea": True}, ships={"year": 1869, "sea": True})
    sea: Any = {"type": "eq", "key": "sea", "value": True}
    late: Any = {"type": "gte", "key": "year", "value": 1860}
    assert set(await find_files(served.client, store_id, "flour", filters=sea)) == {"whales.md", "ships.md"}
    assert await find_files(served.client, store_id, "flour", filters={"type": "and", "filters": [sea, late]}) == [
        "ships.md"
    ]
    assert await find_files(served.client, store_id, "flour", filters={"type": "ne", "key": "sea", "value": True}) == [
        "bread.md"
    ]
    await served.client.vector_stores.files.update(ids["bread.md"], vector_store_id=store_id, attributes={"sea": True})
    assert len(await find_files(served.client, store_id, "flour", filters=sea)) == 3
    assert await find_files(served.client, store_id, "sourdough", ranking_options={"score_threshold": 0.3}) == [
        "bread.md"
    ]
    by_vector = await served.client.vector_stores.search(store_id, query=BREAD, ranking_options={"ranker": "none"})
    assert by_vector.data[0].score == pytest.approx(1.0, abs=1e-5)
    assert by_vector.data[1].score < 0.9
    both = await find_files(served.client, store_id, [WHALES, SHIPS], ranking_options={"ranker": "none"})
    assert set(both[:2]) == {"whales.md", "ships.md"}
    deep: Any = sea
    for _ in range(20):
        deep = {"type": "and", "filters": [deep]}
    with pytest.raises(openai.BadRequestError, match="deep"):
        await find_files(served.client, store_id, "x", filters=deep)


async def test_deleting_takes_everything_along(served: Served) -> None:
    store_id, ids = await filled(served.client)
    vector_stores = served.client.vector_stores
    gone = await vector_stores.files.delete(ids["bread.md"], vector_store_id=store_id)
    assert gone.deleted
    assert "bread.md" not in await find_files(served.client, store_id, "sourdough yeast flour")
    assert (await served.client.files.retrieve(ids["bread.md"])).id  # out of the store, but still a file
    await served.client.files.delete(ids["ships.md"])
    assert await find_files(served.client, store_id, "clipper ship tea") == ["whales.md"]
    with pytest.raises(openai.NotFoundError):
        await vector_stores.files.retrieve(ids["ships.md"], vector_store_id=store_id)
    assert (await vector_stores.delete(store_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await find_files(served.client, store_id, "whale")
    keys = [key for key, _ in await served.stack.kv_store.scan("")]
    assert [key for key in keys if "vs" in key] == []


async def test_lists_page_by_cursor(served: Served) -> None:
    stores = [(await served.client.vector_stores.create(name=str(i))).id for i in range(5)]
    listed = [store.id async for store in served.client.vector_stores.list(limit=2, order="asc")]
    assert sorted(listed) == sorted(stores)
    page = await served.client.vector_stores.list(limit=2, order="asc", before=listed[4])
    assert [store.id for store in page.data] == listed[2:4]
    store_id, ids = await filled(served.client)
    files = served.client.vector_stores.files
    names = [file.id async for file in files.list(store_id, limit=1, order="asc")]
    assert names == list(ids.values())
    assert [file.id async for file in files.list(store_id, filter="failed")] == []


async def test_updates_change_what_they_name(served: Served) -> None:
    store = await served.client.vector_stores.create(name="a", metadata={"k": "v"}, description="all of it")
    changed = await served.client.vector_stores.update(
        store.id, name="b", expires_after={"anchor": "last_active_at", "days": 3}
    )
    assert (changed.name, changed.metadata) == ("b", {"k": "v"})
    assert changed.last_active_at is not None
    assert changed.expires_at == changed.last_active_at + 3 * 86400
    renamed = await served.client.vector_stores.update(store.id, name="c")
    assert renamed.expires_after is not None


async def test_an_expiry_that_is_null_ends(served: Served) -> None:
    """OpenAI's stores do the same; other fields that are null stay."""
    expiry: Any = {"anchor": "last_active_at", "days": 3}
    store = await served.client.vector_stores.create(name="a", expires_after=expiry)
    changed = await served.client.vector_stores.update(store.id, expires_after=None, name=None)
    assert (changed.name, changed.expires_after, changed.expires_at) == ("a", None, None)


async def test_an_expired_store_is_empty_and_says_so(served: Served) -> None:
    store_id, ids = await filled(served.client)
    await served.client.vector_stores.update(store_id, expires_after={"anchor": "last_active_at", "days": 1})
    stores: Any = served.stack.vector_stores
    now = stores.now()
    stores.now = lambda: now + 90_000
    assert (await served.client.vector_stores.retrieve(store_id)).status == "expired"
    with pytest.raises(openai.BadRequestError, match="expired"):
        await find_files(served.client, store_id, "whale")
    with pytest.raises(openai.NotFoundError):
        await served.client.vector_stores.files.retrieve(ids["ships.md"], vector_store_id=store_id)


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.bin", bytes(range(256)) * 10, "unsupported_file"),
        ("a.pdf", b"%PDF-1.7 nothing of it", "invalid_file"),
        ("a.txt", b"  \n ", "invalid_file"),
    ],
)
async def test_what_cannot_be_read_has_failed_and_says_why(served: Served, name: str, data: bytes, code: str) -> None:
    store = await served.client.vector_stores.create()
    file = await served.client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=(name, data), poll_interval_ms=POLL_MS
    )
    assert file.status == "failed"
    assert file.last_error is not None
    assert file.last_error.code == code
    assert file.last_error.message
    assert (await served.client.vector_stores.retrieve(store.id)).file_counts.failed == 1


async def test_a_failing_model_fails_the_file_and_the_search(served: Served) -> None:
    store_id, _ = await filled(served.client)
    model(served.stack.inference).failing = True
    file_id = await upload(served.client, "more.txt", "more text")
    file = await served.client.vector_stores.files.create_and_poll(
        file_id, vector_store_id=store_id, poll_interval_ms=POLL_MS
    )
    assert file.last_error is not None
    assert (file.status, file.last_error.code) == ("failed", "server_error")
    with pytest.raises(openai.InternalServerError, match="not well"):
        await find_files(served.client, store_id, "whale")


async def test_a_batch_is_cancelled_in_the_middle(served: Served) -> None:
    store_id, _ = await filled(served.client)
    hashing = model(served.stack.inference)
    hashing.gate = asyncio.Event()
    ids = [await upload(served.client, f"{i}.txt", f"cancelled number {i}") for i in range(6)]
    batches = served.client.vector_stores.file_batches
    batch = await batches.create(store_id, file_ids=ids)
    async with asyncio.timeout(BOUND_S):
        await hashing.waiting.wait()
    assert (await batches.retrieve(batch.id, vector_store_id=store_id)).status == "in_progress"
    assert (await served.client.vector_stores.retrieve(store_id)).status == "in_progress"
    stopped = await batches.cancel(batch.id, vector_store_id=store_id)
    assert (stopped.status, stopped.file_counts.cancelled) == ("cancelled", 6)
    hashing.gate.set()
    hashing.gate = None
    assert len(await find_files(served.client, store_id, "cancelled number 3")) == 3
    assert (await batches.retrieve(batch.id, vector_store_id=store_id)).status == "cancelled"


async def test_work_goes_on_after_a_restart(tmp_path: Path) -> None:
    kv_store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving(kv_store=kv_store, more=sections(tmp_path)) as served:
        hashing = model(served.stack.inference)
        hashing.gate = asyncio.Event()
        store = await served.client.vector_stores.create()
        ids = [await upload(served.client, name, text) for name, text in TEXTS.items()]
        batch = await served.client.vector_stores.file_batches.create(store.id, file_ids=ids)
        async with asyncio.timeout(BOUND_S):
            await hashing.waiting.wait()
    async with serving(kv_store=kv_store, more=sections(tmp_path)) as served:
        done = await served.client.vector_stores.file_batches.poll(
            batch.id, vector_store_id=store.id, poll_interval_ms=POLL_MS
        )
        assert (done.status, done.file_counts.completed) == ("completed", 3)
        assert (await find_files(served.client, store.id, "krill"))[0] == "whales.md"


async def test_another_tenants_store_is_an_unknown_store(tmp_path: Path) -> None:
    async with serving(more=sections(tmp_path), server={"api_keys": KEYS}) as served:
        store_id, ids = await filled(served.client)
        async with sdk_client(served.url, "key-b") as other:
            stores = other.vector_stores
            mine = await stores.create()
            assert [store.id for store in (await stores.list()).data] == [mine.id]
            for call in (
                stores.retrieve(store_id),
                stores.update(store_id, name="x"),
                stores.delete(store_id),
                stores.files.list(store_id),
                stores.files.retrieve(ids["ships.md"], vector_store_id=store_id),
                stores.files.create(store_id, file_id=ids["ships.md"]),
                stores.files.create(mine.id, file_id=ids["ships.md"]),
                stores.files.content(ids["ships.md"], vector_store_id=store_id),
                stores.search(store_id, query="whale"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": ""}, "query"),
        ({}, "query"),
        ({"query": "x", "max_num_results": 51}, "max_num_results"),
        ({"query": "x", "ranking_options": {"score_threshold": 2}}, "ranking_options.score_threshold"),
        ({"query": "x", "filters": {"type": "like", "key": "a", "value": 1}}, "filters.type"),
        ({"query": "x", "filters": {"type": "eq", "key": "a\0", "value": 1}}, "filters"),
        ({"query": "x", "filters": {"type": "gt", "key": "a", "value": 2**60}}, "filters"),
    ],
    ids=str,
)
async def test_a_bad_search_is_refused_by_name(served: Served, body: dict[str, Any], param: str) -> None:
    store = await served.client.vector_stores.create()
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.post(f"/vector_stores/{store.id}/search", body=body, cast_to=object)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize(
    "strategy",
    [
        {"type": "static", "static": {"max_chunk_size_tokens": 99, "chunk_overlap_tokens": 0}},
        {"type": "static", "static": {"max_chunk_size_tokens": 4097, "chunk_overlap_tokens": 0}},
        {"type": "static", "static": {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 101}},
        {"type": "static"},
        {"type": "other"},
    ],
    ids=str,
)
async def test_a_bad_chunking_is_refused(served: Served, strategy: Any) -> None:
    store = await served.client.vector_stores.create()
    file_id = await upload(served.client, "a.txt", "text")
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.vector_stores.files.create(store.id, file_id=file_id, chunking_strategy=strategy)
    assert str(caught.value.param).startswith("chunking_strategy")


@pytest.mark.parametrize("attributes", [{"a\0": 1}, {"a": "x" * 513}, {"k" * 65: 1}, {"a": [1]}, {"a": {}}], ids=str)
async def test_a_bad_attribute_is_refused(served: Served, attributes: Any) -> None:
    store = await served.client.vector_stores.create()
    file_id = await upload(served.client, "a.txt", "text")
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.vector_stores.files.create(store.id, file_id=file_id, attributes=attributes)
    assert str(caught.value.param).startswith("attributes")


async def test_chunks_are_as_small_as_asked(served: Served) -> None:
    store = await served.client.vector_stores.create()
    text = "\n".join(f"Line number {i} speaks of topic {i % 17}." for i in range(400))
    await served.client.vector_stores.files.create_and_poll(
        await upload(served.client, "lines.txt", text),
        vector_store_id=store.id,
        chunking_strategy={"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 20}},
        poll_interval_ms=POLL_MS,
    )
    page = await served.client.vector_stores.search(store.id, query="line number 123", max_num_results=50)
    assert len(page.data) > 20
    assert "Line number 123 " in page.data[0].content[0].text
    assert max(len(hit.content[0].text) for hit in page.data) < 600


async def test_what_is_null_or_left_out_has_its_default(served: Served) -> None:
    for path in ("/conversations", "/vector_stores"):
        store: Any = await served.client.post(path, cast_to=object)  # no body at all
        assert store["id"]
    nulls = {"query": "x", "filters": None, "max_num_results": None, "ranking_options": None, "rewrite_query": None}
    hits: Any = await served.client.post(f"/vector_stores/{store['id']}/search", body=nulls, cast_to=object)
    assert hits["data"] == []
