"""Webhook log: what became of each delivery, in a KVStore, for the tenant that the webhook belongs to.

    TENANT/webhook_delivery/RESPONSE/ID    the delivery and its latest attempts

A record is written with the change that it describes: with the final response, and with the end of each attempt by the
worker that holds the delivery. It is deleted with the response.
"""

import time
from typing import Final, Literal

import msgspec

from apis.observation.details import DeliveryAttempt, DeliverySummary
from apis.storage.keys import id_to_key_part
from apis.storage.kv_store import KVStore, Op, Put
from apis.storage.records import delete_all, encode_record
from providers.common.state.scan import decode_or_skip, list_records

DeliveryStatus = Literal["pending", "delivered", "failed"]

_MAX_ATTEMPTS: Final = 20
"""Attempts of a delivery that are stored; older ones are counted only."""
_MAX_ERROR_CHARS: Final = 300
_MAX_LISTED: Final = 1000
_TTL_S: Final = 30 * 86_400.0
_EXPIRY_MARGIN_S: Final = 2.0
"""Seconds after its last moment for which a delivery still counts as pending: an attempt may be under way."""


class AttemptRecord(msgspec.Struct):
    """One POST of an event, as `DeliveryAttempt` describes it."""

    created_at: float
    duration_ms: int
    status_code: int | None = None
    error: str | None = None


class DeliveryRecord(msgspec.Struct):
    """A delivery, as `DeliverySummary` describes it. After `expires_at` it is too old to be sent, and gone
    from its queue, which nothing but this record shows."""

    id: str
    event: str
    host: str
    created_at: float
    expires_at: float
    status: DeliveryStatus = "pending"
    next_attempt_at: float | None = None
    attempt_count: int = 0
    attempts: list[AttemptRecord] = []


class WebhookLog:
    """The deliveries of all responses of a store."""

    def __init__(self, kv: KVStore) -> None:
        self._kv = kv

    def begin_op(self, tenant: str, response_id: str, record: DeliveryRecord) -> Op:
        """Return the operation that adds a delivery."""
        return Put(_key(tenant, response_id, record.id), encode_record(record), _TTL_S)

    async def attempt_ops(
        self,
        place: tuple[str, str, str],
        attempt: AttemptRecord,
        status: DeliveryStatus,
        next_attempt_at: float | None = None,
    ) -> list[Op]:
        """Return the operations that add an attempt to the delivery at `place`: its tenant, response and id. There are
        none where the delivery is not in the log, because its response was deleted, or cannot be read there: it would
        be sent again and again. Only the holder of the delivery may write them."""
        key = _key(*place)
        entry = await self._kv.get(key)
        record = None if entry is None else decode_or_skip(self._kv, key, entry, DeliveryRecord)
        if record is None:
            return []
        if attempt.error is not None:
            attempt.error = attempt.error[:_MAX_ERROR_CHARS]
        record.attempts = [*record.attempts, attempt][-_MAX_ATTEMPTS:]
        record.attempt_count += 1
        record.status, record.next_attempt_at = status, next_attempt_at
        return [Put(key, encode_record(record), _TTL_S)]

    async def list_deliveries(self, response_id: str, *, tenant: str) -> list[DeliverySummary]:
        """Return the readable deliveries of a response, oldest first."""
        rows = await list_records(self._kv, _key(tenant, response_id, ""), DeliveryRecord, limit=_MAX_LISTED)
        return [_summarize(record) for record in sorted((row.record for row in rows), key=lambda row: row.created_at)]

    async def delete(self, response_id: str, *, tenant: str) -> None:
        """Delete the deliveries of a response from the log; those that wait are still sent."""
        await delete_all(self._kv, _key(tenant, response_id, ""))


def _summarize(record: DeliveryRecord) -> DeliverySummary:
    is_expired = record.status == "pending" and time.time() > record.expires_at + _EXPIRY_MARGIN_S
    return DeliverySummary(
        record.id,
        "webhook_delivery",
        record.event,
        record.host,
        "failed" if is_expired else record.status,
        record.created_at,
        None if is_expired else record.next_attempt_at,
        record.attempt_count,
        [DeliveryAttempt(each.created_at, each.duration_ms, each.status_code, each.error) for each in record.attempts],
    )


def _key(tenant: str, response_id: str, delivery_id: str) -> str:
    return f"{tenant}/webhook_delivery/{id_to_key_part(response_id)}/{delivery_id}"
