"""Limits of spending that are set while requests are counted."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from apis.accounts.charges import Demand, Use
from apis.accounts.limits import NANOS, RateLimit
from apis.accounts.usage import UsageCounts
from apis.storage.kv_store import Entry
from providers.accounts.audit_log import StoredAuditLog
from providers.accounts.directory import StoredDirectory
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.limiter import StoredLimiter
from providers.accounts.prices import ModelPrice, Prices
from providers.accounts.spending import StoredSpendLimits
from providers.accounts.usage_log import StoredUsageLog
from providers.kv_store.memory import Memory

PRICES = Prices({"m": ModelPrice(input=0, output=1_000_000)})
LIMITS = {"*": RateLimit(month_cost=10**9 * NANOS)}


class InterruptedMemory(Memory):
    """Lets something happen after a sum of usage was read, and before the charges are."""

    interrupt: Callable[[], Awaitable[None]] | None = None
    interruptions = 0

    async def scan(self, prefix: str, **options: Any) -> list[tuple[str, Entry]]:
        if prefix == "/accounts/charges/p/" and self.interruptions:
            self.interruptions -= 1
            assert self.interrupt is not None
            await self.interrupt()
        return await super().scan(prefix, **options)


@pytest.mark.parametrize("interruptions", [1, 3, 12])
async def test_a_limit_of_spending_loses_nothing_that_is_counted_while_it_is_set(interruptions: int) -> None:
    """The counter is read before the sum, and written only if nothing was counted in between; where that never
    happens, what was counted meanwhile is added."""
    store = InterruptedMemory(Memory.Config())
    audit_log, ledger = StoredAuditLog(store, 1), StoredLedger(store, PRICES, 1e6)
    await StoredDirectory(store, audit_log).create_project("p", project_id="p")
    other = StoredLedger(store, PRICES, 1e6)
    spent = 0

    async def spend() -> None:
        nonlocal spent
        charge = await other.open_charge(("p", "k"), LIMITS, Demand("m", 0, 7))
        charge.end(Use("m", UsageCounts(1, 0, 0, 7)))
        await other.flush_all()
        spent += 7 * NANOS

    await spend()
    store.interrupt, store.interruptions = spend, interruptions
    spend_limits = StoredSpendLimits(store, StoredLimiter(store, audit_log), StoredUsageLog(store, ledger))
    limit = await spend_limits.set("p", 10**6 * NANOS)
    assert store.interruptions == max(0, interruptions - 6), "the sum is not read for ever"
    assert limit.spent == spent == (await spend_limits.get("p")).spent
    for each in (ledger, other):
        await each.close()
