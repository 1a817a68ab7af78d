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
from apis.storage.lease import LeaseLost
from providers.responses.background.event_log import EventLog, LogWakeups, encode_event_line, event_key
from providers.responses.background.journal import Journal
from providers.responses.background.runs import ClaimedRun, ResponseRef, Runs, StoredRequest, run_key
from providers.responses.background.webhook_queue import WebhookQueue
from providers.responses.background.workers import BackgroundConfig, BackgroundWorkers
from providers.responses.events.ids import ResponseIds
from providers.responses.events.response_object import ResponseStatus, begin_response, end_response
from providers.responses.run.checkpoint import (
    Checkpoint,
    ResumePoint,
    checkpoint_key,
    collect_tool_results,
    find_resume_point,
    load_checkpoints,
    usage_from_log,
)
from providers.responses.run.pending_response import (
    PendingResponse,
    assign_sequence_numbers,
    in_progress_event,
    terminal_event,
)
from providers.responses.run.unfinished_log import ClosedLog, close_log
from providers.responses.store.conversation_lock import hand_over_lock, release_lock
from providers.responses.store.history import FinishedResponse, History, sdk_model_to_json
from providers.responses.store.history_cache import LoadedHistory

_log = logging.getLogger(__name__)

_INITIAL_EVENTS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_INITIAL_EVENT_COUNT: Final = len(_INITIAL_EVENTS)
_TIER_PRIORITIES: Final = {"ultrafast": 0, "fast": 1, "priority": 2, "flex": 9}
_DEFAULT_PRIORITY: Final = 5
_MAX_ATTEMPTS: Final = 3
_RETRY_INTERVAL_S: Final = 0.2
_WORKER_STOPPED_MESSAGE: Final = "The server that made this response stopped before it was done."
_NO_WORKER_MESSAGE: Final = (
    "No worker is free for this response now, and it cannot wait for one: it holds what is not for storing "
    "(an MCP server's URL, `authorization` or `headers`)."
)
_QUEUE_TIMEOUT_MESSAGE: Final = "No worker was free for this response in time (`responses.background.queue_timeout_s`)."


class PrepareResponse(Protocol):
    """Everything that can be refused before a response is made, or made further."""

    async def __call__(
        self, request: CreateResponse, tenant: str, ids: ResponseIds, *, resume_point: ResumePoint | None = None
    ) -> PendingResponse: ...


class BackgroundResponses:
    """All background responses of a store, as this process sees them."""

    def __init__(
        self,
        kv: KVStore,
        history: History,
        prepare: PrepareResponse,
        config: BackgroundConfig,
        retention_s: float,
        webhook_queue: WebhookQueue,
    ) -> None:
        self._kv = kv
        self._webhook_queue = webhook_queue
        self._history = history
        self._prepare = prepare
        self._config = config
        self._events_ttl_s = config.queue_timeout_s + config.timeout_s + config.event_retention_s
        self._wakeups = LogWakeups()
        self._event_log = EventLog(kv, self._wakeups, run_key)
        self._runs = Runs(
            kv,
            lease_s=config.lease_s,
            queue_timeout_s=config.queue_timeout_s,
            retention_s=retention_s,
            max_waiting=config.max_waiting,
        )
        self._local_responses: dict[ResponseRef, PendingResponse] = {}
        self._journals: dict[ResponseRef, Journal] = {}
        self._workers = BackgroundWorkers(self._runs, self._execute, config)

    def start(self) -> None:
        self._workers.start()

    async def drain(self) -> None:
        """Claim nothing more, let go of readers and of all that somebody else can go on with, at once or when it comes
        to its next step, and return when nothing is made here any more."""
        self._event_log.is_closing = self._workers.is_draining = True
        self._wakeups.wake_all()
        for ref, journal in self._journals.items():
            if journal.next_number <= _INITIAL_EVENT_COUNT or (
                journal.is_at_checkpoint and not journal.is_running_calls
            ):
                self._workers.stop_run(ref)
        await self._workers.drain()

    async def close(self) -> None:
        await self._workers.close()

    async def create(self, pending: PendingResponse) -> AsyncGenerator[Sequence[ResponseStreamEvent | LoggedEvent]]:
        """Put it into the queue, and tell so; with `stream`, tell all of it."""
        ref = ResponseRef(pending.tenant, pending.ids.response_id)
        request = pending.request
        stored = request.model_dump_json(by_alias=True, exclude_none=True).encode()
        portable = CreateResponse.model_validate_json(stored) == request
        given = pending.conversation.input_items_to_json(pending.ids)
        asked = StoredRequest(msgspec.Raw(stored), msgspec.Raw(given), pending.ids.item_id_count, pending.created_at)
        response = pending.build_initial_response("queued")
        queued = ResponseQueuedEvent(type="response.queued", response=response, sequence_number=0)
        first = [ResponseCreatedEvent(type="response.created", response=response, sequence_number=0), queued]
        assign_sequence_numbers(first, 0)
        told = self._event_batch_op(ref, 0, [encode_event_line(event) for event in first])
        rank = _TIER_PRIORITIES.get(request.service_tier or "", _DEFAULT_PRIORITY)
        async with self._workers.reserve_slot(ref.tenant) as room:
            if not (room or portable):
                raise RateLimited(_NO_WORKER_MESSAGE, retry_after_s=5)
            try:
                async with hand_over_lock(pending.lock) as floor:
                    claimed = await self._runs.add(
                        ref, rank, asked, [told, *floor], is_portable=portable, start_now=room
                    )
            except LeaseLost:
                assert pending.lock is not None  # ids are random: nothing else can fail to hold
                raise pending.lock.lost_error() from None
            if claimed is not None:
                self._local_responses[ref] = pending
                self._workers.start_run(claimed)
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
        return self._event_log.follow(response_id, starting_after, tenant=tenant)

    async def get(self, response_id: str, *, tenant: str) -> Response | None:
        """One that is not at its end."""
        found = await self._runs.get(ResponseRef(tenant, response_id))
        return None if found is None else _build_initial_response(response_id, found[1], found[0].status)

    async def load_input_items(self, response_id: str, *, tenant: str) -> list[dict[str, Any]] | None:
        """The input items of one that is not at its end."""
        found = await self._runs.get(ResponseRef(tenant, response_id))
        return None if found is None else orjson.loads(bytes(found[1].input_items))

    async def cancel(self, response_id: str, *, tenant: str) -> bool:
        """End one that is not at its end, whoever makes it: from then on, that worker can write nothing of it."""
        ref = ResponseRef(tenant, response_id)
        while (claimed := await self._runs.take_over(ref)) is not None:
            with suppress(LeaseLost):
                await self._end_from_log(claimed, "cancelled")
                self._workers.stop_run(ref)
                return True
        return False

    async def delete_log(self, response_id: str, *, tenant: str) -> None:
        """Its log goes."""
        await self._event_log.delete(response_id, tenant=tenant)

    # --- what a worker does ------------------------------------------------------------------------------------------

    async def _execute(self, claimed_run: ClaimedRun) -> None:
        """Bring a run to its end, or leave it: then somebody else can go on."""
        try:
            error = await self._attempt(claimed_run)
            if error is not None:
                await self._end_from_log(claimed_run, "failed", error)
        except LeaseLost:
            _log.info("response %s is another worker's now", claimed_run.ref.id)
        except (asyncio.CancelledError, StoreUnavailable):
            journal = self._journals.get(claimed_run.ref)
            with suppress(StackError):
                await claimed_run.lease.hand_back(
                    claimed_run.run, journal.remaining_ops() if journal and journal.is_at_checkpoint else ()
                )
            raise
        finally:
            self._local_responses.pop(claimed_run.ref, None)
            self._journals.pop(claimed_run.ref, None)

    async def _attempt(self, claimed_run: ClaimedRun) -> StackError | None:
        """Make it, with its end; the error for which it has none yet."""
        try:
            if claimed_run.is_late:
                return RateLimited(_QUEUE_TIMEOUT_MESSAGE)
            if claimed_run.run.attempts == 1:
                return await self._generate(claimed_run, 2)
            return await self._resume(claimed_run)
        except (LeaseLost, StoreUnavailable, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except StackError as exc:
            return exc
        except BaseException as exc:  # noqa: BLE001 - else it would be claimed and fail again and again
            return _bug_to_error(exc, claimed_run.ref.id)

    async def _resume(self, claimed_run: ClaimedRun) -> StackError | None:
        """Make it, or what is left of it to make."""
        ref, run = claimed_run.ref, claimed_run.run
        log = await self._event_log.read_all(ref.id, tenant=ref.tenant)
        steps = await load_checkpoints(self._kv, ref.tenant, ref.id)
        so_far = find_resume_point(log, steps)
        told = any(event.type not in _INITIAL_EVENTS for event in log)
        if (told and so_far is None) or not run.is_portable or run.attempts - run.handover_count > _MAX_ATTEMPTS:
            return StackError(_WORKER_STOPPED_MESSAGE)
        if so_far is not None and so_far.closing_events:
            await claimed_run.lease.write(
                [
                    self._event_batch_op(
                        ref,
                        so_far.next_sequence_number - len(so_far.closing_events),
                        _encode_event_lines(so_far.closing_events),
                    )
                ]
            )
            self._wakeups.wake(ref.id)
        return await self._generate(
            claimed_run, len(log) if so_far is None else so_far.next_sequence_number, so_far, len(steps)
        )

    async def _generate(
        self,
        claimed_run: ClaimedRun,
        next_number: int,
        resume_point: ResumePoint | None = None,
        checkpoint_count: int = 0,
    ) -> StackError | None:
        """Make it, with its end, from event `number` on. Raises the StackError for which it cannot even begin."""
        ref, asked = claimed_run.ref, claimed_run.stored_request
        making = self._local_responses.pop(ref, None)
        if making is None:
            ids = ResponseIds(
                ref.id,
                asked.item_id_count if resume_point is None else max(asked.item_id_count, resume_point.item_id_count),
            )
            prepared = await self._prepare(_parse_request(asked), ref.tenant, ids, resume_point=resume_point)
            making = replace(prepared, created_at=asked.created_at)
        journal = Journal(claimed_run.lease, next_number, self._events_ttl_s, self._wakeups, checkpoint_count)
        if claimed_run.run.is_portable:
            self._journals[ref] = journal
            making.agent_loop.on_checkpoint = partial(self._add_checkpoint, journal)
        writing = asyncio.create_task(journal.run())
        working = asyncio.create_task(self._write_events(making, journal))
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
        events = making.agent_loop.close_open_items() if error is not None else ()
        final = making.build_final_response() if error is None else making.build_failed_response(error)
        also = [
            *journal.final_ops([*events, terminal_event(final)]),
            *await making.build_conversation_ops(final, bytes(asked.input_items)),
        ]
        also += self._webhook_queue.delivery_ops(final, ref.tenant)
        finished = FinishedResponse(final, bytes(asked.input_items), making.agent_loop.tool_results, also)
        try:
            await self._store_final(claimed_run, finished, making.previous_history)
        except LeaseLost:
            if making.lock is None or await making.lock.is_held():
                raise
            return making.lock.lost_error()
        return None

    async def _write_events(self, pending: PendingResponse, journal: Journal) -> StackError | None:
        """All turns, into the journal; the error that stopped them."""
        limit_s = self._config.timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            if journal.next_number < _INITIAL_EVENT_COUNT:
                await journal.append([in_progress_event(pending.build_initial_response())])
            async with limit, aclosing(pending.agent_loop.run()) as batches:
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
            return _bug_to_error(exc, pending.ids.response_id)
        return None

    def _add_checkpoint(self, journal: Journal, checkpoint: Checkpoint) -> None:
        journal.add_checkpoint(checkpoint)
        if self._workers.is_draining and not checkpoint.running_indexes:
            raise asyncio.CancelledError  # the run is given back here

    async def _end_from_log(
        self, claimed_run: ClaimedRun, status: ResponseStatus, error: StackError | None = None
    ) -> None:
        """End a run of which only the log is left. Raises LeaseLost."""
        ref, asked = claimed_run.ref, claimed_run.stored_request
        failure = error_to_failure(error) if error else None
        begun = _build_initial_response(ref.id, asked, "in_progress")
        try:
            steps = await load_checkpoints(self._kv, ref.tenant, ref.id)
            log = await self._event_log.read_all(ref.id, tenant=ref.tenant)
            broken = close_log(log)
            final = _build_final_response(begun, status, broken.items, failure, usage_from_log(log, steps))
        except (ValueError, LookupError) as exc:  # damaged: then the end is told by the response alone
            _log.error("the log of response %s cannot be read", ref.id, exc_info=exc)
            steps, broken = [], ClosedLog((), (), 0)
            final = _build_final_response(begun, status, (), failure)
        lines = _encode_event_lines(broken.closing_events)
        if status == "failed" and broken.next_sequence_number:
            last = terminal_event(final)
            assign_sequence_numbers([last], broken.next_sequence_number)
            lines.append(encode_event_line(last))
        also: list[Op] = [*claimed_run.lease.end_ops(), *self._webhook_queue.delivery_ops(final, ref.tenant)]
        also += [Delete(checkpoint_key(ref.tenant, ref.id, number)) for number in range(len(steps))]
        if lines:
            also.append(self._event_batch_op(ref, broken.next_sequence_number - len(broken.closing_events), lines))
        if final.conversation is not None:
            await release_lock(self._kv, ref.tenant, final.conversation.id, ref.id)
        past = LoadedHistory()
        if final.previous_response_id is not None:
            with suppress(InvalidRequest):  # what came before is gone: it stands alone then
                past = await self._history.load_history(final.previous_response_id, tenant=ref.tenant)
        await self._store_final(
            claimed_run, FinishedResponse(final, bytes(asked.input_items), collect_tool_results(steps), also), past
        )

    async def _store_final(
        self, claimed_run: ClaimedRun, finished_response: FinishedResponse, history: LoadedHistory
    ) -> None:
        """How it ended, and its end, in one write. Raises LeaseLost. An outage is waited out while the lease lives."""
        deadline = time.monotonic() + self._config.lease_s
        while True:
            try:
                done = await self._history.save(finished_response, tenant=claimed_run.ref.tenant, history=history)
                break
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_INTERVAL_S)
        self._wakeups.wake(claimed_run.ref.id)
        if not done:
            raise LeaseLost
        self._webhook_queue.wake()

    def _event_batch_op(self, ref: ResponseRef, number: int, lines: Sequence[bytes]) -> Put:
        return Put(event_key(ref.tenant, ref.id, number), b"".join(lines), self._events_ttl_s)


def _bug_to_error(exc: BaseException, response_id: str) -> StackError:
    _log.error("response %s failed on a bug", response_id, exc_info=exc)
    return internal_error(response_id)


def _parse_request(stored_request: StoredRequest) -> CreateResponse:
    return CreateResponse.model_validate_json(bytes(stored_request.request))


def _build_initial_response(response_id: str, stored_request: StoredRequest, status: ResponseStatus) -> Response:
    return begin_response(_parse_request(stored_request), response_id, stored_request.created_at, status)


def _encode_event_lines(events: Sequence[dict[str, Any]]) -> list[bytes]:
    return [b"%b %b\n" % (event["type"].encode(), orjson.dumps(event)) for event in events]


def _build_final_response(
    response: Response,
    status: ResponseStatus,
    items: Sequence[dict[str, Any]],
    failure: ResponseError | None,
    usage: Usage | None = None,
) -> Response:
    """How a response ended of which only the items are known, and what it had used."""
    fields: dict[str, Any] = orjson.loads(
        sdk_model_to_json(end_response(response, status, (), usage or Usage(), error=failure))
    )
    return Response.model_validate({**fields, "output": items})
