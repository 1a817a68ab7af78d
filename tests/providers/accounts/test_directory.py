"""The directory of projects and keys: what a change writes."""

from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.directory import StoredDirectory
from providers.kv_store.memory import Memory


async def test_a_change_of_nothing_writes_nothing() -> None:
    store = Memory(Memory.Config())
    directory = StoredDirectory(store, StoredAuditLog(store, 86_400))
    project = await directory.create_project("alpha", project_id="alpha")
    account = await directory.create_service_account("alpha", "app")
    archived = await directory.create_project("beta", project_id="beta")
    await directory.archive_project(archived.id)
    before = await store.scan("")
    assert await directory.rename_project("alpha", None) == project
    assert await directory.rename_service_account("alpha", account.id, None) == account
    assert (await directory.archive_project("beta")).archived_at is not None
    assert await store.scan("") == before
    await directory.rename_project("alpha", "omega")
    assert len(await store.scan("")) == len(before) + 1, "a change has a record in the audit log"
