"""Which alerts are due at which time, over the turn of a month, from rows of the usage log in a real store."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest_asyncio

from apis.accounts.limits import NANOS
from apis.accounts.spend_alerts import SpendAlert
from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry, UsageSubject
from apis.storage.kv_store import KVStore
from apis.storage.records import encode_record
from providers.accounts.alerts.due_alerts import DueAlert, DueAlerts
from providers.accounts.records import alerts_key, usage_key
from tests.spec.accounts.test_spend_alerts import alerting
from tests.support.tenants.accounts import stored_organization

DAY_S = 24 * HOUR_S


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


NOVEMBER, DECEMBER = at("2026-11-01"), at("2026-12-01")


@pytest_asyncio.fixture
async def watched() -> AsyncGenerator[Any]:
    """A store and the due alerts in it, without a worker that sends them."""
    async with alerting(None) as served:
        usage_log = stored_organization(served.stack.accounts).usage_log
        yield SimpleNamespace(kv=served.stack.kv_store, due=DueAlerts(served.stack.kv_store, usage_log))


async def write_cost(kv: KVStore, seconds: int, cents: int, project_id: str = "alpha", row: str = "a") -> None:
    """Write the cost of one process in an hour."""
    hour = seconds // HOUR_S
    counts = UsageCounts(requests=1, cost=cents * NANOS // 100)
    entry = UsageEntry(hour * HOUR_S, UsageSubject(project_id=project_id), counts)
    await kv.put(usage_key(hour, f"{project_id}{row}", "p"), encode_record(entry))


async def write_alerts(kv: KVStore, *alerts: SpendAlert, owner: str = "alpha") -> None:
    await kv.put(alerts_key(owner), encode_record(alerts))


def new_alert(threshold: int, armed_at: int = NOVEMBER, project_id: str | None = "alpha") -> SpendAlert:
    return SpendAlert(f"alert_{threshold}", project_id, threshold, ("a@example.org",), None, armed_at)


async def find_alerts(watched: Any, now: int) -> list[tuple[int, str, int]]:
    """The threshold, the month and the cents of each due alert."""
    due: list[DueAlert] = await watched.due.find(now)
    return sorted((each.alert.threshold_amount, each.month.name, each.spent * 100 // NANOS) for each in due)


async def test_a_month_that_ended_before_a_worker_looked_is_still_sent_for_three_days(watched: Any) -> None:
    await write_cost(watched.kv, DECEMBER - 1, 700)
    await write_alerts(watched.kv, new_alert(500), new_alert(600, armed_at=DECEMBER + 60), new_alert(701))
    assert await find_alerts(watched, DECEMBER - 1) == [(500, "2026-11", 700)]
    assert await find_alerts(watched, DECEMBER + HOUR_S) == [(500, "2026-11", 700)]
    assert await find_alerts(watched, DECEMBER + 3 * DAY_S - 1) == [(500, "2026-11", 700)]
    assert await find_alerts(watched, DECEMBER + 3 * DAY_S) == []


async def test_a_new_month_arms_again_and_counts_from_its_first_hour(watched: Any) -> None:
    await write_alerts(watched.kv, new_alert(500))
    await write_cost(watched.kv, DECEMBER - 1, 700)
    (due,) = await watched.due.find(DECEMBER - 1)
    await watched.kv.put(due.notice_key, b"1")
    assert await find_alerts(watched, DECEMBER - 1) == []
    await write_cost(watched.kv, DECEMBER, 499)
    assert await find_alerts(watched, DECEMBER + 1) == []
    await write_cost(watched.kv, DECEMBER + 5 * DAY_S, 1)
    assert await find_alerts(watched, DECEMBER + 5 * DAY_S) == [(500, "2026-12", 500)]


async def test_hours_that_are_over_are_read_once_an_hour_and_late_rows_are_counted_then(watched: Any) -> None:
    await write_alerts(watched.kv, new_alert(500))
    now = NOVEMBER + 20 * DAY_S
    await write_cost(watched.kv, NOVEMBER, 100)
    await write_cost(watched.kv, NOVEMBER + 2 * DAY_S, 100, "beta")
    await write_cost(watched.kv, now, 299)
    assert await find_alerts(watched, now) == []
    await write_cost(watched.kv, now, 1, row="b")
    await write_cost(watched.kv, NOVEMBER + DAY_S, 100, row="late")
    assert await find_alerts(watched, now + 60) == []
    assert await find_alerts(watched, now + HOUR_S) == [(500, "2026-11", 500)]
    await write_alerts(watched.kv, new_alert(600, project_id=None), owner=".organization")
    assert await find_alerts(watched, now + HOUR_S) == [(500, "2026-11", 500), (600, "2026-11", 600)]


async def test_a_damaged_record_does_not_stop_the_alerts_of_others(watched: Any) -> None:
    await watched.kv.put(alerts_key("aaa"), b"{")
    await write_alerts(watched.kv, new_alert(0))
    now = NOVEMBER + 9 * DAY_S
    assert await find_alerts(watched, now) == [(0, "2026-11", 0)]
    assert await find_alerts(watched, now) == [(0, "2026-11", 0)]
