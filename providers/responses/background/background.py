"""BackgroundResponses: responses that run without their request's connection, on whichever worker has their lease.

Creates, follows, reads and cancels them; `workers.py` claims their runs and `execution.py` executes them.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, nullcontext, suppress
from operator import itemgetter
from typing import Any, Final

import msgspec
from openai.types.responses import Response

from apis.accounts.accounts import Accounts
from apis.errors import InvalidRequest, RateLimited, StackError, StorageCorrupt
from apis.events import LoggedEvent, ResponseEventBatch
from apis.fair_share import Tenants
from apis.responses import ResponseListParams, SpareCapacity, Steer, SteerResponse
from apis.storage.kv_store import KVStore
from apis.storage.lease import LeaseLost
from apis.webhooks import Webhooks
from providers.common.state.event_logs import LogWakeups
from providers.common.state.scan import skipping_damaged
from providers.common.state.worker_signs import WorkerSign
from providers.responses.background.event_log import EventLog, NewLog
from providers.responses.background.execution import RunExecutor
from providers.responses.background.new_run import NewRun, build_new_run
from providers.responses.background.owners import RunOwners
from providers.responses.background.runs import ClaimedRun, ResponseRef, Runs
from providers.responses.background.steering import Steering
from providers.responses.background.stored_run import build_stored_response
from providers.responses.background.workers import (
    BackgroundConfig,
    BackgroundMetrics,
    BackgroundWorkers,
    WorkerRegistry,
)
from providers.responses.prepare import ResponsePreparer
from providers.responses.run.pending_response import PendingResponse
from providers.responses.store.history import History
from providers.responses.store.response_record import summarize_response

_NO_WORKER_MESSAGE: Final = (
    "No worker is free for this response now, and it cannot wait for one: it holds what is not for storing "
    "(an MCP server's URL, `authorization` or `headers`, or `domain_secrets` of a container)."
)
_NO_WINDOW_MESSAGE: Final = (
    "A response with a completion window is stored until it begins, and this one holds what is not for storing (an MCP "
    "server's URL, `authorization` or `headers`, or `domain_secrets` of a container)."
)

_MAX_LISTED_RUNS: Final = 1000
_REMOVAL_WAIT_S: Final = 0.2
"""Seconds in which processes that end together remove their reports."""


class BackgroundResponses:
    """All background responses of a store, as this process sees them. `webhooks` are called at their ends."""

    def __init__(
        self,
        kv: KVStore,
        history: History,
        preparer: ResponsePreparer,
        webhooks: Webhooks,
        config: BackgroundConfig,
        accounts: Accounts,
        tenants: Tenants,
    ) -> None:
        self._kv = kv
        self._history = history
        self._wakeups = LogWakeups()
        self.event_log = EventLog(kv, self._wakeups, ttl_s=config.event_ttl_s)
        self.registry = WorkerRegistry(kv, config.lease_s, config.max_running)
        self._sign = WorkerSign(kv, config.lease_s, name=self.registry.worker_id)
        self._webhooks = webhooks
        self._runs = Runs(
            kv,
            config.queue_limits,
            lease_s=config.lease_s,
            retention_s=history.retention_s,
            sign=self._sign,
        )
        self.steering = Steering(
            kv,
            history,
            self._runs,
            self.event_log,
            wake=self.wake,
            has_others=self.registry.has_others,
            poll_s=config.poll_s,
        )
        owners = RunOwners(accounts, preparer.inference, history.retention_s)
        self._executor = RunExecutor(kv, history, preparer, config, self.event_log, webhooks, owners, self.steering)
        self._workers = BackgroundWorkers(self._runs, self._executor.execute, config, tenants, self.registry)
        self._workers.on_look = self.steering.offers.take_all

    def start(self) -> None:
        self._sign.start()
        self._workers.start()

    def wake(self) -> None:
        """Look for waiting responses now."""
        self._workers.wake()

    def execute_deferred_with(self, capacity: SpareCapacity) -> None:
        """Execute responses with a completion window in this process, as `capacity` admits them."""
        self._executor.engine_priority = capacity.engine_priority
        self._workers.start_deferred(capacity)

    async def drain(self, *, at_once: bool = False) -> None:
        """Claim no more runs, end the streams of readers, release each run as soon as another worker can resume it,
        and return when no run is left in this process. With `at_once`, runs do not go on where there is no other
        worker: each waits for the next one, or fails if that could not resume it."""
        self.event_log.is_closing = self._executor.is_draining = True
        self._workers.begin_drain()
        self._wakeups.wake_all()
        await self._workers.stop_runs(self._executor.list_resumable())
        if at_once and await self._is_alone():
            await self._workers.stop_all()
        await self._workers.drain()

    async def _is_alone(self) -> bool:
        """Return True if no other process executes background responses. Those that end together with this one have
        removed their reports by then."""
        await self.registry.remove()
        await asyncio.sleep(_REMOVAL_WAIT_S)
        try:
            return not await self.registry.list_workers()
        except StackError:
            return False

    async def close(self) -> None:
        self._executor.is_draining = True
        await self._workers.close()
        await self._sign.close()

    async def create(self, pending: PendingResponse) -> AsyncGenerator[ResponseEventBatch]:
        """Queue a response or start it; yield the queued event, or with `stream` all events."""
        run, request = await build_new_run(pending, self.event_log), pending.request
        ref, window_s = run.ref, run.rank.window_s
        place = None if window_s else await self._workers.try_reserve_place(ref.tenant)
        with ExitStack() as claim_stack:
            if place is not None:
                claim_stack.enter_context(place)
            elif not run.is_portable and window_s:
                raise InvalidRequest(_NO_WINDOW_MESSAGE, param="background_options.completion_window")
            elif not run.is_portable:
                raise RateLimited(_NO_WORKER_MESSAGE, retry_after_s=5)
            claimed_run = await self._add(run, pending, start_now=place is not None)
            if pending.charge is not None:
                pending.charge.confirm_adoption()
            if claimed_run is not None:
                self._executor.add_local(ref, pending, NewLog(run.queued_event.response, [run.log_op.value]))
                self._workers.start_run(claimed_run, place)
                claim_stack.pop_all()
        if claimed_run is None:
            self._workers.wake()
        if not request.stream:
            yield [run.queued_event]
            return
        async with aclosing(self.follow(ref.id, -1, tenant=ref.tenant)) as batches:
            async for events in batches:
                yield events

    def find_begun(self, response_id: str, *, tenant: str) -> Response | None:
        """Return a response that began in this process and has no output yet, as it was then."""
        new_log = self._executor.find_new_log(ResponseRef(tenant, response_id))
        return None if new_log is None else new_log.response

    def follow(self, response_id: str, starting_after: int, *, tenant: str) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield the events of a response as `EventLog.follow` does, without a read of the store where this process
        writes them from the first one on."""
        new_log = self._executor.find_new_log(ResponseRef(tenant, response_id)) if starting_after < 0 else None
        if new_log is not None:
            return self.event_log.follow_new(new_log, response_id, tenant=tenant)
        return self.event_log.follow(response_id, starting_after, tenant=tenant)

    async def _add(self, run: NewRun, pending: PendingResponse, *, start_now: bool) -> ClaimedRun | None:
        """Store the run, with the branch that keeps the turn before it; None if it waits for a worker."""
        ref, history = run.ref, pending.previous_history
        reader_ops = [] if start_now or not pending.request.stream else [self.event_log.reader_op(ref.tenant, ref.id)]
        while True:
            branch_ops = await self._history.branch_ops(
                history, ref.id, self._runs.retention_s + run.rank.window_s, tenant=ref.tenant
            )
            try:
                async with nullcontext(()) if pending.lock is None else pending.lock.hand_over() as lock_ops:
                    return await self._runs.add(
                        ref,
                        run.rank,
                        run.stored_request,
                        [run.log_op, *reader_ops, *lock_ops, *branch_ops, *run.charge_ops, *pending.mailbox_ops],
                        is_portable=run.is_portable,
                        start_now=start_now,
                    )
            except LeaseLost:
                if pending.lock is not None:
                    raise await pending.lock.lost_error() from None
                assert branch_ops  # ids are random: only the conditions of the lock, or of the chain, can fail

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
            response = None
            with skipping_damaged(self._kv, ref.run_key, "RunRecord, or its request"):
                response = await self.get(ref.id, tenant=tenant)
            if response is not None:
                fields = response.model_dump(mode="json", exclude={"output"})
                if params.accepts(fields):
                    responses.append(summarize_response(fields))
        return sorted(responses, key=itemgetter("created_at"), reverse=params.order == "desc")

    async def load_input_items(self, response_id: str, *, tenant: str) -> msgspec.Raw | None:
        """Return the input items of a response that has not ended, as a JSON array; None for any other."""
        stored_run = await self._runs.get(ResponseRef(tenant, response_id))
        return None if stored_run is None else stored_run[1].input_items

    async def cancel(self, response_id: str, *, tenant: str) -> bool:
        """End a response that has not ended, and return whether it was so; its worker can write nothing any more."""
        ref = ResponseRef(tenant, response_id)
        while (claimed_run := await self._runs.take_over(ref)) is not None:
            with suppress(LeaseLost):
                await self._executor.end_from_log(claimed_run, "cancelled")
                await self._workers.stop_runs([ref])
                return True
        return False

    async def steer(self, request: SteerResponse, *, tenant: str) -> Steer:
        """Store input for a response that has not ended, whichever process executes it. Raises SteeringRefused."""
        steer = await self.steering.post(request, tenant=tenant)
        self._executor.note_mail(ResponseRef(tenant, request.previous_response_id))
        return steer

    async def end_after_turn(self, response_id: str, *, tenant: str) -> None:
        """Let a response end after its present turn and the calls of that turn, whichever process executes it."""
        ref = ResponseRef(tenant, response_id)
        await self.steering.end_after_turn(ref)
        self._executor.note_mail(ref)

    async def delete(self, response_id: str, *, tenant: str) -> bool:
        """End a response that has not ended, so that it can be deleted; return True if it was damaged, and is deleted
        by this."""
        try:
            await self.cancel(response_id, tenant=tenant)
        except StorageCorrupt:
            await self._runs.delete(ResponseRef(tenant, response_id))
            return True
        return False

    def metrics(self) -> BackgroundMetrics:
        return self._workers.metrics()

    async def delete_log(self, response_id: str, *, tenant: str) -> None:
        """Delete the events of a response, and the log of its webhook deliveries."""
        await self.event_log.delete(response_id, tenant=tenant)
        await self._webhooks.forget_deliveries(response_id, tenant=tenant)
