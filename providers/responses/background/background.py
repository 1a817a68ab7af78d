"""BackgroundResponses: responses that run without their request's connection, on whichever worker has their lease.

Creates, follows, reads and cancels them; `workers.py` claims their runs and `execution.py` executes them.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, suppress
from operator import itemgetter
from typing import Any, Final

import msgspec
import orjson
from openai.types.responses import Response, ResponseCreatedEvent, ResponseQueuedEvent

from apis.documents.fetcher import Fetcher
from apis.errors import RateLimited
from apis.events import EventQueue, LoggedEvent, ResponseEventBatch
from apis.observation.details import DeliverySummary
from apis.responses import CreateResponse, ResponseListParams
from apis.storage.kv_store import KVStore
from apis.storage.lease import LeaseLost
from apis.storage.records import reading_stored
from providers.responses.background.deployment import BackgroundDeployment
from providers.responses.background.event_log import EventLog, LogWakeups, encode_event_line
from providers.responses.background.execution import RunExecutor
from providers.responses.background.runs import ResponseRef, Runs, StoredRequest
from providers.responses.background.stored_run import build_stored_response
from providers.responses.background.webhook_queue import WebhookQueue
from providers.responses.background.workers import BackgroundWorkers, WorkerRegistry
from providers.responses.run.pending_response import PendingResponse, PrepareResponse
from providers.responses.run.response_stream import assign_sequence_numbers
from providers.responses.store.conversation_lock import hand_over_lock
from providers.responses.store.history import History
from providers.responses.store.response_record import summarize_response

_TIER_PRIORITIES: Final = {"ultrafast": 0, "fast": 1, "priority": 2, "flex": 9}
_DEFAULT_PRIORITY: Final = 5
_NO_WORKER_MESSAGE: Final = (
    "No worker is free for this response now, and it cannot wait for one: it holds what is not for storing "
    "(an MCP server's URL, `authorization` or `headers`)."
)

_MAX_LISTED_RUNS: Final = 1000


class BackgroundResponses:
    """All background responses of a store, as this process sees them, and the webhooks that are called at their
    ends."""

    def __init__(
        self,
        kv: KVStore,
        history: History,
        prepare: PrepareResponse,
        fetcher: Fetcher,
        options: BackgroundDeployment,
    ) -> None:
        config, tenants = options.config, options.tenants
        self._webhook_queue = WebhookQueue(kv, options.webhooks, fetcher, tenants)
        self._webhook_delivery: asyncio.Task[None] | None = None
        self._wakeups = LogWakeups()
        self._event_log = EventLog(kv, self._wakeups, ttl_s=config.event_ttl_s)
        self.registry = WorkerRegistry(kv, config.lease_s, config.max_running)
        self._runs = Runs(
            kv,
            lease_s=config.lease_s,
            queue_timeout_s=config.queue_timeout_s,
            retention_s=history.retention_s,
            max_waiting=config.max_waiting,
            worker=self.registry.worker_id,
        )
        self._executor = RunExecutor(kv, history, prepare, config, self._event_log, self._webhook_queue)
        self._workers = BackgroundWorkers(self._runs, self._executor.execute, config, tenants, self.registry)

    @property
    def event_queue(self) -> EventQueue:
        """The webhooks of this process, for events of other APIs."""
        return self._webhook_queue

    def start(self) -> None:
        self._workers.start()
        self._webhook_delivery = asyncio.create_task(self._webhook_queue.run())

    async def drain(self) -> None:
        """Claim no more runs, end the streams of readers, release each run as soon as another worker can resume it,
        and return when no run is left in this process."""
        self._event_log.is_closing = self._workers.is_draining = self._executor.is_draining = True
        self._wakeups.wake_all()
        for ref in self._executor.list_resumable():
            self._workers.stop_run(ref)
        await self._workers.drain()

    async def close(self) -> None:
        self._executor.is_draining = True
        await self._workers.close()
        if self._webhook_delivery is not None:
            self._webhook_delivery.cancel()
            await asyncio.wait({self._webhook_delivery})

    async def create(self, pending: PendingResponse) -> AsyncGenerator[ResponseEventBatch]:
        """Queue a response or start it; yield the queued event, or with `stream` all events."""
        ref = ResponseRef(pending.tenant, pending.ids.response_id)
        request = pending.request
        request_json = request.model_dump_json(by_alias=True, exclude_none=True).encode()
        is_portable = CreateResponse.model_validate_json(request_json) == request
        stored_request = StoredRequest(
            msgspec.Raw(request_json),
            msgspec.Raw(pending.conversation.input_items_to_json(pending.ids)),
            pending.ids.item_id_count,
            pending.created_at,
            charge=None if pending.charge is None else pending.charge.record,
        )
        charge_ops = pending.charge.adopt_ops(ref.run_key) if pending.charge is not None else ()
        response = pending.build_initial_response("queued")
        queued = ResponseQueuedEvent(type="response.queued", response=response, sequence_number=0)
        first_events = [ResponseCreatedEvent(type="response.created", response=response, sequence_number=0), queued]
        assign_sequence_numbers(first_events, 0)
        log_op = self._event_log.batch_op(ref.tenant, ref.id, 0, [encode_event_line(event) for event in first_events])
        priority = _TIER_PRIORITIES.get(request.service_tier or "", _DEFAULT_PRIORITY)
        place = await self._workers.try_reserve_place(ref.tenant)
        with ExitStack() as held:
            if place is not None:
                held.enter_context(place)
            elif not is_portable:
                raise RateLimited(_NO_WORKER_MESSAGE, retry_after_s=5)
            try:
                async with hand_over_lock(pending.lock) as lock_ops:
                    claimed_run = await self._runs.add(
                        *(ref, priority, stored_request, [log_op, *lock_ops, *charge_ops]),
                        is_portable=is_portable,
                        start_now=place is not None,
                    )
            except LeaseLost:
                assert pending.lock is not None  # ids are random: only the lock's write can fail
                raise await pending.lock.lost_error() from None
            if pending.charge is not None:
                pending.charge.confirm_adoption()
            if claimed_run is not None:
                self._executor.add_local(ref, pending)
                self._workers.start_run(claimed_run, place)
                held.pop_all()
        if claimed_run is None:
            self._workers.wake()
        if not request.stream:
            yield [queued]
            return
        async with aclosing(self.follow(ref.id, -1, tenant=ref.tenant)) as batches:
            async for events in batches:
                yield events

    def follow(self, response_id: str, starting_after: int, *, tenant: str) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield the events after that sequence number, then those to come."""
        return self._event_log.follow(response_id, starting_after, tenant=tenant)

    async def get(self, response_id: str, *, tenant: str) -> Response | None:
        """Return a response that has not ended, without output; None for any other."""
        stored_run = await self._runs.get(ResponseRef(tenant, response_id))
        if stored_run is None:
            return None
        run, stored_request = stored_run
        return build_stored_response(response_id, stored_request, run.status)

    async def list_running(self, params: ResponseListParams, *, tenant: str) -> list[dict[str, Any]]:
        """Return the responses that have not ended, at most 1,000, newest first, without their items."""
        responses: list[dict[str, Any]] = []
        for ref in await self._runs.list_of_tenant(tenant, limit=_MAX_LISTED_RUNS):
            response = await self.get(ref.id, tenant=tenant)
            if response is not None:
                fields = response.model_dump(mode="json", exclude={"output"})
                if params.accepts(fields):
                    responses.append(summarize_response(fields, ""))
        return sorted(responses, key=itemgetter("created_at"), reverse=params.order == "desc")

    async def load_input_items(self, response_id: str, *, tenant: str) -> list[dict[str, Any]] | None:
        """Return the input items of a response that has not ended; None for any other."""
        stored_run = await self._runs.get(ResponseRef(tenant, response_id))
        if stored_run is None:
            return None
        with reading_stored(response_id):
            return orjson.loads(bytes(stored_run[1].input_items))

    async def cancel(self, response_id: str, *, tenant: str) -> bool:
        """End a response that has not ended, and return whether it was so; its worker can write nothing any more."""
        ref = ResponseRef(tenant, response_id)
        while (claimed_run := await self._runs.take_over(ref)) is not None:
            with suppress(LeaseLost):
                await self._executor.end_from_log(claimed_run, "cancelled")
                self._workers.stop_run(ref)
                return True
        return False

    async def list_webhook_deliveries(self, response_id: str, *, tenant: str) -> Sequence[DeliverySummary]:
        """Return the deliveries of a response's end to webhooks, oldest first."""
        return await self._webhook_queue.log.list_deliveries(response_id, tenant=tenant)

    async def delete_log(self, response_id: str, *, tenant: str) -> None:
        """Delete the events of a response, and the log of its webhook deliveries."""
        await self._event_log.delete(response_id, tenant=tenant)
        await self._webhook_queue.log.delete(response_id, tenant=tenant)
