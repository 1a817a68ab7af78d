"""A chain of accounts providers that share one store: one organization, whichever section has its settings."""

import time
from typing import Any

import pytest

from apis.accounts.charges import Demand, Use
from apis.accounts.limits import NANOS, RateLimit
from apis.accounts.usage import UsageCounts
from apis.errors import ConfigError
from providers.accounts.chain import ChainedAccounts
from providers.accounts.organization import StoredProjectsConfig
from providers.accounts.stored import StoredAccounts
from providers.kv_store.memory import Memory
from stack.build import build_providers
from stack.config import StackConfig
from stack.wiring import wire_providers
from tests.support.tenants.accounts import stored_organization

PRICES: dict[str, Any] = {"prices": {"m": {"input": 0, "output": 1_000_000}}}
USE = Use("m", UsageCounts(1, 0, 0, 2))
EMAIL: dict[str, Any] = {"email": {"url": "smtp://127.0.0.1:1", "sender": "stack@example.org"}}


def new_chain(store: Memory, *sections: dict[str, Any]) -> ChainedAccounts:
    config = ChainedAccounts.Config(providers={"a": {}})
    members = [StoredAccounts(StoredProjectsConfig.model_validate(section), store) for section in sections]
    return ChainedAccounts(config, {f"member{number}": member for number, member in enumerate(members)})


@pytest.mark.parametrize("sections", [(PRICES, {}), ({}, PRICES), (PRICES, PRICES)], ids=["first", "second", "both"])
async def test_every_end_has_the_price_that_any_section_sets(sections: tuple[dict[str, Any], ...]) -> None:
    """Those of this process, and those that another one has left."""
    store = Memory(Memory.Config())
    killed, chain = new_chain(store, *sections), new_chain(store, *sections)
    log = stored_organization(chain).usage_log
    for accounts in (killed, chain):
        meter = stored_organization(accounts).meter
        charge = await meter.open_charge(("p", "k"), {"*": RateLimit(day_tokens=100)}, Demand("m", 1, 10))
        if accounts is killed:
            assert await store.write(charge.end_ops(USE)) is not None
        else:
            charge.end(USE)
    now = int(time.time())
    entries = await log.read(now - 3600, now + 3700)
    assert sum(entry.counts.cost for entry in entries) == 2 * 2 * NANOS
    await chain.close()
    await killed.close()


async def test_the_members_of_a_chain_have_one_of_everything() -> None:
    """One ledger, one sweep and one watcher of alerts, which can send."""
    chain = new_chain(Memory(Memory.Config()), {}, EMAIL)
    members = [*chain._providers]  # pyright: ignore[reportPrivateUsage] - what the members share is not shown
    assert members[0].organization() is members[1].organization() is chain.organization()
    alerts = stored_organization(chain).spend_alerts
    assert alerts.can_send
    assert stored_organization(new_chain(Memory(Memory.Config()), {"currency": "eur"}, {})).currency == "eur"


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("prices", {}, PRICES["prices"]),
        ("currency", "usd", "eur"),
        ("usage_retention_days", 1, 2),
        ("audit_retention_days", 3, 4),
        ("email", None, EMAIL["email"]),
    ],
)
def test_sections_that_contradict_each_other_are_an_error(field: str, one: Any, other: Any) -> None:
    """None of two values is ignored without a word."""
    members = {
        "config": {"provider": "config"},
        "stored": {"provider": "stored", field: one},
        "more": {"provider": "stored", field: other},
    }
    sections = {"inference": {"provider": "scripted"}, "kv_store": {"provider": "memory"}}
    config = StackConfig.model_validate(
        {**sections, "responses": {"provider": "loop"}, "accounts": {"provider": "chain", "providers": members}}
    )
    with pytest.raises(ConfigError, match=rf"accounts\.providers\.more\.{field}: differs from that of stored"):
        build_providers(config, wire_providers(config))
