"""Webhook queue: the events that webhooks have not received yet, in a KVStore, and their delivery by any worker.

    /webhook/QUEUE/TIME/ID    the event ID, to be sent to the webhook of that queue from TIME on (ms since the epoch);
                              QUEUE is a hash for a webhook of the run config, TENANT~ID for an endpoint
    /webhook_hold/ID          held by the worker that sends the event; gone when the worker has not finished in time

A delivery is stored in the same write as the final response that it reports. It is sent at least once, always under
the same id, and deleted when it was accepted or is too old. Each webhook has a queue of its own and each tenant a share
of the deliveries, so that slow or dead webhooks delay no other tenant's. Clocks that differ between machines move the
time of the next attempt, and nothing else.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
from openai.types.responses import Response

from apis.documents.fetcher import Fetcher
from apis.errors import StackError, StorageCorrupt
from apis.fair_share import ONE_TENANT, FairShare, Place, Tenants
from apis.storage.kv_store import Delete, Entry, KVStore, Op, Put
from apis.storage.lease import Lease, LeaseLost
from apis.storage.records import decode_record, delete_all, encode_record, scan_groups
from apis.telemetry import continued_trace, current_span
from apis.ticks import wait_for_tick
from apis.webhook_endpoints import WEBHOOK_EVENTS
from providers.common.state.scan import report_damaged
from providers.common.state.worker_signs import WorkerSign
from providers.responses.background.webhook_endpoints import (
    DEFAULT_OPTIONS,
    EndpointQueue,
    StoredWebhookEndpoints,
    WebhookEndpointOptions,
)
from providers.responses.background.webhook_log import AttemptRecord, DeliveryRecord, WebhookLog
from providers.responses.background.webhook_sending import post_event
from providers.responses.background.webhooks import Webhook, build_event_json, webhook_queue_prefix

_log = logging.getLogger(__name__)

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
_MAX_LOST_WORKERS: Final = 3
"""Workers that one delivery may cost until it fails."""
_HTTP_GONE: Final = 410


class WebhookDelivery(msgspec.Struct):
    """An event that is to be sent to one webhook. `trace` holds the trace headers of the response that ended; `worker`
    is the process that sends it now, and `lost_workers` are those that left it without an end."""

    id: str
    body: str
    created_at: float
    response_id: str
    attempts: int = 0
    trace: dict[str, str] = {}
    worker: str = ""
    lost_workers: list[str] = []


@dataclass(slots=True, eq=False)
class _Queue:
    webhook: Webhook
    key_prefix: str
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    is_full: bool = False
    counted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _ClaimedDelivery:
    queue: _Queue
    key: str
    version: int
    delivery: WebhookDelivery
    hold: Lease

    async def finish(self, *ops: Op) -> None:
        """Remove the delivery from its queue and apply `ops`, unless another worker has claimed it since."""
        await self.hold.release([Delete(self.key, self.version), *ops], even_if_lost=True)

    async def release(self) -> None:
        """Leave the delivery to another worker: this one ends, and not by sending it. Raises LeaseLost."""
        self.delivery.worker = ""
        put = Put(self.key, encode_record(self.delivery), _remaining_s(self.queue, self.delivery), self.version)
        await self.hold.release([put])


class WebhookQueue:
    """The queues of the webhooks of the run config and of all endpoints, and the deliveries of this process."""

    def __init__(
        self,
        kv: KVStore,
        webhooks: Sequence[Webhook],
        fetcher: Fetcher,
        sign: WorkerSign,
        tenants: Tenants = ONE_TENANT,
        endpoint_options: WebhookEndpointOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._kv = kv
        self._fetcher = fetcher
        self._sign = sign
        self.log = WebhookLog(kv)
        self._places = FairShare("deliveries", _MAX_DELIVERIES, several_tenants=tenants.are_several)
        self.endpoints = StoredWebhookEndpoints(kv, fetcher, self._places, endpoint_options)
        self._configured = {hook.queue_name: _Queue(hook, webhook_queue_prefix(hook.queue_name)) for hook in webhooks}
        self._of_endpoints: dict[str, _Queue] = {}
        self._wakeup = asyncio.Event()

    async def delivery_ops(self, response: Response, tenant: str) -> list[Op]:
        """Return the operations that queue the event for the tenant's webhooks: to be written with the final
        response."""
        return await self.event_ops(f"response.{response.status}", response.id, tenant)

    async def event_ops(self, event: str, object_id: str, tenant: str) -> list[Op]:
        """Return the operations that queue an event for the tenant's webhooks: to be written with what it reports.
        Raises StoreUnavailable."""
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
                body = build_event_json(event, object_id, int(now)).decode()
                delivery_id = f"wh_{secrets.token_hex(16)}"
                delivery = WebhookDelivery(delivery_id, body, now, response_id=object_id, trace=trace)
                record = DeliveryRecord(delivery.id, event, str(hook), now, now + hook.max_age_s, next_attempt_at=now)
                ops.append(self.log.begin_op(tenant, object_id, record))
                ops.append(Put(_delivery_key(queue, now, delivery), encode_record(delivery), hook.max_age_s))
        return ops

    def wake(self) -> None:
        """Look for due deliveries now."""
        self._wakeup.set()

    async def run(self) -> None:
        """Send due deliveries until cancelled; unfinished ones are then released to other workers."""
        try:
            while True:
                self._wakeup.clear()
                await self._start_all_due()
                await wait_for_tick(self._wakeup, _POLL_S)
        except asyncio.CancelledError:
            tasks = [task for queue in self._all_queues() for task in queue.tasks]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
            raise

    async def _start_all_due(self) -> None:
        try:
            waiting = await self._load_waiting()
        except StackError as exc:
            _log.warning("all webhooks wait: %s", exc.message)
            return
        for queue, rows in sorted(waiting, key=lambda each: self._places.used_by(each[0].webhook.tenant)):
            try:
                await self._start_deliveries(queue, rows)
            except StackError as exc:
                _log.warning("the webhook at %s waits: %s", queue.webhook, exc.message)

    def _all_queues(self) -> list[_Queue]:
        return [*self._configured.values(), *self._of_endpoints.values()]

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
            report_damaged(self._kv, name, "EndpointRecord", exc)
            return None
        if endpoint is not None:
            return self._open_queue(endpoint)
        if "~" in name:  # the endpoint was deleted while an event was added
            await delete_all(self._kv, webhook_queue_prefix(name))
        return None

    async def _load_waiting(self) -> list[tuple[_Queue, list[tuple[str, Entry]]]]:
        """Return the due deliveries of each queue, up to _SCAN_LIMIT: one read where nothing waits, and one more for
        each queue that holds anything."""
        waiting: list[tuple[_Queue, list[tuple[str, Entry]]]] = []
        due = f"{_format_milliseconds(time.time())}~"
        async for name, rows in scan_groups(self._kv, webhook_queue_prefix(""), limit=_SCAN_LIMIT):
            queue = self._configured.get(name)
            if queue is None:
                queue = await self._find_endpoint_queue(name)
                if queue is None:
                    continue
            waiting.append((queue, [row for row in rows if row[0] < queue.key_prefix + due]))
        names = {queue.key_prefix for queue, _ in waiting}
        self._of_endpoints = {
            name: queue for name, queue in self._of_endpoints.items() if queue.tasks or queue.key_prefix in names
        }
        return waiting

    async def _start_deliveries(self, queue: _Queue, rows: Sequence[tuple[str, Entry]]) -> None:
        """Start due deliveries, up to the limits."""
        if self._places.used >= _MAX_DELIVERIES:
            return
        await self._check_backlog(queue, len(rows))
        holds = await self._kv.get_many([_hold_key(_delivery_id(key)) for key, _ in rows]) if rows else ()
        for (key, entry), hold in zip(rows, holds, strict=True):
            if hold is not None:
                continue
            is_full = len(queue.tasks) >= _MAX_DELIVERIES_PER_WEBHOOK
            place = None if is_full else self._places.try_acquire(queue.webhook.tenant)
            if place is None:
                return
            with ExitStack() as places:
                places.enter_context(place)
                claimed = await self._claim(queue, key, entry)
                if claimed is not None:
                    self._start_delivery(claimed, place)
                    places.pop_all()

    def _start_delivery(self, claim: _ClaimedDelivery, place: Place) -> None:
        task = asyncio.create_task(self._send(claim))
        claim.queue.tasks.add(task)
        task.add_done_callback(claim.queue.tasks.discard)
        task.add_done_callback(lambda _: place.release())

    async def _check_backlog(self, queue: _Queue, due_count: int) -> None:
        if due_count < _SCAN_LIMIT:
            queue.is_full = False
        elif time.monotonic() - queue.counted_at > _COUNT_INTERVAL_S:
            queue.counted_at = time.monotonic()
            queue.is_full = len(await self._kv.scan(queue.key_prefix, limit=_MAX_QUEUED)) == _MAX_QUEUED
            if queue.is_full:
                _log.error("the webhook at %s gets no new events: %d wait", queue.webhook, _MAX_QUEUED)

    async def _claim(self, queue: _Queue, key: str, entry: Entry) -> _ClaimedDelivery | None:
        try:
            delivery = decode_record(entry, WebhookDelivery)
        except StackError:
            _log.error("the record %s cannot be read, and is deleted", key)
            await self._kv.write([Delete(key, entry.version)])
            return None
        if delivery.worker not in ("", self._sign.name):
            delivery.lost_workers.append(delivery.worker)
        delivery.worker = self._sign.name
        delivery.attempts += 1
        hold = Lease(self._kv, _hold_key(delivery.id), queue.webhook.timeout_s + _HOLD_MARGIN_S)
        record = Put(key, encode_record(delivery), _remaining_s(queue, delivery), entry.version)
        versions = await hold.acquire([record])
        if versions is None:
            return None
        return _ClaimedDelivery(queue, key, versions[0], delivery, hold)

    async def _has_lost_too_many(self, claim: _ClaimedDelivery) -> bool:
        """Return True if the delivery has cost so many workers that it fails; those that live are found out first."""
        lost = claim.delivery.lost_workers
        if len(lost) < _MAX_LOST_WORKERS:
            return False
        async with claim.hold.renew_in_background():
            claim.delivery.lost_workers = await self._sign.list_ended(lost)
        await claim.hold.write()  # as long a life as after the claim
        return len(claim.delivery.lost_workers) >= _MAX_LOST_WORKERS

    async def _give_up(self, claim: _ClaimedDelivery) -> None:
        """End a delivery that has cost too many workers, without another attempt."""
        delivery = claim.delivery
        failure = f"{_MAX_LOST_WORKERS} processes ended while they sent it."
        _log.error("the webhook at %s does not get %s: %s", claim.queue.webhook, delivery.id, failure)
        place = (claim.queue.webhook.tenant, delivery.response_id, delivery.id)
        attempt = AttemptRecord(time.time(), 0, error=failure)
        await claim.finish(*await self.log.attempt_ops(place, attempt, "failed"))

    async def _send(self, claim: _ClaimedDelivery) -> None:
        try:
            if await self._has_lost_too_many(claim):
                await self._give_up(claim)
                return
            with continued_trace(claim.delivery.trace):
                delivery = claim.delivery
                attempt = await post_event(
                    *(self._fetcher, claim.queue.webhook, delivery.id, delivery.body.encode()),
                    resend_count=delivery.attempts - 1,
                )
            await self._record(claim, attempt)
        except StackError as exc:
            _log.warning("an event for the webhook at %s will be sent again: %s", claim.queue.webhook, exc.message)
        except LeaseLost:
            _log.info("another worker sends %s to the webhook at %s", claim.delivery.id, claim.queue.webhook)
        except asyncio.CancelledError:
            with suppress(StackError, LeaseLost):
                await claim.release()
            raise
        finally:
            self._wakeup.set()

    async def _record(self, claim: _ClaimedDelivery, attempt: AttemptRecord) -> None:
        """End the delivery after an attempt, or send it again later."""
        queue, delivery, code = claim.queue, claim.delivery, attempt.status_code
        place = (queue.webhook.tenant, delivery.response_id, delivery.id)
        # 410 Gone: the receiver wants no more attempts
        if code is not None and (200 <= code < 300 or code == _HTTP_GONE):
            status = "failed" if code == _HTTP_GONE else "delivered"
            await claim.finish(*await self.log.attempt_ops(place, attempt, status))
            return
        failure = attempt.error or f"it answered {code}"
        max_delay_s = min(_MAX_RETRY_DELAY_S, queue.webhook.retry_s * 2 ** min(delivery.attempts - 1, 20))
        delay_s = max_delay_s * random.uniform(0.5, 1)  # noqa: S311 - spreads attempts, not a secret
        remaining_s = _remaining_s(queue, delivery)
        if delay_s >= remaining_s:
            _log.error("the webhook at %s did not accept %s: %s", queue.webhook, delivery.id, failure)
            await claim.finish(*await self.log.attempt_ops(place, attempt, "failed"))
            return
        _log.info("the webhook at %s gets %s again in %.0f s: %s", queue.webhook, delivery.id, delay_s, failure)
        due_s = time.time() + delay_s
        delivery.worker = ""
        put = Put(_delivery_key(queue, due_s, delivery), encode_record(delivery), remaining_s)
        await claim.finish(put, *await self.log.attempt_ops(place, attempt, "pending", due_s))


def _delivery_key(queue: _Queue, due_s: float, delivery: WebhookDelivery) -> str:
    return f"{queue.key_prefix}{_format_milliseconds(due_s)}/{delivery.id}"


def _hold_key(delivery_id: str) -> str:
    return f"/webhook_hold/{delivery_id}"


def _delivery_id(key: str) -> str:
    return key.rpartition("/")[2]


def _format_milliseconds(seconds: float) -> str:
    return f"{int(seconds * 1000):015d}"


def _remaining_s(queue: _Queue, delivery: WebhookDelivery) -> float:
    """Return the seconds until the delivery is too old."""
    return max(1.0, delivery.created_at + queue.webhook.max_age_s - time.time())
