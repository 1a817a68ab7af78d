"""The audit log: every act of an administrator is recorded with its actor, in the SDK's shapes, and never changed."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai.types.admin.organization import AuditLogListResponse

from apis.accounts.audit import AuditLogQuery, EffectiveAt
from apis.errors import StoreUnavailable
from apis.storage.kv_store import Op
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.directory import StoredDirectory
from providers.kv_store.memory import Memory
from stack.keys import KeyRequest, create, load_accounts_config, open_accounts, revoke
from tests.support.servers.serving import serving
from tests.support.tenants.accounts import CHAINED, ROOT, organization_of, stored_organization

ADMINISTERED: dict[str, Any] = {"more": CHAINED, "server": {"api_keys": [ROOT]}}


async def entries_of(organization: Any, **filters: Any) -> list[Any]:
    return [entry async for entry in organization.audit_logs.list(limit=2, **filters)]


async def test_every_act_is_recorded_with_its_actor_address_and_details() -> None:
    async with serving(**ADMINISTERED) as served:
        organization = organization_of(served.client)
        ops = await organization.admin_api_keys.create(name="ops")
        own = organization_of(served.client, ops.value)
        project = await own.projects.create(name="one")
        await own.projects.update(project.id, name="first")
        account = await own.projects.service_accounts.create(project.id, name="app")
        await own.projects.service_accounts.update(account.id, project_id=project.id, name="renamed")
        key_id = account.api_key.id
        updated = await own.projects.api_keys.update(key_id, project_id=project.id, scopes=["read"])
        assert updated.to_dict()["scopes"] == ["read"]
        await own.projects.rate_limits.update_rate_limit("rl-*", project_id=project.id, max_requests_per_1_minute=3)
        await own.projects.api_keys.delete(key_id, project_id=project.id)
        await own.projects.service_accounts.delete(account.id, project_id=project.id)
        await own.projects.archive(project.id)
        entries = await entries_of(organization)
        for entry in entries:
            AuditLogListResponse.model_validate(entry.to_dict(), strict=True)
            assert entry.actor.api_key.to_dict()["ip_address"] == "127.0.0.1"
            assert abs(entry.effective_at - time.time()) < 60
        assert [entry.type for entry in reversed(entries)] == [
            "api_key.created",
            "project.created",
            "project.updated",
            "service_account.created",
            "api_key.created",
            "service_account.updated",
            "api_key.updated",
            "rate_limit.updated",
            "api_key.deleted",
            "service_account.deleted",
            "project.archived",
        ]
        first, *later = reversed(entries)
        assert (first.actor.api_key.id, first.project, first.api_key_created.id) == ("key_config_0", None, ops.id)
        assert {entry.actor.api_key.id for entry in later} == {ops.id}
        assert {entry.project.id for entry in later} == {project.id}
        by_type = {entry.type: entry for entry in later}
        assert by_type["rate_limit.updated"].rate_limit_updated.changes_requested.max_requests_per_1_minute == 3
        assert by_type["project.updated"].project_updated.changes_requested.title == "first"
        assert by_type["api_key.updated"].api_key_updated.changes_requested.scopes == ["read"]
        stored = b"".join(row[1].value for row in await served.stack.kv_store.scan("/accounts/audit/"))
        for secret in (ops.value, account.api_key.value, account.api_key.value[-20:]):
            assert secret.encode() not in stored


async def test_the_log_is_filtered_and_paged_in_both_directions() -> None:
    async with serving(**ADMINISTERED) as served:
        organization = organization_of(served.client)
        projects = [await organization.projects.create(name=f"p{number}") for number in range(3)]
        await organization.projects.archive(projects[0].id)
        every = await entries_of(organization)
        assert [entry.type for entry in every] == ["project.archived", *["project.created"] * 3]
        own = await entries_of(organization, project_ids=[projects[0].id])
        assert own == [every[0], every[3]]
        assert await entries_of(organization, event_types=["project.archived"]) == every[:1]
        assert await entries_of(organization, resource_ids=[projects[1].id, projects[2].id]) == every[1:3]
        at = every[0].effective_at
        assert await entries_of(organization, effective_at={"gte": at - 60, "lte": at}) == every
        for nothing in ({"gt": at + 60}, {"lt": at - 60}, {"gte": at + 60, "lte": at + 90}):
            assert await entries_of(organization, effective_at=nothing) == []
        for strange in ({"actor_ids": ["key_of_no_one"]}, {"actor_emails": ["a@b"]}, {"tenant_only": True}):
            assert await entries_of(organization, **strange) == []
        page = await organization.audit_logs.list(limit=2, before=every[3].id)
        assert [entry.id for entry in page.data] == [every[1].id, every[2].id]
        assert page.has_more
        page = await organization.audit_logs.list(limit=2, before=every[1].id)
        assert ([entry.id for entry in page.data], page.has_more) == ([every[0].id], False)


class _Failing(Memory):
    """A store whose next write fails."""

    fails = False

    async def write(self, ops: Any, *, durable: bool = True) -> list[int] | None:
        if self.fails:
            raise StoreUnavailable("The store is down.")
        return await super().write(ops, durable=durable)


async def test_an_act_and_its_record_are_one_write() -> None:
    """Each act is one call of `write`, so no act can be without its record, nor a record without its act."""
    writes: list[list[Op]] = []

    class Recording(_Failing):
        async def write(self, ops: Any, *, durable: bool = True) -> list[int] | None:
            writes.append([*ops])
            return await super().write(ops, durable=durable)

    kv = Recording(Memory.Config())
    audit_log = StoredAuditLog(kv, 1)
    directory = StoredDirectory(kv, audit_log)
    project = await directory.create_project("one")
    await directory.rename_project(project.id, "two")
    await directory.archive_project(project.id)
    assert [[op.key.split("/")[2] for op in ops] for ops in writes] == [["projects", "audit"]] * 3
    kv.fails = True
    with pytest.raises(StoreUnavailable):
        await directory.create_project("three")
    kv.fails = False
    assert len((await audit_log.list_records(AuditLogQuery())).data) == 3


async def test_records_expire_and_a_bound_of_time_skips_without_reading() -> None:
    kv = Memory(Memory.Config())
    audit_log = StoredAuditLog(kv, 1e-6)
    await StoredDirectory(kv, audit_log).create_project("one")
    assert (await audit_log.list_records(AuditLogQuery(effective_at=EffectiveAt(gte=1)))).data
    time.sleep(0.1)  # the retention is a tenth of a second  # noqa: ASYNC251 - nothing else runs
    assert (await audit_log.list_records(AuditLogQuery())).data == []


def test_acts_on_the_command_line_are_recorded_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    sections = {
        "kv_store": {"provider": "sqlite", "path": str(tmp_path / "s.db")},
        "accounts": {"provider": "stored"},
        "inference": {"provider": "scripted"},
    }
    path.write_text(yaml.safe_dump(sections))
    value, line = create(str(path), KeyRequest("alpha", "app"))
    key_id = re.findall(r"key_\w+", line)[0]
    revoke(str(path), key_id)

    loaded = load_accounts_config(str(path))

    async def read() -> list[Any]:
        async with open_accounts(loaded) as accounts:
            organization = stored_organization(accounts)
            return [*(await organization.audit_log.list_records(AuditLogQuery())).data]

    records = asyncio.run(read())
    assert [record.type for record in records] == [
        "api_key.deleted",
        "api_key.created",
        "service_account.created",
        "project.created",
    ]
    assert all(record.actor.id.startswith("command-line:") for record in records)
    assert value not in str(records)
