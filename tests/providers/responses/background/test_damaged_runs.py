"""Damaged records of background responses: the runs of other tenants are executed, those of their own tenant too."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from apis.errors import StackError
from apis.storage.kv_store import Put
from providers.kv_store.sqlite import SQLite
from providers.responses.background.ranks import QueueLimits, Rank
from providers.responses.background.runs import ClaimedRun, ResponseRef, Runs
from providers.responses.background.workers import BackgroundConfig, BackgroundWorkers
from providers.responses.events.ids import ResponseIds
from tests.providers.responses.background.test_workers import REQUEST
from tests.support.damage import DAMAGES, damage_record
from tests.support.waiting import until

CONFIG: Final = BackgroundConfig(poll_s=0.02, lease_s=0.1)


async def add(runs: Runs, tenant: str, *, start_now: bool = False) -> tuple[ResponseRef, ClaimedRun | None]:
    ref = ResponseRef(tenant, ResponseIds().response_id)
    log_op = Put(f"{tenant}/event/{ref.id}/00000000", b"x y\n")
    claimed = await runs.add(ref, Rank(5), REQUEST, [log_op], is_portable=True, start_now=start_now)
    return ref, claimed


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["queue", "run", "request", "orphan", "lease"])
async def test_a_damaged_run_stops_no_other(part: str, damage: str, tmp_path: Path) -> None:
    """With any of its records damaged, and after a restart too, because nothing of it is in memory."""
    store = SQLite(SQLite.Config(path=str(tmp_path / "store.db"), survives_power_loss=False))
    await store.start()
    runs = Runs(store, QueueLimits(10, 100), lease_s=0.1, retention_s=100)
    damaged, claimed = await add(runs, "alpha", start_now=part in ("orphan", "lease"))
    keys = {"run": damaged.run_key, "orphan": damaged.run_key, "request": damaged.request_key}
    keys |= {"lease": damaged.lease_key} if claimed is not None else {"queue": (await runs.list_waiting(9))[0][0]}
    await asyncio.to_thread(damage_record, tmp_path / "store.db", keys[part], damage)
    others = [(await add(runs, tenant))[0] for tenant in ("alpha", "beta")]
    others.append((await add(runs, "zeta", start_now=True))[0])  # its worker has ended, too
    executed: set[ResponseRef] = set()

    async def execute(run: ClaimedRun, _: StackError | None) -> None:
        executed.add(run.ref)
        await run.lease.release(run.lease.end_ops()[1:])

    workers = BackgroundWorkers(runs, execute, CONFIG)
    workers.start()
    expected = {*others, *([damaged] if part in ("queue", "lease") else [])}
    await until(lambda: executed == expected)
    await workers.close()
    await runs.delete(damaged)
    assert await store.scan("/run/") == []
    await store.close()
