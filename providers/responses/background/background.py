"""Background: responses that go on when nobody listens, made by whichever worker has their lease.

What a worker makes goes into the log of the response, and nowhere else: clients read the log, here or elsewhere. How
a response ends, and the end of its log and of its lease, are one write: nobody can see one without the others.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import orjson
from openai.types.responses import (
    Response,
    ResponseCreatedEvent,
    ResponseError,
    ResponseQueuedEvent,
    ResponseStreamEvent,
)

from apis.deltas import Usage
from apis.errors import (
    InvalidRequest,
    RateLimited,
    StackError,
    StoreUnavailable,
    UpstreamTimeout,
    error_to_failure,
    internal_error,
)
from apis.events import LoggedEvent
from apis.responses import CreateResponse
from apis.storage.kv_store import Delete, KVStore, Op, Put
from providers.responses.background.event_log import EventLog, Wakers, event_key, write_line
from providers.responses.background.journal import Journal
from providers.responses.background.runs import Asked, Claimed, LeaseLost, Ref, Runs, run_key
from providers.responses.background.webhook_queue import Outbox
from providers.responses.background.workers import BackgroundConfig, Workers
from providers.responses.events.ids import Ids
from providers.responses.events.response_object import Status, begin_response, end_response
from providers.responses.run.checkpoint import SoFar, Step, go_on_from, read_steps, step_key, told_by, used_by
from providers.responses.run.pending_response import Making, in_progress, number_on, terminal
from providers.responses.run.unfinished_log import Broken, close_log
from providers.responses.store.conversation_lock import handing_over, release_floor
from providers.responses.store.history import Finished, History, to_json
from providers.responses.store.history_cache import Past

_log = logging.getLogger(__name__)

_BEGINNING: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_BEGUN: Final = len(_BEGINNING)
_RANKS: Final = {"ultrafast": 0, "fast": 1, "priority": 2, "flex": 9}
_USUAL_RANK: Final = 5
_MAX_ATTEMPTS: Final = 3
_RETRY_S: Final = 0.2
_STOPPED: Final = "The server that made this response stopped before it was done."
_NO_ROOM: Final = (
    "No worker is free for this response now, and it cannot wait for one: it holds what is not for storing "
    "(an MCP server's URL, `authorization` or `headers`)."
)
_WAITED: Final = "No worker was free for this response in time (`responses.background.queue_timeout_s`)."


class Prepare(Protocol):
    """Everything that can be refused before a response is made, or made further."""

    async def __call__(
        self, request: CreateResponse, tenant: str, ids: Ids, *, so_far: SoFar | None = None
    ) -> Making: ...


class Background:
    """All background responses of a store, as this process sees them."""

    def __init__(
        self,
        kv: KVStore,
        history: History,
        prepare: Prepare,
        config: BackgroundConfig,
        retention_s: float,
        outbox: Outbox,
    ) -> None:
        self._kv = kv
        self._outbox = outbox
        self._history = history
        self._prepare = prepare
        self._config = config
        self._events_ttl_s = config.queue_timeout_s + config.timeout_s + config.event_retention_s
        self._wakers = Wakers()
        self._events = EventLog(kv, self._wakers, run_key)
        self._runs = Runs(
            kv,
            lease_s=config.lease_s,
            queue_timeout_s=config.queue_timeout_s,
            retention_s=retention_s,
            max_waiting=config.max_waiting,
        )
        self._here: dict[Ref, Making] = {}
        self._journals: dict[Ref, Journal] = {}
        self._workers = Workers(self._runs, self._play, config)

    def start(self) -> None:
        self._workers.start()

    async def drain(self) -> None:
        """Claim nothing more, let go of readers and of all that somebody else can go on with, at once or when it comes
        to its next step, and return when nothing is made here any more."""
        self._events.closing = self._workers.draining = True
        self._wakers.wake_all()
        for ref, journal in self._journals.items():
            if journal.number <= _BEGUN or (journal.at_step and not journal.calls_run):
                self._workers.stop(ref)
        await self._workers.drain()

    async def close(self) -> None:
        await self._workers.close()

    async def create(self, making: Making) -> AsyncGenerator[Sequence[ResponseStreamEvent | LoggedEvent]]:
        """Put it into the queue, and tell so; with `stream`, tell all of it."""
        ref = Ref(making.tenant, making.ids.response)
        request = making.request
        stored = request.model_dump_json(by_alias=True, exclude_none=True).encode()
        portable = CreateResponse.model_validate_json(stored) == request
        given = making.conversation.given_json(making.ids)
        asked = Asked(msgspec.Raw(stored), msgspec.Raw(given), making.ids.minted, making.created_at)
        response = making.begin("queued")
        queued = ResponseQueuedEvent(type="response.queued", response=response, sequence_number=0)
        first = [ResponseCreatedEvent(type="response.created", response=response, sequence_number=0), queued]
        number_on(first, 0)
        told = self._put(ref, 0, [write_line(event) for event in first])
        rank = _RANKS.get(request.service_tier or "", _USUAL_RANK)
        async with self._workers.room(ref.tenant) as room:
            if not (room or portable):
                raise RateLimited(_NO_ROOM, retry_after_s=5)
            try:
                async with handing_over(making.floor) as floor:
                    claimed = await self._runs.add(ref, rank, asked, [told, *floor], portable=portable, at_once=room)
            except LeaseLost:
                assert making.floor is not None  # ids are random: nothing else can fail to hold
                raise making.floor.lost() from None
            if claimed is not None:
                self._here[ref] = making
                self._workers.begin(claimed)
        if claimed is None:
            self._workers.wake()
        if not request.stream:
            yield [queued]
            return
        async with aclosing(self.follow(ref.id, -1, tenant=ref.tenant)) as batches:
            async for events in batches:
                yield events

    def follow(self, response_id: str, starting_after: int, *, tenant: str) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """The events after that number, live or later."""
        return self._events.follow(response_id, starting_after, tenant=tenant)

    async def get(self, response_id: str, *, tenant: str) -> Response | None:
        """One that is not at its end."""
        found = await self._runs.get(Ref(tenant, response_id))
        return None if found is None else _begun(response_id, found[1], found[0].status)

    async def given(self, response_id: str, *, tenant: str) -> list[dict[str, Any]] | None:
        """The input items of one that is not at its end."""
        found = await self._runs.get(Ref(tenant, response_id))
        return None if found is None else orjson.loads(bytes(found[1].given))

    async def cancel(self, response_id: str, *, tenant: str) -> bool:
        """End one that is not at its end, whoever makes it: from then on, that worker can write nothing of it."""
        ref = Ref(tenant, response_id)
        while (claimed := await self._runs.wrest(ref)) is not None:
            with suppress(LeaseLost):
                await self._end_from_log(claimed, "cancelled")
                self._workers.stop(ref)
                return True
        return False

    async def forget(self, response_id: str, *, tenant: str) -> None:
        """Its log goes."""
        await self._events.forget(response_id, tenant=tenant)

    # --- what a worker does ------------------------------------------------------------------------------------------

    async def _play(self, claimed: Claimed) -> None:
        """Bring a run to its end, or leave it: then somebody else can go on."""
        try:
            error = await self._attempt(claimed)
            if error is not None:
                await self._end_from_log(claimed, "failed", error)
        except LeaseLost:
            _log.info("response %s is another worker's now", claimed.ref.id)
        except (asyncio.CancelledError, StoreUnavailable):
            journal = self._journals.get(claimed.ref)
            with suppress(StackError):
                await claimed.lease.give_back(claimed.run, journal.rest() if journal and journal.at_step else ())
            raise
        finally:
            self._here.pop(claimed.ref, None)
            self._journals.pop(claimed.ref, None)

    async def _attempt(self, claimed: Claimed) -> StackError | None:
        """Make it, with its end; the error for which it has none yet."""
        try:
            if claimed.late:
                return RateLimited(_WAITED)
            if claimed.run.attempts == 1:
                return await self._make(claimed, 2)
            return await self._go_on(claimed)
        except (LeaseLost, StoreUnavailable, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except StackError as exc:
            return exc
        except BaseException as exc:  # noqa: BLE001 - else it would be claimed and fail again and again
            return _bug(exc, claimed.ref.id)

    async def _go_on(self, claimed: Claimed) -> StackError | None:
        """Make it, or what is left of it to make."""
        ref, run = claimed.ref, claimed.run
        log = await self._events.whole(ref.id, tenant=ref.tenant)
        steps = await read_steps(self._kv, ref.tenant, ref.id)
        so_far = go_on_from(log, steps)
        told = any(event.type not in _BEGINNING for event in log)
        if (told and so_far is None) or not run.portable or run.attempts - run.handed > _MAX_ATTEMPTS:
            return StackError(_STOPPED)
        if so_far is not None and so_far.closing:
            await claimed.lease.write([self._put(ref, so_far.number - len(so_far.closing), _lines(so_far.closing))])
            self._wakers.wake(ref.id)
        return await self._make(claimed, len(log) if so_far is None else so_far.number, so_far, len(steps))

    async def _make(
        self, claimed: Claimed, number: int, so_far: SoFar | None = None, steps: int = 0
    ) -> StackError | None:
        """Make it, with its end, from event `number` on. Raises the StackError for which it cannot even begin."""
        ref, asked = claimed.ref, claimed.asked
        making = self._here.pop(ref, None)
        if making is None:
            ids = Ids(ref.id, asked.ids if so_far is None else max(asked.ids, so_far.minted))
            prepared = await self._prepare(_request(asked), ref.tenant, ids, so_far=so_far)
            making = replace(prepared, created_at=asked.created_at)
        journal = Journal(claimed.lease, number, self._events_ttl_s, self._wakers, steps)
        if claimed.run.portable:
            self._journals[ref] = journal
            making.turns.on_step = partial(self._note, journal)
        writing = asyncio.create_task(journal.run())
        working = asyncio.create_task(self._work(making, journal))
        try:
            await asyncio.wait({writing, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                writing.result()
            error = await working
        finally:
            journal.stop()
            working.cancel()
            await asyncio.wait({writing, working})
        writing.result()
        events = making.turns.break_off() if error is not None else ()
        final = making.ended() if error is None else making.failed(error)
        also = [*journal.last([*events, terminal(final)]), *await making.adds(final, bytes(asked.given))]
        also += self._outbox.telling(final, ref.tenant)
        finished = Finished(final, bytes(asked.given), making.turns.told, also)
        try:
            await self._keep(claimed, finished, making.past)
        except LeaseLost:
            if making.floor is None or await making.floor.holds():
                raise
            return making.floor.lost()
        return None

    async def _work(self, making: Making, journal: Journal) -> StackError | None:
        """All turns, into the journal; the error that stopped them."""
        limit_s = self._config.timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            if journal.number < _BEGUN:
                await journal.append([in_progress(making.begin())])
            async with limit, aclosing(making.turns.run()) as batches:
                async for events in batches:
                    await journal.append(events)
        except StackError as exc:
            return exc
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # noqa: BLE001 - the stream's outer edge; a native panic is no Exception
            if isinstance(exc, TimeoutError) and limit.expired():
                return UpstreamTimeout(
                    f"The response took longer than {limit_s:g} s (`responses.background.timeout_s`)."
                )
            return _bug(exc, making.ids.response)
        return None

    def _note(self, journal: Journal, step: Step) -> None:
        journal.note(step)
        if self._workers.draining and not step.running:
            raise asyncio.CancelledError  # the run is given back here

    async def _end_from_log(self, claimed: Claimed, status: Status, error: StackError | None = None) -> None:
        """End a run of which only the log is left. Raises LeaseLost."""
        ref, asked = claimed.ref, claimed.asked
        failure = error_to_failure(error) if error else None
        begun = _begun(ref.id, asked, "in_progress")
        try:
            steps = await read_steps(self._kv, ref.tenant, ref.id)
            log = await self._events.whole(ref.id, tenant=ref.tenant)
            broken = close_log(log)
            final = _ended(begun, status, broken.items, failure, used_by(log, steps))
        except (ValueError, LookupError) as exc:  # damaged: then the end is told by the response alone
            _log.error("the log of response %s cannot be read", ref.id, exc_info=exc)
            steps, broken = [], Broken((), (), 0)
            final = _ended(begun, status, (), failure)
        lines = _lines(broken.closing)
        if status == "failed" and broken.number:
            last = terminal(final)
            number_on([last], broken.number)
            lines.append(write_line(last))
        also: list[Op] = [*claimed.lease.end_ops(), *self._outbox.telling(final, ref.tenant)]
        also += [Delete(step_key(ref.tenant, ref.id, number)) for number in range(len(steps))]
        if lines:
            also.append(self._put(ref, broken.number - len(broken.closing), lines))
        if final.conversation is not None:
            await release_floor(self._kv, ref.tenant, final.conversation.id, ref.id)
        past = Past()
        if final.previous_response_id is not None:
            with suppress(InvalidRequest):  # what came before is gone: it stands alone then
                past = await self._history.past(final.previous_response_id, tenant=ref.tenant)
        await self._keep(claimed, Finished(final, bytes(asked.given), told_by(steps), also), past)

    async def _keep(self, claimed: Claimed, kept: Finished, past: Past) -> None:
        """How it ended, and its end, in one write. Raises LeaseLost. An outage is waited out while the lease lives."""
        deadline = time.monotonic() + self._config.lease_s
        while True:
            try:
                done = await self._history.save(kept, tenant=claimed.ref.tenant, past=past)
                break
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)
        self._wakers.wake(claimed.ref.id)
        if not done:
            raise LeaseLost
        self._outbox.wake()

    def _put(self, ref: Ref, number: int, lines: Sequence[bytes]) -> Put:
        return Put(event_key(ref.tenant, ref.id, number), b"".join(lines), self._events_ttl_s)


def _bug(exc: BaseException, response_id: str) -> StackError:
    _log.error("response %s failed on a bug", response_id, exc_info=exc)
    return internal_error(response_id)


def _request(asked: Asked) -> CreateResponse:
    return CreateResponse.model_validate_json(bytes(asked.request))


def _begun(response_id: str, asked: Asked, status: Status) -> Response:
    return begin_response(_request(asked), response_id, asked.created_at, status)


def _lines(events: Sequence[dict[str, Any]]) -> list[bytes]:
    return [b"%b %b\n" % (event["type"].encode(), orjson.dumps(event)) for event in events]


def _ended(
    begun: Response,
    status: Status,
    items: Sequence[dict[str, Any]],
    failure: ResponseError | None,
    usage: Usage | None = None,
) -> Response:
    """How a response ended of which only the items are known, and what it had used."""
    fields: dict[str, Any] = orjson.loads(to_json(end_response(begun, status, (), usage or Usage(), error=failure)))
    return Response.model_validate({**fields, "output": items})
