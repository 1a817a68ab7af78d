"""A stack whose store has a team: projects, keys of every kind, limits, and a month of usage."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry, UsageSubject
from apis.storage.kv_store import Put
from apis.storage.records import encode_record
from providers.accounts.records import usage_key
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import CHAINED, organization_of

ROOT: Final = "sk-root-of-the-console"
SERVER: Final[dict[str, Any]] = {
    "api_keys": [{"key": ROOT, "tenant": "operator", "admin": True}],
    "console": True,
}


@dataclass
class Team:
    served: Served
    organization: Any
    """`client.admin.organization` of the SDK."""
    project: str
    """Id of the first project, "Support desk"."""
    holder: str
    """Text of a key of that project."""
    admin: str
    """Text of a key of an administrator, which is of no project."""


@asynccontextmanager
async def bare_team() -> AsyncGenerator[tuple[Served, Any]]:
    """Serve a stack with a root key alone; yield it with `client.admin.organization` of the SDK."""
    async with serving(more=CHAINED, server=SERVER) as served:
        yield served, organization_of(served.client, ROOT)


@asynccontextmanager
async def team() -> AsyncGenerator[Team]:
    async with bare_team() as (served, organization):
        projects = [await organization.projects.create(name=name) for name in ("Support desk", "Research")]
        old = await organization.projects.create(name="Pilot 2025")
        await organization.projects.archive(old.id)
        desk, research = (project.id for project in projects)
        accounts = organization.projects.service_accounts
        account = await accounts.create(desk, name="ticket-bot", expires_in_seconds=86_400)
        keys = accounts.api_keys
        reader = await keys.create(account.id, project_id=desk, name="reporting", scopes=["read"])
        bound = await keys.create(
            account.id,
            project_id=desk,
            name="night shift",
            scopes=["responses", "model:scripted", "tool:web_search", "tool:file_search"],
            expires_in_seconds=90 * 86_400,
        )
        lab = await accounts.create(research, name="notebooks")
        admin = await organization.admin_api_keys.create(name="ops")
        limits = organization.projects.rate_limits
        await limits.update_rate_limit(
            "rl-*",
            project_id=desk,
            max_requests_per_1_minute=600,
            extra_body={"max_tokens_per_1_month": 50_000_000, "max_stored_bytes": 20 * 2**30},
        )
        await limits.update_rate_limit(f"rl-key:{bound.id}", project_id=desk, max_requests_per_1_day=2000)
        await _write_history(served, desk, [account.api_key.id, reader.id, bound.id])
        await _write_history(served, research, [lab.api_key.id])
        yield Team(served, organization, desk, bound.value, admin.value)


async def _write_history(served: Served, project: str, keys: list[str]) -> None:
    hour = int(time.time()) // HOUR_S
    puts: list[Put] = []
    for back in range(0, 30 * 24, 3):  # from this hour, which may be the first of its day
        for number, key in enumerate(keys):
            for model, share in (("scripted", 3), ("gpt-oss-120b", 1)):
                # busier by day than by night, so that the bars have a shape
                load = 1 + (back * 7 + number * 5) % 11 + 6 * (8 <= (hour - back) % 24 <= 18)
                counts = UsageCounts(
                    load * share,
                    900 * load * share,
                    400 * load,
                    210 * load * share,
                    60 * load,
                    {"web_search_call": load},
                )
                entry = UsageEntry((hour - back) * HOUR_S, UsageSubject(project, key, model), counts)
                puts.append(Put(usage_key(hour - back, f"{key}{model}"[-24:], "seed"), encode_record(entry), 1e6))
    for first in range(0, len(puts), 500):
        await served.stack.kv_store.write(puts[first : first + 500], durable=False)
