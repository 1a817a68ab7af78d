"""A queue of practice jobs, and a process that runs them: `python -m tests.support.servers.job_worker SECTION`.

    /practice/TENANT/NAME         the job
    /practice_lease/TENANT/NAME   its lease
    /practice_end/TENANT/NAME     its end: the status, a space and the number of attempts

A name says what the job does: `poison` ends its process, `held` waits, `late` raises a StackError once, `faulty`
raises another exception, `returned` goes back to the queue once. All others are done at once.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from apis.errors import Overloaded
from apis.fair_share import FairShare
from apis.imports import import_from_string
from apis.storage.kv_store import Delete, KVStore, Put
from apis.storage.records import encode_record, scan_groups
from providers import PROVIDERS
from providers.common.jobs import Claim, Job, JobQueue, JobRecord, LeasedJobs
from providers.common.state.worker_signs import WorkerSign

LEASE_S = 0.5
PREFIX = "/practice/"
DEATHS_KEY = "/practice_deaths/"


def lease_key(name: str) -> str:
    return f"/practice_lease/{name}"


def end_key(name: str) -> str:
    return f"/practice_end/{name}"


async def open_store(section: dict[str, Any]) -> KVStore:
    """Return the started store of a run config's section."""
    provider, fields = section["provider"], {key: value for key, value in section.items() if key != "provider"}
    store_class: Any = import_from_string(PROVIDERS["kv_store"][provider])
    store: KVStore = store_class(store_class.Config.model_validate(fields))
    await store.start()
    return store


async def add_jobs(kv: KVStore, *names: str, record: JobRecord | None = None) -> None:
    await kv.write([Put(PREFIX + name, encode_record(record or JobRecord())) for name in names])


class PracticeQueue(JobQueue[str, JobRecord]):
    """Jobs whose subject is TENANT/NAME; `begun` has those that this process has begun, in their order."""

    title = "practice jobs"

    def __init__(self, kv: KVStore, places: int, lease_s: float) -> None:
        super().__init__(kv, JobRecord, FairShare(self.title, places, several_tenants=True), retry_s=lease_s)
        self.lease_s = lease_s
        self.begun: list[str] = []
        self.may_end = asyncio.Event()

    async def list_waiting(self) -> AsyncGenerator[Job[str]]:
        async for tenant, rows in scan_groups(self.kv, PREFIX, limit=64):
            for key, entry in rows:
                name = key.removeprefix(PREFIX)
                yield Job(tenant, name, lease_key(name), self.lease_s, key, entry)

    async def run(self, claim: Claim[str, JobRecord]) -> None:
        self.begun.append(claim.subject)
        kind, is_first = claim.subject.rpartition("/")[2].partition("-")[0], claim.record.attempts == 1
        if kind == "poison":
            await self.kv.put(f"{DEATHS_KEY}{claim.subject}/{os.getpid()}", b"")
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "held":
            await self.may_end.wait()
        if kind == "late" and is_first:
            raise Overloaded("Try again.")
        if kind == "faulty":
            raise ZeroDivisionError
        if kind != "returned" or not is_first:
            await self._end(claim, "done")

    async def fail(self, claim: Claim[str, JobRecord], lost_workers: int) -> None:
        await self._end(claim, f"failed:{lost_workers}")

    async def _end(self, claim: Claim[str, JobRecord], status: str) -> None:
        end = Put(end_key(claim.subject), f"{status} {claim.record.attempts}".encode())
        await claim.lease.release([Delete(claim.job.key), end])


class PracticeWorker:
    """A worker on a store of its own."""

    def __init__(self, kv: KVStore, *, places: int = 4, lease_s: float = LEASE_S) -> None:
        self.sign = WorkerSign(kv, lease_s)
        self.queue = PracticeQueue(kv, places, lease_s)
        self.jobs = LeasedJobs(self.queue, self.sign, poll_s=0.05)

    async def __aenter__(self) -> "PracticeWorker":
        self.sign.start()
        self.jobs.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.jobs.close(10)
        await self.sign.close()


async def main() -> None:
    async with AsyncExitStack() as opened:
        kv = await open_store(msgspec.json.decode(sys.argv[1]))
        opened.push_async_callback(kv.close)
        await opened.enter_async_context(PracticeWorker(kv))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
