"""RunExecutor: the part of a background response that a worker does, from its claim to its stored end.

All events go into the log of the response; clients read the log. The final response, the end of the log and the end of
the lease are one write, so none is visible without the others.
"""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from openai.types.responses import Response

from apis.errors import (
    InvalidRequest,
    RateLimited,
    StackError,
    StoredValueTooLarge,
    StoreUnavailable,
    WindowExpired,
)
from apis.events import INITIAL_EVENT_COUNT, INITIAL_EVENTS
from apis.storage.kv_store import Delete, KVStore, Op
from apis.storage.lease import LeaseLost
from apis.webhooks import Webhooks
from providers.common.fair_turns import CURRENT_TURN, run_long, turn_of
from providers.common.held_bytes import held_places
from providers.responses.background.event_log import EventLog, NewLog, encode_event_line
from providers.responses.background.journal import Journal
from providers.responses.background.owners import RunOwners
from providers.responses.background.runs import ClaimedRun, ResponseRef
from providers.responses.background.steering import Steering
from providers.responses.background.stored_run import (
    build_charge_ops,
    build_final_response,
    build_stored_response,
    encode_event_lines,
    parse_stored_request,
    select_kept_input,
)
from providers.responses.background.workers import BackgroundConfig
from providers.responses.events.ids import ResponseIds
from providers.responses.events.response_events import assign_sequence_numbers, in_progress_event, terminal_event
from providers.responses.events.response_object import ResponseStatus, error_to_failure
from providers.responses.prepare import ResponsePreparer
from providers.responses.run.checkpoint import (
    AcceptedResponse,
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
    bug_to_error,
    failure_to_error,
    shutdown_error,
    store_span,
    time_limit,
)
from providers.responses.run.response_span import (
    ResponseSpan,
    background_run,
    background_span,
    count_resumed_run,
)
from providers.responses.run.unfinished_log import ClosedLog, close_log
from providers.responses.store.conversation_lock import release_lock
from providers.responses.store.history import History
from providers.responses.store.history_cache import LoadedHistory
from providers.responses.store.turn_writer import FinishedResponse

_log = logging.getLogger(__name__)

_QUEUED_EVENT_COUNT: Final = 2
"""Events in the log of a response that waits for a worker."""
_RETRY_INTERVAL_S: Final = 0.2
"""Seconds between attempts to store a final response during an outage of the store."""
_WORKER_STOPPED_MESSAGE: Final = "The server that made this response stopped before it was done."
_WINDOW_EXPIRED_MESSAGE: Final = (
    "This response had not begun when its completion window expired (`background_options.completion_window`): the "
    "server had other work all the time. Nothing was executed."
)
_QUEUE_TIMEOUT_MESSAGE: Final = "No worker was free for this response in time (`responses.background.queue_timeout_s`)."


class RunExecutor:
    """Executes claimed runs in this process. Once `is_draining`, each run stops at its next checkpoint, for another
    worker to resume."""

    def __init__(  # noqa: PLR0913, PLR0917 - what the life of a response touches
        self,
        kv: KVStore,
        history: History,
        preparer: ResponsePreparer,
        config: BackgroundConfig,
        event_log: EventLog,
        webhooks: Webhooks,
        owners: RunOwners,
        steering: Steering,
    ) -> None:
        self._kv = kv
        self._history = history
        self._preparer = preparer
        self._owners = owners
        self._config = config
        self._event_log = event_log
        self._webhooks = webhooks
        self._steering = steering
        self._local_responses: dict[ResponseRef, PendingResponse] = {}
        self._new_logs: dict[ResponseRef, NewLog] = {}
        self._journals: dict[ResponseRef, Journal] = {}
        self._portable_journals: dict[ResponseRef, Journal] = {}
        self.is_draining = False
        self.engine_priority: int | None = None
        """The priority of responses with a completion window whose request has none."""

    def add_local(self, ref: ResponseRef, pending: PendingResponse, new_log: NewLog) -> None:
        """Take a response that this process has prepared, so that its run need not prepare it again."""
        self._local_responses[ref] = pending
        self._new_logs[ref] = new_log

    def find_new_log(self, ref: ResponseRef) -> NewLog | None:
        """Return the log of a run that began in this process and has no output yet."""
        new_log = self._new_logs.get(ref)
        return None if new_log is None or new_log.has_output else new_log

    def note_mail(self, ref: ResponseRef) -> None:
        """Take note that input for a response is in its mailbox, if this process executes its run."""
        if (journal := self._journals.get(ref)) is not None:
            journal.note_mail()

    def list_resumable(self) -> list[ResponseRef]:
        """Return the runs that another worker can resume now without a loss."""
        return [
            ref
            for ref, journal in self._portable_journals.items()
            if journal.next_number <= INITIAL_EVENT_COUNT or (journal.is_at_checkpoint and not journal.is_running_calls)
        ]

    async def execute(self, claimed_run: ClaimedRun, failure: StackError | None = None) -> None:
        """Bring a run to its end, or release it for another worker: when cancelled, and when the store is
        unavailable, which is raised. With a `failure` it is executed no more, and ends with that."""
        CURRENT_TURN.set(turn_of(claimed_run.ref.tenant))
        with held_places(), background_run(claimed_run.stored_request.trace, self._find_queue_time(claimed_run)):
            await self._execute(claimed_run, failure)

    def _find_queue_time(self, claimed_run: ClaimedRun) -> float | None:
        """Return since when a run waited; None for one that began at once, or that another worker began."""
        is_first = claimed_run.run.attempts == 1 and claimed_run.ref not in self._local_responses
        return claimed_run.queued_at_s if is_first else None

    async def _execute(self, claimed_run: ClaimedRun, failure: StackError | None) -> None:
        try:
            error = failure or await self._attempt(claimed_run)
            if error is not None:
                await self.end_from_log(claimed_run, "failed", error)
        except LeaseLost:
            _log.info("response %s has ended, or another worker has it now", claimed_run.ref.id)
        except (asyncio.CancelledError, StoreUnavailable) as exc:
            with suppress(StackError, LeaseLost):
                await self._leave(claimed_run, is_ending=isinstance(exc, asyncio.CancelledError) and self.is_draining)
            raise
        finally:
            self._local_responses.pop(claimed_run.ref, None)
            self._journals.pop(claimed_run.ref, None)
            self._portable_journals.pop(claimed_run.ref, None)
            await self._mark_reader(claimed_run.ref)
            self._event_log.wakeups.wake(claimed_run.ref.id)  # its readers look which process writes now

    async def _mark_reader(self, ref: ResponseRef) -> None:
        """Store that the log of a run which goes on elsewhere has a reader here, where no output was written."""
        new_log = self._new_logs.pop(ref, None)
        if new_log is not None and new_log.is_read and not new_log.has_output:
            with suppress(StackError):
                await self._event_log.add_reader(ref.id, tenant=ref.tenant)

    async def _leave(self, claimed_run: ClaimedRun, *, is_ending: bool) -> None:
        """Return a run to the queue. One that no other worker could go on with is ended, where this process ends."""
        ref, journal = claimed_run.ref, self._portable_journals.get(claimed_run.ref)
        is_at_checkpoint = journal is not None and journal.is_at_checkpoint
        if is_ending and not await self._can_go_on(claimed_run, journal):
            _log.warning("response %s fails, because this server ends before it is done", ref.id)
            await self.end_from_log(claimed_run, "failed", shutdown_error())
            return
        await claimed_run.lease.hand_back(
            claimed_run.run, journal.remaining_ops() if is_at_checkpoint and journal else ()
        )

    async def _can_go_on(self, claimed_run: ClaimedRun, journal: Journal | None) -> bool:
        if not claimed_run.run.is_portable:
            return False
        if journal is None or journal.next_number <= INITIAL_EVENT_COUNT:
            return True
        if journal.is_at_checkpoint or journal.is_running_calls:
            return True
        return not await self._event_log.has_reader(claimed_run.ref.id, tenant=claimed_run.ref.tenant)

    async def end_from_log(
        self, claimed_run: ClaimedRun, status: ResponseStatus, error: StackError | None = None
    ) -> None:
        """End a run that no worker continues with what its log holds, or without that if it is too large to be stored.
        Raises LeaseLost."""
        try:
            await self._end_from_log(claimed_run, status, error)
        except StoredValueTooLarge as exc:
            await self._end_from_log(claimed_run, "failed", exc)

    async def _end_from_log(self, claimed_run: ClaimedRun, status: ResponseStatus, error: StackError | None) -> None:
        ref, stored_request = claimed_run.ref, claimed_run.stored_request
        failure = error_to_failure(error) if error else None
        initial = build_stored_response(ref.id, stored_request, "in_progress")
        try:
            checkpoints = await load_checkpoints(self._kv, ref.tenant, ref.id)
            log = await self._event_log.read_all(ref.id, tenant=ref.tenant)
            closed = close_log(log)
            if isinstance(error, StoredValueTooLarge):
                closed = ClosedLog((), (), closed.next_sequence_number - len(closed.closing_events))
            final = build_final_response(initial, status, closed.items, failure, usage_from_log(log, checkpoints))
        except (ValueError, LookupError) as exc:  # damaged: the response ends without the log
            _log.error("the log of response %s cannot be read", ref.id, exc_info=exc)
            checkpoints, closed = [], ClosedLog((), (), 0)
            final = build_final_response(initial, status, (), failure)
        lines = encode_event_lines(closed.closing_events)
        if status == "failed" and closed.next_sequence_number:
            last = terminal_event(final)
            assign_sequence_numbers([last], closed.next_sequence_number)
            lines.append(encode_event_line(last))
        ops: list[Op] = [*claimed_run.lease.end_ops(), *await self._build_webhook_ops(final, ref.tenant)]
        ops += [Delete(checkpoint_key(ref.tenant, ref.id, number)) for number in range(len(checkpoints))]
        ops.append(self._steering.drop_op(ref))
        if lines:
            number = closed.next_sequence_number - len(closed.closing_events)
            ops.append(self._event_log.batch_op(ref.tenant, ref.id, number, lines))
        if final.conversation is not None:
            await release_lock(self._kv, ref.tenant, final.conversation.id, ref.id)
        history = LoadedHistory()
        if final.previous_response_id is not None:
            with suppress(InvalidRequest):  # its chain is gone: this one begins another
                history = await self._history.load_history(
                    final.previous_response_id, tenant=ref.tenant, kept_position=stored_request.previous
                )
        input_json = select_kept_input(stored_request, error)
        await self._store_final(
            claimed_run, FinishedResponse(final, input_json, collect_tool_results(checkpoints), ops), history
        )

    async def _attempt(self, claimed_run: ClaimedRun) -> StackError | None:
        """Run the response up to its stored end; return the error for which it has none yet."""
        try:
            if claimed_run.is_late and claimed_run.run.is_deferred:
                return WindowExpired(_WINDOW_EXPIRED_MESSAGE)
            if claimed_run.is_late:
                return RateLimited(_QUEUE_TIMEOUT_MESSAGE)
            await self._owners.open_charge(claimed_run)
            if claimed_run.run.attempts == 1:
                return await self._generate(claimed_run, _QUEUED_EVENT_COUNT)
            return await self._resume(claimed_run)
        except (LeaseLost, StoreUnavailable, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except StackError as exc:
            return exc
        except BaseException as exc:  # noqa: BLE001 - else it would be claimed and fail again and again
            return bug_to_error(exc, claimed_run.ref.id)

    async def _resume(self, claimed_run: ClaimedRun) -> StackError | None:
        """Continue a response of another worker, from its newest checkpoint or from the beginning. A turn of the model
        that the worker did not end is run again, unless its events may have been read."""
        ref, run = claimed_run.ref, claimed_run.run
        log = await self._event_log.read_all(ref.id, tenant=ref.tenant)
        checkpoints = await load_checkpoints(self._kv, ref.tenant, ref.id)
        resume_point = find_resume_point(log, checkpoints)
        has_output = any(event.type not in INITIAL_EVENTS for event in log)
        if not run.is_portable:
            return StackError(_WORKER_STOPPED_MESSAGE)
        if has_output and resume_point is None:
            if checkpoints and checkpoints[-1].running_indexes:
                return StackError(_WORKER_STOPPED_MESSAGE)
            initial_count = sum(event.type in INITIAL_EVENTS for event in log)
            event_count = checkpoints[-1].event_count if checkpoints else initial_count
            if not await self._event_log.rewind(claimed_run.lease, ref.id, event_count, tenant=ref.tenant):
                return StackError(_WORKER_STOPPED_MESSAGE)
            log = log[:event_count]
            resume_point = find_resume_point(log, checkpoints)
        count_resumed_run()
        if resume_point is None:
            return await self._generate(claimed_run, len(log), checkpoint_count=len(checkpoints))
        if resume_point.closing_events:
            number = resume_point.next_sequence_number - len(resume_point.closing_events)
            lines = encode_event_lines(resume_point.closing_events)
            await claimed_run.lease.write([self._event_log.batch_op(ref.tenant, ref.id, number, lines)])
            self._event_log.wakeups.wake(ref.id)
        return await self._generate(claimed_run, resume_point.next_sequence_number, resume_point, len(checkpoints))

    async def _generate(
        self,
        claimed_run: ClaimedRun,
        next_number: int,
        resume_point: ResumePoint | None = None,
        checkpoint_count: int = 0,
    ) -> StackError | None:
        """Run the response up to its stored end, with events from `next_number` on. Raises the StackError for which it
        cannot begin; returns the error of a lost conversation lock."""
        pending = await self._take_or_prepare(claimed_run, resume_point)
        with background_span(pending, claimed_run.stored_request.trace, claimed_run.run.attempts) as span:
            try:
                return await self._run_pending(claimed_run, pending, next_number, checkpoint_count, span)
            except asyncio.CancelledError:
                if self.is_draining:
                    span.hand_over()
                raise

    async def _run_pending(
        self,
        claimed_run: ClaimedRun,
        pending: PendingResponse,
        next_number: int,
        checkpoint_count: int,
        span: ResponseSpan,
    ) -> StackError | None:
        loop = pending.agent_loop
        new_log = self._new_logs.get(claimed_run.ref)
        journal = Journal(
            claimed_run.lease, next_number, self._event_log, checkpoint_count, loop.end_after_turn, new_log
        )
        on_checkpoint = None
        if claimed_run.run.is_portable:
            if self.is_draining:
                raise asyncio.CancelledError  # it was claimed as the drain began: another worker goes on with it
            self._portable_journals[claimed_run.ref] = journal
            on_checkpoint = partial(self._add_checkpoint, journal, pending)
        self._journals[claimed_run.ref] = journal
        writing = asyncio.create_task(journal.run())
        writing.add_done_callback(_retrieve_exception)
        working = asyncio.create_task(self._write_events(pending, journal, on_checkpoint))
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
        span.count_logged_events(journal.next_number - next_number)
        return await self._end(claimed_run, pending, journal, error, span)

    async def _take_or_prepare(self, claimed_run: ClaimedRun, resume_point: ResumePoint | None) -> PendingResponse:
        ref, stored_request = claimed_run.ref, claimed_run.stored_request
        pending = self._local_responses.pop(ref, None)
        if pending is not None:
            return pending
        caller = await self._owners.find(claimed_run)
        request = parse_stored_request(stored_request, ref.id)
        if claimed_run.run.is_deferred and request.priority is None:
            request = request.model_copy(update={"priority": self.engine_priority})
        item_id_count = max(stored_request.item_id_count, resume_point.item_id_count if resume_point else 0)
        return await self._preparer.prepare(
            request,
            ref.tenant,
            ResponseIds(ref.id, item_id_count),
            accepted=AcceptedResponse(
                stored_request.created_at, stored_request.judged_input, resume_point, stored_request.previous
            ),
            caller=caller,
            count_use=self._owners.find_counter(claimed_run),
        )

    async def _end(
        self,
        claimed_run: ClaimedRun,
        pending: PendingResponse,
        journal: Journal,
        error: StackError | None,
        span: ResponseSpan,
    ) -> StackError | None:
        """Store the end of a response whose turns have ended, or were ended by `error`."""
        if error is not None:
            await pending.agent_loop.count_unfinished_prompt()
        events = await run_long(pending.agent_loop.close_open_items) if error is not None else ()
        final = pending.build_final_response() if error is None else pending.build_failed_response(error)
        span.describe(final)
        input_json = bytes(claimed_run.stored_request.input_items)
        ops = [
            *await run_long(journal.final_ops, [*events, terminal_event(final)]),
            *await pending.build_conversation_ops(final, input_json),
            *await self._build_webhook_ops(final, claimed_run.ref.tenant),
        ]
        state, root = pending.agent_loop.state, pending.conversation.root
        finished = FinishedResponse(final, input_json, state.tool_results, ops, root)
        try:
            await self._steering.store_end(
                lambda ending: self._store_final(claimed_run, ending, pending.previous_history),
                finished,
                pending.request,
                claimed_run.ref,
                claimed_run.stored_request.key_id,
                has_mail=journal.has_mail,
            )
        except LeaseLost:
            if pending.lock is None or await pending.lock.is_held():
                raise
            return await pending.lock.lost_error()
        return None

    async def _write_events(
        self, pending: PendingResponse, journal: Journal, on_checkpoint: "partial[None] | None"
    ) -> StackError | None:
        """Write the events of all turns into the journal; return the error that ended them."""
        try:
            if journal.next_number < INITIAL_EVENT_COUNT:
                await journal.put([in_progress_event(pending.build_initial_response())])
            async with time_limit(self._config.timeout_s, "responses.background.timeout_s"):
                await pending.agent_loop.run(journal, on_checkpoint=on_checkpoint)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # noqa: BLE001 - the stream's outer edge; a native panic is no Exception
            return failure_to_error(exc, pending.ids.response_id)
        return None

    def _add_checkpoint(self, journal: Journal, pending: PendingResponse, checkpoint: Checkpoint) -> None:
        journal.add_checkpoint(pending.add_scores(checkpoint))
        if self.is_draining and not checkpoint.running_indexes:
            raise asyncio.CancelledError  # another worker resumes from here

    async def _build_webhook_ops(self, final: Response, tenant: str) -> list[Op]:
        """Return the operations that report the end to webhooks. An outage of the store is waited out as in
        `_store_final`."""
        deadline = time.monotonic() + self._config.lease_s
        while True:
            try:
                return await self._webhooks.event_ops(f"response.{final.status}", final.id, tenant)
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _store_final(
        self, claimed_run: ClaimedRun, finished_response: FinishedResponse, history: LoadedHistory
    ) -> None:
        """Store the final response together with the end of its run and its usage. Raises LeaseLost. An outage of the
        store is waited out for as long as the lease can live."""
        was_executed = finished_response.response.status != "cancelled" or claimed_run.run.attempts > 1
        charge_ops = build_charge_ops(claimed_run.stored_request, finished_response.response, was_executed=was_executed)
        ops = [*finished_response.extra_ops, *charge_ops]
        finished_response = msgspec.structs.replace(finished_response, extra_ops=ops)
        deadline = time.monotonic() + self._config.lease_s
        while True:
            try:
                with store_span():
                    tenant = claimed_run.ref.tenant
                    versions = await self._history.save(finished_response, tenant=tenant, history=history)
                break
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_INTERVAL_S)
        if versions is None:
            self._event_log.wakeups.wake(claimed_run.ref.id)
            raise LeaseLost
        self._event_log.announce(claimed_run.ref.tenant, claimed_run.ref.id, ops)
        self._webhooks.wake(ops)


def _retrieve_exception(task: "asyncio.Task[None]") -> None:
    """Keep asyncio from logging the exception of a task that its run no longer awaits: a cancelled run lost its lease
    to the process that cancelled it."""
    if not task.cancelled():
        task.exception()
