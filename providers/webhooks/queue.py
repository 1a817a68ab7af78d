"""Webhook queue: the events that webhooks have not received yet, in a KVStore, and their delivery by any worker.

    /webhook/QUEUE/TIME/ID    the event ID, to be sent to the webhook of that queue from TIME on (ms since the epoch);
                              QUEUE is a hash for a webhook of the run config, TENANT~ID for an endpoint
    /webhook_hold/ID          held by the worker that sends the event; gone when the worker has not finished in time

A delivery is stored in the same write as the final response that it reports. It is sent at least once, always under
the same id, and deleted when it was accepted or is too old. Each webhook has a queue of its own and each tenant a share
of the deliveries, so that slow or dead webhooks delay no other tenant's. Clocks that differ between machines move the
time of the next attempt, and nothing else.
"""

import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec

from apis.documents.fetcher import Fetcher
from apis.errors import StorageCorrupt
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.records import delete_all, encode_record, scan_groups
from apis.telemetry import continued_trace, current_span
from apis.webhooks import WEBHOOK_EVENTS
from providers.common.jobs import MAX_UNRETURNED, Claim, Job, JobQueue, JobRecord, LeasedJobs
from providers.common.state.scan import report_damaged
from providers.common.state.worker_signs import WorkerSign
from providers.webhooks.delivery_log import AttemptRecord, DeliveryRecord, DeliveryStatus, WebhookLog
from providers.webhooks.endpoints import (
    DEFAULT_OPTIONS,
    EndpointQueue,
    StoredWebhookEndpoints,
    WebhookEndpointOptions,
)
from providers.webhooks.receivers import Webhook, build_event_json, webhook_queue_prefix
from providers.webhooks.sending import post_event

_log = logging.getLogger(__name__)

_ALL_QUEUES: Final = webhook_queue_prefix("")
_POLL_S: Final = 1.0
_MAX_DELIVERIES: Final = 16
_MAX_DELIVERIES_PER_WEBHOOK: Final = 4
_SCAN_LIMIT: Final = 64
_MAX_QUEUED: Final = 10_000
"""Deliveries waiting for one webhook; while there are so many, no more are added."""
_COUNT_INTERVAL_S: Final = 5.0
_MAX_RETRY_DELAY_S: Final = 3600.0
_CLOSE_TIMEOUT_S: Final = 0.4
_HOLD_MARGIN_S: Final = 10.0
"""Seconds that a hold lives beyond the POST's time-out, for the writes to the store."""
_RETRY_S: Final = 10.0
"""Seconds until a delivery whose outcome could not be stored is sent again."""
_HTTP_GONE: Final = 410


class WebhookDelivery(JobRecord, kw_only=True):
    """An event that is to be sent to one webhook. `trace` holds the trace headers of the response that ended."""

    id: str
    body: str
    created_at: float
    response_id: str
    trace: dict[str, str] = msgspec.field(default_factory=dict[str, str])


@dataclass(slots=True, eq=False)
class _Queue:
    webhook: Webhook
    key_prefix: str
    is_full: bool = False
    counted_at: float = 0.0


_Claim = Claim[_Queue, WebhookDelivery]


class WebhookQueue(JobQueue[_Queue, WebhookDelivery]):
    """The queues of the webhooks of the run config and of all endpoints, and the deliveries of this process."""

    title = "webhook deliveries"

    def __init__(
        self,
        kv: KVStore,
        webhooks: Sequence[Webhook],
        fetcher: Fetcher,
        sign: WorkerSign,
        tenants: Tenants = ONE_TENANT,
        endpoint_options: WebhookEndpointOptions = DEFAULT_OPTIONS,
    ) -> None:
        places = FairShare(self.title, _MAX_DELIVERIES, several_tenants=tenants.are_several)
        super().__init__(kv, WebhookDelivery, places, retry_s=_RETRY_S)
        self._fetcher = fetcher
        self._sign = sign
        self.log = WebhookLog(kv)
        self.endpoints = StoredWebhookEndpoints(kv, fetcher, places, endpoint_options)
        self._configured = {hook.queue_name: _Queue(hook, webhook_queue_prefix(hook.queue_name)) for hook in webhooks}
        self._of_endpoints: dict[str, _Queue] = {}
        self._jobs = LeasedJobs(self, sign, _POLL_S)

    def start(self) -> None:
        """Begin to send due deliveries."""
        self._jobs.start()

    async def close(self) -> None:
        """Stop; unfinished deliveries are released to other workers."""
        await self._jobs.close(_CLOSE_TIMEOUT_S)

    async def event_ops(
        self, event: str, object_id: str, tenant: str, data: Mapping[str, object] | None = None
    ) -> list[Op]:
        """See `Webhooks.event_ops`."""
        if event not in WEBHOOK_EVENTS:
            return []
        now = time.time()
        ops: list[Op] = []
        trace = dict(current_span().headers)
        queues = [queue for queue in self._configured.values() if queue.webhook.tenant == tenant]
        queues += [self._open_queue(each) for each in await self.endpoints.list_queues(tenant)]
        for queue in queues:
            hook = queue.webhook
            if event in hook.events and not queue.is_full:
                body = build_event_json(event, object_id, int(now), data).decode()
                delivery_id = f"wh_{secrets.token_hex(16)}"
                delivery = WebhookDelivery(
                    id=delivery_id, body=body, created_at=now, response_id=object_id, trace=trace
                )
                record = DeliveryRecord(delivery.id, event, str(hook), now, now + hook.max_age_s, next_attempt_at=now)
                ops.append(self.log.begin_op(tenant, object_id, record))
                ops.append(Put(_delivery_key(queue, now, delivery), encode_record(delivery), hook.max_age_s))
        return ops

    def wake(self, ops: Sequence[Op]) -> None:
        """See `Webhooks.wake`."""
        if any(op.key.startswith(_ALL_QUEUES) for op in ops):
            self._jobs.wake()

    def _open_queue(self, endpoint: EndpointQueue) -> _Queue:
        """Return the queue of an endpoint, whose webhook is as it was just read."""
        queue = self._of_endpoints.get(endpoint.name)
        if queue is None:
            queue = self._of_endpoints[endpoint.name] = _Queue(endpoint.webhook, webhook_queue_prefix(endpoint.name))
        queue.webhook = endpoint.webhook
        return queue

    async def _find_endpoint_queue(self, name: str) -> _Queue | None:
        try:
            endpoint = await self.endpoints.find_queue(name)
        except StorageCorrupt as exc:
            report_damaged(self.kv, name, "EndpointRecord", exc)
            return None
        if endpoint is not None:
            return self._open_queue(endpoint)
        if "~" in name:  # the endpoint was deleted while an event was added
            await delete_all(self.kv, webhook_queue_prefix(name))
        return None

    async def list_waiting(self) -> AsyncGenerator[Job[_Queue]]:
        """Yield the due deliveries of each queue, up to _SCAN_LIMIT: one read where nothing waits, and one more for
        each queue that holds anything."""
        filled = {claim.subject.key_prefix for claim in self._jobs.claims}
        due = f"{_format_milliseconds(time.time())}~"
        async with aclosing(scan_groups(self.kv, webhook_queue_prefix(""), limit=_SCAN_LIMIT)) as groups:
            async for name, rows in groups:
                queue = self._configured.get(name) or await self._find_endpoint_queue(name)
                if queue is None:
                    continue
                filled.add(queue.key_prefix)
                due_rows = [row for row in rows if row[0] < queue.key_prefix + due]
                await self._check_backlog(queue, len(due_rows))
                hold_s = queue.webhook.timeout_s + _HOLD_MARGIN_S
                for key, entry in due_rows:
                    yield Job(queue.webhook.tenant, queue, _hold_key(key), hold_s, key, entry)
        self._of_endpoints = {name: each for name, each in self._of_endpoints.items() if each.key_prefix in filled}

    async def _check_backlog(self, queue: _Queue, due_count: int) -> None:
        if due_count < _SCAN_LIMIT:
            queue.is_full = False
        elif time.monotonic() - queue.counted_at > _COUNT_INTERVAL_S:
            queue.counted_at = time.monotonic()
            queue.is_full = len(await self.kv.scan(queue.key_prefix, limit=_MAX_QUEUED)) == _MAX_QUEUED
            if queue.is_full:
                _log.error("the webhook at %s gets no new events: %d wait", queue.webhook, _MAX_QUEUED)

    async def read_record(self, job: Job[_Queue]) -> WebhookDelivery | None:
        """Return a delivery unless its webhook gets enough already. One that is damaged is deleted."""
        if sum(claim.subject is job.subject for claim in self._jobs.claims) >= _MAX_DELIVERIES_PER_WEBHOOK:
            return None
        delivery = await super().read_record(job)
        if delivery is None and job.entry is not None:
            await self.kv.write([Delete(job.key, job.entry.version)])
        return delivery

    def find_record_life_s(self, job: Job[_Queue], record: WebhookDelivery) -> float:
        """Return the seconds until the delivery is too old."""
        return max(1.0, record.created_at + job.subject.webhook.max_age_s - time.time())

    async def run(self, claim: _Claim) -> None:
        delivery = claim.record
        with continued_trace(delivery.trace):
            attempt = await post_event(
                self._fetcher,
                claim.subject.webhook,
                delivery.id,
                delivery.body.encode(),
                resend_count=delivery.attempts - 1,
            )
        await self._record(claim, attempt)

    async def fail(self, claim: _Claim, lost_workers: int) -> None:
        if lost_workers:
            failure = f"{lost_workers} processes ended while they sent it."
        else:
            failure = f"{MAX_UNRETURNED} attempts to send it have failed."
        await self._finish(claim, AttemptRecord(time.time(), 0, error=failure), "failed")

    async def _record(self, claim: _Claim, attempt: AttemptRecord) -> None:
        """End the delivery after an attempt, or send it again later."""
        queue, delivery, code = claim.subject, claim.record, attempt.status_code
        # 410 Gone: the receiver wants no more attempts
        if code is not None and (200 <= code < 300 or code == _HTTP_GONE):
            return await self._finish(claim, attempt, "failed" if code == _HTTP_GONE else "delivered")
        failure = attempt.error or f"it answered {code}"
        max_delay_s = min(_MAX_RETRY_DELAY_S, queue.webhook.retry_s * 2 ** min(delivery.attempts - 1, 20))
        delay_s = max_delay_s * random.uniform(0.5, 1)  # noqa: S311 - spreads attempts, not a secret
        if delay_s >= self.find_record_life_s(claim.job, delivery):
            _log.error("the webhook at %s did not accept %s: %s", queue.webhook, delivery.id, failure)
            return await self._finish(claim, attempt, "failed")
        _log.info("the webhook at %s gets %s again in %.0f s: %s", queue.webhook, delivery.id, delay_s, failure)
        return await self._finish(claim, attempt, "pending", time.time() + delay_s)

    async def _finish(
        self, claim: _Claim, attempt: AttemptRecord, status: DeliveryStatus, due_s: float | None = None
    ) -> None:
        """Log the attempt and remove the delivery from its place in the queue, for one at `due_s` where that is set,
        unless another worker has claimed it since."""
        delivery, job = claim.record, claim.job
        ops: list[Op] = [Delete(job.key, claim.version)]
        ops += await self.log.attempt_ops((job.tenant, delivery.response_id, delivery.id), attempt, status, due_s)
        if due_s is not None:
            delivery.give_back(self._sign.name)
            life_s = self.find_record_life_s(job, delivery)
            ops.append(Put(_delivery_key(claim.subject, due_s, delivery), encode_record(delivery), life_s))
        await claim.lease.release(ops, even_if_lost=True)


def _delivery_key(queue: _Queue, due_s: float, delivery: WebhookDelivery) -> str:
    return f"{queue.key_prefix}{_format_milliseconds(due_s)}/{delivery.id}"


def _hold_key(delivery_key: str) -> str:
    return f"/webhook_hold/{delivery_key.rpartition('/')[2]}"


def _format_milliseconds(seconds: float) -> str:
    return f"{int(seconds * 1000):015d}"
