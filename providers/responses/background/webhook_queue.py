"""Outbox: what webhooks are still to be told, in a KVStore, and the delivery of it by whichever worker comes first.

    /webhook/LANE/TIME/ID     the event ID, to be sent to the webhook of that lane from TIME on (ms since the epoch)
    /webhook_hold/ID          that a worker is sending it; gone when the worker has not come to an end in time

A record is written together with the end that it tells of, so neither is there without the other. It is sent at least
once, always under the same id, and goes when it was taken or is too old. Each webhook has a lane of its own: one that
is slow or dead keeps nobody else waiting. A hold lives by the clock of the store; clocks that differ between machines
move the next attempt, and nothing else.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
from openai.types.responses import Response

from apis.errors import FetchFailed, StackError
from apis.fetcher import Fetcher, FetchRequest
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from providers.responses.background.webhooks import WEBHOOK_EVENTS, Webhook, build_event_json, build_signed_headers

_log = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_MAX_DELIVERIES: Final = 16
_MAX_DELIVERIES_PER_WEBHOOK: Final = 4
_SCAN_LIMIT: Final = 64
_MAX_QUEUED: Final = 10_000
"""Of one webhook: what ends while so many wait for it, it is not told."""
_COUNT_INTERVAL_S: Final = 5.0
_MAX_RETRY_DELAY_S: Final = 3600.0
_CLOSE_TIMEOUT_S: Final = 0.4
_HOLD_MARGIN_S: Final = 10.0
"""After a POST's own time-out, for what the store takes."""
_HTTP_GONE: Final = 410


class WebhookDelivery(msgspec.Struct, rename={"created_at": "at"}):
    """An event on its way to one webhook."""

    id: str
    body: str
    created_at: float
    attempts: int = 0


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

    @property
    def delete_ops(self) -> list[Op]:
        """What takes it off its lane, if it is still there as it was claimed."""
        return [Delete(self.key, self.version), self.release_op]

    @property
    def release_op(self) -> Delete:
        return Delete(_hold_key(self.delivery.id))


_decode = msgspec.json.Decoder(WebhookDelivery).decode
_encode = msgspec.json.Encoder().encode


class WebhookQueue:
    """All webhooks of a config, as this process serves them."""

    def __init__(self, kv: KVStore, webhooks: Sequence[Webhook]) -> None:
        self._kv = kv
        self._queues = [_Queue(hook, f"/webhook/{hook.queue_name}/") for hook in webhooks]
        self._wakeup = asyncio.Event()

    def delivery_ops(self, response: Response, tenant: str) -> list[Op]:
        """What tells the tenant's webhooks how a response ended: to be written together with that end."""
        event, now = f"response.{response.status}", time.time()
        ops: list[Op] = []
        for lane in self._queues:
            hook = lane.webhook
            if event in WEBHOOK_EVENTS and event in hook.events and tenant == hook.tenant and not lane.is_full:
                body = build_event_json(event, response.id, int(now)).decode()
                delivery = WebhookDelivery(f"wh_{secrets.token_hex(16)}", body, now)
                ops.append(Put(_delivery_key(lane, now, delivery), _encode(delivery), hook.max_age_s))
        return ops

    def wake(self) -> None:
        """Something may have been written."""
        self._wakeup.set()

    async def run(self, fetcher: Fetcher) -> None:
        """Send what is due, until cancelled; what is being sent then is left to others. Without webhooks there is
        nothing to do."""
        try:
            while self._queues:
                self._wakeup.clear()
                for lane in self._queues:
                    try:
                        await self._start_deliveries(lane, fetcher)
                    except StackError as exc:
                        _log.warning("the webhook at %s waits: %s", lane.webhook, exc.message)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._wakeup.wait()
        finally:
            tasks = [task for lane in self._queues for task in lane.tasks]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)

    async def _start_deliveries(self, queue: _Queue, fetcher: Fetcher) -> None:
        """Begin to send what is due, as far as there is room."""
        running = sum(len(each.tasks) for each in self._queues)
        room = min(_MAX_DELIVERIES_PER_WEBHOOK - len(queue.tasks), _MAX_DELIVERIES - running)
        if room <= 0:
            return
        due = f"{queue.key_prefix}{_format_milliseconds(time.time())}~"
        rows = await self._kv.scan(queue.key_prefix, before=due, limit=_SCAN_LIMIT)
        await self._check_backlog(queue, len(rows))
        held = await self._kv.get_many([_hold_key(_delivery_id(key)) for key, _ in rows]) if rows else ()
        for (key, entry), hold in zip(rows, held, strict=True):
            if hold is None and room > 0 and (claimed := await self._claim(queue, key, entry.value, entry.version)):
                room -= 1
                task = asyncio.create_task(self._send(claimed, fetcher))
                queue.tasks.add(task)
                task.add_done_callback(queue.tasks.discard)

    async def _check_backlog(self, queue: _Queue, due_count: int) -> None:
        if due_count < _SCAN_LIMIT:
            queue.is_full = False
        elif time.monotonic() - queue.counted_at > _COUNT_INTERVAL_S:
            queue.counted_at = time.monotonic()
            queue.is_full = len(await self._kv.scan(queue.key_prefix, limit=_MAX_QUEUED)) == _MAX_QUEUED
            if queue.is_full:
                _log.error("the webhook at %s is told of nothing more: %d events wait", queue.webhook, _MAX_QUEUED)

    async def _claim(self, queue: _Queue, key: str, value: bytes, version: int) -> _ClaimedDelivery | None:
        try:
            delivery = _decode(value)
        except msgspec.MsgspecError:
            _log.error("the record %s cannot be read, and is forgotten", key)
            await self._kv.write([Delete(key, version)])
            return None
        delivery.attempts += 1
        hold = Put(_hold_key(delivery.id), b"", queue.webhook.timeout_s + _HOLD_MARGIN_S, ABSENT)
        record = Put(key, _encode(delivery), _remaining_s(queue, delivery), version)
        versions = await self._kv.write([hold, record], durable=False)
        return None if versions is None else _ClaimedDelivery(queue, key, versions[1], delivery)

    async def _send(self, claim: _ClaimedDelivery, fetcher: Fetcher) -> None:
        try:
            why = await _post(claim, fetcher)
            if why is None:
                await self._kv.write(claim.delete_ops, durable=False)
            else:
                await self._reschedule(claim, why)
        except StackError as exc:
            _log.warning("what the webhook at %s was told is told again: %s", claim.queue.webhook, exc.message)
        except asyncio.CancelledError:
            with suppress(StackError):
                await self._kv.write([claim.release_op], durable=False)
            raise
        finally:
            self._wakeup.set()

    async def _reschedule(self, claim: _ClaimedDelivery, reason: str) -> None:
        lane, delivery = claim.queue, claim.delivery
        longest_s = min(_MAX_RETRY_DELAY_S, lane.webhook.retry_s * 2 ** min(delivery.attempts - 1, 20))
        pause_s = longest_s * random.uniform(0.5, 1)  # noqa: S311 - to spread attempts, not to hide them
        left_s = _remaining_s(lane, delivery)
        if pause_s >= left_s:
            _log.error("the webhook at %s was not told of %s: %s", lane.webhook, delivery.id, reason)
            await self._kv.write(claim.delete_ops)
            return
        _log.info("the webhook at %s is told of %s again in %.0f s: %s", lane.webhook, delivery.id, pause_s, reason)
        put = Put(_delivery_key(lane, time.time() + pause_s, delivery), _encode(delivery), left_s)
        await self._kv.write([*claim.delete_ops, put])


async def _post(claim: _ClaimedDelivery, fetcher: Fetcher) -> str | None:
    """Why it was not taken, if so. Each attempt is signed anew: signatures grow old."""
    hook, delivery = claim.queue.webhook, claim.delivery
    body = delivery.body.encode()
    outgoing = FetchRequest(
        hook.url,
        "POST",
        build_signed_headers(hook.secret, delivery.id, int(time.time()), body),
        body,
        follow_redirects=False,
        timeout_s=hook.timeout_s,
        allow_private=hook.private,
    )
    try:
        async with fetcher.open(outgoing) as incoming:
            status = incoming.status
    except FetchFailed as exc:
        return exc.message
    # who is gone for good says so, and wants no more of it
    return None if 200 <= status < 300 or status == _HTTP_GONE else f"it answered {status}"


def _delivery_key(queue: _Queue, due_s: float, delivery: WebhookDelivery) -> str:
    return f"{queue.key_prefix}{_format_milliseconds(due_s)}/{delivery.id}"


def _hold_key(delivery_id: str) -> str:
    return f"/webhook_hold/{delivery_id}"


def _delivery_id(key: str) -> str:
    return key.rpartition("/")[2]


def _format_milliseconds(seconds: float) -> str:
    return f"{int(seconds * 1000):015d}"


def _remaining_s(queue: _Queue, delivery: WebhookDelivery) -> float:
    """How much longer it is worth telling."""
    return max(1.0, delivery.created_at + queue.webhook.max_age_s - time.time())
