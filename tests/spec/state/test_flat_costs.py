"""The reads and writes that one call costs the store do not grow with what the store holds.

Rows are counted, not times. A call is made in a store with some objects, and again with twenty times as many.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from stack.retention.erasure import ProjectEraser
from stack.retention.sweeper import RetentionSweeper
from tests.support.counting_store import CountingSQLite
from tests.support.grown_store import count_grown_files, grow, load_records
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import ROOT, new_project, organization_of, stored_organization

PAGE = 20
SMALL, LARGE = 40, 800
LIFE_S = 1e6
PREFIXES = ("resp_", "conv_", "file-", "vs_")
KINDS = ("response", "conversation", "file", "vector store")
Call = Callable[[], Awaitable[Any]]


@dataclass
class Grown:
    """A served stack, a project of it that grows, and another one; `records` and `id_keys` are those of each kind."""

    served: Served
    client: AsyncOpenAI
    project: str
    other: str
    records: dict[str, dict[str, bytes]]
    id_keys: dict[str, str]
    newest: dict[str, str]
    store_id: str

    async def grow(self, count: int) -> None:
        """Add `count` objects of each kind."""
        kv = self.served.stack.kv_store
        for kind in KINDS:
            life_s = LIFE_S if kind == "response" else None
            self.newest[kind] = (await grow(kv, self.records[kind], self.id_keys[kind], count, life_s))[-1]
        await count_grown_files(kv, self.project, self.store_id, count)
        stores = await kv.get(f"{self.project}/vs_count")
        assert stores is not None
        await kv.put(f"{self.project}/vs_count", b"%d" % (int(stores.value) + count))


def sections(folder: Path) -> dict[str, Any]:
    return {
        "kv_store": {
            "provider": "tests.support.counting_store:CountingSQLite",
            "path": str(folder / "store.db"),
            "survives_power_loss": False,
        },
        "server": {"api_keys": [ROOT]},
        "more": {
            "accounts": {
                "provider": "chain",
                "providers": {"config": {"provider": "config"}, "stored": {"provider": "stored"}},
            },
            "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
            "vector_stores": {"provider": "hybrid", "embedding_model": "hashing", "max_stores": 100_000},
        },
    }


FILING: dict[str, Any] = {"provider": "tests.support.sdk.file_search_stack:Filing", "turns": [[{"text": "hello"}]]}


@pytest.fixture
async def grown(tmp_path: Path) -> AsyncIterator[Grown]:
    async with serving(FILING, **sections(tmp_path)) as served:
        organization = organization_of(served.client)
        project, key = await new_project(organization)
        other, other_key = await new_project(organization)
        async with sdk_client(served.url, key) as client, sdk_client(served.url, other_key) as neighbour:
            await neighbour.responses.create(model="scripted", input="hi")
            response = await client.responses.create(model="scripted", input="hi")
            conversation = await client.conversations.create(items=[{"role": "user", "content": "hi"}])
            empty = await client.vector_stores.create(name="empty")
            store = await client.vector_stores.create(name="full")
            file = await client.files.create(file=("a.md", b"A whale."), purpose="assistants")
            await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
            ids = dict(zip(KINDS, (response.id, conversation.id, file.id, empty.id), strict=True))
            id_keys = {kind: each[-44:] for kind, each in ids.items()}
            kv = served.stack.kv_store
            records = {kind: await load_records(kv, project, id_keys[kind]) for kind in KINDS}
            yield Grown(served, client, project, other, records, id_keys, {}, store.id)


async def count_rows(call: Call, project: str) -> int:
    """Return the rows of the project that a call reads and writes: other work of the server has rows of its own."""
    before = CountingSQLite.rows[project]
    await call()
    return CountingSQLite.rows[project] - before


async def list_newest(pages: Any) -> list[Any]:
    """Return the first page of a listing of the SDK."""
    data: list[Any] = (await pages).data
    assert len(data) == PAGE
    return data


def calls_of(grown: Grown) -> dict[str, Call]:
    """Return each call by its name."""
    client, store_id = grown.client, grown.store_id
    newest = {kind: f"{prefix}{grown.newest[kind]}" for kind, prefix in zip(KINDS, PREFIXES, strict=True)}
    get: Any = client.get

    async def search() -> None:
        results = await client.vector_stores.search(store_id, query="whale")
        assert len(results.data) == 1

    async def chain() -> None:
        await client.responses.create(model="scripted", input="hi", previous_response_id=newest["response"])

    async def list_responses() -> None:
        page = await get(f"/responses?limit={PAGE}", cast_to=object)
        assert len(page["data"]) == PAGE

    async def list_conversations() -> None:
        page = await get(f"/conversations?limit={PAGE}", cast_to=object)
        assert len(page["data"]) == PAGE

    return {
        "create a response": lambda: client.responses.create(model="scripted", input="hi"),
        "continue a response": chain,
        "get a response": lambda: client.responses.retrieve(newest["response"]),
        "list responses": list_responses,
        "create a conversation": lambda: client.conversations.create(items=[{"role": "user", "content": "hi"}]),
        "get a conversation": lambda: client.conversations.retrieve(newest["conversation"]),
        "list conversations": list_conversations,
        "create a file": lambda: client.files.create(file=("b.md", b"A ship."), purpose="user_data"),
        "get a file": lambda: client.files.retrieve(newest["file"]),
        "list files": lambda: list_newest(client.files.list(limit=PAGE)),
        "create a vector store": lambda: client.vector_stores.create(name="new"),
        "get a vector store": lambda: client.vector_stores.retrieve(store_id),
        "list vector stores": lambda: list_newest(client.vector_stores.list(limit=PAGE)),
        "list files of a vector store": lambda: list_newest(client.vector_stores.files.list(store_id, limit=PAGE)),
        "get a file of a vector store": lambda: client.vector_stores.files.retrieve(
            newest["file"], vector_store_id=store_id
        ),
        "search a vector store": search,
        "remove a file of a vector store": lambda: client.vector_stores.files.delete(
            newest["file"], vector_store_id=store_id
        ),
        "delete a file": lambda: client.files.delete(newest["file"]),
        "delete a vector store": lambda: client.vector_stores.delete(newest["vector store"]),
        "delete a conversation": lambda: client.conversations.delete(newest["conversation"]),
        "delete a response": lambda: client.responses.delete(newest["response"]),
        "sweep expired records": grown.served.stack.kv_store.sweep,
        "sweep projects by retention": RetentionSweeper(grown.served.stack).sweep,
    }


async def erase(grown: Grown) -> None:
    """Erase the other project, which is small."""
    eraser = ProjectEraser(grown.served.stack, stored_organization(grown.served.stack.accounts).erasure)
    assert await eraser.erase_tenant(grown.other) > 0
    assert await eraser.list_remaining(grown.other) == []


async def test_no_call_reads_more_rows_in_a_larger_store(grown: Grown) -> None:
    organization = organization_of(grown.served.client)
    await organization.projects.data_retention.update(
        grown.project, retention_type="none", extra_body={"retention_days": 30}
    )
    rows: dict[int, dict[str, int]] = {}
    for size in (SMALL, LARGE):
        await grown.grow(size)
        rows[size] = {name: await count_rows(call, grown.project) for name, call in calls_of(grown).items()}
    assert rows[LARGE] == rows[SMALL]
    assert max(rows[LARGE].values()) <= 2 * PAGE + 5
    # of all that was created one by one, and grown
    assert await count_rows(lambda: erase(grown), grown.other) < 20
