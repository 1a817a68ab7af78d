"""OpenMailbox: the mailbox of a response that the task of its request or connection runs, in this process.

Only this process writes it until the response has ended. It is stored if the response will be; else it is in memory.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec

from apis.errors import SteeringRefused
from apis.events import ResponseStreamEvent
from apis.responses import CreateResponse, SteerResponse
from apis.steering import Steer
from apis.storage.kv_store import Delete, KVStore
from apis.storage.records import encode_record
from providers.responses.events.steer_events import accepted_event
from providers.responses.run.live_events import LiveEvents
from providers.responses.run.mailbox import Mailbox, check_input, check_steering, mailbox_key
from providers.responses.store.turn_writer import FinishedResponse

Follow = Callable[[FinishedResponse, Mailbox], Awaitable[FinishedResponse]]
"""Returns the end of a response with the response that follows it by itself, or with a mailbox that stays."""


async def keep_mailbox(finished: FinishedResponse, _: Mailbox) -> FinishedResponse:
    """Leave the mailbox to the next response that continues this one."""
    return msgspec.structs.replace(finished, has_mailbox=True)


class OpenMailbox:
    """The mailbox of one response, which takes input while it is entered as a context. `end_after_turn` lets the
    response end early, and `follow` decides what becomes of the input at its end. `events` is where the events of the
    response go, while it runs."""

    events: LiveEvents | None = None

    def __init__(
        self,
        mailboxes: "OpenMailboxes",
        request: CreateResponse,
        subject: tuple[str, str],
        end_after_turn: Callable[[], None],
        follow: Follow = keep_mailbox,
    ) -> None:
        """`subject` is the tenant and the id of the response, by which the `mailboxes` find it."""
        self.subject = subject
        self.mailbox: Mailbox | None = None
        self._mailboxes = mailboxes
        self._request = request
        self._end_after_turn = end_after_turn
        self._follow = follow
        self._is_written = self._is_closed = False
        self._writing = asyncio.Lock()

    def __enter__(self) -> Self:
        self._mailboxes.by_subject[self.subject] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._mailboxes.by_subject[self.subject]

    @property
    def is_stored(self) -> bool:
        return self._request.store is not False

    async def post(self, request: SteerResponse, *, is_announced: bool = False) -> Steer:
        """Add input, and return once it is stored. With `is_announced`, the events of the response say so. Raises
        SteeringRefused."""
        check_input(request)
        check_steering(self._request)
        async with self._writing:
            if self._is_closed:
                raise SteeringRefused(
                    f"The response '{request.previous_response_id}' is at its end: continue it with a request.",
                    param="previous_response_id",
                    code="response_not_active",
                )
            mailbox = Mailbox() if self.mailbox is None else msgspec.structs.replace(self.mailbox)
            steer = mailbox.add(request)
            if self.is_stored:
                self._is_written = True
                mailboxes, key = self._mailboxes, mailbox_key(*self.subject)
                await mailboxes.kv.put(key, encode_record(mailbox), ttl_s=mailboxes.life_s)
            self.mailbox = mailbox
            self._end_after_turn()
            if is_announced:
                self.write_event(accepted_event(steer))
        return steer

    def write_event(self, event: ResponseStreamEvent) -> None:
        """Put an event among those of the response."""
        assert self.events is not None  # a client knows the id of a response from its first event
        self.events.write([event])

    async def close(self) -> None:
        """Take no more input, once what is being stored is stored."""
        if self._writing.locked():
            async with self._writing:
                self._is_closed = True
        self._is_closed = True

    async def complete(self, finished: FinishedResponse) -> FinishedResponse:
        """Close the mailbox, and return the end of the response with what becomes of the input."""
        await self.close()
        if not self._is_written:
            return finished
        if self.mailbox is not None and finished.response.status in ("completed", "incomplete"):
            finished = await self._follow(finished, self.mailbox)
        if finished.has_mailbox:
            return finished
        return msgspec.structs.replace(finished, extra_ops=[*finished.extra_ops, self._delete_op()])

    async def drop(self) -> None:
        """Delete what no response will read."""
        await self.close()
        if self._is_written:
            await self._mailboxes.kv.write([self._delete_op()], durable=False)

    def _delete_op(self) -> Delete:
        return Delete(mailbox_key(*self.subject))


class OpenMailboxes:
    """The mailboxes of the responses that this process runs without a queue."""

    def __init__(self, kv: KVStore, life_s: float) -> None:
        """A mailbox whose process was killed is deleted after `life_s`."""
        self.kv = kv
        self.life_s = life_s
        self.by_subject: dict[tuple[str, str], OpenMailbox] = {}

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete the mailbox of a response that has ended."""
        await self.kv.write([Delete(mailbox_key(tenant, response_id))], durable=False)

    @property
    def are_open(self) -> bool:
        """True while a response runs here that can be steered."""
        return bool(self.by_subject)

    def find(self, tenant: str, response_id: str) -> OpenMailbox | None:
        """Return the mailbox of a response that runs here; None for any other."""
        return self.by_subject.get((tenant, response_id))
