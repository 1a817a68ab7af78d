"""Scores, attributes and updates of vector stores, as the SDK shows them."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.sdk.library import BREAD, filled, find_files, sections, upload
from tests.support.servers.serving import Served, serving


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(more=sections(tmp_path)) as served:
        yield served


async def test_a_score_is_the_relevance(served: Served) -> None:
    """A text that fits nothing scores low, by every ranker and weight, so that a threshold can leave it out."""
    store_id, _ = await filled(served.client)
    search = served.client.vector_stores.search
    weights: list[Any] = [
        {},
        {"ranker": "none"},
        {"hybrid_search": {"embedding_weight": 1, "text_weight": 0}},
        {"hybrid_search": {"embedding_weight": 0, "text_weight": 1}},
    ]
    for options in weights:
        nonsense = await search(store_id, query="0x7f 4242 xyzzy", ranking_options=options)
        assert all(hit.score < 0.25 for hit in nonsense.data), (options, [hit.score for hit in nonsense.data])
        assert (
            await find_files(served.client, store_id, "0x7f 4242", ranking_options={**options, "score_threshold": 0.3})
            == []
        )
        exact = await search(store_id, query=BREAD, ranking_options=options)
        assert (exact.data[0].filename, exact.data[0].score) == ("bread.md", pytest.approx(1.0, abs=1e-5))
        both = await search(store_id, query=["xyzzy", BREAD], ranking_options=options)
        assert both.data[0].score == pytest.approx(1.0, abs=1e-5)


async def test_whole_numbers_stay_whole(served: Served) -> None:
    """An attribute comes back as the number that it was."""
    store_id, ids = await filled(served.client)
    files = served.client.vector_stores.files.with_raw_response
    numbers: Any = {"year": 2020, "share": 0.5, "two": 2.0, "large": 2**53, "yes": True, "name": "1"}
    changed = await files.update(ids["bread.md"], vector_store_id=store_id, attributes=numbers)
    loaded = await files.retrieve(ids["bread.md"], vector_store_id=store_id)
    searched = await served.client.vector_stores.with_raw_response.search(store_id, query=BREAD, max_num_results=1)
    for attributes in (
        changed.http_response.json()["attributes"],
        loaded.http_response.json()["attributes"],
        searched.http_response.json()["data"][0]["attributes"],
    ):
        assert repr(attributes) == repr(numbers)


async def test_an_update_moves_the_last_activity_and_null_removes_the_expiry(served: Served) -> None:
    """OpenAI's stores do both."""
    store = await served.client.vector_stores.create(name="a", expires_after={"anchor": "last_active_at", "days": 1})
    stores: Any = served.stack.vector_stores
    stores.now = lambda: time.time() + 3600
    renamed = await served.client.vector_stores.update(store.id, name="b")
    assert renamed.last_active_at is not None
    assert store.last_active_at is not None
    assert renamed.last_active_at >= store.last_active_at + 3500
    assert renamed.expires_at == renamed.last_active_at + 86400
    cleared = await served.client.vector_stores.update(store.id, expires_after=None)
    assert (cleared.expires_after, cleared.expires_at, cleared.name) == (None, None, "b")


async def test_an_unknown_file_is_named_by_its_place(served: Served) -> None:
    """The error of a foreign or unknown file says which it is."""
    stores, unknown = served.client.vector_stores, "file-" + "0" * 44
    file_id = await upload(served.client, "a.txt", "a")
    store = await stores.create()
    calls: dict[str, Any] = {
        "file_ids[1]": lambda: stores.create(file_ids=[file_id, unknown]),
        "file_id": lambda: stores.files.create(store.id, file_id=unknown),
        "file_ids[2]": lambda: stores.file_batches.create(store.id, file_ids=[file_id, file_id, unknown, unknown]),
        "files[0].file_id": lambda: stores.file_batches.create(store.id, files=[{"file_id": unknown}]),
    }
    for param, call in calls.items():
        with pytest.raises(openai.NotFoundError) as caught:
            await call()
        assert caught.value.param == param
