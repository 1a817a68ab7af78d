"""Damaged records: for each type of record that the product stores, only the owner of a damaged one notices.

Three projects each have all records of the type damaged in one way, and a fourth one has none: for it everything goes
on, and so do the lists and sums of the operator, and the start of a server.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from apis.storage.kv_store import Delete, Put
from tests.spec.state.damaged_world import (
    LISTS,
    OWNERS,
    World,
    check_beta,
    check_ingestion,
    check_owner,
    damaged,
    find_families,
    is_damage,
    open_world,
)
from tests.support.damage import DAMAGES

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOMS: Final[dict[str, tuple[str, ...]]] = {
    "accounts": (
        "/accounts/counters/TENANT/*",
        "/accounts/digests/ID",
        "/accounts/keys/TENANT/ID",
        "/accounts/limits/TENANT",
        "/accounts/projects/TENANT",
        "/accounts/service_accounts/TENANT/ID",
        "/accounts/settings/TENANT",
        "/accounts/usage/ID/ID/ID.all",
    ),
    "responses": (
        "TENANT/branch/ID/ID/ID",
        "TENANT/item/msg_of-TENANT",
        "TENANT/line/ID",
        "TENANT/response/ID",
        "TENANT/turn/ID/ID",
    ),
    "idempotent requests": ("TENANT/idempotency/ID", "TENANT/idempotent/ID/ID", "TENANT/idempotent_of/ID"),
    "conversations": (
        "TENANT/conversation/ID",
        "TENANT/conversation_end/ID",
        "TENANT/conversation_item/ID/ID",
        "TENANT/conversation_place/ID/ID",
    ),
    "files": (
        "TENANT/file/ID",
        "TENANT/file_piece/ID/ID",
        "TENANT/file_usage",
        "TENANT/upload/ID",
        "TENANT/upload_part/ID/ID",
        "TENANT/upload_piece/ID/ID/ID",
        "TENANT/upload_usage",
    ),
    "vector stores": (
        "TENANT/vs/ID",
        "TENANT/vs_count",
        "TENANT/vs_batch/ID/ID",
        "TENANT/vs_file/ID/ID",
        "TENANT/vs_file_order/ID/ID/ID",
        "TENANT/vs_of/ID/ID",
        "TENANT/vs_text/ID/ID/ID",
        "~vs_expiring/TENANT/ID",
    ),
    "skills": ("TENANT/skill/ID", "TENANT/skill_archive/ID/ID", "TENANT/skill_count"),
    "traces": (
        "TENANT/trace/ID",
        "TENANT/trace_age/ID/ID",
        "TENANT/trace_of/ID/ID",
        "TENANT/trace_span/ID/ID",
        "TENANT/trace_usage",
    ),
    "webhook endpoints": ("TENANT/webhook_endpoint/ID",),
}
"""The types of records that belong to one project, by their keys without ids."""
OWNED: Final = tuple(family for families in ROOMS.values() for family in families)
SHARED: Final = (
    "/accounts/audit/ID",
    "/accounts/cache_salt_secret",
    "/accounts/counters/.organization/*",
    "/accounts/heartbeats/ID",
    "/accounts/last_uses/ID",
    "/accounts/limits/.organization",
    "/accounts/sweep_lease",
    "/retention_lease",
)
"""The types of records that belong to no project."""
TRANSIENT: Final = (
    "~file_loose/{}/file-{:044x}",
    "~vs_work/{}/vs_{:044x}/file-{:044x}",
    "~vs_claim/{}/vs_{:044x}/file-{:044x}",
    "{}/upload_guard/upload_{:044x}/part_{:044x}",
    "{}/conversation_floor/conv_{:048x}",
    "/accounts/alerts/{}",
    "/accounts/charges/{}/{:016x}/open",
    "/accounts/charges/{}/{:016x}/end",
    "/accounts/charges/{}/{:016x}/lease",
    "/stored_bytes/{}/sum",
)
"""Keys of records that are there only for a while."""
NOT_LISTED: Final = (
    "/worker/",
    "/worker_sign/",
    "TENANT/event/",
    "TENANT/webhook",
    "/run/",
    "/queue/",
    "/lease/",
    "/place/",
    "/accounts/charges/",
    "/stored_bytes/",
    "~",
    "TENANT/upload_guard/",
    "TENANT/conversation_floor/",
)
"""The beginnings of types that are there only for a while, or that the tests of background work damage."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    async with open_world(tmp_path_factory.mktemp("world")) as world:
        yield world


def owned_keys(world: World, *families: str) -> dict[str, list[str]]:
    """Return the keys of these types by the damage of their owner."""
    key_families = find_families(world.database)
    keys = {
        damage: [key for family in families for key in key_families[family].get(owner, [])]
        for damage, owner in OWNERS.items()
    }
    assert all(keys.values()), (families, key_families)
    return keys


async def test_no_type_of_record_is_missing_here(world: World) -> None:
    """A new type of record is damaged here, too."""
    families = {name for name in find_families(world.database) if not name.startswith(NOT_LISTED)}
    families |= {"TENANT/webhook_endpoint/ID", "~vs_expiring/TENANT/ID"}
    assert set(OWNED) <= families <= {*OWNED, *SHARED}


@pytest.mark.parametrize("room", ROOMS)
async def test_only_the_owner_notices_damaged_records(world: World, room: str) -> None:
    """Others list, read, search and continue what is theirs, and no request ends on a bug."""
    async with damaged(world, owned_keys(world, *ROOMS[room])):
        await check_beta(world)
        for project in OWNERS.values():
            await check_owner(world, project, can_enter=room != "accounts")
        if room in ("files", "vector stores"):
            await check_ingestion(world)


@pytest.mark.long
@pytest.mark.parametrize("family", OWNED)
async def test_only_the_owner_notices_records_of_one_type(world: World, family: str) -> None:
    """The other types are whole, so that each is read as far as it can be."""
    async with damaged(world, owned_keys(world, family)):
        await check_beta(world)
        for project in OWNERS.values():
            await check_owner(world, project, can_enter=not family.startswith("/accounts/"))


@pytest.mark.parametrize("damage", DAMAGES)
async def test_no_project_is_stopped_by_damaged_records_of_all(world: World, damage: str) -> None:
    """Damaged records that belong to no project stop none."""
    families = find_families(world.database)
    async with damaged(world, {damage: [key for family in SHARED for key in families[family][""]]}):
        await check_beta(world)


async def test_only_the_owner_notices_damaged_records_of_work_in_progress(world: World) -> None:
    """Work in progress of others goes on."""
    async with damaged_work(world) as keys, damaged(world, keys):
        await check_beta(world)
        await check_ingestion(world)


@asynccontextmanager
async def damaged_work(world: World) -> AsyncGenerator[dict[str, list[str]]]:
    """Store records of work in progress while the context is entered; yield their keys by damage."""
    store = world.served.stack.kv_store
    by_damage = {damage: [template.format(owner, 1, 2) for template in TRANSIENT] for damage, owner in OWNERS.items()}
    keys = [key for keys in by_damage.values() for key in keys]
    await store.write([Put(key, b'{"a":1}', ttl_s=60) for key in keys])
    yield by_damage
    await store.write([Delete(key) for key in keys])


async def test_a_server_starts_with_damaged_records_of_every_type(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that starts with all of them serves the project whose records are whole."""
    async with damaged_work(world) as work:
        owned, shared = owned_keys(world, *OWNED), find_families(world.database)
        keys = {damage: [*owned[damage], *work[damage]] for damage in DAMAGES}
        for family, damage in zip(SHARED, cycle(DAMAGES), strict=False):
            keys[damage] += shared[family][""]
        async with damaged(world, keys):
            caplog.clear()
            async with open_world(world.database.parent, like=world) as restarted:
                await check_beta(restarted)
                await check_ingestion(restarted)
    bugs = [record for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info]
    assert bugs == []


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_server_starts_with_a_damaged_counter_of_all_projects(world: World, damage: str) -> None:
    """The projects go on under the limit of the organization, and setting it again sums the month."""
    [key] = find_families(world.database)["/accounts/counters/.organization/*"][""]
    limit = {"threshold_amount": 1_000_000_00, "currency": "USD", "interval": "month"}
    async with damaged(world, {damage: [key]}), open_world(world.database.parent, like=world) as restarted:
        before = await restarted.get("operator", "/organization/spend_limit")
        await check_beta(restarted)
        after = await restarted.post("operator", "/organization/spend_limit", limit)
        assert after["spent_amount"] >= before["spent_amount"] > 0


async def test_an_owner_deletes_what_is_damaged_by_its_id(world: World) -> None:
    """Objects that no list shows can be deleted, and those that can be read are still there."""
    deletable = {
        "/responses": ("fork", "TENANT/response/ID"),
        "/conversations": ("conversation", "TENANT/conversation/ID"),
        "/files": ("file", "TENANT/file/ID"),
        "/vector_stores": ("store", "TENANT/vs/ID"),
        "/skills": ("skill", "TENANT/skill/ID"),
        "/webhook_endpoints": ("endpoint", "TENANT/webhook_endpoint/ID"),
        "/traces": ("trace", "TENANT/trace/ID"),
    }
    families = find_families(world.database)
    assert deletable.keys() == LISTS.keys()
    for path, (name, family) in deletable.items():
        keys = {
            damage: [key for key in families[family][owner] if key.endswith(world.ids[owner][name])]
            for damage, owner in OWNERS.items()
        }
        async with damaged(world, keys):
            for owner in OWNERS.values():
                object_id = world.ids[owner][name]
                assert is_damage(*await world.ask(owner, "GET", f"{path}/{object_id}")), path
                status, answer = await world.ask(owner, "DELETE", f"{path}/{object_id}")
                assert status in (200, 204), (path, owner, answer)
                assert (await world.ask(owner, "GET", f"{path}/{object_id}"))[0] == 404
    await check_beta(world)
