"""Offers: input for responses that other processes run in the tasks of their requests.

    /steer_offer/TENANT/RESPONSE/ID    the input, until a process has taken it; then the answer

No record says which process runs such a response. So the input is offered to all, which look for offers when they look
for waiting runs, and the one that runs the response answers.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

import msgspec

from apis.errors import StackError, SteeringRefused
from apis.responses import SteerResponse
from apis.steering import Steer
from apis.storage.kv_store import Delete, KVStore, Put
from apis.storage.records import decode_record, encode_record
from providers.common.state.scan import StoredRecord, scan_records
from providers.responses.run.open_mailbox import OpenMailbox, OpenMailboxes

_PREFIX: Final = "/steer_offer/"
_LIFE_S: Final = 10.0
"""Seconds after which an offer is void that its process does not take back."""
_POLL_S: Final = 0.05
_TAKING_S: Final = 1.5
"""Seconds that other processes have to take an offer, besides twice the interval at which they look."""


class Answer(msgspec.Struct, frozen=True):
    """The ids of input that was accepted, or the error with which it was refused."""

    steer_id: str = ""
    successor_id: str = ""
    code: str = ""
    message: str = ""


class Offer(msgspec.Struct):
    """Input for a response, as JSON. One that `is_taken` is answered soon."""

    request: msgspec.Raw
    is_taken: bool = False
    answer: Answer | None = None


class Offers:
    """The offers of a store, of which this process takes those for `mailboxes`. `has_others` returns true if other
    processes share the store; each looks every `poll_s`."""

    def __init__(
        self, kv: KVStore, mailboxes: OpenMailboxes, has_others: Callable[[], Awaitable[bool]], poll_s: float
    ) -> None:
        self._kv = kv
        self._mailboxes = mailboxes
        self._has_others = has_others
        self._patience_s = 2 * poll_s + _TAKING_S

    async def send(self, request: SteerResponse, *, tenant: str) -> Steer | None:
        """Offer input to the other processes; None if none of them runs the response. Raises SteeringRefused."""
        if not await self._has_others():
            return None
        key = f"{_PREFIX}{tenant}/{request.previous_response_id}/{secrets.token_hex(8)}"
        offer = Offer(msgspec.Raw(request.model_dump_json(by_alias=True, exclude_none=True).encode()))
        await self._kv.put(key, encode_record(offer), ttl_s=_LIFE_S, durable=False)
        deadline = monotonic() + self._patience_s
        while (entry := await self._kv.get(key)) is not None:
            offer = decode_record(entry, Offer)
            if offer.answer is not None:
                await self._kv.write([Delete(key)], durable=False)
                return _read_answer(offer.answer, request)
            is_late = not offer.is_taken and monotonic() > deadline
            if is_late and await self._kv.write([Delete(key, entry.version)], durable=False) is not None:
                return None
            await asyncio.sleep(_POLL_S)
        return None

    async def take_all(self) -> None:
        """Take the offers for responses that this process runs."""
        if not self._mailboxes.are_open:
            return
        async for stored in scan_records(self._kv, _PREFIX, Offer):
            tenant, _, response_id = stored.key.removeprefix(_PREFIX).rpartition("/")[0].rpartition("/")
            mailbox = self._mailboxes.find(tenant, response_id)
            if mailbox is not None and not stored.record.is_taken:
                await self._take(stored, mailbox)

    async def _take(self, stored: StoredRecord[Offer], mailbox: OpenMailbox) -> None:
        """Claim an offer, so that its process waits for the answer, and answer it."""
        offer = msgspec.structs.replace(stored.record, is_taken=True)
        if await self._kv.write([Put(stored.key, encode_record(offer), _LIFE_S, stored.version)]) is None:
            return
        try:
            steer = await mailbox.post(SteerResponse.model_validate_json(bytes(offer.request)))
            offer.answer = Answer(steer.id, steer.successor_id)
        except StackError as exc:
            offer.answer = Answer(code=exc.code or exc.failure_code, message=exc.message)
        await self._kv.put(stored.key, encode_record(offer), ttl_s=_LIFE_S, durable=False)


def _read_answer(answer: Answer, request: SteerResponse) -> Steer:
    if answer.code:
        raise SteeringRefused(answer.message, code=answer.code)
    return Steer(answer.steer_id, request.previous_response_id, answer.successor_id)
