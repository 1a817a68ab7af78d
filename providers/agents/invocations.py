"""AutomationQueue: begins the invocations of automations whose time has come, and delivers them, on any worker.

An invocation is stored, with the ids of what it will create, in the write that takes its time from the automation. So
each time is invoked once, and a worker that ends in a delivery leaves nothing that another one would create again.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from apis.batches.batches import BatchOwner
from apis.errors import AgentNotFound, StorageCorrupt
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.storage.kv_store import Delete, Op
from providers.agents.automations import (
    AutomationRecord,
    InvocationRecord,
    StoredAutomations,
    begin_occurrence,
    invocation_key,
)
from providers.agents.deliveries import Delivery, TargetDeliverer
from providers.agents.work import AUTOMATION_PREFIX
from providers.common.due_rows import list_due_rows
from providers.common.jobs import Claim, Job, JobQueue, JobRecord, LeasedJobs
from providers.common.state.scan import skipping_damaged
from providers.common.state.worker_signs import WorkerSign

_MAX_DELIVERIES: Final = 8
_RETRY_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 0.4


class AutomationQueue(JobQueue[str, JobRecord]):
    """The automations of a store that have something to do now."""

    title = "automations"

    def __init__(
        self,
        automations: StoredAutomations,
        deliverer: TargetDeliverer,
        sign: WorkerSign,
        tenants: Tenants = ONE_TENANT,
        *,
        lease_s: float,
        poll_s: float,
    ) -> None:
        """An automation that waits for a worker that has ended goes on after `lease_s`."""
        places = FairShare(self.title, _MAX_DELIVERIES, several_tenants=tenants.are_several)
        super().__init__(automations.kv, JobRecord, places, retry_s=_RETRY_S)
        self._automations = automations
        self._deliverer = deliverer
        self._lease_s = lease_s
        self._jobs = LeasedJobs(self, sign, poll_s)
        automations.on_due = self._jobs.wake

    def start(self) -> None:
        """Begin to invoke automations."""
        self._jobs.start()

    async def close(self) -> None:
        """Stop; unfinished deliveries are released to other workers."""
        await self._jobs.close(_CLOSE_TIMEOUT_S)

    async def list_waiting(self) -> AsyncGenerator[Job[str]]:
        """Yield the automations that are due, the longest first."""
        async with aclosing(list_due_rows(self.kv, AUTOMATION_PREFIX, self._automations.now())) as rows:
            async for tenant, automation_id, key, entry in rows:
                lease_key = f"/automation_lease/{tenant}/{automation_id}"
                yield Job(tenant, automation_id, lease_key, self._lease_s, key, entry)

    async def run(self, claim: Claim[str, JobRecord]) -> None:
        """Begin the invocation whose time has come, and deliver those that wait. Raises StoreUnavailable."""
        tenant, automation_id = claim.job.tenant, claim.subject
        try:
            record, _ = await self._automations.load(automation_id, tenant)
            if record.due_key != claim.job.key:
                await claim.lease.release([Delete(claim.job.key)])
                return
            record = await self._begin(tenant, automation_id)
            while record.queued and record.retry_at <= self._automations.now():
                claim.lease.check()
                record = await self._deliver(tenant, automation_id, record)
        except AgentNotFound:  # it was deleted meanwhile
            await claim.lease.release([Delete(claim.job.key)])

    async def fail(self, claim: Claim[str, JobRecord], lost_workers: int) -> None:
        """End the first invocation that waits: its delivery has cost workers."""
        tenant, automation_id = claim.job.tenant, claim.subject
        failure = Delivery("failed", code="internal_error", message="The workers that delivered it have ended.")
        try:
            record = await self._begin(tenant, automation_id)
            if record.queued:
                await self._end(tenant, automation_id, next(iter(record.queued)), failure)
        except AgentNotFound:
            await claim.lease.release([Delete(claim.job.key)])

    async def _begin(self, tenant: str, automation_id: str) -> AutomationRecord:
        """Store the invocation of the time that has come, if one has, and return the automation."""

        def edit(record: AutomationRecord, now: float) -> Sequence[Op] | None:
            due_at = record.next_at
            begun = begin_occurrence(record, automation_id, now)
            if begun is None or due_at is None:
                return None
            invocation_id, invocation = begun
            if invocation.status == "queued":
                # the due row stays where it is, with its attempts, until the delivery has ended
                record.queued, record.retry_at = {invocation_id: record.target_number}, due_at
            return [self._automations.put_invocation(tenant, automation_id, invocation_id, invocation)]

        return await self._automations.edit(automation_id, tenant, edit)

    async def _deliver(self, tenant: str, automation_id: str, record: AutomationRecord) -> AutomationRecord:
        """Deliver the first invocation that waits, and return the automation."""
        invocation_id, number = next(iter(record.queued.items()))
        delivery = Delivery("failed")
        if await self._load_or_skip(automation_id, invocation_id, tenant) is not None:
            owner = BatchOwner(tenant, record.key_id)
            try:
                target = await self._automations.load_target(automation_id, number, tenant)
                delivery = await self._deliverer.deliver(invocation_id, target, owner)
            except StorageCorrupt as exc:  # it is damaged, or the run config has its key no more
                delivery = Delivery("failed", code=exc.code or exc.type, message=exc.message)
        return await self._end(tenant, automation_id, invocation_id, delivery)

    async def _load_or_skip(self, automation_id: str, invocation_id: str, tenant: str) -> InvocationRecord | None:
        """Return an invocation; None where it has expired or is damaged: it would stop those after it."""
        with skipping_damaged(self.kv, invocation_key(tenant, automation_id, invocation_id), InvocationRecord.__name__):
            return await self._automations.load_invocation(automation_id, invocation_id, tenant)
        return None

    async def _end(self, tenant: str, automation_id: str, invocation_id: str, delivery: Delivery) -> AutomationRecord:
        """Store the end of an attempt, and return the automation."""
        invocation = await self._load_or_skip(automation_id, invocation_id, tenant)

        def edit(record: AutomationRecord, now: float) -> Sequence[Op] | None:
            if next(iter(record.queued), None) != invocation_id:  # another worker has ended it
                return None
            if delivery.status == "waiting":
                record.retry_at = now + delivery.retry_s
                return ()
            number = record.queued.pop(invocation_id)
            record.retry_at = now
            target_end = self._automations.build_target_end(record, number, tenant, automation_id)
            if delivery.pauses and record.status == "active":
                record.status, record.pause_reason, record.next_at = "paused", "target_session_failed", None
            if invocation is None:
                return target_end
            ended = msgspec.structs.replace(
                invocation,
                status=delivery.status,
                session_id=delivery.session_id,
                response_id=delivery.response_id,
                error={"code": delivery.code, "message": delivery.message} if delivery.code else None,
            )
            return [self._automations.put_invocation(tenant, automation_id, invocation_id, ended), *target_end]

        return await self._automations.edit(automation_id, tenant, edit)
