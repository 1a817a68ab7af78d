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
from apis.fetcher import Fetcher, Outgoing
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from providers.responses.background.webhooks import EVENTS, Webhook, event_json, signed_headers

_log = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_AT_ONCE: Final = 16
_LANE_AT_ONCE: Final = 4
_LOOK_AT: Final = 64
_MAX_WAITING: Final = 10_000
"""Of one webhook: what ends while so many wait for it, it is not told."""
_COUNT_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 3600.0
_LEAVE_S: Final = 0.4
_HOLD_MORE_S: Final = 10.0
"""After a POST's own time-out, for what the store takes."""
_GONE: Final = 410


class Delivery(msgspec.Struct):
    """An event on its way to one webhook."""

    id: str
    body: str
    at: float
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Lane:
    hook: Webhook
    prefix: str
    running: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    full: bool = False
    counted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Claimed:
    lane: _Lane
    key: str
    version: int
    delivery: Delivery

    @property
    def end(self) -> list[Op]:
        """What takes it off its lane, if it is still there as it was claimed."""
        return [Delete(self.key, self.version), self.free]

    @property
    def free(self) -> Delete:
        return Delete(_hold_key(self.delivery.id))


_decode = msgspec.json.Decoder(Delivery).decode
_encode = msgspec.json.Encoder().encode


class Outbox:
    """All webhooks of a config, as this process serves them."""

    def __init__(self, kv: KVStore, hooks: Sequence[Webhook]) -> None:
        self._kv = kv
        self._lanes = [_Lane(hook, f"/webhook/{hook.lane}/") for hook in hooks]
        self._woken = asyncio.Event()

    def telling(self, response: Response, tenant: str) -> list[Op]:
        """What tells the tenant's webhooks how a response ended: to be written together with that end."""
        event, now = f"response.{response.status}", time.time()
        ops: list[Op] = []
        for lane in self._lanes:
            hook = lane.hook
            if event in EVENTS and event in hook.events and tenant == hook.tenant and not lane.full:
                body = event_json(event, response.id, int(now)).decode()
                delivery = Delivery(f"wh_{secrets.token_hex(16)}", body, now)
                ops.append(Put(_key(lane, now, delivery), _encode(delivery), hook.max_age_s))
        return ops

    def wake(self) -> None:
        """Something may have been written."""
        self._woken.set()

    async def run(self, fetcher: Fetcher) -> None:
        """Send what is due, until cancelled; what is being sent then is left to others. Without webhooks there is
        nothing to do."""
        try:
            while self._lanes:
                self._woken.clear()
                for lane in self._lanes:
                    try:
                        await self._advance(lane, fetcher)
                    except StackError as exc:
                        _log.warning("the webhook at %s waits: %s", lane.hook, exc.message)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._woken.wait()
        finally:
            tasks = [task for lane in self._lanes for task in lane.running]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_LEAVE_S)

    async def _advance(self, lane: _Lane, fetcher: Fetcher) -> None:
        """Begin to send what is due, as far as there is room."""
        running = sum(len(each.running) for each in self._lanes)
        room = min(_LANE_AT_ONCE - len(lane.running), _AT_ONCE - running)
        if room <= 0:
            return
        due = f"{lane.prefix}{_milliseconds(time.time())}~"
        rows = await self._kv.scan(lane.prefix, before=due, limit=_LOOK_AT)
        await self._count(lane, len(rows))
        held = await self._kv.get_many([_hold_key(_id(key)) for key, _ in rows]) if rows else ()
        for (key, entry), hold in zip(rows, held, strict=True):
            if hold is None and room > 0 and (claimed := await self._claim(lane, key, entry.value, entry.version)):
                room -= 1
                task = asyncio.create_task(self._send(claimed, fetcher))
                lane.running.add(task)
                task.add_done_callback(lane.running.discard)

    async def _count(self, lane: _Lane, due: int) -> None:
        if due < _LOOK_AT:
            lane.full = False
        elif time.monotonic() - lane.counted_at > _COUNT_S:
            lane.counted_at = time.monotonic()
            lane.full = len(await self._kv.scan(lane.prefix, limit=_MAX_WAITING)) == _MAX_WAITING
            if lane.full:
                _log.error("the webhook at %s is told of nothing more: %d events wait", lane.hook, _MAX_WAITING)

    async def _claim(self, lane: _Lane, key: str, value: bytes, version: int) -> _Claimed | None:
        try:
            delivery = _decode(value)
        except msgspec.MsgspecError:
            _log.error("the record %s cannot be read, and is forgotten", key)
            await self._kv.write([Delete(key, version)])
            return None
        delivery.attempts += 1
        hold = Put(_hold_key(delivery.id), b"", lane.hook.timeout_s + _HOLD_MORE_S, ABSENT)
        record = Put(key, _encode(delivery), _left_s(lane, delivery), version)
        versions = await self._kv.write([hold, record], durable=False)
        return None if versions is None else _Claimed(lane, key, versions[1], delivery)

    async def _send(self, claimed: _Claimed, fetcher: Fetcher) -> None:
        try:
            why = await _post(claimed, fetcher)
            if why is None:
                await self._kv.write(claimed.end, durable=False)
            else:
                await self._put_off(claimed, why)
        except StackError as exc:
            _log.warning("what the webhook at %s was told is told again: %s", claimed.lane.hook, exc.message)
        except asyncio.CancelledError:
            with suppress(StackError):
                await self._kv.write([claimed.free], durable=False)
            raise
        finally:
            self._woken.set()

    async def _put_off(self, claimed: _Claimed, why: str) -> None:
        lane, delivery = claimed.lane, claimed.delivery
        longest_s = min(_LONGEST_PAUSE_S, lane.hook.retry_s * 2 ** min(delivery.attempts - 1, 20))
        pause_s = longest_s * random.uniform(0.5, 1)  # noqa: S311 - to spread attempts, not to hide them
        left_s = _left_s(lane, delivery)
        if pause_s >= left_s:
            _log.error("the webhook at %s was not told of %s: %s", lane.hook, delivery.id, why)
            await self._kv.write(claimed.end)
            return
        _log.info("the webhook at %s is told of %s again in %.0f s: %s", lane.hook, delivery.id, pause_s, why)
        put = Put(_key(lane, time.time() + pause_s, delivery), _encode(delivery), left_s)
        await self._kv.write([*claimed.end, put])


async def _post(claimed: _Claimed, fetcher: Fetcher) -> str | None:
    """Why it was not taken, if so. Each attempt is signed anew: signatures grow old."""
    hook, delivery = claimed.lane.hook, claimed.delivery
    body = delivery.body.encode()
    outgoing = Outgoing(
        hook.url,
        "POST",
        signed_headers(hook.secret, delivery.id, int(time.time()), body),
        body,
        follow_redirects=False,
        timeout_s=hook.timeout_s,
        private=hook.private,
    )
    try:
        async with fetcher.open(outgoing) as incoming:
            status = incoming.status
    except FetchFailed as exc:
        return exc.message
    # who is gone for good says so, and wants no more of it
    return None if 200 <= status < 300 or status == _GONE else f"it answered {status}"


def _key(lane: _Lane, due_s: float, delivery: Delivery) -> str:
    return f"{lane.prefix}{_milliseconds(due_s)}/{delivery.id}"


def _hold_key(delivery_id: str) -> str:
    return f"/webhook_hold/{delivery_id}"


def _id(key: str) -> str:
    return key.rpartition("/")[2]


def _milliseconds(seconds: float) -> str:
    return f"{int(seconds * 1000):015d}"


def _left_s(lane: _Lane, delivery: Delivery) -> float:
    """How much longer it is worth telling."""
    return max(1.0, delivery.at + lane.hook.max_age_s - time.time())
