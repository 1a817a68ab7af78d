"""Deletion of a project with all it owns, and retention: proved by looking through the whole store."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

from apis.storage.kv_store import KVStore
from stack.retention.sweeper import RetentionSweeper
from tests.spec.accounts.test_stored_keys import say
from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.batch_files import batch_line, create_batch, wait_for_end
from tests.support.sdk.client import sdk_client
from tests.support.sdk.sessions import run_session
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of, stored_organization
from tests.support.waiting import until_status

WORD = "aardvark7391"
KEPT = ("/accounts/audit/", "/accounts/usage/", "/accounts/deleted/")
"""The keys that a deletion leaves: the log of acts, the sums of usage, and the id of the deleted project for a day."""


def lasting(project_id: str) -> tuple[str, ...]:
    """Return the prefixes of a project's keys that stay until the project deletes them."""
    kinds = ("turn", "response", "conversation", "file", "file_piece", "upload", "vs", "vs_file", "webhook_endpoint")
    return (*(f"{project_id}/{kind}/" for kind in kinds), "/accounts/keys/", "/accounts/service_accounts/")


@asynccontextmanager
async def administered(folder: Path, *turns: Script, **more: Any) -> AsyncGenerator[Served]:
    email = {"url": "smtp://127.0.0.1:1", "sender": "stack@example.org"}
    sections: dict[str, Any] = {
        "accounts": {
            "provider": "chain",
            "providers": {"config": {"provider": "config"}, "stored": {"provider": "stored", "email": email}},
        },
        "files": {"provider": "kv"},
        "uploads": {"provider": "kv"},
        "traces": {"provider": "kv"},
        "vaults": {"provider": "kv", "keys": ["a key of the run config, of 32 characters"]},
        "batches": {"provider": "leased", "poll_s": 0.05},
        "vector_index": {"provider": "sqlite_vec", "path": str(folder / "vectors.db")},
        "vector_stores": {"provider": "hybrid", "embedding_model": "hashing"},
    }
    responses = {"background": {"poll_s": 0.05, "lease_s": 1}}
    async with serving(
        {"provider": "tests.support.sdk.file_search_stack:Filing", **({"turns": turns} if turns else {})},
        more=sections,
        responses=responses,
        webhooks={"endpoints": {"private": True}},
        server={"api_keys": [ROOT]},
        **more,
    ) as served:
        yield served


def projects_of(served: Served) -> Any:
    return organization_of(served.client).projects


async def store_one_of_everything(client: AsyncOpenAI, model: str) -> None:
    create: Any = client.responses.create
    conversation = await client.conversations.create(items=[{"role": "user", "content": WORD}])
    first = await create(model=model, input=WORD)
    await create(model=model, input=WORD, previous_response_id=first.id)
    await create(model=model, input=WORD, conversation=conversation.id)
    await create(model=model, input=WORD, extra_headers={"Idempotency-Key": "one"})
    await create(model=model, input=WORD, background=True)
    file = await client.files.create(file=(f"{WORD}.md", WORD.encode() * 3), purpose="assistants")
    await client.uploads.create(bytes=9, filename=f"{WORD}.txt", mime_type="text/plain", purpose="user_data")
    store = await client.vector_stores.create(name=WORD, expires_after={"anchor": "last_active_at", "days": 3})
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
    await client.webhooks.create(name=WORD, url="http://127.0.0.1:1/x", event_types=["response.completed"])
    await create(model=model, input=WORD, background=True)  # its event waits for the endpoint
    await wait_for_end(client, await create_batch(client, [batch_line("one", model=model)]))
    await client.beta.agents.create(model=model, instructions=WORD)
    await run_session(client, WORD, model=model)
    vault = await client.beta.agents.vaults.create(name=WORD)
    bearer: Any = {"type": "static_bearer", "mcp_server_url": f"https://{WORD}.example/mcp", "token": WORD}
    await client.beta.agents.vaults.credentials.create(vault.id, name=WORD, auth=bearer)
    target: Any = {"type": "response", "request": {"model": model, "input": WORD}}
    schedule: Any = {"type": "periodic", "expression": "0 0 1 1 *", "timezone": "UTC"}
    automation = await client.beta.agents.automations.create(**schedule, name=WORD, target=target)
    await client.beta.agents.automations.invocations.create(automation.id)


async def remnants(kv: KVStore, project_id: str, word: str = WORD) -> list[str]:
    """Return all keys of the store that name the project or whose value holds its word."""
    results: list[str] = []
    after = ""
    while rows := await kv.scan("", after=after):
        after = rows[-1][0]
        for key, entry in rows:
            if (project_id in key or project_id.encode() in entry.value or word.encode() in entry.value) and not (
                key.startswith(KEPT)
            ):
                results.append(key)
    return results


def sweep(served: Served) -> Any:
    return RetentionSweeper(served.stack).sweep()


async def test_a_deleted_project_leaves_nothing_in_any_store(tmp_path: Path) -> None:
    runtime = {"provider": "python", "timeout_s": 5, **SHARED_PYTHON}
    async with administered(tmp_path, tool_runtime=runtime) as served:
        own_id, own_key = await new_project(organization_of(served.client))
        other_id, other_key = await new_project(organization_of(served.client))
        kv = served.stack.kv_store
        async with sdk_client(served.url, own_key) as own, sdk_client(served.url, other_key) as other:
            await store_one_of_everything(other, "scripted")
            others = [key for key in await remnants(kv, other_id, "none") if key.startswith(lasting(other_id))]
            await store_one_of_everything(own, "scripted")
            await own.containers.create(name=WORD)
            await projects_of(served).rate_limits.update_rate_limit(
                "rl-*", project_id=own_id, max_requests_per_1_day=1000
            )
            await projects_of(served).data_retention.update(own_id, retention_type="none")
            channel: Any = {"type": "email", "recipients": [f"{WORD}@example.org"]}
            amount: Any = {"currency": "USD", "interval": "month", "threshold_amount": 10**9}
            alert = await projects_of(served).spend_alerts.create(own_id, notification_channel=channel, **amount)
            await kv.put(f"/accounts/alert_notices/{own_id}/{alert.id}/2020-01/5", b"1")  # of an earlier threshold
            await say(own)
            kinds = {key.split("/")[1] for key in await remnants(kv, own_id) if key.startswith(f"{own_id}/")}
            assert {"turn", "response", "conversation", "file", "file_piece", "upload", "vs", "vs_file"} <= kinds
            assert {"webhook_endpoint", "idempotency", "batch", "container"} <= kinds
            with pytest.raises(BadRequestError, match="archive it first"):
                await delete_project(served, own_id)
            await projects_of(served).archive(own_id)
            outcome = await delete_project(served, own_id)
            assert outcome["deleted"]
            assert (outcome["erased_entries"] > 20, outcome["remaining_entries"]) == (True, 0)
            assert await remnants(kv, own_id, own_id) == []
            assert [key for key in await remnants(kv, own_id) if not key.startswith(f"{other_id}/")] == []
            assert count_index_rows(tmp_path, own_id) == 0
            assert count_index_rows(tmp_path, other_id) > 0
            assert set(others) <= set(await remnants(kv, other_id, "none"))
            with pytest.raises(AuthenticationError):
                await say(own)
            assert await say(other)
            with pytest.raises(NotFoundError):
                await delete_project(served, own_id)
            entries = organization_of(served.client).audit_logs.list(event_types=["project.deleted"])
            assert [entry.project.id async for entry in entries if entry.project] == [own_id]


async def delete_project(served: Served, project_id: str) -> dict[str, Any]:
    client = served.client.with_options(api_key="sk-root")
    return await client.delete(f"/organization/projects/{project_id}", cast_to=dict[str, Any])


def count_index_rows(folder: Path, project_id: str) -> int:
    """Return the rows of the vector index that name the project in any column."""
    count = 0
    with sqlite3.connect(folder / "vectors.db") as database:
        for (table,) in database.execute("select name from sqlite_master where type = 'table'").fetchall():
            with suppress(sqlite3.OperationalError):  # a table of an extension that is not loaded here
                rows = database.execute(f"select * from '{table}'").fetchall()
                count += sum(any(project_id in str(cell) for cell in row) for row in rows)
    return count


async def test_a_project_with_a_key_in_the_run_config_is_not_deleted() -> None:
    keys = [ROOT, {"key": "sk-old", "tenant": "legacy"}]
    async with serving(more=CHAINED, server={"api_keys": keys}) as served:
        directory = stored_organization(served.stack.accounts).directory
        await directory.create_project("legacy", project_id="legacy")
        await projects_of(served).archive("legacy")
        with pytest.raises(BadRequestError, match=r"server\.api_keys") as refusal:
            await delete_project(served, "legacy")
        assert refusal.value.code == "project_in_config"


async def test_a_background_response_that_runs_ends_with_its_project(tmp_path: Path) -> None:
    async with administered(tmp_path, [{"text": WORD}, {"wait_s": 30}]) as served:
        project_id, key = await new_project(organization_of(served.client))
        kv = served.stack.kv_store
        async with sdk_client(served.url, key) as client:
            running = await say(client, background=True)
            await until_status(client.responses, running.id, "in_progress")
        await projects_of(served).archive(project_id)
        await delete_project(served, project_id)
        await asyncio.sleep(1.2)  # the life of the lease that the worker has lost
        assert await remnants(kv, project_id) == []


async def test_what_a_request_that_was_under_way_stores_later_is_deleted_by_the_next_sweep(tmp_path: Path) -> None:
    async with administered(tmp_path) as served:
        project_id, _ = await new_project(organization_of(served.client))
        await projects_of(served).archive(project_id)
        await delete_project(served, project_id)
        kv = served.stack.kv_store
        await kv.put(f"{project_id}/response/resp_late", WORD.encode())
        await kv.put("other-tenant/response/resp_other", WORD.encode())
        await sweep(served)
        assert await remnants(kv, project_id) == ["other-tenant/response/resp_other"]


async def test_what_is_older_than_a_projects_retention_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    async with administered(tmp_path) as served:
        clients: dict[str, AsyncOpenAI] = {}
        ids: dict[str, tuple[str, ...]] = {}
        projects: dict[str, str] = {}
        for name in ("brief", "long", "default"):
            projects[name], key = await new_project(organization_of(served.client))
            clients[name] = client = sdk_client(served.url, key)
            first = await say(client)
            second = await say(client, previous_response_id=first.id)
            conversation = await client.conversations.create(items=[{"role": "user", "content": WORD}])
            file = await client.files.create(file=("a.md", WORD.encode()), purpose="assistants")
            store = await client.vector_stores.create(name="v", file_ids=[file.id])
            session = await run_session(client, WORD)
            ids[name] = (second.id, conversation.id, file.id, store.id, session.id)
        update = projects_of(served).data_retention.update
        await update(projects["brief"], retention_type="none", extra_body={"retention_days": 1e-9})
        await update(projects["long"], retention_type="none", extra_body={"retention_days": 1})
        await asyncio.sleep(max(0.0, 1.05 - time.time() % 1))  # times of creation are whole seconds
        await sweep(served)
        for name, client in clients.items():
            response, conversation_id, file_id, store_id, session_id = ids[name]
            for call in (
                client.responses.retrieve(response),
                client.conversations.retrieve(conversation_id),
                client.files.retrieve(file_id),
                client.vector_stores.retrieve(store_id),
                client.beta.agents.sessions.retrieve(session_id),
            ):
                if name == "brief":
                    with pytest.raises(NotFoundError):
                        await call
                else:
                    await call
            await client.close()
        rest = {
            key.split("/")[1] for key in await remnants(served.stack.kv_store, projects["brief"], projects["brief"])
        }
        assert rest.isdisjoint({"turn", "response", "conversation", "conversation_item", "file", "file_piece", "vs"})
