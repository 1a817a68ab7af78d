"""Damaged records of accounts: the operator's lists and sums go on, and the server starts."""

import time
from typing import Any, Final

import pytest
from openai import APIStatusError, AuthenticationError

from apis.accounts.charges import CHARGES_PREFIX, Demand, Use
from apis.accounts.limits import RateLimit
from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry, UsageSubject
from apis.storage.records import encode_record
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.organization import StoredProjectsConfig
from providers.accounts.prices import Prices
from providers.accounts.records import SALT_KEY, digest_reference_key, limits_key, project_key, usage_key
from providers.accounts.stored import StoredAccounts
from providers.accounts.usage_log import StoredUsageLog
from providers.kv_store.memory import Memory
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served
from tests.support.tenants.accounts import new_project, organization_of

DAMAGED_VALUES: Final = (b"\xff\xfejunk", b'[{"a":1}]')
HOUR: Final = int(time.time()) // HOUR_S


async def read_usage(store: Memory) -> list[UsageEntry]:
    """Return the usage that a new process reads from the store."""
    ledger = StoredLedger(store, Prices({}), 1e6)
    entries = await StoredUsageLog(store, ledger).read((HOUR - 1) * HOUR_S, (HOUR + 2) * HOUR_S)
    await ledger.close()
    return entries


@pytest.mark.parametrize("damaged", DAMAGED_VALUES)
@pytest.mark.parametrize("name", ["aaa/open", "aaa/end", "process/lease"])
async def test_a_damaged_charge_stops_no_other_project(name: str, damaged: bytes) -> None:
    """The ends of all projects are counted, and the usage of the organization can be read."""
    store = Memory(Memory.Config())
    killed = StoredLedger(store, Prices({}), 1e6)
    charge = await killed.open_charge(("zproj", "key"), {"*": RateLimit(month_tokens=100)}, Demand("m", 10))
    await store.write(charge.end_ops(Use("m", UsageCounts(1, 3, 0, 2))))
    await store.put(f"{CHARGES_PREFIX}aproj/{name}", damaged)
    assert [entry.counts.input_tokens for entry in await read_usage(store)] == [3]
    await killed.close()


@pytest.mark.parametrize("damaged", DAMAGED_VALUES)
async def test_the_usage_of_an_organization_is_the_sum_of_what_can_be_read(damaged: bytes) -> None:
    """One damaged sum of an hour does not make the organization's usage a 500."""
    store = Memory(Memory.Config())
    entry = UsageEntry(HOUR * HOUR_S, UsageSubject("p", "key", "m"), UsageCounts(1, 5))
    for row, value in (("a", damaged), ("b", encode_record(entry))):
        await store.put(usage_key(HOUR, "process", row), value)
    assert [entry.counts.input_tokens for entry in await read_usage(store)] == [5]


@pytest.mark.parametrize("damaged", DAMAGED_VALUES)
async def test_a_server_starts_with_a_damaged_secret_of_its_cache_salts(damaged: bytes) -> None:
    """The secret is replaced, and all processes that start later have the new one."""
    store = Memory(Memory.Config())
    await store.put(SALT_KEY, damaged)
    results: set[bytes | None] = set()
    for _ in range(2):
        accounts = StoredAccounts(StoredProjectsConfig(), store)
        await accounts.start()
        results.add(accounts.organization().cache_salt_secret)
        await accounts.close()
    [secret] = results
    assert secret is not None
    assert len(secret) == 32


async def test_an_operator_finds_and_deletes_damaged_records(served: Served) -> None:
    """Lists of projects, accounts and keys show what can be read, and a damaged key can be revoked."""
    organization, store = organization_of(served.client), served.stack.kv_store
    damaged_project, _ = await new_project(organization)
    project, key = await new_project(organization)
    account = await organization.projects.service_accounts.create(project, name="other")
    for record in (
        project_key(damaged_project),
        f"/accounts/keys/{project}/{account.api_key.id}",
        f"/accounts/service_accounts/{project}/{account.id}",
    ):
        assert await store.get(record) is not None
        await store.put(record, b"\xff")
    assert [each.id async for each in organization.projects.list()] == [project]
    assert [each.name async for each in organization.projects.service_accounts.list(project)] == ["app"]
    assert len([each async for each in organization.projects.api_keys.list(project)]) == 1
    async with sdk_client(served.url, key) as client:
        await client.responses.create(model="scripted", input="hi")
    with pytest.raises(APIStatusError, match="damaged"):
        await organization.projects.api_keys.retrieve(account.api_key.id, project_id=project)
    await organization.projects.api_keys.delete(account.api_key.id, project_id=project)
    await organization.projects.service_accounts.delete(account.id, project_id=project)
    async with sdk_client(served.url, account.api_key.value) as client:
        with pytest.raises(AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize("damaged", DAMAGED_VALUES)
async def test_a_damaged_record_stops_only_the_requests_that_need_it(served: Served, damaged: bytes) -> None:
    """The limits of all projects stop no one; a key whose own records are damaged is an error, and no bug."""
    organization, store = organization_of(served.client), served.stack.kv_store
    _, key = await new_project(organization)
    await organization.spend_limit.update(threshold_amount=100_000, currency="USD", interval="month")
    await store.put(limits_key(".organization"), damaged)
    async with sdk_client(served.url, key) as client:
        await client.responses.create(model="scripted", input="hi")
    _, other_key = await new_project(organization)
    references: Any = await store.scan(digest_reference_key(""))
    for name, _ in references:
        await store.put(name, damaged)
    async with sdk_client(served.url, other_key) as client:
        with pytest.raises(APIStatusError) as refusal:
            await client.models.list()
    assert refusal.value.code == "storage_corrupt"
